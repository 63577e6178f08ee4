"""Saving under the names of steps, while the pruner keeps its hands off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ckpt_storage.background.handle import SaveHandle, SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.frontdoor import plain_state
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import CheckpointError
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.running import save_on

from .census import Census
from .claims import Claims

_BY = "it is being saved"


class StepSaver:
    """Saves steps below one root, now or in the background.

    Args:
        census: of the root; what is saved is looked at anew.
        claims: of this process.
        process_group: the ranks that save.
        make_saver: makes the `AsyncSaver`, with the first save in the background.
        damaged: returns the saves under a name that are known to be damaged: those are replaced.
        committed: told of each commit, by name and save id, before its claim ends.
        ended: called after that.

    """

    def __init__(
        self,
        census: Census,
        claims: Claims,
        process_group: dist.ProcessGroup | None,
        *,
        make_saver: Callable[[], AsyncSaver],
        damaged: Callable[[str], frozenset[str]],
        committed: Callable[[str, str | None], None],
        ended: Callable[[], None],
    ) -> None:
        self._census = census
        self._claims = claims
        self._process_group = process_group
        self._make_saver = make_saver
        self._damaged = damaged
        self._committed = committed
        self._ended = ended
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
        """Save with `metrics`, and return what was committed; as `save`."""
        job = self._job(step, metrics, options)

        def prepared() -> dict[str, Any]:
            job.prepare()
            return plain_state(state)

        try:
            try:
                info = save_on(
                    Ranks.of(self._process_group), prepared, job.target, lambda: job.options
                )
            finally:
                self._census.forget(job.name)
            self._committed(job.name, info.save_id)
        except CheckpointError as error:
            # The checkpoint counts, whatever went wrong after its commit.
            committed: CheckpointInfo | None = getattr(error, "info", None)
            if committed is not None:
                self._committed(job.name, committed.save_id)
            raise
        finally:
            job.release()
        self._ended()
        return info

    def begin(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
        options: SaveOptions,
        *,
        block_until_staged: bool,
    ) -> SaveHandle:
        """Begin to save with `metrics` in the background; as `AsyncSaver.begin`."""
        job = self._job(step, metrics, options)

        def ended(handle: SaveHandle) -> None:
            self._census.forget(job.name)
            is_committed = handle.state is SaveState.COMMITTED
            if is_committed:
                self._committed(job.name, handle.save_id)
            job.release()
            if is_committed:
                self._ended()

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

    def _job(self, step: int, metrics: Mapping[str, Any], options: SaveOptions) -> _Job:
        location = self._census.location
        try:
            name = self._census.names.name_of(step)
            user = user_record(step, metrics)
        except Exception as error:  # noqa: BLE001  # the other ranks are waiting to be told
            return _Job(self._claims, "", location.target, options, refusal=error)
        chosen = replace(options, user=user, replaces=self._damaged(name))
        return _Job(self._claims, name, location.child(name).target, chosen)

    def wait(self, timeout: float | None) -> None:
        """Wait for all in the background; as `AsyncSaver.wait`."""
        if self._saver is not None:
            self._saver.wait(timeout)

    def close(self, timeout: float | None) -> None:
        """Wait for all in the background and end; as `AsyncSaver.close`."""
        if self._saver is not None:
            self._saver.close(timeout)


class _Job:
    """One save under a name that the pruner must leave alone meanwhile.

    What speaks against it is raised only by `prepare`, once this rank is in the operation that
    all ranks are in: one that raised before would leave them waiting.
    """

    def __init__(
        self,
        claims: Claims,
        name: str,
        target: str,
        options: SaveOptions,
        *,
        refusal: Exception | None = None,
    ) -> None:
        self._claims = claims
        self._refusal = refusal
        self.name = name
        self.target = target
        self.options = options
        self.release: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Take the name; waits while it is deleted. Raises `PhaseTimeoutError`, and refusals."""
        if self._refusal is not None:
            raise self._refusal
        self.release = self._claims.take(self.name, _BY, timeout_s=self.options.timeouts.plan)
