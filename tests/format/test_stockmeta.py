"""The `.metadata` of stock torch is found whole; nothing in it runs or exhausts the reader."""

from __future__ import annotations

import enum
import io
import os
import pathlib
import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as stock
from dcp_cases import Call
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_storage.errors import CheckpointError, FormatError, UnsafeContentError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.stock_metadata import StockMetadata, decode_stock_metadata


def described(dtype: torch.dtype, size: list[int], *chunks: tuple[list[int], list[int]]) -> Any:
    made = [stock.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    return TensorStorageMetadata(stock.TensorProperties(dtype), torch.Size(size), made)


def made_metadata(rank_count: int = 3, **changes: Any) -> Metadata:
    chunks = [([4 * rank, 0], [4, 1 << 40]) for rank in range(rank_count)]
    fields: dict[str, Any] = {
        "state_dict_metadata": {
            "model.w": described(torch.bfloat16, [4 * rank_count, 1 << 40], *chunks),
            "scalar": described(torch.float32, [], ([], [])),
            "step": stock.BytesStorageMetadata(),
        },
        "planner_data": {"model.w": ("model", "w"), "scalar": ("scalar",), "step": ("o", 0, "s")},
        "storage_data": {
            MetadataIndex("scalar", []): _StorageInfo("__0_0.distcp", 7, 1577),
            MetadataIndex("step"): _StorageInfo("sub/__0_1.distcp", 0, 5, ["zstd", "own"]),
        },
        "storage_meta": stock.StorageMeta(pathlib.Path("/data/run"), "save-1", "load-1"),
        "version": "1.0.0",
    }
    for rank, (offsets, _) in enumerate(chunks):
        info = _StorageInfo(f"__{rank}_0.distcp", 1 << 33, 1 << 43)
        fields["storage_data"][MetadataIndex("model.w", offsets, rank)] = info
    return Metadata(**(fields | changes))


pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def assert_tells_all(found: StockMetadata, expected: Metadata) -> None:
    """Compare what was decoded with the objects that torch's own pickle.load returns."""
    told = expected.state_dict_metadata
    blobs = {fqn for fqn, value in told.items() if isinstance(value, stock.BytesStorageMetadata)}
    assert found.blobs == blobs
    assert found.tensors.keys() == told.keys() - blobs
    for fqn, tensor in found.tensors.items():
        theirs: Any = told[fqn]
        assert f"torch.{tensor.dtype}" == str(theirs.properties.dtype)
        assert tensor.shape == tuple(theirs.size)
        assert list(tensor.boxes) == [(tuple(c.offsets), tuple(c.sizes)) for c in theirs.chunks]
    items = {}
    for index, info in (expected.storage_data or {}).items():
        key = (index.fqn, None if index.offset is None else tuple(index.offset))
        transforms = tuple(info.transform_descriptors or ())
        items[key] = (info.relative_path, info.offset, info.length, transforms)
    assert {key: astuple(item) for key, item in found.items.items()} == items
    assert found.paths == expected.planner_data


def old_metadata() -> Metadata:
    """Return what torch 2.0 wrote: other properties of tensors, no version or storage metadata."""
    metadata = made_metadata()
    for tensor in metadata.state_dict_metadata.values():
        if isinstance(tensor, TensorStorageMetadata):
            old = OldTensorProperties(dtype=tensor.properties.dtype)
            tensor.properties = old  # type: ignore[assignment]
    for name in ("version", "storage_meta"):
        del metadata.__dict__[name]
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors")
    return metadata


class ByName(pickle.Pickler):
    """Pickles enums through getattr, as Python 3.11.0 to 3.11.3 did."""

    def reducer_override(self, obj: object) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


class TestStockFiles:
    """What torch writes is decoded as torch itself reads it."""

    def test_all_dtypes_and_nested_state(self, tmp_path: Path) -> None:
        """Tensors of every dtype, nested containers and blobs are all found."""
        # Torch's own planner fails on the bits dtypes (`torch._utils._element_size`).
        names = [name for name in DTYPES if not name.startswith("bits")]
        tensors = {
            name: torch.zeros(32, dtype=torch.uint8).view(getattr(torch, name)) for name in names
        }
        state = {
            "model": {**tensors, "empty": torch.zeros(0, 3), "scalar": torch.tensor(1.0)},
            "step": 3,
            "optim": [torch.ones(2), {"lr": 0.1, 7: torch.zeros(1)}, ("a", None)],
        }
        save(state, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
        data = (tmp_path / ".metadata").read_bytes()
        found = decode_stock_metadata(data)
        expected = pickle.loads(data)
        assert_tells_all(found, expected)
        assert {found.tensors[f"model.{name}"].dtype for name in names} == set(names)
        assert "step" in found.blobs

    @pytest.mark.parametrize("make", [lambda: made_metadata(300), old_metadata])
    @pytest.mark.parametrize(
        ("protocol", "kind"), [*((n, pickle.Pickler) for n in (2, 3, 4, 5)), (4, ByName)]
    )
    def test_every_binary_protocol(
        self, protocol: int, kind: type[pickle.Pickler], make: Callable[[], Metadata]
    ) -> None:
        """Chunks, large counts, transforms and ids are found, of old torch and Python, too."""
        metadata, stream = make(), io.BytesIO()
        kind(stream, protocol).dump(metadata)
        assert (b"getattr" in stream.getvalue()) == (kind is ByName)
        assert_tells_all(decode_stock_metadata(stream.getvalue()), metadata)

    @pytest.mark.parametrize(
        "given_id",
        ["s3://bucket/run", pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath(r"C:\a\b"), None],
    )
    def test_checkpoint_ids(self, given_id: Any) -> None:
        """The id may be text, a path of either system, or nothing."""
        data = pickle.dumps(made_metadata(storage_meta=stock.StorageMeta(given_id)), 2)
        for spelt in (data, data.replace(b"cpathlib\n", b"cpathlib._local\n")):
            assert decode_stock_metadata(spelt).tensors

    @pytest.mark.parametrize("planner_data", [None, 7, [1], {"a": "b"}, {"a": (1.5,)}, {3: ("a",)}])
    def test_other_planners(self, planner_data: object) -> None:
        """What is no map from FQNs to paths of keys counts as absent."""
        metadata = made_metadata(planner_data=planner_data)
        assert decode_stock_metadata(pickle.dumps(metadata)).paths is None

    @pytest.mark.parametrize("kind", [dict, OrderedDict])
    def test_unusual_containers(self, kind: Callable[..., Any]) -> None:
        """An OrderedDict is as good as a dict, a list of sizes as a torch.Size; sets are inert."""
        metadata = made_metadata(planner_data=kind({"a": ("a",)}))
        metadata.state_dict_metadata["scalar"].size = []  # type: ignore[union-attr]
        metadata.mystery = [{1, 2}, frozenset({3}), b"x", 1.5, -(1 << 70)]  # type: ignore[attr-defined]
        found = decode_stock_metadata(pickle.dumps(metadata))
        assert found.paths == {"a": ("a",)}
        assert found.tensors["scalar"].shape == ()

    def test_bytes_behind_the_pickle_are_allowed(self) -> None:
        """A footer does not disturb."""
        data = pickle.dumps(made_metadata())
        assert decode_stock_metadata(data + b"footer \x80\x04.") == decode_stock_metadata(data)


META = b"ctorch.distributed.checkpoint.metadata\n"
GLOBALS = (
    "os system",
    "posix system",
    "nt system",
    "builtins eval",
    "builtins exec",
    "builtins getattr",
    "builtins set",
    "subprocess Popen",
    "operator attrgetter",
    "codecs encode",
    "pickle loads",
    "pathlib Path",
    "torch load",
    "torch nn.Module",
    "torch._utils _rebuild_tensor_v2",
    "torch.distributed.checkpoint.metadata dataclass",
)


class TestHostileFiles:
    """Nothing in a file is run, and files that try are told apart from damaged ones."""

    @pytest.mark.parametrize("spelt", GLOBALS)
    def test_other_globals_are_refused_by_name(self, spelt: str, tmp_path: Path) -> None:
        """Whatever torch does not write there is named and not called."""
        marker = tmp_path / "ran"
        module, name = spelt.encode().split()
        argument = b"X" + _sized(f"touch {marker}".encode())
        for callee in (
            b"c" + module + b"\n" + name + b"\n",
            b"X" + _sized(module) + b"X" + _sized(name) + b"\x93",
        ):
            with pytest.raises(UnsafeContentError, match=spelt.replace(" ", r"\.")) as caught:
                decode_stock_metadata(b"\x80\x04" + callee + argument + b"\x85R.")
            assert caught.value.path == ".metadata"
        assert not marker.exists()

    @pytest.mark.parametrize(
        "where", ["planner_data", "storage_meta", "version", "state_dict_metadata", "mystery"]
    )
    def test_a_call_is_found_wherever_it_hides(self, where: str, tmp_path: Path) -> None:
        """A call in any attribute, used or not, is refused and does not happen."""
        marker = tmp_path / "ran"
        metadata = made_metadata()
        setattr(metadata, where, {"a": Call(os.system, (f"touch {marker}",))})
        data = pickle.dumps(metadata)
        with pytest.raises(UnsafeContentError, match="system"):
            decode_stock_metadata(data)
        assert not marker.exists()
        pickle.loads(data)
        assert marker.exists(), "the pickle was harmless, so this test shows nothing"

    @pytest.mark.parametrize(
        "arguments",
        [
            META + b"Metadata\nX\x08\0\0\0__init__",
            META + b"_MEM_FORMAT_ENCODING\nX\x03\0\0\0mroN",
            META + b"_MEM_FORMAT_ENCODING\nK\0",
            b"X\x02\0\0\0osX\x06\0\0\0system",
        ],
    )
    def test_getattr_reaches_enum_members_only(self, arguments: bytes) -> None:
        """The one builtin that old Pythons need is refused for everything else."""
        with pytest.raises(UnsafeContentError, match=r"builtins\.getattr"):
            decode_stock_metadata(b"\x80\x02cbuiltins\ngetattr\n(" + arguments + b"tR.")

    @pytest.mark.parametrize(
        "path",
        ["/etc/passwd", "../x", "a/../../x", "s3://b/x", "file:/x", "a\0b", "", "a//b", "c:\\x"],
    )
    def test_paths_out_of_the_folder_are_refused(self, path: str) -> None:
        """A file elsewhere is not read because a metadata file says so."""
        items = {MetadataIndex("step"): _StorageInfo(path, 0, 5)}
        with pytest.raises(UnsafeContentError, match="which is unsafe"):
            decode_stock_metadata(pickle.dumps(made_metadata(storage_data=items)))

    def test_no_import_and_no_process_happens(self, tmp_path: Path) -> None:
        """While a hostile file is refused, the interpreter neither imports nor starts anything."""
        (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
        data = b"\x80\x02cevil_module\nf\n)R."
        code = (
            "import sys; from ckpt_storage.format.stock_metadata import decode_stock_metadata\n"
            "from ckpt_storage.errors import UnsafeContentError\n"
            "def hook(event, args):\n"
            "    if event.split('.')[0] in {'import', 'os', 'subprocess', 'exec', 'pickle'}:\n"
            "        print('event', event, args)\n"
            "sys.addaudithook(hook)\n"
            f"try:\n    decode_stock_metadata({data!r})\n"
            "except UnsafeContentError:\n    print('refused')\n"
        )
        root = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["refused"]


def _sized(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


def _altered(name: str, value: object) -> bytes:
    metadata = made_metadata()
    tensor: Any = metadata.state_dict_metadata["model.w"]
    objects = (metadata, tensor, tensor.chunks[0], next(iter(metadata.storage_data.values())))
    target = next(one for one in objects if name in vars(one))
    vars(target)[name] = value
    return pickle.dumps(metadata)


ODD = {
    "json": b'{"state_dict_metadata": {}}',
    "protocol-0": pickle.dumps({"a": 1}, 0),
    "other-object": pickle.dumps({"a": 1}),
    "empty-stack": b"\x80\x02R.",
    "left-over": b"\x80\x02NN.",
    "open-mark": b"\x80\x02(N.",
    "missing-memo": b"\x80\x02h\x05.",
    "odd-items": b"\x80\x02}(Nu.",
    "setitem-on-list": b"\x80\x02]NNs.",
    "call-without-tuple": b"\x80\x02ctorch\nSize\nNR.",
    "state-on-dict": b"\x80\x02}}b.",
    "state-twice": b"\x80\x02cpathlib\nPosixPath\n)R}b}b.",
    "size-of-texts": b"\x80\x02ctorch\nSize\nX\x01\0\0\0a\x85\x85R.",
    "size-with-65-dims": b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 65 + b"t\x85R.",
    "bad-utf-8": b"\x80\x02X\x01\0\0\0\xff.",
    "persistent-id": b"\x80\x02NQ.",
    "extension": b"\x80\x02\x82\x01.",
    "inst": b"\x80\x02(ios\nsystem\n.",
    "deep-marks": b"\x80\x02" + b"(" * 100_000 + b".",
    "deep-tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "deep-lists": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    # Each list holds the one before twice.
    "doubled-lists": b"\x80\x02]"
    + b"".join(b"q%c]q%c" % (i, i + 1) + b"h%c" % i * 2 + b"\x86a" for i in range(0, 250, 2))
    + b".",
    "huge-memo-index": b"\x80\x02Nr\xff\xff\xff\xff.",
    "endless-name": b"\x80\x02c" + b"x" * 10_000,
    "deep-properties": _altered("properties", None),
    "size-true": _altered("size", (True, 4)),
    "size-huge": _altered("size", (1 << 64, 1 << 64)),
    "chunk-outside": _altered("offsets", torch.Size([12, 0])),
    "chunks-none": _altered("chunks", None),
    "tensors-of-numbers": _altered("state_dict_metadata", {"a": 3}),
    "offset-true": _altered("offset", True),  # noqa: FBT003
    "length-missing": _altered("length", None),
    "items-info": _altered("storage_data", {MetadataIndex("a"): stock.StorageMeta()}),
}


class TestOddFiles:
    """Files that are damaged, cut or built to exhaust the reader are format errors."""

    @pytest.mark.parametrize("name", ODD)
    def test_odd_files_are_format_errors(self, name: str) -> None:
        """Each says what file it is and what to do, without exhausting memory or the stack."""
        with pytest.raises(FormatError, match="another checkpoint") as caught:
            decode_stock_metadata(ODD[name])
        assert str(caught.value).startswith(".metadata ")
        assert len(str(caught.value)) < 1000

    def test_every_cut_is_found(self) -> None:
        """A file cut short anywhere says so."""
        data = pickle.dumps(made_metadata())
        for length in range(len(data)):
            with pytest.raises(FormatError, match="cut short"):
                decode_stock_metadata(data[:length])

    def test_duplicates_are_found(self) -> None:
        """A name, an item or an attribute given twice is refused, as one would hide the other."""
        name = b"X\x01\0\0\0a"
        described = b"X\x13\0\0\0state_dict_metadata"
        tensors = described + b"}(" + (name + META + b"BytesStorageMetadata\n)\x81") * 2 + b"u"
        index = META + b"MetadataIndex\n)\x81}X\x03\0\0\0fqn" + name + b"sb"
        info = pickle.dumps(_StorageInfo("x", 0, 1), 2)[2:-1]
        items = described + b"}X\x0c\0\0\0storage_data}(" + (index + info) * 2 + b"u"
        for fields, complaint in (
            (tensors, "'a' occurs twice"),
            (items, "'a' is stored twice"),
            ((described + b"}") * 2, "attribute name .* occurs twice"),
        ):
            with pytest.raises(FormatError, match=complaint):
                decode_stock_metadata(b"\x80\x02" + META + b"Metadata\n)\x81}(" + fields + b"ub.")

    def test_repeated_contents_are_not_multiplied(self) -> None:
        """One large list of chunks under many names is refused, not decoded many times."""
        tensor = made_metadata(rank_count=2000).state_dict_metadata["model.w"]
        metadata = made_metadata(state_dict_metadata={str(i): tensor for i in range(20_000)})
        with pytest.raises(FormatError, match="repeats its contents"):
            decode_stock_metadata(pickle.dumps(metadata))

    def test_files_beyond_the_limit_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Length alone decides, before anything is read."""
        monkeypatch.setattr("ckpt_storage.format.stock_metadata.MAX_STOCK_BYTES", 100)
        with pytest.raises(FormatError, match="100 is the limit"):
            decode_stock_metadata(b"x" * 101)

    @given(data=st.data())
    def test_damaged_files_never_crash(self, data: st.DataObject) -> None:
        """Any damage gives a result or one of the two documented errors."""
        blob = bytearray(pickle.dumps(made_metadata()))
        for _ in range(data.draw(st.integers(1, 8))):
            blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
        try:
            found = decode_stock_metadata(bytes(blob))
        except CheckpointError as error:
            assert isinstance(error, FormatError | UnsafeContentError)  # noqa: PT017
        else:
            assert isinstance(found, StockMetadata)
