"""The reads of one load on one rank: each for itself, or shared with other ranks.

Knows requests, the order of who reads what, and stores; knows no DCP plan and no tensor. Called by
`reader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing

from .costs import costs_for
from .deadline import Deadline
from .errors import IntegrityError, StorageError
from .fetching import Fetch, run_fetches
from .loads import LoadJob
from .mappedreads import MappedReads
from .options import Progress, TransferOptions
from .progress import reporting
from .readplan import plan_reads
from .sharedreads import SharedReads, Sharers, Wish
from .sharing import ShareOrder
from .store.base import Store
from .workers import bounded

__all__ = ["LoadReads"]


class LoadReads:
    """What one rank reads in one load; one of the methods is called, once.

    They return when all bytes that `load` wants are verified and in its targets. Raise
    `IntegrityError`, `StorageError` and what the deadline raises; targets are then undefined.

    Args:
        load: what is wanted, planned.
        store: of the checkpoint.
        options: of the transfers.
        rank: of the process in the load.
        verifies: whether this rank holds bytes to the checkpoint's checksums.
        progress: who is told of it, with a bar if `with_bar`.
        save_id: of the save that is read, None where there is none.

    """

    def __init__(
        self,
        load: LoadJob,
        store: Store,
        options: TransferOptions,
        *,
        rank: int,
        verifies: bool,
        progress: Progress,
        save_id: str | None,
        with_bar: bool,
    ) -> None:
        self._load = load
        self._store = store
        self._options = options
        self._rank = rank
        self._verifies = verifies
        self._progress = progress
        self._save_id = save_id
        self._with_bar = with_bar
        self._is_remote = store.capabilities.is_remote
        self._costs = costs_for(is_remote=self._is_remote)

    def alone(self, deadline: Deadline) -> None:
        """Read everything here."""
        self._read(deadline)

    def mapped(self, mapped: MappedReads, deadline: Deadline) -> None:
        """Read what `mapped` does, and everything else here.

        What it copied counts once all ranks of this host have told that their reads ended well.
        """
        self._read(deadline, mapped=mapped)

    def together(
        self,
        order: ShareOrder,
        sharers: Sharers,
        deadline: Deadline,
        *,
        is_willing: bool,
        is_last: bool,
    ) -> None:
        """Read what the coordinator's order says, and take what others read; all ranks of it.

        If any is not willing, or cannot, each reads alone. `is_last`: nothing of this rank's load
        can fail after its reads.
        """
        load, options = self._load, self._options
        mapped: MappedReads | None = None
        shared: SharedReads | None = None
        own: list[Fetch] = []
        wish = None

        def otherwise() -> Wish | None:
            """Return the wish of a rank that reads."""
            nonlocal mapped, shared, own
            mapped = None
            tables.close()
            shared = SharedReads(order, load.shared)
            own = shared.fetches(self._costs)
            return shared.wish(
                own,
                options,
                verifies=self._verifies,
                lends_reads=self._store.capabilities.lends_reads,
            )

        with ExitStack() as tables:
            # A unit goes through one buffer, which must not be more than a part may be.
            if (
                is_willing
                and load.can_share(order.unit_bytes)
                and options.part_bytes >= order.unit_bytes
            ):
                mapped = self._mapped(order, deadline)
                if mapped is None:
                    wish = otherwise()
                else:
                    tables.enter_context(closing(mapped.claims))
                    wish = _wish_to_map(mapped, order, verifies=self._verifies, is_last=is_last)
            with sharers.joined(wish, deadline, otherwise=otherwise) as links:
                if links is None:
                    mapped = shared = None
                    load.share_nothing()
                    self._read(deadline)
                    return
                if shared is not None:
                    shared.link(links)
                if mapped is not None:
                    mapped.claims.join(links.claims)
                watched = links.deadline
                with watched.governs(f"Loading from {self._store.url}", rank=self._rank):
                    self._read(watched, shared, own, mapped)

    def _mapped(self, order: ShareOrder, deadline: Deadline) -> MappedReads | None:
        """Return this rank's part of an order out of mapped files, None if that cannot be."""
        if order.among != "host":
            return None
        return MappedReads.of(
            bounded(self._store, deadline),
            order.spans,
            self._load.shared,
            unit_bytes=order.unit_bytes,
            rank=order.rank,
        )

    def _read(
        self,
        deadline: Deadline,
        shared: SharedReads | None = None,
        own: Sequence[Fetch] = (),
        mapped: MappedReads | None = None,
    ) -> None:
        load, options = self._load, self._options
        store = bounded(self._store, deadline)
        fetches = plan_reads(
            load.requests,
            part_bytes=options.part_bytes,
            costs=self._costs,
            stream_count=options.thread_count,
            # A disk likes order; servers like to be asked for several things at a time.
            turn=self._rank if self._is_remote else None,
        )
        total_bytes = sum(fetch.stop - fetch.start for fetch in [*own, *fetches])
        total_bytes += 0 if shared is None else shared.awaited_bytes
        total_bytes += 0 if mapped is None else mapped.total_bytes
        deadline.expect(total_bytes)
        with reporting(
            self._progress,
            phase="load",
            rank=self._rank,
            total_bytes=total_bytes,
            save_id=self._save_id,
            with_bar=self._with_bar,
        ) as on_bytes:
            try:
                if mapped is not None:
                    mapped.run(store, deadline, on_bytes)
                if shared is not None:
                    shared.run(store, own, fetches, options=options, on_bytes=on_bytes)
                else:
                    run_fetches(
                        store, fetches, options=options, deadline=deadline, on_bytes=on_bytes
                    )
                for request in load.wholes():
                    fetches = plan_reads([request], part_bytes=options.part_bytes)
                    run_fetches(
                        store, fetches, options=options, deadline=deadline, on_bytes=on_bytes
                    )
            except (StorageError, IntegrityError) as error:
                raise load.explain(error) from error


def _wish_to_map(mapped: MappedReads, order: ShareOrder, *, verifies: bool, is_last: bool) -> Wish:
    """Return what a rank needs that maps: partners on its host that do the same."""
    return Wish(
        buffer_bytes=0,
        buffer_count=0,
        partners=order.partners,
        among=order.among,
        verifies=verifies,
        maps=True,
        claims=mapped.claims.offer,
        is_last=is_last,
    )
