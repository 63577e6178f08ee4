"""What a save does before its turn, where a request costs a round trip.

The coordinator looks at the place while the ranks plan, and, under the front doors, begins the
attempt while they write; ranks tell what they write before it is durable, so that the documents of
the save are written meanwhile. Knows the beginning of an attempt and what waits for what; knows no
plan and no rank's data. Called by `writer` and `saveattempt`; what it begins ends by itself, as all
calls to stores.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch.distributed.checkpoint.storage import WriteResult

from . import commit
from .commit import Grant
from .committing import Prepared
from .deadline import Deadline
from .errors import InvalidInputError
from .shards import Claim
from .store.base import Capabilities, Store
from .store.probe import probe_exclusive_create
from .workers import Aside, bounded

__all__ = ["EarlyWord", "HeadStart", "Opened", "Place", "begins_early", "is_told_early"]

log = logging.getLogger("ckpt_storage")


def is_told_early(capabilities: Capabilities) -> bool:
    """Return whether ranks tell what they write before it is durable; all ranks find the same.

    Where a request costs a round trip, the documents of the save need not wait for it.
    """
    return capabilities.is_remote and not capabilities.cheap_stat


def begins_early(capabilities: Capabilities) -> bool:
    """Return whether ranks may send parts before the coordinator has seen what lies at the place.

    Where an upload shows nothing until it is completed, and no folder has to be made for it.
    """
    return is_told_early(capabilities) and capabilities.kind in {"s3", "gcs", "azure"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyWord:
    """How the ranks of a front door speak of a save before its turn; bare DCP has no such way.

    told: takes what `write_data` will return, on every rank, in a thread of its own. Only where
        `is_told_early`; what it raises, `write_data` raises.
    granted: of the coordinator, in a thread of its own: the attempt may go on.
    await_grant: of the other ranks: returns once that was said, raises why it will not be.
    """

    told: Callable[[list[WriteResult]], object]
    granted: Callable[[], object]
    await_grant: Callable[[], object]


class _Claimed:
    """The claim of an attempt where nothing is to be waited for."""

    def check(self) -> None:
        """Raise nothing."""

    def wait(self) -> None:
        """Wait for nothing."""


class _Heard:
    """The claim of an attempt that the coordinator is still beginning, as other ranks see it."""

    def __init__(self, await_grant: Callable[[], object]) -> None:
        self._await_grant = await_grant

    def check(self) -> None:
        """Raise nothing: of a failure the phase's deadline knows."""

    def wait(self) -> None:
        """Wait for the coordinator's word."""
        self._await_grant()


class Opened:
    """A store that is opened once, by whichever thread needs it first."""

    def __init__(self, open_it: Callable[[], Store]) -> None:
        self._open = open_it
        self._store: Store | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Store:
        """Return the store. Raises what opening it raises, each time anew."""
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a save goes, and what may lie there: what `HeadStart` begins it by.

    scope: returns that of the storage's exclusive create, for the probe. replaces: ids of saves
        that may be replaced in any case.
    """

    url: str
    rank: int
    open: Opened
    scope: Callable[[], Hashable]
    overwrite: bool
    replaces: frozenset[str]


class HeadStart:
    """What one save has under way on one rank before its turn; belongs to the save's thread.

    `claim` is what has to end before anything of this rank becomes visible. `grant` is the
    coordinator's, once the attempt has begun. `prepared` are the documents that lie there already.
    """

    def __init__(self, place: Place) -> None:
        self.claim: Claim = _Claimed()
        self.grant: Grant | None = None
        self.prepared: Prepared | None = None
        self._place = place
        self._look: Aside | None = None
        self._looked: commit.Looked | None = None

    def look(self, deadline: Deadline) -> None:
        """Look at the place from now on, aside; coordinator only."""

        def look() -> None:
            with self._governed(deadline):
                store = bounded(self._place.open(), deadline)
                self._looked = commit.look(store, overwrite=self._place.overwrite)

        self._look = Aside(look, is_remote=True)

    def begin(self, rank_count: int, deadline: Deadline, word: EarlyWord | None) -> Grant:
        """Return the leave to save on so many ranks; coordinator only.

        Where the ranks can speak of it before its turn, it may only be promised: then the attempt
        is begun aside, and who waits for `claim` hears of a refusal. Raises as `commit.begin`.
        """
        place = self._place
        with self._governed(deadline):
            store = bounded(place.open(), deadline)
            capabilities = store.capabilities
            if rank_count > 1 and not capabilities.shared:
                raise InvalidInputError(
                    f"{store.url} is seen by one process only; this save runs on {rank_count} "
                    "ranks.",
                    phase="plan",
                    next_step="Save to a storage that all ranks share.",
                )
        if word is None or not begins_early(capabilities):
            grant = self.grant = self._begun(store, rank_count, deadline, None)
            # Beside the first parts: this rank completes nothing before it has ended.
            self.claim = Aside(
                lambda: self._claim(store, grant.save_id, deadline),
                is_remote=capabilities.is_remote,
            )
            return grant
        promised = commit.promised()

        def begin() -> None:
            self.grant = self._begun(store, rank_count, deadline, promised.save_id)
            word.granted()
            self._claim(store, promised.save_id, deadline)

        self.claim = Aside(begin, is_remote=True)
        return promised

    def await_coordinator(self, word: EarlyWord) -> None:
        """Let nothing of this rank become visible before the coordinator kept its promise."""
        self.claim = _Heard(word.await_grant)

    def _governed(self, deadline: Deadline) -> AbstractContextManager[None]:
        place = self._place
        return deadline.governs(f"Beginning a save to {place.url}", rank=place.rank)

    def _begun(
        self, store: Store, rank_count: int, deadline: Deadline, save_id: str | None
    ) -> Grant:
        place = self._place
        if self._look is not None:
            self._look.wait()
        with self._governed(deadline):
            grant = commit.begin(
                store,
                overwrite=place.overwrite,
                replaces=place.replaces,
                probe=self._probe,
                claims=False,
                looked=self._looked,
                save_id=save_id,
            )
        if grant.previous is not None and grant.previous.save_id in place.replaces:
            log.warning(
                "%s: save %s is damaged, and save %s is to replace it",
                store.url,
                grant.previous.save_id,
                grant.save_id,
            )
        log.info("save %s to %s begins on %d ranks", grant.save_id, store.url, rank_count)
        return grant

    def _claim(self, store: Store, save_id: str, deadline: Deadline) -> None:
        with self._governed(deadline):
            commit.claim(store, save_id)

    def _probe(self, store: Store) -> bool:
        result = probe_exclusive_create(store, key=self._place.scope())
        if not result.exclusive:
            log.warning(
                "%s is single-writer: %s. Two jobs that save to one id at the same time are "
                "not told apart there.",
                store.url,
                result.reason,
            )
        return result.exclusive
