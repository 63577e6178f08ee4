"""Which values a conversion takes over, as `include` and `exclude` say.

Pure. Called by `converting`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection
from typing import Protocol

from ckpt_storage.consolidation.options import Selection
from ckpt_storage.errors import InvalidInputError

__all__ = ["chosen"]

_GLOB = re.compile(r"[*?\[]")


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
    kept = names if include is None else _selected(include, names, "include")
    if exclude is not None:
        kept = kept - _selected(exclude, names, "exclude")
    return set(kept), names - kept


def _selected(selection: Selection, names: set[str], option: str) -> set[str]:
    if callable(selection):
        return {fqn for fqn in sorted(names) if selection(fqn)}
    found: set[str] = set()
    for entry in [selection] if isinstance(selection, str) else sorted(selection):
        if entry in names:
            found.add(entry)
            continue
        match = re.compile(fnmatch.translate(entry)).match
        matches = {fqn for fqn in names if match(fqn)} if _GLOB.search(entry) else set()
        if not matches:
            below = any(fqn.startswith(f"{entry}.") for fqn in names)
            raise InvalidInputError(
                f"{option} names {entry!r}, which matches no value of the checkpoint.",
                next_step=f'For all below it give "{entry}.*".'
                if below
                else "Give FQNs or glob patterns.",
            )
        found |= matches
    return found
