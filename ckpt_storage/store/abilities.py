"""What a storage was seen to do: one record for all who use it in this process.

A record is of one `Store.scope`: endpoint, bucket and options. A bucket with versions, another
policy or other credentials may change each answer.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Abilities", "find_record", "forget", "forget_all", "remember"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one storage does; None: not tried yet. A problem is "" where there is none.

    create_problem: creating an object only if nothing is there (I4).
    hides_absence: what is not there is "forbidden" to these credentials: they may not list.
    replace_problem: replacing an object only if it is of a version.
    delete_problem: deleting it only if it is of a version.
    copies_parts: whether it copies a range of an object as a part of an upload.
    """

    create_problem: str | None = None
    hides_absence: bool = False
    replace_problem: str | None = None
    delete_problem: str | None = None
    copies_parts: bool | None = None


# Keyed by process too: a child of fork asks anew, with clients of its own.
_RECORDS: dict[tuple[int, Hashable], Abilities] = {}


def find_record(scope: Hashable) -> Abilities | None:
    """Return what this process has seen of a storage, if anything."""
    return _RECORDS.get((os.getpid(), scope))


def remember(scope: Hashable, record: Abilities) -> None:
    """Keep what was seen of a storage."""
    _RECORDS[os.getpid(), scope] = record


def forget_all() -> None:
    """Drop what was seen of all storages, as a new process does."""
    _RECORDS.clear()


def forget(scope: Hashable) -> None:
    """Drop what was seen: an answer contradicts it, so that the next one who asks tries anew."""
    _RECORDS.pop((os.getpid(), scope), None)
