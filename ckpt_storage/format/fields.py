"""Strict access to the values of a JSON document."""

from __future__ import annotations

import binascii
import re
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np

from ckpt_storage.errors import FormatError

from .columns import INTEGER_BYTES, MAX_INFLATED_BYTES, Counts, InflateBudget
from .documents import DAMAGED, WRONG_FILE, FileRef, strict_json
from .names import checked_path

MAX_COUNT = (1 << 63) - 1
"""The largest integer of tensor libraries and file systems; a larger number overflows in them."""
MAX_DIMS = 64
"""The limit of torch."""
MAX_NAMES = 1 << 24
"""The limit for one list of names."""
_T = TypeVar("_T")

_MAJOR = 1
_FORMAT = re.compile(r"ckpt_storage\.([a-z][a-z0-9_]*)/([1-9][0-9]{0,8})")
_CRC = re.compile("[0-9a-f]{8}")


def format_of(kind: str) -> str:
    """Return the value of the key `format` of a document: its kind and major version."""
    return f"ckpt_storage.{kind}/{_MAJOR}"


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
            raise FormatError(what, path=where, next_step=WRONG_FILE)
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
        default: _T | None = None,
        *,
        ok: Callable[[_T], bool] = lambda _: True,
    ) -> _T:
        """Return a value of this kind; without a `default` a missing value is an error."""
        if default is not None and key not in self:
            return default
        value = self.body.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not ok(value):
            self.fail(f"has {value!r:.80} where {key!r} should be")
        return value

    def note(self, key: str, kind: type[_T], default: _T) -> _T:
        """Return a value for people, `default` for a missing value or one of another kind."""
        value = self.body.get(key)
        return value if isinstance(value, kind) and not isinstance(value, bool) else default

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer from 0 on; as `value`."""
        return self.value(key, int, default, ok=lambda n: 0 <= n <= MAX_COUNT)

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
            self._take(key, len(plain) * INTEGER_BYTES)
            column, is_within = np.array(plain, dtype=np.int64), not plain or max(plain) < below
        else:
            packed = self.object(key)
            size_bytes = packed.count("count") * INTEGER_BYTES
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
