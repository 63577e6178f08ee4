"""The observed abilities of storages: one record per storage for all users in this process.

A record belongs to a `Store.scope`: endpoint, bucket and options. Versioning of a bucket, policies
and credentials may change each ability.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Abilities", "find_record", "forget", "forget_all", "remember"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one storage does; None: not probed yet. A problem is "" if there is none.

    create_problem: why an object is not created only if nothing is there (I4).
    hides_absence: absent objects are "forbidden", as these credentials may not list.
    replace_problem: why an object is not replaced only if it has a version.
    delete_problem: why an object is not deleted only if it has a version.
    copies_parts: whether it copies a range of an object as a part of an upload.
    """

    create_problem: str | None = None
    hides_absence: bool = False
    replace_problem: str | None = None
    delete_problem: str | None = None
    copies_parts: bool | None = None


# By process, too: a child of fork probes again, with clients of its own.
_RECORDS: dict[tuple[int, Hashable], Abilities] = {}


def find_record(scope: Hashable) -> Abilities | None:
    """Return the record of a storage, if it was probed."""
    return _RECORDS.get((os.getpid(), scope))


def remember(scope: Hashable, record: Abilities) -> None:
    """Store the record of a storage."""
    _RECORDS[os.getpid(), scope] = record


def forget_all() -> None:
    """Drop all records, as in a new process."""
    _RECORDS.clear()


def forget(scope: Hashable) -> None:
    """Drop a record that a response contradicts, so that the storage is probed again."""
    _RECORDS.pop((os.getpid(), scope), None)
