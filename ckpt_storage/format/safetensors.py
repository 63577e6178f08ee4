"""A strict codec of the header of a safetensors file; it handles no tensor bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ckpt_storage.errors import FormatError, InvalidInputError

from .documents import strict_json
from .dtypes import DTYPES
from .fields import MAX_DIMS, is_int_list
from .shard_item import NeedMoreBytes

# The reference implementation refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

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
    """The header of a safetensors file; the bytes of `entries` begin at `data_offset`.

    A shard that torch's DCP wrote has `saved_offsets`: for each tensor, the offsets of this file's
    chunk in the whole tensor, in elements. The shape of the whole tensor is in no such file.
    """

    entries: Mapping[str, SafetensorsEntry]
    metadata: Mapping[str, str]
    saved_offsets: Mapping[str, tuple[int, ...]] | None
    data_offset: int


def encode_safetensors_header(
    entries: Iterable[SafetensorsEntry],
    metadata: Mapping[str, str] | None = None,
    *,
    align_bytes: int = 8,
) -> bytes:
    """Return the bytes of a safetensors file before its data.

    `entries` are adjacent. The data begins at a multiple of `align_bytes`, itself a multiple of 8.
    Raises `InvalidInputError` for tensors that safetensors cannot hold, and for a header beyond the
    100 MB that readers accept.
    """
    body: dict[str, object] = {_METADATA_KEY: dict(metadata)} if metadata else {}
    for entry in entries:
        kind, shape = DTYPES.get(entry.dtype), list(entry.shape)
        why = None
        if kind is None or kind.safetensors is None:
            why = f"has dtype {entry.dtype}, which safetensors lacks"
        elif entry.name in body or entry.name == _METADATA_KEY:
            why = "has a name that is used twice"
        elif entry.dtype == _PAIRED and not shape:
            why = f"is a single {_PAIRED}"
        if why is not None or kind is None:
            what = f"The tensor {entry.name!r} {why}, so it cannot be written to safetensors."
            raise InvalidInputError(what, next_step="Exclude, rename or convert it.")
        if entry.dtype == _PAIRED:
            shape[-1] *= 2
        offsets = [entry.start, entry.end]
        body[entry.name] = {"dtype": kind.safetensors, "shape": shape, "data_offsets": offsets}
    try:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "A name or a metadata text is not valid Unicode.",
            next_step="Rename the tensor, or drop the metadata.",
        ) from error
    text += b" " * (-(_LENGTH_BYTES + len(text)) % align_bytes)
    if len(text) > _MAX_HEADER_BYTES:
        what = f"The safetensors header would be {len(text)} bytes long; readers accept 100 MB."
        raise InvalidInputError(what, next_step="Spread the tensors over more files.")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_safetensors_header(
    prefix: bytes, *, file_bytes: int, path: str
) -> SafetensorsHeader | NeedMoreBytes:
    """Return the header of the safetensors file of `file_bytes` that begins with `prefix`.

    Raises `FormatError` for a violation of the specification, an unknown dtype, and unusable
    `DCP_SHARDING_INFO`.
    """
    try:
        return _parse(prefix, file_bytes)
    except _BadHeaderError as error:
        what = f"The safetensors file {path} {error}."
        raise FormatError(what, path=path, next_step="Fetch or export it again.") from error


class _BadHeaderError(Exception):
    """The header is invalid; the text is a predicate, whose subject is the file."""


def _parse(prefix: bytes, file_bytes: int) -> SafetensorsHeader | NeedMoreBytes:
    if file_bytes < _LENGTH_BYTES:
        raise _BadHeaderError(f"has only {file_bytes} bytes")
    data_offset = _LENGTH_BYTES + int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if len(prefix) < _LENGTH_BYTES:
        return NeedMoreBytes(total_bytes=_LENGTH_BYTES)
    if data_offset > min(file_bytes, _LENGTH_BYTES + _MAX_HEADER_BYTES):
        raise _BadHeaderError(f"of {file_bytes} bytes claims a header of {data_offset - 8}")
    if len(prefix) < data_offset:
        return NeedMoreBytes(total_bytes=data_offset)
    body = _json_object(prefix[_LENGTH_BYTES:data_offset], "header")
    metadata = body.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise _BadHeaderError(f"has a {_METADATA_KEY} that is no map of text to text")
    entries = sorted(
        (_entry(name, value) for name, value in body.items()),
        key=lambda entry: (entry.start, entry.end),
    )
    end = 0
    for entry in entries:
        if entry.start != end:
            raise _BadHeaderError(f"has a hole or an overlap before the bytes of {entry.name!r}")
        end = entry.end
    if end != file_bytes - data_offset:
        raise _BadHeaderError(f"has {file_bytes - data_offset} bytes of data instead of {end}")
    return SafetensorsHeader(
        entries={entry.name: entry for entry in entries},
        metadata=metadata,
        saved_offsets=_saved_offsets(metadata, entries),
        data_offset=data_offset,
    )


def _json_object(text: bytes, what: str) -> dict[str, Any]:
    # The reference implementation allows blanks after the object only.
    if not text.startswith(b"{"):
        raise _BadHeaderError(f"has a {what} that is no JSON object")
    try:
        return strict_json(text, dict)
    except (ValueError, RecursionError) as error:
        raise _BadHeaderError(f"has a {what} that is no valid JSON ({error})") from error


def _entry(name: str, value: object) -> SafetensorsEntry:
    match value:
        case {"dtype": str(code), "shape": list(sizes), "data_offsets": [_, _] as run}:
            pass
        case _:
            raise _BadHeaderError(f"has no dtype, shape and data_offsets for {name!r}")
    kind = _DTYPE_OF_CODE.get(code)
    if kind is None:
        raise _BadHeaderError(f"holds {name!r} with the unknown dtype {code!r}")
    shape = _sizes(name, sizes)
    start, end = _sizes(name, run)
    if kind.name == _PAIRED:
        if not shape or shape[-1] % 2:
            raise _BadHeaderError(f"holds {name!r}, whose last row of 4-bit numbers ends in a byte")
        shape = (*shape[:-1], shape[-1] // 2)
    if end - start != prod(shape) * kind.item_bytes:
        raise _BadHeaderError(
            f"holds {name!r} of dtype {code} and shape {list(shape)} in the bytes "
            f"[{start}, {end}), which have another length"
        )
    return SafetensorsEntry(name=name, dtype=kind.name, shape=shape, start=start, end=end)


def _sizes(name: str, values: list[Any]) -> tuple[int, ...]:
    if len(values) > MAX_DIMS or not is_int_list(values):
        raise _BadHeaderError(f"has sizes or offsets for {name!r} that are no counts")
    return tuple(values)


def _saved_offsets(
    metadata: Mapping[str, str], entries: list[SafetensorsEntry]
) -> Mapping[str, tuple[int, ...]] | None:
    text = metadata.get(_SHARDING_KEY)
    if not text:
        return None
    sharding = _json_object(text.encode(errors="surrogatepass"), _SHARDING_KEY)
    shapes = {}
    for entry in entries:
        match sharding.get(entry.name):
            case {"saved_offsets": list(values)} if len(values) == len(entry.shape):
                shapes[entry.name] = _sizes(entry.name, values)
            case _:
                raise _BadHeaderError(f"has no usable {_SHARDING_KEY} for {entry.name!r}")
    return shapes
