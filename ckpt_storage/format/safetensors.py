"""The header of a safetensors file, read strictly and written.

It reads no storage and sees no tensor bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ckpt_storage.errors import FormatError, InvalidInputError

from .dtypes import DTYPES
from .item_header import NeedMoreBytes

# The reference implementation refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

# Torch has no tensors of more dimensions, and addresses elements with 63 bits.
_MAX_DIMS = 64
_MAX_SIZE = (1 << 63) - 1
_METADATA_KEY = "__metadata__"
_SHARDING_KEY = "DCP_SHARDING_INFO"
_DTYPE_OF_CODE = {d.safetensors: d for d in DTYPES.values() if d.safetensors}

# Safetensors counts single numbers here, torch pairs of them that share a byte.
_PAIRED = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsEntry:
    """One tensor: its bytes are `[start, end)`, counted from the end of the header.

    `dtype` and `shape` are torch's: a `float4_e2m1fn_x2` element is a pair of numbers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """What the header of a safetensors file says.

    `entries` are ordered by `start`. `data_offset` is where their bytes begin in the
    file, `data_bytes` how many there are. `metadata` is the file's own text. A file that
    torch's DCP wrote as a shard has `saved_offsets`: per tensor, the position in elements
    of what lies here in the whole tensor, whose shape no such file tells; otherwise it is
    None.
    """

    entries: Mapping[str, SafetensorsEntry]
    metadata: Mapping[str, str]
    saved_offsets: Mapping[str, tuple[int, ...]] | None
    data_offset: int
    data_bytes: int


def encode_safetensors_header(
    entries: Iterable[SafetensorsEntry],
    metadata: Mapping[str, str] | None = None,
    *,
    align_bytes: int = 8,
) -> bytes:
    """Return the bytes of a safetensors file that stand before its data.

    The data then begins at a multiple of `align_bytes`, itself a multiple of 8; the gap
    is filled with spaces. Pure; the same arguments give the same bytes.

    Raises `InvalidInputError` for a dtype that safetensors lacks, for entries whose bytes
    overlap, leave holes, or do not fit their shape, for a name given twice or not to be
    had, and for a header beyond the 100 MB that readers accept.
    """
    if align_bytes <= 0 or align_bytes % 8:
        raise InvalidInputError(
            f"A safetensors header cannot be aligned to {align_bytes} bytes.",
            next_step="Pass a multiple of 8.",
        )
    body: dict[str, object] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    ordered = list(entries)
    for entry in ordered:
        if entry.name in body or entry.name == _METADATA_KEY:
            raise _cannot_write(entry.name, "has a name that is taken")
        body[entry.name] = _entry_json(entry)
    gap = _first_gap(ordered)
    if gap is not None:
        raise _cannot_write(gap, "does not begin where the one before it ends")
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "A name or a metadata text is no valid Unicode.",
            next_step="Rename the tensor, or drop the metadata.",
        ) from error
    text += b" " * (-(_LENGTH_BYTES + len(text)) % align_bytes)
    if len(text) > _MAX_HEADER_BYTES:
        raise InvalidInputError(
            f"The safetensors header would be {len(text)} bytes long; readers accept 100 MB.",
            next_step="Spread the tensors over more files.",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entry_json(entry: SafetensorsEntry) -> dict[str, object]:
    kind = DTYPES.get(entry.dtype)
    if kind is None or kind.safetensors is None:
        raise _cannot_write(entry.name, f"has dtype {entry.dtype}, which safetensors lacks")
    shape = list(entry.shape)
    fits = entry.end - entry.start == prod(shape) * kind.item_bytes
    if not fits or min(shape, default=0) < 0:
        raise _cannot_write(entry.name, "has a shape that does not fit its bytes")
    if entry.dtype == _PAIRED:
        if not shape:
            raise _cannot_write(entry.name, f"is a single {_PAIRED}")
        shape[-1] *= 2
    offsets = [entry.start, entry.end]
    return {"dtype": kind.safetensors, "shape": shape, "data_offsets": offsets}


def _cannot_write(name: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"The tensor {name!r} {why}, so it cannot be written to safetensors.",
        next_step="Exclude, rename or convert it.",
    )


def _first_gap(entries: Iterable[SafetensorsEntry]) -> str | None:
    """Return the first tensor in order of bytes that is not adjacent to the one before it."""
    end = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            return entry.name
        end = entry.end
    return None


def parse_safetensors_header(
    prefix: bytes, *, file_bytes: int | None = None, path: str | None = None
) -> SafetensorsHeader | NeedMoreBytes:
    """Return the header of the safetensors file that begins with `prefix`.

    `file_bytes` is the length of the whole file; without it, nothing tells whether the
    data is complete. `path` is for error messages.

    Raises `FormatError` for a header that is too long, no JSON object, or names something
    twice; for a tensor with a dtype unknown here, sizes that do not fit its bytes, or
    bytes that overlap, leave a hole, or lie outside the file (the message names it); for
    bytes behind the last tensor; and for unusable `DCP_SHARDING_INFO`.
    """
    parser = _Parser(path)
    if file_bytes is not None and file_bytes < _LENGTH_BYTES:
        raise parser.error(f"has only {file_bytes} bytes")
    if len(prefix) < _LENGTH_BYTES:
        return NeedMoreBytes(total_bytes=_LENGTH_BYTES)
    header_bytes = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise parser.error(f"claims a header of {header_bytes} bytes; 100 MB is the limit")
    data_offset = _LENGTH_BYTES + header_bytes
    if file_bytes is not None and data_offset > file_bytes:
        raise parser.error(f"ends inside its header, after {file_bytes} bytes")
    if len(prefix) < data_offset:
        return NeedMoreBytes(total_bytes=data_offset)
    body = parser.json_object(prefix[_LENGTH_BYTES:data_offset], "header")
    metadata = parser.metadata(body.pop(_METADATA_KEY, {}))
    entries = sorted(
        (parser.entry(name, value) for name, value in body.items()),
        key=lambda entry: (entry.start, entry.end),
    )
    gap = _first_gap(entries)
    if gap is not None:
        raise parser.error(f"has a hole or an overlap before the bytes of {gap!r}")
    data_bytes = entries[-1].end if entries else 0
    if file_bytes is not None:
        parser.check_length(entries, file_bytes - data_offset)
    return SafetensorsHeader(
        entries={entry.name: entry for entry in entries},
        metadata=metadata,
        saved_offsets=parser.saved_offsets(metadata, entries),
        data_offset=data_offset,
        data_bytes=data_bytes,
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    # A name that UTF-8 cannot spell would fail later, far from its cause.
    "".join(found).encode()
    return found


class _Parser:
    """Checks of one file, whose path every error names."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def error(self, problem: str) -> FormatError:
        return FormatError(
            f"The safetensors file {self._path or 'at hand'} {problem}.",
            path=self._path,
            next_step="Fetch or export it again.",
        )

    def json_object(self, text: bytes, what: str) -> dict[str, object]:
        # The reference implementation allows blanks behind the object only.
        if not text.startswith(b"{"):
            raise self.error(f"has a {what} that is no JSON object")
        try:
            value: dict[str, object] = json.loads(text.decode(), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self.error(f"has a {what} that is no valid JSON ({error})") from error
        return value

    def metadata(self, value: object) -> dict[str, str]:
        if not isinstance(value, dict) or not all(type(text) is str for text in value.values()):
            raise self.error(f"has a {_METADATA_KEY} that is no map of text to text")
        return value

    def entry(self, name: str, value: object) -> SafetensorsEntry:
        match value:
            case {"dtype": str(code), "shape": list(sizes), "data_offsets": [_, _] as run}:
                pass
            case _:
                raise self.error(f"has no dtype, shape and data_offsets for {name!r}")
        kind = _DTYPE_OF_CODE.get(code)
        if kind is None:
            raise self.error(f"holds {name!r} with the dtype {code!r}, which is not known here")
        shape = self._sizes(name, sizes)
        start, end = self._sizes(name, run)
        if kind.name == _PAIRED:
            if not shape or shape[-1] % 2:
                raise self.error(f"holds {name!r}, whose last row of 4-bit numbers ends in a byte")
            shape = (*shape[:-1], shape[-1] // 2)
        if end - start != prod(shape) * kind.item_bytes:
            raise self.error(
                f"holds {name!r} of dtype {code} and shape {list(shape)} in the bytes "
                f"[{start}, {end}), which do not fit"
            )
        return SafetensorsEntry(name=name, dtype=kind.name, shape=shape, start=start, end=end)

    def _sizes(self, name: str, values: object) -> tuple[int, ...]:
        if not isinstance(values, list) or len(values) > _MAX_DIMS:
            raise self.error(f"has no usable list of sizes for {name!r}")
        # `type() is`, because JSON's true is an int to isinstance.
        if not all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values):
            raise self.error(f"has a size or offset that is no count for {name!r}")
        return tuple(values)

    def check_length(self, entries: list[SafetensorsEntry], data_bytes: int) -> None:
        for entry in entries:
            if entry.end > data_bytes:
                raise self.error(
                    f"ends before the last byte of {entry.name!r}: "
                    f"{data_bytes} bytes of data, {entry.end} needed"
                )
        surplus = data_bytes - (entries[-1].end if entries else 0)
        if surplus:
            raise self.error(f"has {surplus} bytes behind its last tensor")

    def saved_offsets(
        self, metadata: Mapping[str, str], entries: list[SafetensorsEntry]
    ) -> Mapping[str, tuple[int, ...]] | None:
        text = metadata.get(_SHARDING_KEY)
        if not text:
            return None
        sharding = self.json_object(text.encode(errors="surrogatepass"), _SHARDING_KEY)
        found = {}
        for entry in entries:
            match sharding.get(entry.name):
                case {"saved_offsets": list(values)} if len(values) == len(entry.shape):
                    found[entry.name] = self._sizes(entry.name, values)
                case _:
                    raise self.error(f"has no usable {_SHARDING_KEY} for {entry.name!r}")
        return found
