"""No checkpoint, of whatever format, runs code or gives values that nobody saved."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from copy_cases import make
from damage_cases import load_failure
from dcp_cases import Call, seeded
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, FormatError, UnsafeContentError, verify
from ckpt_storage.format.inert_pickle import is_inert_with_numpy
from ckpt_storage.inspect.torchload import blob_value, scan_blob
from ckpt_storage.transfer.chunks import ChunkPlace


def attack(sign: Path) -> Call:
    return Call(os.mkdir, (str(sign),))


@dataclass(frozen=True)
class Benign:
    """A class of a program's own, in its state."""

    value: int


def refused(path: Path, target: dict[str, Any]) -> UnsafeContentError:
    """Load; assert that it is refused before the planner gets anything; return the error."""
    error = load_failure(path, target)
    assert isinstance(error, UnsafeContentError)
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("kind", ["ckpt_storage", "dcp"])
def test_a_malicious_blob_is_refused_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    """It is refused by name before the planner gets anything; loads without it work."""
    sign, run = tmp_path / "ran", tmp_path / "run"
    make(kind, {"a": seeded(1, 3), "evil": attack(sign), "z": 1}, run)
    target = {"a": torch.zeros(3), "evil": None, "z": None}
    error = refused(run, target)
    for told in ("evil in", f"{os.name}.mkdir", "unsafe_pickle=True"):
        assert told in str(error)
    assert "\x1b" not in str(error)
    assert target["z"] is None
    dcp_cases.assert_holds(run, {"a": seeded(1, 3)}, [dcp_cases.load])
    assert verify(str(run)).ok
    opened = ckpt_storage.open_checkpoint(run)
    for look in (lambda: opened["evil"], opened.load):
        with pytest.raises(UnsafeContentError, match="unsafe_pickle=True"):
            look()
    assert opened.load(["a"])["a"].tolist() == seeded(1, 3).tolist()
    assert not sign.exists()
    assert ckpt_storage.open_checkpoint(run, unsafe_pickle=True)["evil"] is None
    assert sign.exists()


def test_a_pickle_with_an_archive_of_numbers_behind_it_runs_nothing(tmp_path: Path) -> None:
    """Readers of archives see the numbers at the end, torch.load the pickle at the start."""
    sign = tmp_path / "ran"
    numbers = io.BytesIO()
    torch.save(np.arange(4), numbers)
    both = io.BytesIO()
    both.write(pickle.dumps(attack(sign), protocol=2))
    with zipfile.ZipFile(numbers) as source, zipfile.ZipFile(both, "a") as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    reader: Any = torch._C.PyTorchFileReader(io.BytesIO(both.getvalue()))  # noqa: SLF001
    assert reader.has_record("data.pkl")
    place = ChunkPlace(path="f", fqn="evil", start=0, size_bytes=len(both.getvalue()))
    with pytest.raises(UnsafeContentError):
        scan_blob(bytearray(both.getvalue()), place)
    with pytest.raises(UnsafeContentError):
        blob_value(bytearray(both.getvalue()), place, unsafe_pickle=False)
    assert not sign.exists()
    with pytest.raises(FormatError, match=r"evil in f cannot be unpickled .*magic number"):
        blob_value(bytearray(both.getvalue()), place, unsafe_pickle=True)
    assert sign.exists()


@pytest.mark.parametrize("damage", [b"", b"\x80\x04 no pickle", b"PK\x03\x04 no archive"])
def test_a_trusted_blob_that_cannot_be_unpickled_is_a_format_error(damage: bytes) -> None:
    """No error of torch's own leaves the door: ours names the value and the file, in one line."""
    place = ChunkPlace(path="saves/f", fqn="object", start=0, size_bytes=len(damage))
    with pytest.raises(FormatError, match=r"object in saves/f cannot be unpickled") as caught:
        blob_value(bytearray(damage), place, unsafe_pickle=True)
    assert caught.value.path == "saves/f"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ckpt_storage", "dcp"])
def test_classes_of_a_program_load_when_it_says_so(tmp_path: Path, kind: str) -> None:
    """An object of one's own is refused, unless its class was allowed or pickles are trusted."""
    make(kind, {"own": Benign(5)}, tmp_path / "run")
    assert "Benign" in str(refused(tmp_path / "run", {"own": None}))
    for load in (dcp_cases.load, ckpt_storage.load):
        trusting: dict[str, Any] = {"own": None}
        load(trusting, tmp_path / "run", unsafe_pickle=True)
        assert trusting["own"] == Benign(5)
    allowed: dict[str, Any] = {"own": None}
    with torch.serialization.safe_globals([Benign]):
        dcp_cases.load(allowed, tmp_path / "run")
    assert allowed["own"] == Benign(5)


