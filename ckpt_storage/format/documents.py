"""Sealed JSON documents, which carry their own checksum; strict access to them; packed columns.

The size of packed data is checked before it is inflated.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError

from .crc import crc32c_of
from .names import checked_path

MAX_COUNT = (1 << 63) - 1
"""The largest integer of tensor libraries and file systems; a larger number overflows in them."""
MAX_DIMS = 64
"""The limit of torch."""
MAX_RANKS = 1 << 20
MAX_NAMES = 1 << 24
"""The limit for one list of names."""
MAX_SLOT_BYTES = 4 << 20
"""The limit for a commit record: metrics have at most 16 KiB, and each fenced attempt 36 bytes."""
MAX_DOCUMENT_BYTES = 1 << 30
"""The limit for every other document, and for the index of another tool."""
MAX_INFLATED_BYTES = 256 << 20
"""The limit for all columns and names of one document together, inflated."""

RESTORE = "Restore the file from a copy, or load another checkpoint."
DAMAGED = (
    "It was read twice, the second time past the caches of this host. Caches of mounts and "
    f"gateways cannot be bypassed, so try another host, too. {RESTORE}"
)

Counts = NDArray[np.int64]

_T = TypeVar("_T")
_WRONG_FILE = "Check that the URL names a checkpoint and that no other program wrote the file."

_HEAD = b'{"crc32c":"'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_DIGITS = slice(len(_HEAD), len(_HEAD) + 8)
_BODY_START = _DIGITS.stop + len(_MIDDLE)

_MAJOR = 1
_FORMAT = re.compile(r"ckpt_storage\.([a-z][a-z0-9_]*)/([1-9][0-9]{0,8})")
_CRC = re.compile("[0-9a-f]{8}")
_SURROGATE = re.compile("[\ud800-\udfff]")

_PLAIN_COUNT = 64
_PLAIN_CHARS = 2048
_INTEGER_BYTES = 8
# Differences of ascending columns are small numbers with long runs: higher levels gain nothing.
_LEVEL = 1


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
        raise FormatError(what, path=path, next_step=_WRONG_FILE)
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
        raise FormatError(what, path=path, next_step=_WRONG_FILE) from error


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


def format_of(kind: str) -> str:
    """Return the value of the key `format` of a document: its kind and major version."""
    return f"ckpt_storage.{kind}/{_MAJOR}"


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


def pack_crcs(crcs: Sequence[int]) -> str:
    """Return checksums as packed CRCs: base64 of little-endian 32-bit words."""
    return pack_bytes(np.asarray(crcs, dtype="<u4").tobytes())


def pack_column(values: Sequence[int] | Counts) -> list[int] | dict[str, Any]:
    """Return the JSON value of a column of integers that fit 64 bits."""
    column: Counts = np.asarray(values, dtype=np.int64)
    if len(column) <= _PLAIN_COUNT:
        plain: list[int] = column.tolist()
        return plain
    # Differences may wrap around at 64 bits; the sums of a reader wrap back.
    differences = np.diff(column, prepend=np.int64(0)).astype("<i8")
    packed = zlib.compress(differences.tobytes(), _LEVEL)
    return {"count": len(column), "zlib": pack_bytes(packed)}


def pack_names(names: Sequence[str]) -> list[str] | dict[str, Any]:
    """Return the JSON value of a list of strings.

    Raises `InvalidInputError` for half of a surrogate pair, which UTF-8 cannot encode.
    """
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        name = next((name for name in names if _SURROGATE.search(name)), "")
        raise InvalidInputError(
            f"The name {name!r:.200} holds half of a surrogate pair, which is no text.",
            next_step="Give this value a name that UTF-8 can spell.",
        ) from None
    if sum(map(len, names)) <= _PLAIN_CHARS:
        return list(names)
    text = json.dumps(list(names), ensure_ascii=False, separators=(",", ":")).encode()
    return {"count": len(names), "bytes": len(text), "zlib": pack_bytes(zlib.compress(text, 6))}


def pack_bytes(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode("ascii")


@dataclass(slots=True)
class InflateBudget:
    """The bytes of one document that may still be inflated."""

    remaining_bytes: int = MAX_INFLATED_BYTES


def is_int_list(value: object, least: int = 0) -> bool:
    """Return whether `value` is a list or tuple of integers from `least` on, without booleans."""
    if not isinstance(value, list | tuple) or not set(map(type, value)) <= {int}:
        return False
    return not value or (min(value) >= least and max(value) <= MAX_COUNT)


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object; a wrong or missing value raises `FormatError`.

    `where` names the document in errors. All objects of one document share a `budget`.
    """

    body: Mapping[str, Any]
    where: str
    budget: InflateBudget = field(default_factory=InflateBudget)

    @classmethod
    def of(cls, body: Mapping[str, object], kind: str, where: str) -> Fields:
        """Return access to the body of a document of this kind. Raises `FormatError` for others."""
        text = body.get("format")
        match = _FORMAT.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[1] != kind or int(match[2]) < _MAJOR:
            what = f"{where} has the format {text!r}; {format_of(kind)!r} belongs there."
            raise FormatError(what, path=where, next_step=_WRONG_FILE)
        if int(match[2]) > _MAJOR:
            what = (
                f"{where} has the format {text!r}; the highest version that this release of "
                f"ckpt_storage reads is {_MAJOR}."
            )
            raise FormatError(what, path=where, next_step="Install a newer ckpt_storage.")
        return cls(body, where)

    def __contains__(self, key: str) -> bool:
        return self.body.get(key) is not None

    def required(self, key: str) -> Fields:
        """Return this object if it has the key, which may be null. Raises `FormatError`."""
        if key not in self.body:
            self.fail(f"has no {key!r}")
        return self

    def fail(self, what: str) -> NoReturn:
        """Raise a `FormatError` whose subject is the document."""
        raise FormatError(f"{self.where} {what}.", path=self.where, next_step=DAMAGED)

    def value(
        self,
        key: str,
        kind: type[_T],
        absent: _T | None = None,
        *,
        ok: Callable[[_T], bool] = lambda _: True,
    ) -> _T:
        """Return a value of this kind; an `absent` other than None replaces a missing value."""
        if absent is not None and key not in self:
            return absent
        value = self.body.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not ok(value):
            self.fail(f"has {value!r:.80} where {key!r} should be")
        return value

    def note(self, key: str, kind: type[_T], absent: _T) -> _T:
        """Return a value for people; `absent` replaces a missing value or one of another kind."""
        value = self.body.get(key)
        return value if isinstance(value, kind) and not isinstance(value, bool) else absent

    def count(self, key: str, absent: int | None = None) -> int:
        """Return an integer from 0 on; as `value`."""
        return self.value(key, int, absent, ok=lambda n: 0 <= n <= MAX_COUNT)

    def strings(self, key: str) -> list[str]:
        """Return a list of strings."""
        return self.value(key, list, ok=lambda v: all(isinstance(s, str) for s in v))

    def object(self, key: str) -> Fields:
        """Return access to an object."""
        return Fields(self.value(key, dict), self.where, self.budget)

    def objects(self, key: str) -> list[Fields]:
        """Return access to each entry of a list of objects."""
        entries = self.value(key, list, ok=lambda v: all(isinstance(entry, dict) for entry in v))
        return [Fields(entry, self.where, self.budget) for entry in entries]

    def crc(self, key: str) -> int:
        """Return a checksum of 8 hexadecimal digits."""
        return int(self.value(key, str, ok=lambda text: bool(_CRC.fullmatch(text))), 16)

    def ref(self) -> FileRef:
        """Return the file that this object references; its path is below the checkpoint."""
        return FileRef(
            path=checked_path(self.value("path", str), where=self.where),
            size_bytes=self.count("bytes"),
            crc32c=self.crc("crc32c"),
        )

    def document(self, key: str, path: str) -> FileRef | None:
        """Return the document that an object references, None without the object.

        Its path must be `path`: a copy writes to the same place below another root.
        """
        ref = self.object(key).ref() if key in self else None
        if ref is not None and ref.path != path:
            self.fail(f"names {ref.path!r:.200}, which is not a document of this save")
        return ref

    def crcs(self, key: str, count: int) -> array[int]:
        """Return `count` packed checksums (type code "I")."""
        data = self.packed(key, 4 * count)
        return array("I", np.frombuffer(data, dtype="<u4").astype(np.uint32).tobytes())

    def packed(self, key: str, size_bytes: int) -> bytes:
        """Return `size_bytes` that are spelt in base64."""
        try:
            data = binascii.a2b_base64(self.value(key, str), strict_mode=True)
        except ValueError:
            data = b"?"
        if len(data) != size_bytes:
            self.fail(f"has packed checksums in {key!r} that are not {size_bytes} bytes")
        return data

    def column(
        self, key: str, *, count: int | None = None, least: int = 0, below: int = 1 << 63
    ) -> Counts:
        """Return `count` integers from `least` on, less than `below`."""
        if isinstance(self.body.get(key), list):
            plain = self.value(key, list, ok=lambda v: is_int_list(v, least))
            self._take(key, len(plain) * _INTEGER_BYTES)
            column, is_within = np.array(plain, dtype=np.int64), not plain or max(plain) < below
        else:
            packed = self.object(key)
            size_bytes = packed.count("count") * _INTEGER_BYTES
            steps = np.frombuffer(packed.inflate(key, size_bytes), dtype="<i8")
            column = np.cumsum(steps, dtype=np.int64)
            is_within = not len(column) or least <= column.min() <= column.max() < below
        if count is not None and len(column) != count:
            self.fail(f"has {len(column)} entries in {key!r} instead of {count}")
        if not is_within:
            self.fail(f"has a number in {key!r} that is out of range")
        return column

    def names(self, key: str) -> list[str]:
        """Return packed strings."""
        if isinstance(self.body.get(key), list):
            return self.strings(key)
        packed = self.object(key)
        count = packed.count("count")
        if count > MAX_NAMES:
            self.fail(f"declares more than {MAX_NAMES} names in {key!r}")
        try:
            names = strict_json(packed.inflate(key, packed.count("bytes")), list)
        except (RecursionError, ValueError):
            names = [None]
        if len(names) != count or not all(isinstance(name, str) for name in names):
            self.fail(f"has packed {key!r} that are not {count} names")
        return names

    def _take(self, key: str, size_bytes: int) -> None:
        self.budget.remaining_bytes -= size_bytes
        if self.budget.remaining_bytes < 0:
            self.fail(f"declares more than {MAX_INFLATED_BYTES} inflated bytes up to {key!r}")

    def inflate(self, key: str, size_bytes: int) -> bytes:
        """Return exactly `size_bytes` of a stream; `key` is for errors."""
        self._take(key, size_bytes)
        inflater = zlib.decompressobj()
        try:
            data = binascii.a2b_base64(self.value("zlib", str), strict_mode=True)
            # With one byte more, the inflater reaches the end of a sound stream.
            inflated = inflater.decompress(data, size_bytes + 1)
        except (ValueError, zlib.error):
            inflated = b""
        if len(inflated) != size_bytes or not inflater.eof or inflater.unused_data:
            self.fail(f"has packed {key!r} that do not inflate to {size_bytes} bytes")
        return inflated


class LazyList(Sequence[_T]):
    """`count` values that `make` makes on access; equal to any sequence of equal values."""

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __init__(self, count: int, make: Callable[[int], _T]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401  # a value, or a list for a slice
        at = range(self._count)[index]
        return self._make(at) if isinstance(at, int) else list(map(self._make, at))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented
