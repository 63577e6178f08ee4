"""Tensors in files of others: torch's zip around one, and headers of safetensors."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dcp_cases import raw_bytes, seeded
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import save as safetensors_save

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError
from ckpt_storage.format import shard_item
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.safetensors import (
    SafetensorsEntry,
    SafetensorsHeader,
    encode_safetensors_header,
    parse_safetensors_header,
)
from ckpt_storage.format.shard_item import ItemHeader, parse_tensor_item, tensor_envelope

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*:DeprecationWarning"),
]

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (2, 0, 3), (5,), (2, 3, 4), (1, 2, 1, 3, 1))


def torch_saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def enveloped(tensor: torch.Tensor) -> bytes:
    head, tail = tensor_envelope(str(tensor.dtype).removeprefix("torch."), tensor.shape)
    return head + raw_bytes(tensor) + tail


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert (found.stride(), found.storage_offset()) == (expected.stride(), 0)
    assert found.untyped_storage().nbytes() == expected.numel() * expected.itemsize
    assert found.is_leaf
    assert not found.requires_grad
    assert raw_bytes(found) == raw_bytes(expected)


def survives_torch(dtype: torch.dtype) -> bool:
    try:
        tensor = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        loaded = torch.load(io.BytesIO(torch_saved(tensor.clone())))
    except (KeyError, NotImplementedError, RuntimeError):
        return False
    return bool(loaded.dtype == dtype)


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental:UserWarning")
def test_all_dtypes_that_torch_can_store_are_known() -> None:
    """A dtype is in the table exactly if torch can copy, save and load it, but for newer ones."""
    known = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    storable = {str(dtype).removeprefix("torch.") for dtype in known if survives_torch(dtype)}
    unknown = {"float4_e2m1fn_x2"} if torch.__version__ < "2.10" else set()
    # New in torch 2.14; a save refuses it by name until a version of the format has it.
    newer = {"bcomplex32"}
    assert set(DTYPES) - unknown == storable - newer


class TestEnvelope:
    """Head, raw bytes and tail are together what torch.save writes."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_torch_loads_exactly_the_tensor(self, dtype: str, tmp_path: Path) -> None:
        """Every dtype and shape loads as the same plain tensor in all three ways of torch.load."""
        for shape in SHAPES:
            tensor = seeded(1, *shape, dtype=getattr(torch, dtype))
            item = enveloped(tensor)
            path = tmp_path / f"item{shape}.pt"
            path.write_bytes(item)
            assert_same(torch.load(io.BytesIO(item), weights_only=True), tensor)
            assert_same(torch.load(io.BytesIO(item), weights_only=False), tensor)
            mapped = torch.load(path, mmap=True)
            assert_same(mapped, tensor)
            assert mapped.data_ptr() % shard_item.PAYLOAD_ALIGN_BYTES == 0
            assert len(tensor_envelope(dtype, shape)[0]) % shard_item.PAYLOAD_ALIGN_BYTES == 0

    @pytest.mark.parametrize("payload_bytes", [(1 << 32) - 2000, (1 << 32) - 1, (9 << 32) // 8])
    def test_it_works_around_and_beyond_4_gib(self, payload_bytes: int, tmp_path: Path) -> None:
        """A sparse file loads by mmap with its first and last bytes in place."""
        head, tail = tensor_envelope("uint8", (payload_bytes,))
        path = tmp_path / "big.pt"
        with path.open("wb") as file:
            file.write(head + b"\x07")
            file.seek(len(head) + payload_bytes - 1)
            file.write(b"\x09" + tail)
        tensor = torch.load(path, mmap=True)
        assert tensor.shape == (payload_bytes,)
        assert (tensor[0].item(), tensor[-1].item()) == (7, 9)
        with zipfile.ZipFile(path) as archive:
            assert archive.getinfo("archive/data/0").file_size == payload_bytes
            assert archive.read("archive/version") == b"3\n"
        del tensor
        path.unlink()

    @pytest.mark.parametrize(
        ("dtype", "shape"), [("qint8", (2,)), ("float", ()), ("int8", (2, -1))]
    )
    def test_what_cannot_be_stored_is_refused(self, dtype: str, shape: tuple[int, ...]) -> None:
        """An unknown dtype and a negative size are errors of the caller."""
        with pytest.raises(InvalidInputError, match=re.escape(repr(dtype))):
            tensor_envelope(dtype, shape)


NOT_PLAIN: dict[str, Callable[[], object]] = {
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "start-of-storage": lambda: torch.arange(6.0)[:3],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "with-attribute": lambda: _with_attribute(torch.ones(2)),
    "list": lambda: [torch.ones(2)],
}


class TestTensorItem:
    """Items written by torch give away where their raw bytes lie."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_plain_tensors_are_found(self, dtype: str) -> None:
        """Dtype, shape and raw bytes of torch's items and of ours are found in the first 4 KiB."""
        tensors = [seeded(1, *shape, dtype=getattr(torch, dtype)) for shape in SHAPES]
        for tensor, write in itertools.product(tensors, (torch_saved, enveloped)):
            item = write(tensor)
            header = parse_tensor_item(item[:4096], item_bytes=len(item))
            assert isinstance(header, ItemHeader)
            assert (header.dtype, header.shape) == (dtype, tensor.shape)
            end = header.payload_offset + header.payload_bytes
            assert item[header.payload_offset : end] == raw_bytes(tensor)
            assert header.payload_offset % shard_item.PAYLOAD_ALIGN_BYTES == 0

    @pytest.mark.parametrize("kind", NOT_PLAIN)
    def test_anything_else_is_left_to_torch(self, kind: str) -> None:
        """Views, other layouts, subclasses, quantised tensors and objects give None."""
        item = torch_saved(NOT_PLAIN[kind]())
        assert parse_tensor_item(item, item_bytes=len(item)) is None

    def test_other_packings_are_found_or_left_to_torch(self) -> None:
        """Old and unchecked ones are found; compressed, big-endian and endless ones give None."""
        tensor = torch.arange(6)
        torch.serialization.set_crc32_options(False)
        try:
            unchecked = torch_saved(tensor)
        finally:
            torch.serialization.set_crc32_options(True)
        old = _rewritten(tensor, keep=("data.pkl", "data/0"))
        for item in (unchecked, old, _rewritten(tensor, contents={"byteorder": b"little"})):
            header = parse_tensor_item(item, item_bytes=len(item))
            assert isinstance(header, ItemHeader)
            assert (header.dtype, header.shape, header.payload_bytes) == ("int64", (6,), 48)
            assert item[header.payload_offset :].startswith(raw_bytes(tensor))
        for item in (
            _rewritten(torch.zeros(100), compression=zipfile.ZIP_DEFLATED),
            _rewritten(tensor, contents={"byteorder": b"big"}),
            _rewritten(tensor, contents={"byteorder": b"x" * (2 << 20)}),
        ):
            assert parse_tensor_item(item[: 1 << 20], item_bytes=len(item)) is None

    def test_damage_to_the_pickle_is_found(self) -> None:
        """No flipped bit in a record before the raw bytes goes unnoticed."""
        item = torch_saved(torch.arange(100))
        archive = zipfile.ZipFile(io.BytesIO(item))
        for name in ("data.pkl", "byteorder", ".format_version"):
            content = archive.read(f"archive/{name}")
            start = item.index(content, archive.getinfo(f"archive/{name}").header_offset)
            for bit in range(8 * len(content)):
                damaged = bytearray(item)
                damaged[start + bit // 8] ^= 1 << bit % 8
                with pytest.raises(IntegrityError, match=re.escape(name)):
                    parse_tensor_item(bytes(damaged), item_bytes=len(item))

    @given(data=st.data())
    def test_damaged_heads_never_crash(self, data: st.DataObject) -> None:
        """Any damage gives a header, a request, None, or one of the two documented errors."""
        item = bytearray(torch_saved(torch.arange(20)))
        for _ in range(data.draw(st.integers(1, 8))):
            item[data.draw(st.integers(0, 720))] = data.draw(st.integers(0, 255))
        try:
            found = parse_tensor_item(bytes(item), item_bytes=len(item))
        except (FormatError, IntegrityError):
            return
        assert found is None or isinstance(found, ItemHeader | shard_item.NeedMoreBytes)


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = "kept by torch.save"  # type: ignore[attr-defined]
    return tensor


def _rewritten(
    tensor: torch.Tensor,
    *,
    keep: tuple[str, ...] = ("data.pkl", "byteorder", "data/0", "version"),
    contents: dict[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    stream = io.BytesIO()
    source = zipfile.ZipFile(io.BytesIO(torch_saved(tensor)))
    with zipfile.ZipFile(stream, "w", compression) as target:
        for name in keep:
            content = (contents or {}).get(name, source.read(f"archive/{name}"))
            target.writestr(f"renamed/{name}", content)
    return stream.getvalue()


SQUARE = {"a": {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}}


class TestSafetensors:
    """Headers agree with the safetensors library, and unsound ones are refused."""

    @pytest.mark.parametrize(
        ("body", "data_bytes", "complaint"),
        [
            ({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3, "'a'.*F6_E2M3"),
            ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "another length"),
            ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, 8, "another length"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, 3, "before .*'a'"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 1, "1 bytes of data"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 3, "3 bytes of data"),
            ({"a": {"dtype": "U8", "shape": [-2], "data_offsets": [0, 2]}}, 2, "no counts"),
            ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, 1]}}, 1, "no counts"),
            ({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, 1, "no counts"),
            ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, 1, "no dtype, shape"),
            ({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, 3, "4-bit"),
            ({"a": {"dtype": "F4", "shape": [], "data_offsets": [0, 1]}}, 1, "4-bit"),
            (
                {
                    name: {"dtype": "U8", "shape": [2], "data_offsets": [at, at + 2]}
                    for at, name in enumerate("ab")
                },
                3,
                "before the bytes of 'b'",
            ),
            ({"a": 3}, 0, "no dtype, shape"),
            ({"__metadata__": {"a": 3}}, 0, "no map of text"),
            (b" {}", 0, "no JSON object"),
            (b"{}x", 0, "no valid JSON"),
            (b'{"a":1,"a":2}', 0, "a key twice"),
            (b'{"\\ud800":1}', 0, "no valid JSON"),
            (b'{"\xff":1}', 0, "no valid JSON"),
            (b'{"a":' + b"[" * 200_000, 0, "no valid JSON"),
            (b'{"a":' + b"9" * 5000 + b"}", 0, "no valid JSON"),
            ({"__metadata__": {"DCP_SHARDING_INFO": "{"}}, 0, "INFO .* no valid JSON"),
            *(
                ({"__metadata__": {"DCP_SHARDING_INFO": info}, **SQUARE}, 1, "INFO for 'a'")
                for info in ("{}", '{"a": {}}', '{"a": {"saved_offsets": [0]}}', '{"a": 1}')
            ),
        ],
    )
    def test_unsound_headers_are_refused(
        self, body: object, data_bytes: int, complaint: str
    ) -> None:
        """What the specification forbids is a format error that says what; so is half a place."""
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        blob = struct.pack("<Q", len(text)) + text + bytes(data_bytes)
        with pytest.raises(FormatError, match=complaint) as caught:
            parse_safetensors_header(blob, file_bytes=len(blob), path="x/y.safetensors")
        assert caught.value.path == "x/y.safetensors"

    def test_files_without_a_whole_header_are_refused(self) -> None:
        """A file that is too short or claims a huge header is refused at once."""
        for blob, file_bytes, complaint in (
            (b"1234567", 7, "only 7 bytes"),
            (struct.pack("<Q", 100_000_001), 1 << 40, "claims a header"),
            (struct.pack("<Q", 50) + b"{}", 10, "claims a header"),
        ):
            with pytest.raises(FormatError, match=complaint):
                parse_safetensors_header(blob, file_bytes=file_bytes, path="x")

    @given(data=st.data())
    def test_damaged_headers_never_crash(self, data: st.DataObject) -> None:
        """Any damage gives a header or a format error; names agree with the library's."""
        blob = bytearray(safetensors_save({"w": torch.arange(3), "v": torch.ones(2)}, {"k": "v"}))
        for _ in range(data.draw(st.integers(1, 4))):
            blob[data.draw(st.integers(0, 150))] = data.draw(st.integers(0, 255))
        try:
            found = parse_safetensors_header(bytes(blob), file_bytes=len(blob), path="x")
        except FormatError:
            return
        assert isinstance(found, SafetensorsHeader)
        with contextlib.suppress(SafetensorError, KeyError):
            assert set(load(bytes(blob))) == set(found.entries)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"dtype": "complex128", "end": 32}, "complex128, which safetensors lacks"),
            ({"dtype": "what"}, "what, which safetensors lacks"),
            ({"name": "__metadata__"}, "name that is used"),
            ({"dtype": "float4_e2m1fn_x2", "shape": (), "end": 1}, "a single float4"),
            ({"name": "\ud800"}, "not valid Unicode"),
        ],
    )
    def test_what_cannot_be_encoded_is_refused(
        self, change: dict[str, object], complaint: str
    ) -> None:
        """Headers that no reader would accept are not written."""
        fields = {"name": "a", "dtype": "uint8", "shape": (2,), "start": 0, "end": 2} | change
        entry = SafetensorsEntry(**fields)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=complaint):
            encode_safetensors_header([entry])
