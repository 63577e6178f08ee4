"""Which units of files one rank checks for all of its host: those that it claims first.

Knows chunks, and memory that processes of one host share; knows no storage, no tensor and no
process group. Used by `mappedreads`.

A unit is a run of bytes of one chunk. A claim is a promise to check a unit, or to fail the load of
all. So two ranks that claim one at the same time, or one whose claim was lost, only check more than
they had to; what may not be is that all take a unit for claimed that nobody has claimed. A slot
holds the whole number of the unit, so a rank that finds that number there knows that another one
promised this very unit. Nothing is locked, and nobody waits; who is slow claims less.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os

from .namelessmemory import make_memory, open_memory
from .sharing import Key

__all__ = ["UnitClaims", "units_of"]

log = logging.getLogger("ckpt_storage")

_SLOT_BYTES = 8
_LEAST_SLOTS, _MOST_SLOTS = 512, 1 << 20

_SPARSE = 4
"""Slots for each unit of a rank: its mates may want others."""

_TRIES = 8
"""Slots that are looked at for one unit. Where all are others', one of those is forgotten, and so
may be checked twice."""

_BITS = 64
_MASK = (1 << _BITS) - 1

_GAMMA, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9
"""Odd: no two places in a chunk get one number. Of SplitMix64 (Steele, Lea and Flood, "Fast
Splittable Pseudorandom Number Generators", 2014)."""


def units_of(path: str, chunk: Key, identity: str, unit_bytes: int) -> int:
    """Return what tells the units of one chunk from all others', for `UnitClaims.claim`.

    Equal only for equal arguments, but for accidents of 64 bits. `identity` alone would not do:
    two paths may lead to one file, which can be as saved for one of them only.
    """
    text = repr((unit_bytes, identity, path, chunk)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=_BITS // 8).digest(), "little")


class UnitClaims:
    """The claims of one load: a rank's own table until it joins a mate's.

    Args:
        unit_count: units that this rank may claim, or more.

    """

    def __init__(self, unit_count: int) -> None:
        wanted = min(max(_LEAST_SLOTS, _SPARSE * unit_count), _MOST_SLOTS)
        count = 1 << (wanted - 1).bit_length()
        self._fd = -1
        self._offer: str | None = None
        name = f"ckpt_storage-claims-{os.urandom(12).hex()}"
        try:
            self._fd = make_memory(name, count * _SLOT_BYTES)
            memory = memoryview(mmap.mmap(self._fd, count * _SLOT_BYTES))
        except (OSError, ValueError) as error:
            # A table that nobody else sees: this rank checks all of its units.
            log.debug("No memory to share claims in: %s", error)
            self.close()
            memory = memoryview(bytearray(count * _SLOT_BYTES))
        else:
            self._offer = json.dumps(
                {"pid": os.getpid(), "fd": self._fd, "name": name, "size_bytes": len(memory)}
            )
        self._use(memory)

    def _use(self, memory: memoryview) -> None:
        self._slots = memory.cast("Q")
        self._shift = _BITS - (len(self._slots).bit_length() - 1)

    @property
    def offer(self) -> str | None:
        """What mates need in order to `join`; None if they cannot."""
        return self._offer

    def join(self, offer: str | None) -> None:
        """Claim in the table of a mate's offer from now on; in one's own if that is none.

        The mate must not close its claims before. If its table cannot be reached, this rank goes on
        with its own.
        """
        if offer is None or offer == self._offer:
            return
        try:
            self._use(open_memory(**json.loads(offer)))
        except (OSError, ValueError) as error:
            log.debug("Checks are not shared: %s", error)

    def claim(self, units: int, start: int) -> bool:
        """Return whether this rank is to check a unit; only for a unit that it then checks.

        `units` is what `units_of` returned, `start` where the unit begins in the payload.
        """
        number = (units ^ (start * _GAMMA)) & _MASK
        number = ((number ^ (number >> 30)) * _MIX) & _MASK or 1
        slots, first = self._slots, number >> self._shift
        last = len(slots) - 1
        for step in range(_TRIES):
            at = (first + step) & last
            found = slots[at]
            if found == number:
                return False
            if not found:
                slots[at] = number
                return True
        slots[first] = number
        return True

    def close(self) -> None:
        """End the way to this rank's table; idempotent. Who has joined it still can use it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
