"""Documents that carry their own checksum: strict access, packed columns, limits.

What is inflated is bounded before it is.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError

from .crc import crc32c_of
from .names import checked_path

MOST_RANKS = 1 << 20
"""Of one save."""


MOST_NAMES = 1 << 24
"""In one list of a document."""


MOST_SLOT_BYTES = 4 << 20
"""Of a commit record; metrics take 16 KiB of it at most, and a fenced attempt 36 bytes."""


MOST_DOCUMENT_BYTES = 1 << 30
"""Of every other document of ours, and of an index of others; no reader inflates more either."""


_HEAD = b'{"crc32c":"'


_MIDDLE = b'","body":'


_TAIL = b"}\n"


_DIGITS = slice(len(_HEAD), len(_HEAD) + 8)


_BODY_START = _DIGITS.stop + len(_MIDDLE)


_FORMAT = re.compile(r"ckpt_storage\.([a-z][a-z0-9_]*)/([1-9][0-9]{0,8})")


_RESTORE = "Restore the file from a copy, or load another checkpoint."


_WRONG_FILE = "Check that the URL names a checkpoint and that no other program wrote the file."


def encode_crcs(crcs: Sequence[int]) -> str:
    """Return checksums as packed CRCs: base64 of little-endian 32-bit words."""
    words = array("I", crcs)
    if sys.byteorder == "big":
        words.byteswap()
    return base64.b64encode(words.tobytes()).decode("ascii")


def decode_crcs(text: str, count: int, *, path: str | None = None) -> array[int]:
    """Return the `count` checksums packed in `text` (type code "I").

    Raises `FormatError`, with the `path` of the document, if `text` is not base64 or holds
    another number of them.
    """
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        data = None
    if data is None or len(data) != 4 * count:
        found = "not base64" if data is None else f"{len(data)} bytes"
        raise FormatError(
            f"{path or 'A document'} holds packed checksums that are {found}; {count} of them, "
            f"{4 * count} bytes, belong there.",
            path=path,
            next_step=_WRONG_FILE,
        )
    words = array("I", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def seal(body: Mapping[str, object]) -> bytes:
    """Return `body` as a sealed document: one line of JSON with the CRC-32C of its body.

    Keys keep their order. Raises `InvalidInputError` for what JSON cannot say: a NaN, a lone
    surrogate, an object of another type; and for a document longer than readers take.
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
    if len(sealed) > MOST_DOCUMENT_BYTES:
        raise InvalidInputError(
            f"A document of the checkpoint would have {len(sealed)} bytes; readers take "
            f"{MOST_DOCUMENT_BYTES}.",
            next_step="Save fewer, larger tensors, or spread them over several checkpoints.",
        )
    return sealed


def unseal(data: bytes, *, path: str) -> dict[str, Any]:
    """Return the body of a sealed document after checking every byte of it.

    Raises `IntegrityError` for a sealed document that was cut, extended or changed, with `path`
    and the `offset` before which it is sound; `FormatError` for a file that never was one, and
    for a body that is sound but no JSON object or that has a key twice.
    """
    damage = _envelope_damage(data)
    if damage is not None:
        offset, what = damage
        raise IntegrityError(
            f"{path} ({len(data)} bytes) is damaged at or after byte {offset}: {what}.",
            path=path,
            offset=offset,
            next_step=_RESTORE,
        )
    if data[: len(_HEAD)] != _HEAD:
        raise FormatError(
            f"{path} ({len(data)} bytes) is not a document of a checkpoint: it begins with "
            f"{data[:16]!r}.",
            path=path,
            next_step=_WRONG_FILE,
        )
    try:
        body = json.loads(
            data[_BODY_START : -len(_TAIL)].decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
        )
        if b"\\ud" in data or b"\\uD" in data:
            # Half of a surrogate pair, which only an escape can spell, is no text.
            json.dumps(body, ensure_ascii=False).encode()
    except (RecursionError, ValueError) as error:
        raise FormatError(
            f"{path} was written with a body that is not valid JSON: {error}.",
            path=path,
            next_step=_WRONG_FILE,
        ) from error
    if not isinstance(body, dict):
        raise FormatError(
            f"{path} was written with a body that is no JSON object.",
            path=path,
            next_step=_WRONG_FILE,
        )
    return body


def encode_format(kind: str, major: int) -> str:
    """Return what the key `format` of a document says: its kind and major version."""
    return f"ckpt_storage.{kind}/{major}"


def check_format(
    body: Mapping[str, object], kind: str, major: int, *, path: str | None = None
) -> None:
    """Raise `FormatError` unless `body` is of this kind and major version; `path` is its file's."""
    name = path or "A document"
    found = body.get("format")
    match = _FORMAT.fullmatch(found) if isinstance(found, str) else None
    if match is None or match.group(1) != kind or int(match.group(2)) < major:
        raise FormatError(
            f"{name} has the format {found!r}; {encode_format(kind, major)!r} belongs there.",
            path=path,
            next_step=_WRONG_FILE,
        )
    if int(match.group(2)) > major:
        raise FormatError(
            f"{name} has the format {found!r}; the highest version that this release of "
            f"ckpt_storage reads is {major}.",
            path=path,
            next_step="Install a newer ckpt_storage.",
        )


