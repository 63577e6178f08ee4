"""Saving under the names of steps, while the pruner keeps its hands off.

Knows names, claims and the front doors that save; knows no policy. Called by `manager` on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from .census import Census
from .claims import Claims
from .coordination_torch import coordinator_of
from .frontdoor import plain_state
from .handle import SaveHandle, SaveState
from .info import CheckpointInfo
from .saver import AsyncSaver
from .saving import SaveOptions, run_save

__all__ = ["StepSaver"]

_BY = "it is being saved"


class StepSaver:
    """Saves steps below one root, now or in the background.

    Args:
        census: of the root; what is saved is looked at anew.
        claims: of this process.
        process_group: the ranks that save.
        make_saver: makes the `AsyncSaver`, with the first save in the background.
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
        committed: Callable[[str, str | None], None],
        ended: Callable[[], None],
    ) -> None:
        self._census = census
        self._claims = claims
        self._process_group = process_group
        self._make_saver = make_saver
        self._committed = committed
        self._ended = ended
        self._saver: AsyncSaver | None = None

    @property
    def saver(self) -> AsyncSaver:
        """The saver of the background, made when it is first asked for."""
        if self._saver is None:
            self._saver = self._make_saver()
        return self._saver

    def save(self, name: str, state: Mapping[str, Any], options: SaveOptions) -> CheckpointInfo:
        """Save, and return what was committed; as `run_save`."""
        with self._claims.used(name, _BY, timeout_s=options.timeouts.plan):
            try:
                info = run_save(
                    coordinator_of(self._process_group),
                    lambda: plain_state(state),
                    self._census.location.child(name).target,
                    lambda: options,
                )
            finally:
                self._census.forget(name)
            self._committed(name, info.save_id)
        self._ended()
        return info

    def begin(
        self,
        name: str,
        state: Mapping[str, Any],
        options: SaveOptions,
        *,
        block_until_staged: bool,
    ) -> SaveHandle:
        """Begin to save in the background; as `AsyncSaver.begin`."""
        release = self._claims.take(name, _BY, timeout_s=options.timeouts.plan)

        def ended(handle: SaveHandle) -> None:
            self._census.forget(name)
            is_committed = handle.state is SaveState.COMMITTED
            if is_committed:
                self._committed(name, handle.save_id)
            release()
            if is_committed:
                self._ended()

        try:
            handle = self.saver.begin(
                state,
                self._census.location.child(name).target,
                options,
                block_until_staged=block_until_staged,
            )
        except BaseException:
            release()
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
