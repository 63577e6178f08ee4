"""Which values a conversion takes over, as `include` and `exclude` say.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ckpt_storage.export.consolidation.options import Selection, selected

__all__ = ["chosen"]


class HasValues(Protocol):
    """What has named values: a source."""

    @property
    def tensors(self) -> Collection[str]:
        """FQNs of tensors."""

    @property
    def blobs(self) -> frozenset[str]:
        """FQNs of the values that are no tensors."""


def chosen(
    source: HasValues, *, include: Selection | None, exclude: Selection | None
) -> tuple[set[str], set[str]]:
    """Return the FQNs that go over, and those that a selection leaves out.

    Raises `InvalidInputError` for an entry that matches nothing: it is likely misspelt.
    """
    names = {*source.tensors, *source.blobs}
    kept = names if include is None else selected(include, names, "include")
    if exclude is not None:
        kept = kept - selected(exclude, names, "exclude")
    return set(kept), names - kept
