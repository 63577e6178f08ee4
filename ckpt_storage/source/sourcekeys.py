"""The keys of all values of a source: what is asked for by who looks at everything."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from .model import Key, TensorInfo


class _Values(Protocol):
    """The part of a source that says what there is."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors by FQN."""

    @property
    def blobs(self) -> AbstractSet[str]:
        """FQNs of what is no tensor."""


def value_keys(source: _Values) -> list[Key]:
    """Return the keys of all chunks that have elements, then of all blobs."""
    chunks: list[Key] = [
        (info.fqn, box.offsets)
        for info in source.tensors.values()
        for box in info.boxes
        if not box.is_empty
    ]
    return [*chunks, *((fqn, None) for fqn in sorted(source.blobs))]
