"""Which checkpoint a step or a URL means: the roots that may have it, and its name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.store import Location

from .root import Root

Selection = tuple[Sequence[Root], str | None]
"""Roots that may have a checkpoint, and its name; None: the newest."""


def find_own(roots: Sequence[Root], location: Location) -> tuple[Root, str] | None:
    """Return root and name of a location that is a step below one of `roots`, else None."""
    parent_url, _, name = location.url.rstrip("/").rpartition("/")
    for root in roots:
        is_parent = root.location.url.rstrip("/") == parent_url
        if is_parent and root.names.step_of(name) is not None:
            return root, name
    return None


def select(
    roots: Sequence[Root], *, step: int | None, url: str | os.PathLike[str] | None
) -> Selection:
    """Return the selection of a step below `roots`, of a checkpoint below any root, or of neither.

    Raises `InvalidInputError` for a value that is no step or no such URL, and for both.
    """
    if url is None:
        return roots, None if step is None else roots[0].names.name_of(step)
    if step is not None:
        raise InvalidInputError("restore has both step and url.", next_step="Give one of them.")
    own = roots[0]
    location = Location.of(url, own.location.storage_options)
    own_checkpoint = find_own(roots, location)
    if own_checkpoint is not None:
        root, name = own_checkpoint
        return [root], name
    parent, _, name = location.target.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        raise InvalidInputError(
            f"{location.url} is no folder of a root.",
            next_step="Use ckpt_storage.load, or give the URL of a checkpoint below a root.",
        )
    other = Root(
        Location.of(parent or "/", location.storage_options),
        own.names,
        timeouts=own.timeouts,
        retry=own.retry,
        recorded_steps=True,
    )
    return [other], name
