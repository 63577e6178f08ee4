"""Freeing what nobody needs: superseded commits and attempts that died (I7).

Only one rank calls it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MOST_SLOT_BYTES, unseal
from ckpt_storage.format.names import begun_path, probe_path, save_folder
from ckpt_storage.store.store import Store

from .delete import attempts_there, delete_attempt, log_to_extend
from .publishing import publish, read_footer
from .slotlog import CommitLog, history, is_there, read_if_there, read_log, read_slot, take_slot

log = logging.getLogger("ckpt_storage")

LEFTOVER_AGE_S = 24 * 3600.0
"""Age by the storage's clock from which an attempt that never committed may be fenced and freed."""


def free_superseded(
    store: Store, *, keep_previous: int = 1, known: SlotRecord | None = None
) -> list[str]:
    """Delete the files of superseded commits beyond the newest `keep_previous`; return save ids.

    Idempotent, safe when cut at any point, safe against readers of the head, savers, openers and
    other callers (invariant I7). Looks no further back than the newest one already freed;
    `free_leftovers` gets what had to be left then. `known` is any record of the log, and saves
    reads. Raises `StorageError`.
    """
    head = read_log(store, known=known).head
    candidates: list[SlotRecord] = []
    for index, record in enumerate(history(store, head)):
        if index <= keep_previous or record.manifest is None:
            continue
        if not is_there(store, record.manifest.path):
            # Who freed it may have been cut just before the end.
            store.delete_folder(save_folder(record.save_id or ""))
            break  # the manifest goes last, and older attempts go first
        candidates.append(record)
    return _free_commits(store, head, candidates[::-1])


def _free_commits(
    store: Store, head: SlotRecord | None, records: Sequence[SlotRecord]
) -> list[str]:
    """Delete commits that `head` superseded, in this order, but the one that `.metadata` names."""
    if head is None or not records:
        return []
    named = read_footer(store)
    if named is None or named.slot < head.slot:
        publish(store)
        named = read_footer(store)
    kept = named.save_id if named else None
    freed = [record.save_id for record in records if record.save_id and record.save_id != kept]
    for save_id in freed:
        delete_attempt(store, save_id)
    return freed


def fence(store: Store, save_ids: Sequence[str]) -> CommitLog:
    """Take the next slot with a fence record: after it, none of `save_ids` can commit.

    Returns the log as of the fence. An id that has committed meanwhile shows as its head or in
    its history, and the caller must not delete it.
    """
    while True:
        found = log_to_extend(store)
        slot, head = found.last_slot + 1, found.head.head if found.head else None
        record, is_ours = take_slot(store, "fence", slot, head, fenced=tuple(save_ids))
        if is_ours:
            return replace(found, last_slot=record.slot, last=record)
        store.deadline.check(f"Fencing {', '.join(save_ids)}")


def free_leftovers(
    store: Store,
    *,
    min_age_s: float = LEFTOVER_AGE_S,
    keep_previous: int = 1,
    known: SlotRecord | None = None,
) -> list[str]:
    """Free attempts that are old enough and needed by nobody; return their save ids.

    These are attempts that never committed, which are fenced first, and superseded commits that
    `free_superseded` had to leave. Age is that of the youngest file of the attempt, by the
    storage's clock; a storage that tells no times keeps its leftovers. A listing chooses the
    candidates; fence and head make deleting them safe. Costs a listing and the search for the
    head when there is nothing old; otherwise all slots are read. `known` is as in
    `free_superseded`.
    """
    times_s = attempts_there(store)
    found = read_log(store, known=known)
    for reference in (found.head.head, found.head.previous) if found.head else ():
        times_s.pop(reference.save_id if reference else "", None)
    told = {save_id: time_s for save_id, time_s in times_s.items() if time_s is not None}
    now_s = store.server_time(probe_path()) if told else 0.0
    old = [save_id for save_id, time_s in told.items() if now_s - time_s >= min_age_s]
    if not old:
        return []
    commits = _commits(store, found)
    dead = [save_id for save_id in old if save_id not in commits]
    if dead:
        found = fence(store, dead)
        commits = _commits(store, found)
    superseded = [commits[save_id] for save_id in list(commits)[keep_previous + 1 :]]
    wanted = [record for record in superseded[::-1] if record.save_id in old]
    freed = _free_commits(store, found.head, wanted)
    if dead:
        # `.metadata` may still show what was deleted before the head was saved anew.
        publish(store)
    return freed + _delete_all(store, (save_id for save_id in dead if save_id not in commits))


def free_dead(store: Store, *, besides: str) -> list[str]:
    """Free attempts, however young, whose coordinator ran on this host and has ended; return ids.

    For a save that finds the storage full; `besides` is its own id. They are fenced first: one
    that lives after all fails with `CommitConflictError`.
    """
    others = attempts_there(store).keys() - {besides} - _commits(store, read_log(store)).keys()
    dead = [save_id for save_id in sorted(others) if _has_ended(store, save_id)]
    if not dead:
        return []
    commits = _commits(store, fence(store, dead))
    return _delete_all(store, (save_id for save_id in dead if save_id not in commits))


def _has_ended(store: Store, save_id: str) -> bool:
    """Return whether the process that began an attempt, or this one which began another, ended."""
    path = begun_path(save_id)
    found = read_if_there(store, path, most_bytes=MOST_SLOT_BYTES)
    begun = {} if found is None else unseal(found.data, path=path)
    pid = begun.get("pid")
    if begun.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return pid == os.getpid()


def _delete_all(store: Store, save_ids: Iterable[str]) -> list[str]:
    freed = []
    for save_id in save_ids:
        log.info("%s: freeing save attempt %s, which never committed", store.url, save_id)
        delete_attempt(store, save_id)
        freed.append(save_id)
    return freed


def _commits(store: Store, found: CommitLog) -> dict[str, SlotRecord]:
    """Return commits by save id, newest first: the head and what it superseded."""
    records: Iterable[SlotRecord | None] = history(store, found.head)
    if found.head is None:
        records = (read_slot(store, slot) for slot in range(found.last_slot, 0, -1))
    return {record.save_id: record for record in records if record and record.save_id}
