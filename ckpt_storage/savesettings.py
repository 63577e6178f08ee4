"""What a writer was told of all its saves: how stores are opened, what ranks must have in common.

Knows the writer's arguments but its path, the process group and whatever belongs to one save or
one process, so that it pickles; knows no save and no call of DCP. Made by `writer`, asked by it
and by `saveattempt`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ._version import __version__
from .options import (
    PageCache,
    Progress,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    TransferOptions,
)
from .store import Location, endpoint_of, open_store
from .store.base import Capabilities, Store

__all__ = ["SaveSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSettings:
    """The arguments of a `CheckpointStorageWriter`, checked.

    `commit_base` is where `commit_url` leads to. `transfer_options` says how bytes go to a storage.
    """

    commit_base: Location | None
    overwrite: bool
    page_cache: PageCache
    sync_files: bool
    stock_metadata: StockMetadata
    transfer_options: Callable[[Capabilities], TransferOptions]
    timeouts: Timeouts
    retry: RetryPolicy
    progress: Progress

    def open(self, location: Location, checkpoint_id: str | os.PathLike[str] | None) -> Store:
        """Open the store at `location`, which `checkpoint_id` has led to. Raises `StorageError`."""
        return open_store(
            location,
            commit_location=self.commit_base.join(checkpoint_id) if self.commit_base else None,
            page_cache=self.page_cache,
            sync_files=self.sync_files,
            timeouts=self.timeouts,
            retry=self.retry,
        )

    def terms(self, location: Location) -> dict[str, str]:
        """Return what all ranks must have in common for a save to `location`."""
        return {
            "the checkpoint's URL": location.normalised,
            "overwrite": str(self.overwrite),
            "sync_files": str(self.sync_files),
            "the storage's endpoint": endpoint_of(location),
            "stock_metadata": self.stock_metadata,
            "commit_url": self.commit_base.normalised if self.commit_base else "None",
            "the version of ckpt_storage": __version__,
        }