def script(_: Path) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Identity()), stream)
    return stream.getvalue()


def legacy(sign: Path) -> bytes:
    """Return what torch wrote before 1.6: a plain sequence of pickles, which call."""
    stream = io.BytesIO()
    torch.save(attack(sign), stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def inert_script(_: Path) -> bytes:
    """Return an archive that torch takes for TorchScript, although its pickle is a number."""
    stream = io.BytesIO()
    torch.save(1, stream)
    with zipfile.ZipFile(stream, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}/constants.pkl", pickle.dumps(()))
    return stream.getvalue()


BLOBS: dict[str, Callable[[Path], bytes]] = {
    "nothing": lambda _: b"",
    "garbage": lambda _: b"garbage",
    "a pickle": lambda _: pickle.dumps(1),
    "no archive": lambda _: b"PK\x03\x04" + b"\0" * 60,
    "TorchScript": script,
    "TorchScript of a number": inert_script,
    "legacy": legacy,
}


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file:UserWarning")
@pytest.mark.parametrize("name", BLOBS)
def test_blobs_that_torch_cannot_read_or_would_run_are_refused(tmp_path: Path, name: str) -> None:
    """An error of ours names the blob; what torch would run is never handed to `torch.load`."""
    data = BLOBS[name](tmp_path / "ran")
    planner = dcp_cases.planner(transform_object=lambda *_: io.BytesIO(data))
    dcp_cases.save({"x": 1}, tmp_path / "run", planner=planner)
    error = load_failure(tmp_path / "run", {"x": None})
    assert isinstance(error, FormatError | UnsafeContentError)
    is_run = name.startswith("TorchScript") or name == "legacy"
    assert isinstance(error, UnsafeContentError) or not is_run
    assert "x in saves/" in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "ran").exists()


def test_a_malicious_stock_metadata_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    """A `.metadata` that calls a function is refused by every entry point, and does not run."""
    folder = tmp_path / "run"
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder))
    sign = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(attack(sign)))
    reader = CheckpointStorageReader(folder)
    for look in (reader.read_metadata, lambda: reader.format):
        with pytest.raises(UnsafeContentError, match=r"posix\.mkdir"):
            look()
    with pytest.raises(CheckpointException) as raised:
        dcp_cases.load({"a": torch.zeros(3)}, folder)
    assert dcp_cases.HIDES_REASONS or "posix.mkdir" in str(raised.value)
    assert not verify(str(folder)).ok
    assert not sign.exists()


def test_a_malicious_metadata_beside_ours_does_not_run(tmp_path: Path) -> None:
    """In a checkpoint of ours a `.metadata` that is not ours is refused without unpickling it."""
    folder = tmp_path / "run"
    dcp_cases.save({"a": seeded(1, 3)}, folder)
    sign = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(attack(sign)))
    with pytest.raises(FormatError, match="holds two checkpoints"):
        ckpt_storage.load({"a": torch.zeros(3)}, folder)
    assert not sign.exists()


