"""The hash by which a save sees that a value has not changed: XXH3-128, of the package `xxhash`."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from ckpt_storage.errors import InvalidInputError


class Digest(Protocol):
    """A hash under way."""

    def update(self, data: memoryview | bytes, /) -> None:
        """Append bytes."""

    def digest(self) -> bytes:
        """Return the hash of the bytes so far, 16 bytes in canonical order."""


def check_hashes() -> None:
    """Raise `InvalidInputError` unless hashes can be computed."""
    if importlib.util.find_spec("xxhash") is None:
        raise InvalidInputError(
            "Reusing files of an earlier save (base=, stable=, reuse=) needs the package xxhash, "
            "which is not installed.",
            next_step="Run: pip install 'ckpt-storage[reuse]'",
        )


def new_hash() -> Digest:
    """Return the hash of no bytes. Imports `xxhash`."""
    import xxhash  # noqa: PLC0415  # an optional package

    digest: Digest = xxhash.xxh3_128()
    return digest
