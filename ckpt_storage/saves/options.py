"""What a save is told besides state and ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, get_args

from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage._version import __version__
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.consolidate import ConsolidateJob
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.options import (
    STOCK_ENTRY_LIMIT,
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    TransferOptions,
    UnsafeValues,
)
from ckpt_storage.store import Location, anchored, endpoint_of, open_store
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import write_options

Chained = bool | str | os.PathLike[str] | ConsolidateOptions | None
"""What `save(consolidate=...)` takes: whether, where to, or all options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Everything a save is told besides state, place and ranks; as `CheckpointStorageWriter`.

    `user` goes into the commit record; `replaces` are saves known to be damaged.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    overwrite: bool = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    planner: SavePlanner | None = None
    thread_count: int | None = None
    part_bytes: int | None = None
    memory_limit_bytes: int | None = None
    page_cache: PageCache = "keep"
    sync_files: bool = True
    stock_metadata: StockMetadata = "auto"
    unsafe_values: UnsafeValues = "warn"
    retry: RetryPolicy | None = None
    progress: Progress = None
    consolidate: Chained = None
    user: Mapping[str, Any] = field(default_factory=dict)
    replaces: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: Mapping[str, Any], *, timeouts: Timeouts) -> Self:
        """Return the options among the arguments of a call."""
        names = {one.name for one in fields(cls)} & given.keys()
        return cls(**{**{name: given[name] for name in names}, "timeouts": timeouts})

    def anchored(self) -> SaveOptions:
        """Return options that mean the same in every working folder. Raises `InvalidInputError`."""
        chained = self.consolidate
        if isinstance(chained, str | os.PathLike):
            chained = anchored(chained)
        elif isinstance(chained, ConsolidateOptions) and chained.output is not None:
            chained = replace(chained, output=anchored(chained.output))
        return replace(self, consolidate=chained)

    def place(self, url: str | os.PathLike[str]) -> Location:
        """Return where a save to `url` goes. Raises `InvalidInputError` for it or an option."""
        self.transfer(None)
        for name, kind in (("stock_metadata", StockMetadata), ("unsafe_values", UnsafeValues)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                *others, last = map(repr, known)
                raise InvalidInputError(
                    f"{name} is {value!r}.", next_step=f"Give {', '.join(others)} or {last}."
                )
        return Location.of(url, self.storage_options)

    def consolidation(self, source: Location) -> ConsolidateJob | None:
        """Return the consolidation that follows a save to `source`. Raises `InvalidInputError`."""
        chained = self.consolidate
        if chained is None or chained is False:
            return None
        options = chained if isinstance(chained, ConsolidateOptions) else ConsolidateOptions()
        if isinstance(chained, str | os.PathLike):
            options = replace(options, output=chained)
        elif chained is not True and chained is not options:
            raise InvalidInputError(
                f"consolidate is {chained!r:.80}.",
                next_step="Give True, the URL of the output, or ConsolidateOptions.",
            )
        options = replace(options, page_cache=options.page_cache or self.page_cache)
        job = ConsolidateJob.of(source, options)
        return replace(job, timeouts=self.timeouts, retry=self.retry, progress=self.progress)

    def transfer(self, capabilities: Capabilities | None) -> TransferOptions:
        """Return how bytes go to a storage; None: to any remote one."""
        return write_options(
            capabilities,
            thread_count=self.thread_count,
            part_bytes=self.part_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def open(self, location: Location) -> Store:
        """Open the store at `location`."""
        return open_store(
            location,
            page_cache=self.page_cache,
            sync_files=self.sync_files,
            timeouts=self.timeouts,
            retry=self.retry or RetryPolicy(),
        )

    def terms(self, location: Location) -> dict[str, str]:
        """Return what all ranks must have in common for a save to `location`."""
        return {
            "the checkpoint's URL": location.url,
            "overwrite": str(self.overwrite),
            "sync_files": str(self.sync_files),
            "the storage's endpoint": endpoint_of(location),
            "stock_metadata": self.stock_metadata,
            "the version of ckpt_storage": __version__,
        }

    def is_stock_wanted(self, item_count: int) -> bool:
        """Return whether `.metadata` is to be written for so many items."""
        if self.stock_metadata == "auto":
            return item_count <= STOCK_ENTRY_LIMIT
        return self.stock_metadata == "always"