def _envelope_damage(data: bytes) -> tuple[int, str] | None:
    """Return where a sealed document may be damaged first, and how; None if it is sound.

    None also for a file that shows neither the beginning nor the middle of an envelope, which no
    single fault does to a sealed document. Behind the head nothing vouches for one byte rather
    than another, so the offset is then that of the checksum's digits.
    """
    head = data[: len(_HEAD)]
    if not _HEAD.startswith(head):
        if _MIDDLE not in data[: _BODY_START + 1]:
            return None
        offset = next(at for at, byte in enumerate(_HEAD) if data[at : at + 1] != bytes([byte]))
        return offset, "its first bytes are not those of a sealed document"
    if len(data) < _BODY_START + len(_TAIL):
        return min(len(data), _DIGITS.start), "it is cut short"
    digits = data[_DIGITS]
    actual = b"%08x" % crc32c_of(memoryview(data)[_BODY_START : -len(_TAIL)])
    if data[_DIGITS.stop : _BODY_START] != _MIDDLE:
        what = "its body does not begin where it should"
    elif not data.endswith(_TAIL):
        what = "it does not end as a sealed document does; it was cut or extended"
    elif digits != actual:
        recorded = digits.decode("ascii", "backslashreplace")
        what = f"its body has CRC-32C {actual.decode()}, and {recorded} is recorded"
    else:
        return None
    return _DIGITS.start, what


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_T = TypeVar("_T")

DAMAGED = "Restore the file from a copy, or load another checkpoint."


# What tensor libraries and file systems count with; a larger number only overflows in them.
_MOST = (1 << 63) - 1


def are_counts(value: object, *, least: int = 0) -> bool:
    """Return whether `value` is a list of integers from `least` on that fit 64 bits."""
    return isinstance(value, list) and all(type(n) is int and least <= n <= _MOST for n in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """A file by path, length in bytes and CRC-32C of all its bytes."""

    path: str
    size_bytes: int
    crc32c: int

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "bytes": self.size_bytes, "crc32c": f"{self.crc32c:08x}"}


@dataclass(frozen=True, slots=True)
class Getter:
    """Typed access to a JSON object; a wrong or missing value is a `FormatError`."""

    body: Any  # whatever the document holds at this place
    where: str

    def fail(self, what: str) -> NoReturn:
        """Raise the `FormatError` that says what the document has or does."""
        raise FormatError(f"{self.where} {what}.", path=self.where, next_step=DAMAGED)

    def _get(self, key: str, kind: type[_T], ok: Callable[[_T], bool] = lambda _: True) -> _T:
        value = self.body.get(key) if isinstance(self.body, Mapping) else None
        if not isinstance(value, kind) or isinstance(value, bool) or not ok(value):
            self.fail(f"has {value!r:.80} where {key!r} should be")
        return value

    def string(self, key: str) -> str:
        """Return a string."""
        return self._get(key, str)

    def count(self, key: str, *, below: int | None = None) -> int:
        """Return an integer from 0 on, less than `below`."""
        return self._get(key, int, lambda n: 0 <= n <= _MOST and (below is None or n < below))

    def items(self, key: str) -> list[Any]:
        """Return a list of anything."""
        return self._get(key, list)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object."""
        return self._get(key, dict)

    def strings(self, key: str) -> list[str]:
        """Return a list of strings."""
        return self._get(key, list, lambda v: all(isinstance(s, str) for s in v))

    def objects(self, key: str) -> list[Getter]:
        """Return access to each entry of a list of objects."""
        entries = self._get(key, list, lambda v: all(isinstance(entry, dict) for entry in v))
        return [Getter(entry, self.where) for entry in entries]

    def counts(self, key: str, length: int | None = None, *, least: int = 0) -> list[int]:
        """Return a list of `length` integers from `least` on."""
        return self._get(
            key,
            list,
            lambda v: (length is None or len(v) == length) and are_counts(v, least=least),
        )

    def lists_of_counts(self, key: str) -> list[list[int]]:
        """Return a list of lists of integers from 0 on."""
        return self._get(key, list, lambda v: all(map(are_counts, v)))

    def crc(self, key: str) -> int:
        """Return a checksum that is spelt as 8 hexadecimal digits."""
        text = self.string(key)
        try:
            value = int(text, 16) if len(text) == 8 else -1  # noqa: PLR2004  # 32 bits in hex
        except ValueError:
            value = -1
        if value < 0:
            self.fail(f"has {text!r:.40} where the checksum {key!r} should be")
        return value


def ref_from_json(value: object, where: str) -> FileRef:
    """Return the reference that a JSON object spells; its path stays below the checkpoint."""
    get = Getter(value, where)
    return FileRef(
        path=checked_path(get.string("path"), where=where),
        size_bytes=get.count("bytes"),
        crc32c=get.crc("crc32c"),
    )
