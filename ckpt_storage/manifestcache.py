"""Manifests that this process has read before, so that opening a checkpoint again costs less.

Knows manifests by where they lie and what a commit record says of their bytes: the path, with its
random save id, the length and the checksum. A checksum is no proof of origin: whoever writes a
manifest can give it any. So what lies elsewhere is another manifest, whatever is said of it; and
what lies in the same place may be written anew only by who may write there. Called by `opening`;
what checks a storage's files reads them and asks nobody.
"""

from __future__ import annotations

from collections.abc import Hashable

from .documents import FileRef
from .manifest import Manifest

_MAX_COUNT = 16
_MAX_BYTES = 128 << 20

_BYTES_PER_BYTE = 4
"""What values take in memory for each byte of a document, and of what it inflates to."""

# A dict's own steps are atomic, so threads need no lock, and none is inherited by fork.
KEPT: dict[tuple[Hashable, FileRef], Manifest] = {}
"""What is remembered, oldest first."""


def known_manifest(place: Hashable, reference: FileRef) -> Manifest | None:
    """Return the manifest of these very bytes if this process has read it there lately."""
    return KEPT.get((place, reference))


def keep_manifest(place: Hashable, reference: FileRef, manifest: Manifest) -> None:
    """Remember a manifest that was read and checked; the oldest ones are forgotten.

    They together take about `_MAX_BYTES` of memory: what was decoded since of ranks is counted
    when the next one comes.
    """
    if held_bytes(reference, manifest) > _MAX_BYTES:
        return
    KEPT[place, reference] = manifest
    while len(KEPT) > _MAX_COUNT or _total_bytes() > _MAX_BYTES:
        oldest = next(iter(list(KEPT)), None)
        if oldest is None:
            return
        KEPT.pop(oldest, None)


def held_bytes(reference: FileRef, manifest: Manifest) -> int:
    """Return about how much memory a manifest takes by now."""
    ranks = manifest.inline_ranks
    inflated_bytes = manifest.inflated_bytes if ranks is None else ranks.inflated_bytes
    return _BYTES_PER_BYTE * (reference.size_bytes + inflated_bytes)


def _total_bytes() -> int:
    return sum(held_bytes(key[1], manifest) for key, manifest in list(KEPT.items()))
