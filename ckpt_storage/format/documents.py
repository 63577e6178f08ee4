"""Sealed JSON documents, which carry their own checksum, and references to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError

from .crc import crc32c_of

MAX_RANKS = 1 << 20
MAX_SLOT_BYTES = 4 << 20
"""The limit for a commit record: metrics have at most 16 KiB, and each fenced attempt 36 bytes."""
MAX_DOCUMENT_BYTES = 1 << 30
"""The limit for every other document, and for the index of another tool."""
RESTORE = "Restore the file from a copy, or load another checkpoint."
WRONG_FILE = "Check that the URL names a checkpoint and that no other program wrote the file."
DAMAGED = (
    "It was read twice, the second time past the caches of this host. Caches of mounts and "
    f"gateways cannot be bypassed, so try another host, too. {RESTORE}"
)

_T = TypeVar("_T")

_HEAD = b'{"crc32c":"'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_DIGITS = slice(len(_HEAD), len(_HEAD) + 8)
_BODY_START = _DIGITS.stop + len(_MIDDLE)


def seal(body: Mapping[str, object]) -> bytes:
    """Return `body` as a sealed document: one line of JSON with the CRC-32C of its body.

    Keys keep their order. Raises `InvalidInputError` for values that JSON does not have (NaN, a
    lone surrogate, an object of another type), and for a document longer than readers accept.
    """
    try:
        text = json.dumps(
            dict(body), ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"A document of the checkpoint cannot be written as JSON: {error}.",
            next_step="Use plain strings, numbers, lists and dictionaries.",
        ) from error
    sealed = b"".join((_HEAD, b"%08x" % crc32c_of(text), _MIDDLE, text, _TAIL))
    if len(sealed) > MAX_DOCUMENT_BYTES:
        raise InvalidInputError(
            f"A document of the checkpoint would have {len(sealed)} bytes; readers accept "
            f"{MAX_DOCUMENT_BYTES}.",
            next_step="Save fewer, larger tensors, or spread them over several checkpoints.",
        )
    return sealed


def unseal(data: bytes, *, path: str) -> dict[str, Any]:
    """Return the body of a sealed document after checking every byte of it.

    Raises `IntegrityError` for a sealed document that was cut, extended or changed, and
    `FormatError` for another file, and for a body that is not a strict JSON object.
    """
    name = f"{path} ({len(data)} bytes)"
    text = data[_BODY_START : -len(_TAIL)]
    actual, recorded = b"%08x" % crc32c_of(text), data[_DIGITS]
    begins = _HEAD.startswith(data[: len(_HEAD)])
    if not begins and _MIDDLE not in data[: _BODY_START + 1]:
        what = f"{name} is not a document of a checkpoint: it begins with {data[:16]!r}."
        raise FormatError(what, path=path, next_step=WRONG_FILE)
    if data != b"".join((_HEAD, actual, _MIDDLE, text, _TAIL)):
        what = (
            f"{name} is damaged: its body has CRC-32C {actual.decode()}, and {recorded!r} is "
            "recorded."
        )
        raise IntegrityError(what, path=path, offset=0, next_step=DAMAGED)
    try:
        return strict_json(text, dict)
    except (RecursionError, ValueError) as error:
        what = f"{path} was written with a body that is not valid JSON: {error}."
        raise FormatError(what, path=path, next_step=WRONG_FILE) from error


def strict_json(text: bytes, kind: type[_T]) -> _T:
    """Return the value of a JSON text. Raises `ValueError`, also for Python's extensions."""
    value: object = json.loads(
        text.decode(), object_pairs_hook=_unique_keys, parse_constant=no_constant
    )
    if b"\\ud" in text or b"\\uD" in text:
        # Only an escape can spell half of a surrogate pair, which UTF-8 cannot encode.
        json.dumps(value, ensure_ascii=False).encode()
    if not isinstance(value, kind):
        raise ValueError(f"it is no {kind.__name__}")  # noqa: TRY004  # callers catch one class
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has a key twice")
    return members


def no_constant(name: str) -> float:
    """Refuse NaN and the infinities, which Python's `json` reads."""
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A file by path, length in bytes and CRC-32C of all its bytes."""

    path: str
    size_bytes: int
    crc32c: int

    @classmethod
    def of(cls, path: str, data: bytes) -> FileRef:
        """Return the reference to a file of these bytes."""
        return cls(path=path, size_bytes=len(data), crc32c=crc32c_of(data))

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "bytes": self.size_bytes, "crc32c": f"{self.crc32c:08x}"}