def replace_item(folder: Path, value: object) -> None:
    """Put what `torch.save` makes of a value in place of the only item of a stock checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    stream = io.BytesIO()
    torch.save(value, stream)
    (folder / info.relative_path).write_bytes(stream.getvalue())
    info.offset, info.length = 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("value", [torch.ones(2, 3).t(), torch.ones(3, 2)])
def test_a_tensor_item_of_another_shape_is_refused(tmp_path: Path, value: torch.Tensor) -> None:
    """So is one that only torch itself reads, as its strides are not those of C order."""
    dcp.save({"a": torch.ones(2, 3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "run"))
    replace_item(tmp_path / "run", value)
    opened = ckpt_storage.open_checkpoint(tmp_path / "run")
    with pytest.raises(FormatError, match=r"has (the )?shape \[3, 2\]"):
        opened["a"][:]


def test_a_tensor_item_that_is_something_else_is_refused(tmp_path: Path) -> None:
    """A stock item of a tensor whose pickle calls a function is refused, and does not run."""
    folder, sign = tmp_path / "run", tmp_path / "ran"
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(folder))
    replace_item(folder, attack(sign))
    error = refused(folder, {"a": torch.zeros(3)})
    assert "a in __0_0.distcp" in str(error)
    assert "posix.mkdir" in str(error)
    assert not sign.exists()


_reconstruct: Any = np.array([]).__reduce__()[0]
_scalar: Any = np.float64(0).__reduce__()[0]


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


@pytest.mark.parametrize(
    "value",
    [
        np.random.RandomState(1).get_state(),
        np.random.RandomState(1).get_state(legacy=False),
        np.random.default_rng(2).bit_generator.state,
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.asfortranarray(np.ones((2, 3), dtype=np.complex64)),
        np.zeros((0, 3), dtype=np.float16),
        np.bool_(1).reshape(()),
        np.float64(0.5),
        [{"a": (np.int64(1), None, "text", b"raw", 1 << 80, -1.5)}],
        7,
    ],
)
def test_numbers_of_numpy_among_plain_values_pass(value: object) -> None:
    """Random states, arrays and scalars of numbers are inert, in containers too."""
    assert is_inert_with_numpy(pickled(value))


def dtype_call(name: str = "f8", state: object = (3, "<", None, None, None, -1, -1, 0)) -> Call:
    return Call(np.dtype, (name, False, True), state)


def array_call(dtype: object, raw: object = b"\0" * 8, kind: object = np.ndarray) -> Call:
    return Call(_reconstruct, (kind, (0,), b"b"), (1, (1,), dtype, False, raw))


def test_the_forgeries_below_differ_from_the_real_thing_in_one_place() -> None:
    """Unaltered, the calls of this file pass and unpickle to an array of one number."""
    forged = pickled(array_call(dtype_call()))
    assert is_inert_with_numpy(forged)
    assert np.array_equal(pickle.loads(forged), np.zeros(1))


NO_HOOKS: OrderedDict[int, object] = OrderedDict()

FORGERIES: dict[str, object] = {
    "another function": Call(print, ("x",)),
    "object array": np.array([None]),
    "array of text": np.array(["a"]),
    "fields": np.zeros(1, dtype=[("a", "f4")]),
    "dates": np.zeros(1, dtype="M8[s]"),
    "generator": np.random.default_rng(1),
    "dtype of objects": array_call(dtype_call("O")),
    "dtype with flags": array_call(dtype_call(state=(3, "<", None, None, None, -1, -1, 63))),
    "dtype with fields": array_call(
        dtype_call("V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0))
    ),
    "dtype without state": array_call(Call(np.dtype, ("f8", False, True))),
    "shared dtype": array_call(Call(np.dtype, ("f8", False, False), (3, "<"))),
    "elements as list": array_call(dtype_call(), [print]),
    "array of another kind": array_call(dtype_call(), kind=np.matrix),
    "array without state": Call(_reconstruct, (np.ndarray, (0,), b"b")),
    "large to begin with": Call(_reconstruct, (np.ndarray, (1 << 40,), b"b")),
    "array called": Call(np.ndarray, ((1,),)),
    "scalar of an object": Call(_scalar, (dtype_call("O"), [1])),
    "bytes called": Call(bytes, (1 << 40,)),
    "storage called": Call(torch.FloatStorage, (1 << 40,)),
    "tensor without a storage": Call(_rebuild_tensor_v2, ([1], 0, (1,), (1,), False, NO_HOOKS)),
    "parameter of no tensor": Call(_rebuild_parameter, (1, False, NO_HOOKS)),
    "parameter of an array": Call(_rebuild_parameter, (array_call(dtype_call()), False, NO_HOOKS)),
}


def in_archive(value: object) -> bytes:
    """Return the pickle in what `torch.save` writes for a value."""
    file = io.BytesIO()
    torch.save(value, file)
    return zipfile.ZipFile(file).read("archive/data.pkl")


@pytest.mark.parametrize(
    "value",
    [
        (b"", torch.ones(2), torch.ones(0, dtype=torch.uint16)),
        [np.arange(3), {"p": torch.nn.Parameter(torch.ones(2)[:1])}],
    ],
)
def test_tensors_beside_plain_values_pass(value: object) -> None:
    """A tensor's pickle names its storage and runs nothing; so does a parameter's."""
    assert is_inert_with_numpy(in_archive(value))


def test_a_tensor_with_hooks_is_refused() -> None:
    """A hook, also one that is added after the tensor was made, is no inert value."""
    whole = in_archive(torch.ones(1))
    mark = b"ccollections\nOrderedDict\n"
    at = whole.index(b")R", whole.index(mark)) + 2
    assert is_inert_with_numpy(whole)
    assert not is_inert_with_numpy(whole[:at] + b"K\x01cnumpy\ndtype\ns" + whole[at:])


def test_a_conjugate_or_negated_tensor_passes_with_no_other_property() -> None:
    """Torch may be told to negate or to conjugate; any other text or value is refused."""
    conjugate, other = (torch.ones(1, dtype=torch.complex64).conj() for _ in range(2))
    whole = in_archive([conjugate, other.imag])
    assert is_inert_with_numpy(whole)
    assert not is_inert_with_numpy(whole.replace(b"conj", b"code"))
    assert not is_inert_with_numpy(whole.replace(b"\x88s", b"K\x01s"))


@pytest.mark.parametrize("count", [2, 10_000])
def test_a_tensor_with_properties_more_than_once_is_refused(count: int) -> None:
    """However many there are: each took a copy of all others, and a level of the stack."""
    whole = in_archive(torch.ones(1))
    at = whole.rindex(b"t")
    assert not is_inert_with_numpy(whole[:at] + b"}" * count + whole[at:])


@pytest.mark.parametrize("name", FORGERIES)
def test_everything_else_is_refused(name: str) -> None:
    """Other calls, dtypes that are no numbers, and states that numpy does not write do not pass."""
    assert not is_inert_with_numpy(pickled(FORGERIES[name]))


def test_what_is_no_pickle_is_refused() -> None:
    """Bytes that end early, or mean nothing, do not pass."""
    whole = pickled(np.arange(3))
    assert not any(is_inert_with_numpy(whole[:end]) for end in range(len(whole)))
    assert not is_inert_with_numpy(b"cos\nsystem\n")


def with_gap(folder: Path, *, second: int) -> Path:
    """Save a stock checkpoint of a tensor of 12 elements in chunks of 4: at 0, `second` and 8."""
    path = folder / "stock"
    parts = {name: torch.arange(4.0) for name in "abc"}
    dcp.save(parts, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())  # torch's own
    described = metadata.state_dict_metadata
    offsets = [torch.Size([at]) for at in dict.fromkeys((0, second, 8))]
    chunks = [ChunkStorageMetadata(at, torch.Size([4])) for at in offsets]
    whole = dataclasses.replace(described["a"], size=torch.Size([12]), chunks=chunks)
    items = {index.fqn: item for index, item in metadata.storage_data.items()}
    metadata.state_dict_metadata = {"w": whole}
    metadata.storage_data = {
        MetadataIndex("w", at): items[name] for at, name in zip(offsets, "abc", strict=False)
    }
    metadata.planner_data = {"w": ("w",)}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def loaded(path: Path) -> torch.Tensor:
    target = {"w": torch.full((12,), -1.0)}
    ckpt_storage.load(target, path)
    return target["w"]


DOORS: dict[str, Callable[[Path], object]] = {
    "load": loaded,
    "open_checkpoint": lambda path: ckpt_storage.open_checkpoint(path)["w"][:],
    "convert": lambda path: ckpt_storage.convert(path, path / "out", to="safetensors"),
    "consolidate": lambda path: ckpt_storage.consolidate(path, path / "out"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_stock_checkpoint_with_a_gap_is_refused(tmp_path: Path, door: str) -> None:
    """No front door invents what no chunk holds; the error names tensor and region."""
    path = with_gap(tmp_path, second=8)
    with pytest.raises(FormatError, match=r"chunks of w .*no chunk holds the element \[4\]"):
        DOORS[door](path)
    assert not (path / "out").exists()


def test_chunks_that_meet_are_loaded_and_those_that_overlap_are_not(tmp_path: Path) -> None:
    """The same checkpoint without the gap is sound; two values for one element are not."""
    assert loaded(with_gap(tmp_path / "a", second=4)).tolist() == [0.0, 1.0, 2.0, 3.0] * 3
    with pytest.raises(FormatError, match=r"2 chunks hold the element \[2\]"):
        loaded(with_gap(tmp_path / "b", second=2))


def test_a_pickle_that_torch_would_not_write_is_not_inert() -> None:
    """Neither is one that leaves values over, nests deeply, or sets a state twice."""
    dtype = pickled(np.dtype("f4"))
    state = dtype[dtype.rindex(b"(K\x03") : -1]
    assert is_inert_with_numpy(dtype)
    assert not is_inert_with_numpy(dtype[:-1] + state + b".")
    assert is_inert_with_numpy(b"\x80\x02K\x01.")
    assert not is_inert_with_numpy(b"\x80\x02K\x01K\x02.")
    for depth in (50, 150):
        nested = b"\x80\x02" + b"(" * depth + b"t" * depth + b"."
        assert is_inert_with_numpy(nested) == (depth == 50)
