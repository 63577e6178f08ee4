"""The observed abilities of storages: one record per storage for all users in this process.

A record belongs to a `Store.scope`: endpoint, bucket and options. Versioning of a bucket, policies
and credentials may change each ability.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass


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


RECORDS: dict[Hashable, Abilities] = {}
"""The records, by scope. A record that a response contradicts is dropped, and probed again."""

# A child of fork probes again, with clients of its own.
os.register_at_fork(after_in_child=RECORDS.clear)
