"""Manifests that this process has read before, so that opening a checkpoint again costs less.

Knows manifests by what a commit record says of their bytes: the path, with its random save id, the
length and the checksum. Equal ones are equal content, wherever they lie, so nothing here can be
out of date. Called by `opening`; what checks a storage's files reads them and asks nobody.
"""

from __future__ import annotations

from .documents import FileRef
from .manifest import Manifest

_MAX_COUNT = 16
_MAX_BYTES = 32 << 20
"""Of documents; what is parsed of them takes a few times as much."""

# A dict's own steps are atomic, so threads need no lock, and none is inherited by fork.
KEPT: dict[FileRef, Manifest] = {}
"""What is remembered, oldest first."""


def known_manifest(reference: FileRef) -> Manifest | None:
    """Return the manifest of these very bytes if this process has read it lately."""
    return KEPT.get(reference)


def keep_manifest(reference: FileRef, manifest: Manifest) -> None:
    """Remember a manifest that was read and checked; the oldest ones are forgotten."""
    if reference.size_bytes > _MAX_BYTES:
        return
    KEPT[reference] = manifest
    while len(KEPT) > _MAX_COUNT or sum(each.size_bytes for each in list(KEPT)) > _MAX_BYTES:
        oldest = next(iter(list(KEPT)), None)
        if oldest is None:
            return
        KEPT.pop(oldest, None)
