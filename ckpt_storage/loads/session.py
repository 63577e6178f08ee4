"""The load of a rank: opens the checkpoint, plans shared reads, reads and commits."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from ckpt_storage._version import __version__
from ckpt_storage.commit import publishing
from ckpt_storage.errors import CheckpointError, FormatError, InvalidInputError, StorageError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import (
    LOCAL_READ_BYTES,
    Casts,
    Phase,
    Progress,
    RetryPolicy,
    Shared,
    Timeouts,
    TransferOptions,
    check_choice,
)
from ckpt_storage.progress import reporting
from ckpt_storage.source.model import Source, adding_context
from ckpt_storage.source.opening import open_source
from ckpt_storage.source.renaming import Rename, check_rename, new_names
from ckpt_storage.store import Location, endpoint_of, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.monitor import OperationMonitor
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkReader
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.read_costs import REMOTE_READ_BYTES

from .items import LoadItems, wanted_regions
from .loadplanner import metadata_of
from .sharing import Key, Links, ShareOrder, can_plan, plan_shares, unit_for
from .targets import warn_of_unfilled

log = logging.getLogger("ckpt_storage")

_LOCAL_THREADS = 1

_PUBLISH_S = 10.0
"""The time limit of a load for updating `.metadata`."""

_REMOTE_THREADS = 16
"""The maximum of requests in flight; fewer if the storage throttles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """The options of a load, checked."""

    base: Location
    verify: bool
    thread_count: int | None
    memory_limit_bytes: int | None
    rename: Rename | None
    shared_reads: Shared
    unsafe_pickle: bool
    casts: Casts
    timeouts: Timeouts
    retry: RetryPolicy
    progress: Progress

    @classmethod
    def of(cls, arguments: Mapping[str, Any], *, base: Location) -> Self:
        """Return the settings among the arguments of a call. Raises `InvalidInputError`."""
        names = {option.name for option in fields(cls)} & arguments.keys()
        options = {name: arguments[name] for name in names}
        options["timeouts"] = Timeouts.of(arguments["timeout"])
        options["retry"] = arguments["retry"] or RetryPolicy()
        return cls(**{**options, "base": base})

    def __post_init__(self) -> None:
        """Raise `InvalidInputError` for invalid settings."""
        check_choice("shared_reads", self.shared_reads, Shared)
        check_choice("casts", self.casts, Casts)
        check_rename(self.rename)
        self.transfer_options(is_remote=True)

    def transfer_options(self, *, is_remote: bool) -> TransferOptions:
        """Return how bytes are read. Raises `InvalidInputError`."""
        options = TransferOptions.for_storage(
            is_remote=is_remote,
            local_threads=_LOCAL_THREADS,
            local_part_bytes=LOCAL_READ_BYTES,
            thread_count=self.thread_count or (_REMOTE_THREADS if is_remote else None),
            part_bytes=None,
            memory_limit_bytes=self.memory_limit_bytes,
        )
        share = options.part_bytes
        if is_remote:
            # Most reads go directly into the target; only the client keeps a copy meanwhile.
            share = max(options.memory_limit_bytes // options.thread_count, share)
        return dataclasses.replace(options, part_bytes=min(share, REMOTE_READ_BYTES))


_READERS_ONLY = frozenset({"permission", "unsupported"})
"""Kinds of the errors of a reader without write permission, or of a read-only storage."""


class LoadSession:
    """The steps of a load on this rank, called in one thread; `begin` starts a phase.

    Methods that open the checkpoint raise what `CheckpointStorageReader.read_metadata` raises.
    """

    def __init__(
        self,
        settings: LoadSettings,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        begin: Callable[[Phase], Deadline],
    ) -> None:
        """Begin a load from `checkpoint_id`, relative to the base URL."""
        self._settings = settings
        self._location = settings.base.join(checkpoint_id)
        self._begin = begin
        self.rank = 0
        self._is_coordinator = False
        self._opened: Store
        self._monitor: OperationMonitor
        self._source: Source | None = None
        self._stored_names: Mapping[str, str] | None = None
        self._publishing: threading.Thread | None = None
        self._newer: FormatError | None = None

    @property
    def url(self) -> str:
        """The URL that is read from."""
        return self._location.url

    def terms(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks for a load."""
        return {
            "the checkpoint's URL": self._location.url,
            "the storage's endpoint": endpoint_of(self._location),
            "the version of ckpt_storage": __version__,
        }

    def open(self) -> Source:
        """Return the checkpoint, opened on the first call. Raises the errors of opening it."""
        if self._source is None:
            settings = self._settings
            store = open_store(self._location, timeouts=settings.timeouts, retry=settings.retry)
            deadline = self._begin("load")
            self._opened, self._monitor = store, deadline.monitor
            with deadline.annotate_errors(f"Opening {store.url}"):
                options = settings.transfer_options(is_remote=store.capabilities.is_remote)
                self._source = open_source(store.bounded(deadline), options)
            self._stored_names = None
            if settings.rename is not None:
                fqns = [*self._source.tensors, *sorted(self._source.blobs)]
                names = new_names(fqns, settings.rename)
                self._stored_names = {name: fqn for fqn, name in names.items()}
        return self._source

    def metadata(self, *, lazy: bool) -> Metadata:
        """Open the checkpoint again and return its metadata; `lazy`: entries are made on access."""
        self._source = None
        source = self.open()
        return metadata_of(source, url=self.url, lazy=lazy, stored_names=self._stored_names)

    def stored_names(self, plan: LoadPlan) -> Mapping[str, str] | None:
        """Return the stored name of each value of a plan; None if no values are renamed."""
        names = self._stored_names
        if names is None:
            return None
        fqns = {item.storage_index.fqn for item in plan.items}
        return {fqn: names[fqn] for fqn in fqns if fqn in names}

    def set_up(self, *, is_coordinator: bool, rank: int) -> None:
        """Record the rank; the coordinator also publishes the save of a crashed saver."""
        self._is_coordinator = is_coordinator
        self.rank = rank
        source, store = self.open(), self._opened
        if not is_coordinator or source.save_id is None:
            return
        # Not a step of the load: it has a deadline of its own.
        limit_s = min(_PUBLISH_S, self._settings.timeouts.load / 2)
        deadline = Deadline("load", limit_s, monitor=self._monitor)
        publish = partial(self._publish, store.bounded(deadline), source.save_id)
        if not store.capabilities.is_remote:
            publish()
            return
        # It takes at least two round trips, for which the load does not wait.
        name = f"publish {store.url}"
        self._publishing = threading.Thread(target=publish, name=name, daemon=True)
        self._publishing.start()

    def _publish(self, store: Store, save_id: str) -> None:
        try:
            publishing.roll_forward(store, save_id)
        except FormatError as error:
            self._newer = error
        except CheckpointError as error:
            # The next saver publishes.
            is_denied = isinstance(error, StorageError) and error.kind in _READERS_ONLY
            level = logging.DEBUG if is_denied else logging.WARNING
            log.log(level, "%s: .metadata was not updated: %s", store.url, error)

    def _finish_publishing(self, deadline: Deadline) -> None:
        """Wait for the thread of `set_up`; raise its `FormatError` about a newer save."""
        if self._publishing is not None:
            self._publishing.join(min(_PUBLISH_S + 1, deadline.remaining_s()))
            if self._publishing.is_alive():
                log.warning("%s: .metadata may be out of date: no response in time.", self.url)
        newer, self._newer, self._publishing = self._newer, None, None
        if newer is not None:
            raise newer

    def save_terms(self) -> dict[str, str]:
        """Return the save that was opened, which must be the same on all ranks."""
        source = self.open()
        save = f"{source.format} {source.save_id}"
        return {"the checkpoint's URL": self._location.url, "the save to read": save}

    def share_unit(self, world_size: int) -> int | None:
        """Return the maximum unit of shared reads; None: nothing is shared, and no plan is sent."""
        source, shared_reads = self.open(), self._settings.shared_reads
        if (
            shared_reads == "never"
            or world_size == 1
            # A local disk serves all ranks of its host from the page cache; a mount does not.
            or (shared_reads == "auto" and not self._opened.capabilities.is_remote)
            or source.format == "dcp"  # offsets of payloads are known only from their headers
        ):
            return None
        return unit_for(self._settings.transfer_options(is_remote=True).part_bytes)

    def share_orders(
        self, plans: list[LoadPlan], stored_names: Sequence[Mapping[str, str] | None]
    ) -> Sequence[ShareOrder | None]:
        """Return the shared reads of each rank; None: it reads for itself. Coordinator only.

        `stored_names` has the result of the method `stored_names` of each rank.
        """
        source, unit_bytes = self.open(), self.share_unit(len(plans))
        orders = None
        if unit_bytes is not None and can_plan(sum(len(plan.items) for plan in plans)):
            orders = plan_shares(
                wanted_regions(plans, stored_names),
                partial(_shape_of, source),
                world_size=len(plans),
                unit_bytes=unit_bytes,
                is_forced=self._settings.shared_reads == "always",
            )
        return orders or [None] * len(plans)

    def read(
        self,
        plan: LoadPlan,
        planner: LoadPlanner,
        links: Links | None = None,
        *,
        begin: Callable[[Phase], Deadline] | None = None,
    ) -> None:
        """Read this rank's items into the planner's targets; commit them once all are verified.

        With `links`, reads are shared; then all ranks pass it. `begin` begins the phase; default:
        that of the session.
        """
        source, settings = self.open(), self._settings
        names = self._stored_names or chain(source.tensors, source.blobs)
        warn_of_unfilled(getattr(planner, "original_state_dict", None), names, self.url)
        deadline = (begin or self._begin)("load")
        store = self._opened.bounded(deadline)
        is_remote = store.capabilities.is_remote
        options = settings.transfer_options(is_remote=is_remote)
        ranges = RangeReader(store, options)
        chunks, places = ChunkReader(ranges), list[ChunkPlace]()
        effect = "Targets of this load hold undefined values."
        share = options.memory_limit_bytes // (2 * options.part_bytes)
        with (
            deadline.annotate_errors(f"Loading from {store.url}", rank=self.rank),
            adding_context(source, store, places, effect=effect),
            # Otherwise torch makes a differentiable view of each sharded target.
            torch.no_grad(),
        ):
            source.store = store
            items = LoadItems(
                source,
                plan,
                planner,
                buffer_count=max(1, min(options.thread_count + 1, share)),
                verify=settings.verify,
                casts=settings.casts,
                stored_names=self._stored_names,
            )
            places += items.places
            split = None if settings.shared_reads == "never" else items.split
            with nullcontext() if links is None else links(ranges, split) as divided:
                own, shared = divided or (items.reads, None)
                # Disks are read in order; on servers each rank starts at another read.
                reads = chunks.plan(own, turn=self.rank if is_remote else None)
                own_bytes = sum(read.stop - read.start for read in reads)
                shared_bytes = 0 if shared is None else shared.total_bytes
                total_bytes = own_bytes + shared_bytes
                if log.isEnabledFor(logging.DEBUG):
                    counts = (items.wanted_bytes, own_bytes, len(reads), shared_bytes)
                    log.debug(
                        "%s: rank %d wants %d bytes. It reads %d bytes in %d requests by itself, "
                        "and %d bytes together with other ranks.",
                        *(self.url, self.rank, *counts),
                    )
                deadline.monitor.expect(total_bytes)
                bar, save_id = self._is_coordinator, source.save_id
                with reporting(
                    settings.progress, "load", self.rank, total_bytes, save_id, with_bar=bar
                ) as on_bytes:
                    run = partial(ranges.run, reads, on_bytes=on_bytes)
                    if shared is None:
                        run()
                    else:
                        shared.run(run, on_bytes=on_bytes)
                    items.read_opaque(chunks)
            items.finish()
        items.commit(unsafe_pickle=settings.unsafe_pickle)
        items.checker.report(self.url)
        self._finish_publishing(deadline)


def _shape_of(source: Source, key: Key) -> tuple[tuple[int, ...], int]:
    info = source.tensors[key[0]]
    chunk = info.chunk_at(key[1])
    if chunk is None:
        raise InvalidInputError(
            f"A plan asks for {key[0]} at {list(key[1])}, which is not a stored chunk."
        )
    return chunk.sizes, DTYPES[info.dtype].item_bytes
