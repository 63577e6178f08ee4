"""The store that ranks share, in the memory of one process: for ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch.distributed as dist

from ckpt_storage.coordination.keyvalue import KeyValues
from ckpt_storage.errors import InvalidInputError


class MemoryKeys(KeyValues):
    """A store for the threads of one process."""

    def __init__(self) -> None:
        super().__init__(_none, "")
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes, timeout_s: float) -> None:  # noqa: ARG002  # as there
        with self._lock:
            self._values[key] = bytes(value)

    def get(self, key: str, timeout_s: float) -> bytes | None:  # noqa: ARG002  # as there
        with self._lock:
            return self._values.get(key)

    def has_all(self, keys: Sequence[str], timeout_s: float) -> bool:  # noqa: ARG002  # as there
        with self._lock:
            return all(key in self._values for key in keys)

    def set_first(self, key: str, value: bytes, timeout_s: float) -> None:  # noqa: ARG002  # as there
        with self._lock:
            self._values.setdefault(key, bytes(value))

    def delete(self, key: str, timeout_s: float) -> None:  # noqa: ARG002  # as there
        with self._lock:
            self._values.pop(key, None)

    @property
    def keys(self) -> list[str]:
        with self._lock:
            return sorted(self._values)


def _none() -> dist.Store:
    raise InvalidInputError("Nobody connects here.")
