"""Fences: slots after which attempts can no longer commit (I7). Only one rank calls it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.store.store import Store

from . import slotlog
from .attempt_files import delete_attempt, marker_of
from .deletion import log_to_extend

log = logging.getLogger("ckpt_storage")


def fence(store: Store, save_ids: Sequence[str]) -> slotlog.CommitLog:
    """Create a fence in the next slot, after which none of `save_ids` can commit.

    Returns the log that ends with the fence. Its history may have a commit of one of `save_ids`,
    which the caller must not delete.
    """
    while True:
        commit_log = log_to_extend(store)
        slot, head = commit_log.last_slot + 1, commit_log.head.head if commit_log.head else None
        record, is_ours = slotlog.take_slot(store, "fence", slot, head, fenced=tuple(save_ids))
        if is_ours:
            return replace(commit_log, last_slot=record.slot, last=record)
        store.deadline.check(f"Fencing {', '.join(save_ids)}")


def fence_and_free(store: Store, dead: Sequence[str]) -> list[str]:
    """Fence attempts, and delete those that had not committed before the fence."""
    commits = commits_since(store, fence(store, dead), dead) if dead else {}
    freed = [save_id for save_id in dead if save_id not in commits]
    for save_id in freed:
        log.info("%s: freeing save attempt %s, which never committed", store.url, save_id)
        delete_attempt(store, save_id)
    return freed


def commits_since(
    store: Store, commit_log: slotlog.CommitLog, attempts: Iterable[str]
) -> dict[str, SlotRecord]:
    """Return commits by save id, newest first, down to the lowest slot that `attempts` may have.

    An attempt commits above `last_slot` of its marker.
    """
    lowest = commit_log.last_slot
    for save_id in attempts:
        slot = marker_of(store, save_id).get("last_slot")
        lowest = min(lowest, slot if isinstance(slot, int) and slot >= 0 else 0)
    records: Iterable[SlotRecord | None] = slotlog.history(store, commit_log.head)
    if commit_log.head is None:
        records = (
            slotlog.read_slot(store, slot) for slot in range(commit_log.last_slot, lowest, -1)
        )
    commits: dict[str, SlotRecord] = {}
    for record in records:
        if record is not None and record.slot <= lowest:
            break
        if record is not None and record.save_id is not None:
            commits[record.save_id] = record
    return commits
