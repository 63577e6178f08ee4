"""The options of a save."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.coordination.identity import Identity
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.consolidate import ConsolidateSpec
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.options import (
    DEFAULT_GROUPS,
    STOCK_ENTRY_LIMIT,
    PageCache,
    Progress,
    Replicas,
    RetryPolicy,
    StockMetadata,
    Timeouts,
    TransferOptions,
    UnsafeValues,
    check_choice,
)
from ckpt_storage.store import Location, anchored
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.transfer.writing import write_options

from .groups import check_patterns
from .hashes import check_hashes

log = logging.getLogger("ckpt_storage")

STEP_NAMES = ("step", "global_step", "iteration")
"""Where trainers keep the training step in their state."""

_warned: list[bool] = []

Chained = bool | str | os.PathLike[str] | ConsolidateOptions | None
"""The values of `save(consolidate=...)`: whether, the output, or all options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The options of one save; as those of `CheckpointStorageWriter`.

    `has_reuse` is whether files of `base`, the URL of an earlier save, are to be reused, or to be
    prepared for later saves. `step` and `restores` identify a save of a run: its training step, and
    how often the run has gone back to an earlier step. `user` goes into the commit record;
    `replaces` are the ids of saves known to be damaged; no difference between ranks fails a save
    with `is_preemption`.
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
    replicas: Replicas = "warn"
    groups: Sequence[str] = DEFAULT_GROUPS
    base: str | os.PathLike[str] | None = None
    stable: str | Sequence[str] = ()
    full_every: int | None = None
    has_reuse: bool = False
    retry: RetryPolicy | None = None
    progress: Progress = None
    consolidate: Chained = None
    step: int | None = None
    restores: int | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    replaces: frozenset[str] = frozenset()
    is_preemption: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any], *, timeouts: Timeouts) -> Self:
        """Return the options among the arguments of a call."""
        names = {option.name for option in fields(cls)} & arguments.keys()
        options = cls(**{**{name: arguments[name] for name in names}, "timeouts": timeouts})
        has_reuse = options.has_reuse or options.base is not None or bool(options.stable)
        return replace(options, has_reuse=has_reuse)

    def with_step_of(self, state: object) -> Self:
        """Return options with the step of `state`, for an overwriting save without a step.

        That is a plain integer at its top, under one of `STEP_NAMES`. Without it, saves to a URL
        that stays the same cannot be distinguished, which is logged once a process.
        """
        if self.step is not None or not self.overwrite:
            return self
        if isinstance(state, Mapping):
            for name in STEP_NAMES:
                # A look-up that fails will fail again, and be reported, when the state is read.
                with suppress(Exception):
                    if type(step := state.get(name)) is int:
                        return replace(self, step=step)
        if not _warned:
            _warned.append(True)
            log.warning(
                "A save with overwrite=True has no step: a rank that skips a save cannot be "
                "detected then. Pass step=, or put an integer 'step' at the top of the state."
            )
        return self

    def identity(self, url: str) -> Identity:
        """Return the identity of a save to `url` among the saves of a run."""
        return Identity(kind="the save", url=url, step=self.step, restores=self.restores)

    def anchored(self) -> SaveOptions:
        """Return options that mean the same in every working folder. Raises `InvalidInputError`."""
        chained = self.consolidate
        if isinstance(chained, str | os.PathLike):
            chained = anchored(chained)
        elif isinstance(chained, ConsolidateOptions) and chained.output is not None:
            chained = replace(chained, output=anchored(chained.output))
        base = None if self.base is None else anchored(self.base)
        return replace(self, consolidate=chained, base=base)

    @property
    def stable_patterns(self) -> list[str]:
        """The patterns of names that are expected to stay the same."""
        return [self.stable] if isinstance(self.stable, str) else list(self.stable)

    def base_of(self, location: Location) -> Location | None:
        """Return the location of the base of a save to `location`; None if nothing is reused.

        Nothing is reused from a storage of another kind.
        """
        if self.base is None:
            return None
        base = Location.of(self.base, self.storage_options)
        return base if base.protocol == location.protocol else None

    def place(self, url: str | os.PathLike[str]) -> Location:
        """Return the location of a save to `url`. Raises `InvalidInputError`."""
        self.transfer(None)
        check_choice("stock_metadata", self.stock_metadata, StockMetadata)
        check_choice("unsafe_values", self.unsafe_values, UnsafeValues)
        check_choice("replicas", self.replicas, Replicas)
        check_patterns("groups", self.groups)
        if self.has_reuse:
            check_patterns("stable", self.stable_patterns)
            check_hashes()
        if self.base is not None:
            Location.of(self.base, self.storage_options)
        return Location.of(url, self.storage_options)

    def consolidation(self, source: Location) -> ConsolidateSpec | None:
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
                next_step="Pass True, the URL of the output, or ConsolidateOptions.",
            )
        options = replace(options, page_cache=options.page_cache or self.page_cache)
        job = ConsolidateSpec.of(source, options)
        return replace(job, timeouts=self.timeouts, retry=self.retry, progress=self.progress)

    def transfer(self, capabilities: Capabilities | None) -> TransferOptions:
        """Return the options of transfers to a storage; None: to any remote storage."""
        return write_options(
            capabilities,
            thread_count=self.thread_count,
            part_bytes=self.part_bytes,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def is_stock_wanted(self, item_count: int) -> bool:
        """Return whether `.metadata` is to be written for so many items."""
        if self.stock_metadata == "auto":
            return item_count <= STOCK_ENTRY_LIMIT
        return self.stock_metadata == "always"
