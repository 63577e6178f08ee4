"""Headers of safetensors files, written and read."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from dcp_cases import raw_bytes, seeded
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from safetensors.torch import save as safetensors_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_storage.errors import FormatError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.safetensors import (
    SafetensorsEntry,
    SafetensorsHeader,
    encode_safetensors_header,
    parse_safetensors_header,
)

STORED_DTYPES = [name for name, kind in DTYPES.items() if kind.safetensors]


def laid_out(tensors: dict[str, torch.Tensor]) -> tuple[list[SafetensorsEntry], bytes]:
    """Return entries for the tensors, one behind the other, and their bytes."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        raw = raw_bytes(tensor)
        entry = SafetensorsEntry(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            start=len(data),
            end=len(data) + len(raw),
        )
        entries.append(entry)
        data += raw
    return entries, data


def with_header(body: object, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header, given as JSON text or as an object."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<Q", len(text)) + text + data


class TestSafetensors:
    """Headers agree with the safetensors library, and unsound ones are refused."""

    @pytest.mark.parametrize("dtype", STORED_DTYPES)
    def test_the_library_loads_what_is_encoded(self, dtype: str, tmp_path: Path) -> None:
        """Behind our header, raw bytes load as the same tensor."""
        tensor = seeded(1, 2, 4, dtype=getattr(torch, dtype))
        entries, data = laid_out({"a.b": tensor, "ü": torch.arange(3)})
        path = tmp_path / "x.safetensors"
        path.write_bytes(encode_safetensors_header(entries, {"format": "pt"}) + data)
        loaded = load_file(path)
        assert list(loaded) == ["a.b", "ü"]
        assert (loaded["a.b"].dtype, loaded["a.b"].shape) == (tensor.dtype, tensor.shape)
        assert raw_bytes(loaded["a.b"]) == raw_bytes(tensor)
        assert torch.equal(loaded["ü"], torch.arange(3))

    @pytest.mark.parametrize("dtype", STORED_DTYPES)
    def test_what_the_library_writes_is_parsed(self, dtype: str) -> None:
        """Names, shapes, byte runs and metadata of a file of the library are found."""
        tensors = {"w": seeded(1, 2, 6, dtype=getattr(torch, dtype)), "b": torch.arange(3.0)}
        blob = safetensors_save(tensors, {"format": "pt", "note": "ü"})
        header = parse_safetensors_header(blob, file_bytes=len(blob), path="x")
        assert isinstance(header, SafetensorsHeader)
        assert dict(header.metadata) == {"format": "pt", "note": "ü"}
        assert header.saved_offsets is None
        assert set(header.entries) == set(tensors)
        for name, tensor in tensors.items():
            entry = header.entries[name]
            start, end = header.data_offset + entry.start, header.data_offset + entry.end
            assert (entry.dtype, entry.shape) == (
                str(tensor.dtype).removeprefix("torch."),
                tensor.shape,
            )
            assert blob[start:end] == raw_bytes(tensor)

    def test_shards_of_torchs_dcp_tell_their_place(self, tmp_path: Path) -> None:
        """The offsets that torch's own safetensors writer notes are exposed."""
        state = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
        writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
        save(state, storage_writer=writer, no_dist=True)
        (path,) = tmp_path.glob("*.safetensors")
        blob = path.read_bytes()
        header = parse_safetensors_header(blob, file_bytes=len(blob), path="x")
        assert isinstance(header, SafetensorsHeader)
        assert header.saved_offsets == {"w": (0, 0), "b": (0,)}
        for name, tensor in state.items():
            start = header.data_offset + header.entries[name].start
            assert blob[start:].startswith(raw_bytes(tensor))

    @pytest.mark.parametrize(
        ("body", "data_bytes", "complaint"),
        [
            ({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3, "'a'.*F6_E2M3"),
            ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "'a'.*do not fit"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, 3, "before .*'a'"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 1, "1 bytes of data; 2"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 3, "3 bytes of data; 2"),
            ({"a": {"dtype": "U8", "shape": [-2], "data_offsets": [0, 2]}}, 2, "no counts for 'a'"),
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
        ],
    )
    def test_unsound_headers_are_refused(
        self, body: object, data_bytes: int, complaint: str
    ) -> None:
        """Whatever the safetensors specification forbids is a format error that says what."""
        blob = with_header(body, b"\0" * data_bytes)
        with pytest.raises(FormatError, match=complaint) as caught:
            parse_safetensors_header(blob, file_bytes=len(blob), path="x/y.safetensors")
        assert caught.value.path == "x/y.safetensors"

    @pytest.mark.parametrize("info", [{}, {"a": {}}, {"a": {"saved_offsets": [0]}}, {"a": 1}])
    def test_unusable_sharding_information_is_refused(self, info: object) -> None:
        """If a file says it is a shard, it has to say where every tensor belongs."""
        body = {
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)},
            "a": {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]},
        }
        blob = with_header(body, b"x")
        with pytest.raises(FormatError, match="DCP_SHARDING_INFO for 'a'"):
            parse_safetensors_header(blob, file_bytes=len(blob), path="x")

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
            ({"name": "__metadata__"}, "name that is taken"),
            ({"dtype": "float4_e2m1fn_x2", "shape": (), "end": 1}, "a single float4"),
            ({"name": "\ud800"}, "no valid Unicode"),
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
