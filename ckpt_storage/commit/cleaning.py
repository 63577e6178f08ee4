"""Freeing of superseded commits and of leftovers of dead attempts (I7). Only one rank calls it.

A fence is a slot after which the attempts that it names can no longer commit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.store.store import Store

from . import slotlog
from .attempt_files import (
    LEFTOVER_AGE_S,
    attempts_there,
    delete_attempt,
    marker_of,
    sweep_temporary_files,
)
from .deletion import log_to_extend
from .process import has_ended
from .publishing import publish_head, read_footer

log = logging.getLogger("ckpt_storage")


def free_leftovers(
    store: Store,
    *,
    min_age_s: float = LEFTOVER_AGE_S,
    keep_previous: int = 1,
    known: SlotRecord | None = None,
) -> list[str]:
    """Free superseded commits and leftovers of dead attempts; return their save ids.

    Superseded commits are freed except the newest `keep_previous`, and all of them if the head
    thinned the save before it. An attempt that never committed is fenced and freed if its youngest
    file is older than `min_age_s` by the storage's clock; a storage without times keeps it.
    Idempotent; safe if killed, and safe for readers and savers (invariant I7). `known` is any
    record of the log and saves reads. Costs a listing and the search for the head if there is
    nothing to free; old attempts cost the reads of the slots since they began.
    """
    times_s = attempts_there(store)
    commit_log = slotlog.read_log(store, known=known)
    if commit_log.head is not None and commit_log.head.is_thinned:
        # Thinning drops values in order to free them.
        keep_previous = 0
    references = (commit_log.head.head, commit_log.head.previous) if commit_log.head else ()
    unknown = times_s.keys() - {ref.save_id for ref in references[: keep_previous + 1] if ref}
    commits: dict[str, SlotRecord] = {}
    for record in slotlog.history(store, commit_log.head) if unknown else ():
        save_id = record.save_id or ""
        commits[save_id] = record
        unknown.discard(save_id)
        if not unknown or save_id not in times_s:
            break  # older commits were freed before
    dated = [(save_id, time_s) for save_id in unknown if (time_s := times_s[save_id]) is not None]
    old: list[str] = []
    with suppress(UnsupportedByStoreError):  # the storage has no clock
        now_s = store.server_time(names.probe_path()) if dated else 0.0
        old = [save_id for save_id, time_s in dated if now_s - time_s >= min_age_s]
    if old:
        older = commits_since(store, commit_log, old)
        commits = max(commits, older, key=len)
    # The manifest of an attempt goes last, and older attempts go first.
    superseded = [save_id for save_id in list(commits)[keep_previous + 1 :] if save_id in times_s][
        ::-1
    ]
    freed = _free_superseded(store, commit_log.head, superseded)
    dead = sorted(save_id for save_id in old if save_id not in commits)
    if dead:
        # `.metadata` may name a save from before a deletion.
        publish_head(store)
    freed += fence_and_free(store, dead)
    sweep_temporary_files(store, min_age_s=min_age_s)
    return freed


def _free_superseded(store: Store, head: SlotRecord | None, save_ids: Sequence[str]) -> list[str]:
    """Delete commits that `head` superseded, in this order, except that of `.metadata`."""
    if head is None or not save_ids:
        return []
    named = read_footer(store)
    if named is None or named.slot < head.slot:
        publish_head(store)
        named = read_footer(store)
    freed = [save_id for save_id in save_ids if named is None or save_id != named.save_id]
    for save_id in freed:
        delete_attempt(store, save_id)
    return freed


def free_dead(store: Store, *, besides: str) -> list[str]:
    """Free attempts of any age whose coordinator ran on this host and has ended; return their ids.

    For a save to a full storage; `besides` is its own id. The attempts are fenced first: an attempt
    that is still running fails with `CommitConflictError`.
    """
    others = attempts_there(store).keys() - {besides}
    dead = [save_id for save_id in others if has_ended(marker_of(store, save_id).get("process"))]
    committed = commits_since(store, slotlog.read_log(store), dead) if dead else {}
    return fence_and_free(store, sorted({*dead} - {*committed}))


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
