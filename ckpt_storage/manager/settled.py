"""Which steps were pruned for good: a note at the root, so that no later process looks again.

Only spares requests: that a checkpoint is there, or deleted, is never decided by it. A step that is
noted and was saved since is at worst kept for longer.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Mapping

from ckpt_storage.commit.slotlog import read_if_there
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format import integrity
from ckpt_storage.format.columns import Columns, pack_column
from ckpt_storage.format.documents import Getter
from ckpt_storage.store.base import Store

__all__ = ["SETTLED_PATH", "SettledSteps"]

SETTLED_PATH = ".ckpt-storage-pruned.json"
"""At the root of the checkpoints; sealed, replaced as a whole, may be deleted at any time."""

_KIND = "pruned"

_WORTH_COUNT = 64
"""How many steps must have changed before the note is written anew."""

_DOUBTED_COUNT = 64
"""How many noted steps each process looks at all the same, chosen at random.

Others may have saved there since, without noting it. So it is found out in time.
"""

log = logging.getLogger("ckpt_storage")


class SettledSteps:
    """The steps below one root of which only slots are left; `forget` is for any thread."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._lock = threading.Lock()
        self._is_loaded = False
        self._stored: frozenset[int] = frozenset()
        self._trusted: set[int] = set()
        self._empty: set[int] = set()
        self._saved: set[int] = set()

    def load(self, store: Store) -> None:
        """Read the note at the root, once: one request. One that cannot be read counts for none."""
        if self._is_loaded:
            return
        self._is_loaded = True
        try:
            found = read_if_there(store, SETTLED_PATH)
            steps = [] if found is None else self._decode(found.data)
        except CheckpointError as error:
            # Every step is then looked at, as if there were no note.
            log.info("%s: %s is not used: %s", store.url, SETTLED_PATH, error)
            return
        doubted = random.sample(steps, min(_DOUBTED_COUNT, len(steps)))
        with self._lock:
            self._stored = frozenset(steps)
            self._trusted = set(steps).difference(doubted, self._saved)
            self._empty = set(steps) - self._saved

    def _decode(self, data: bytes) -> list[int]:
        body = integrity.unseal(data, path=SETTLED_PATH)
        integrity.check_format(body, _KIND, 1, path=SETTLED_PATH)
        if Getter(body, SETTLED_PATH).string("names") != self._template:
            return []
        steps: list[int] = Columns(SETTLED_PATH).column(body, "steps").tolist()
        return sorted(set(steps))

    def is_known(self, step: int) -> bool:
        """Return whether a step need not be looked at."""
        return step in self._trusted

    def note(self, found: Mapping[int, bool], listed: Iterable[int]) -> None:
        """Note of steps that were looked at whether only slots are left; `listed` are all."""
        with self._lock:
            for step, is_empty in found.items():
                if is_empty:
                    self._empty.add(step)
                else:
                    self._empty.discard(step)
            self._empty.intersection_update(listed)

    def doubt(self) -> None:
        """Trust no note: look at every step again."""
        with self._lock:
            self._is_loaded = True
            self._trusted.clear()

    def forget(self, step: int) -> None:
        """Note that a step is being saved anew."""
        with self._lock:
            self._saved.add(step)
            self._trusted.discard(step)
            self._empty.discard(step)

    def keep(self, store: Store) -> None:
        """Write the note if that is worth a request. A failure is no harm."""
        with self._lock:
            empty = frozenset(self._empty)
        if len(self._stored ^ empty) < _WORTH_COUNT:
            return
        body = {
            "format": integrity.encode_format(_KIND, 1),
            "names": self._template,
            "steps": pack_column(sorted(empty)),
        }
        try:
            store.replace(SETTLED_PATH, integrity.seal(body))
        except StorageError as error:
            log.info("%s: %s was not written: %s", store.url, SETTLED_PATH, error)
        else:
            self._stored = empty
