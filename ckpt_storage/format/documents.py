"""What all documents of a checkpoint share: references to files, and strict access to JSON.

Pure values; no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ckpt_storage.errors import FormatError

from . import layout

DAMAGED = "Restore the file from a copy, or load another checkpoint."
_T = TypeVar("_T")
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
        path=layout.checked_path(get.string("path"), where=where),
        size_bytes=get.count("bytes"),
        crc32c=get.crc("crc32c"),
    )
