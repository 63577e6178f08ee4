"""Whether what another writer left can be read: each of its files is there, and long enough."""

from __future__ import annotations

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.source.model import Place, Source
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store.base import Store

from .findings import Findings

__all__ = ["check_foreign"]


def check_foreign(store: Store, source: Source, findings: Findings) -> None:
    """Check that what another writer left can be read; it carries no checksums."""
    keys = value_keys(source)
    source.require(keys)
    ends: dict[str, Place] = {}
    for key in keys:
        place = source.place(*key)
        end = ends.get(place.path)
        if end is None or place.start + place.size_bytes > end.start + end.size_bytes:
            ends[place.path] = place
    for path, place in ends.items():
        findings.file_count += 1
        needed = place.start + place.size_bytes
        try:
            size_bytes = store.stat(path).size_bytes
        except StorageError as error:
            if error.kind != "not-found":
                raise
            findings.note(_missing_of(source, place))
            continue
        if size_bytes < needed:
            findings.note(
                IntegrityError(
                    f"{path} has {size_bytes} bytes; {place.fqn} ends at byte {needed}.",
                    path=path,
                    fqn=place.fqn,
                    offset=size_bytes,
                    next_step="Restore the file from a copy, or load another checkpoint.",
                )
            )


def _missing_of(source: Source, place: Place) -> CheckpointError:
    error = source.explain_missing(place)
    if not isinstance(error, CheckpointError):  # pragma: no cover  # sources return ours
        raise error
    return error
