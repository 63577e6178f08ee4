"""Which checkpoint a step or a URL means: the roots that may have it, and its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.store import Location, redacted_url

from .root import Root

Selection = tuple[Sequence[Root], str]
"""Roots that may have a checkpoint, and its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The checkpoint that a caller names: its text in messages, and how its selection is made."""

    text: str
    select: Callable[[], Selection]

    @classmethod
    def of(
        cls, roots: Sequence[Root], *, step: int | None, url: str | os.PathLike[str] | None
    ) -> Selected | None:
        """Return the checkpoint of a step or at a URL; None: the newest is wanted."""
        if url is not None:
            return cls(text=redacted_url(url), select=partial(select_url, roots, url, step))
        if step is not None:
            return cls(text=f"step {step}", select=lambda: (roots, roots[0].names.name_of(step)))
        return None


def select_own(roots: Sequence[Root], location: Location) -> Selection | None:
    """Return the selection of a location that is a step below one of `roots`, else None."""
    parent_url, _, name = location.url.rstrip("/").rpartition("/")
    for root in roots:
        is_parent = root.location.url.rstrip("/") == parent_url
        if is_parent and root.names.step_of(name) is not None:
            return [root], name
    return None


def select_url(
    roots: Sequence[Root], url: str | os.PathLike[str], step: int | None = None
) -> Selection:
    """Return the selection of a checkpoint below any root.

    Raises `InvalidInputError` for a value that is no such URL, or if there is a `step`, too.
    """
    if step is not None:
        raise InvalidInputError("restore has both step and url.", next_step="Give one of them.")
    own = roots[0]
    location = Location.of(url, own.location.storage_options)
    selection = select_own(roots, location)
    if selection is not None:
        return selection
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
