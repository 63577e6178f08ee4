"""Saving under the names of steps, while the pruner keeps its hands off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ckpt_storage.background.handle import SaveHandle, SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.plans import plain_state
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.running import save_on

from .root import Root
from .upkeep import Upkeep


class StepSaver:
    """Saves steps below one root, now or in the background, and tells `upkeep` of each commit."""

    def __init__(
        self,
        root: Root,
        upkeep: Upkeep,
        process_group: dist.ProcessGroup | None,
        *,
        make_saver: Callable[[], AsyncSaver],
        timeouts: Timeouts,
    ) -> None:
        self._root = root
        self._upkeep = upkeep
        self._process_group = process_group
        self._make_saver = make_saver
        self._timeouts = timeouts
        self._saver: AsyncSaver | None = None

    @property
    def saver(self) -> AsyncSaver:
        """The saver of the background, made when it is first asked for."""
        if self._saver is None:
            self._saver = self._make_saver()
        return self._saver

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, Any], options: SaveOptions
    ) -> CheckpointInfo:
        """Save with `metrics`, and return what was committed; as `ckpt_storage.save`."""
        job = self._job(step, metrics, options)

        def prepared() -> dict[str, Any]:
            job.prepare()
            return plain_state(state)

        committed: CheckpointInfo | None = None
        ranks = Ranks.of(self._process_group)
        try:
            committed = save_on(ranks, prepared, job.target, lambda: job.options)
        except CheckpointError as error:
            # The checkpoint counts, whatever went wrong after its commit.
            committed = getattr(error, "info", None)
            raise
        finally:
            self._end(job, committed.save_id if committed is not None else None)
        return committed

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        options: SaveOptions,
        *,
        block_until_staged: bool,
    ) -> SaveHandle:
        """Begin to save with `metrics` in the background; as `AsyncSaver.save`."""
        job = self._job(step, metrics, options)

        def ended(handle: SaveHandle) -> None:
            self._end(job, handle.save_id if handle.state is SaveState.COMMITTED else None)

        try:
            handle = self.saver.begin(
                state,
                job.target,
                job.options,
                block_until_staged=block_until_staged,
                prepare=job.prepare,
            )
        except BaseException:
            job.release()
            raise
        handle.add_done_callback(ended)
        return handle

    def wait(self, timeout: float | None) -> None:
        """Wait for all in the background; as `AsyncSaver.wait`."""
        if self._saver is not None:
            self._saver.wait(timeout)

    def close(self, timeout: float | None) -> None:
        """Wait for all in the background and end; as `AsyncSaver.close`."""
        if self._saver is not None:
            self._saver.close(timeout)

    def _job(self, step: int, metrics: Mapping[str, Any], options: SaveOptions) -> _Job:
        name, refusal, user = "", None, {}
        try:
            name = self._root.names.name_of(step)
            user = user_record(step, metrics)
            self._upkeep.begun(step)
        except Exception as error:  # noqa: BLE001  # the other ranks are waiting to be told
            refusal = error
        location = self._root.location
        chosen = replace(
            options,
            timeouts=self._timeouts,
            retry=self._root.retry,
            storage_options=location.storage_options,
            user=user,
            replaces=self._root.damaged_ids(name),
        )
        target = (location.child(name) if name else location).target
        return _Job(self._root, name, target, chosen, refusal)

    def _end(self, job: _Job, save_id: str | None) -> None:
        """Note how a save ended, from any thread; only then may its name be deleted."""
        self._root.forget(job.name)
        if save_id is not None:
            self._upkeep.committed(job.name, save_id)
        job.release()
        if save_id is not None:
            self._upkeep.wake()


class _Job:
    """One save under a name that the pruner must leave alone meanwhile.

    What speaks against it is raised only by `prepare`, once this rank is in the operation that
    all ranks are in: one that raised before would leave them waiting.
    """

    def __init__(
        self,
        root: Root,
        name: str,
        target: str,
        options: SaveOptions,
        refusal: Exception | None,
    ) -> None:
        self._root = root
        self._refusal = refusal
        self.name = name
        self.target = target
        self.options = options
        self.release: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Take the name; waits while it is deleted. Raises `PhaseTimeoutError`, and refusals."""
        if self._refusal is not None:
            raise self._refusal
        limit_s = self.options.timeouts.plan
        self.release = self._root.uses.take(self.name, "it is being saved", timeout_s=limit_s)
