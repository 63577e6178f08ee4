"""One save of a manager: under the name of its step, which is in use meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_storage.background.handle import SaveHandle, SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.plans import plain_state
from ckpt_storage.errors import CheckpointError
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import save_on

from .root import Root


class StepSave:
    """One save; `given` are the arguments of the call. `committed` gets the name, in any thread."""

    def __init__(
        self, root: Root, given: Mapping[str, Any], committed: Callable[[str], None]
    ) -> None:
        self._root = root
        self._committed = committed
        self._release: Callable[[], None] = lambda: None
        self._refusal: Exception | None = None
        self._name, place, user = "", root.location, {}
        try:
            self._name = root.names.name_of(given["step"])
            place = place.child(self._name)
            user = user_record(given["step"], given["metrics"] or {})
        except Exception as error:  # noqa: BLE001  # raised by `_prepare`, when all ranks are there
            self._refusal = error
        self._target = place.target
        self._options = replace(
            SaveOptions.of(given, timeouts=root.timeouts),
            retry=root.retry,
            storage_options=place.storage_options,
            user=user,
            replaces=root.damaged_ids(self._name),
        )

    def _prepare(self) -> None:
        """Take the name; waits while it is deleted. Raises `PhaseTimeoutError`, and refusals."""
        if self._refusal is not None:
            raise self._refusal
        limit_s = self._options.timeouts.plan
        self._release = self._root.uses.take(self._name, "it is being saved", timeout_s=limit_s)

    def run(self, ranks: RankGroup, state: Mapping[str, Any]) -> CheckpointInfo:
        """Save now, and return what was committed; as `ckpt_storage.save`."""

        def prepared() -> dict[str, Any]:
            self._prepare()
            return plain_state(state)

        committed: CheckpointInfo | None = None
        try:
            committed = save_on(ranks, prepared, self._target, self._options)
        except CheckpointError as error:
            # The checkpoint counts, whatever went wrong after its commit.
            committed = getattr(error, "info", None)
            raise
        finally:
            self._end(None if committed is None else committed.save_id)
        return committed

    def begin(
        self, saver: AsyncSaver, state: Mapping[str, Any], *, block_until_staged: bool
    ) -> SaveHandle:
        """Begin to save in the background; as `AsyncSaver.save`."""
        given: dict[str, Any] = {"block_until_staged": block_until_staged, "prepare": self._prepare}
        try:
            handle = saver.begin(state, self._target, self._options, **given)
        except BaseException:
            self._end(None)
            raise
        handle.add_done_callback(
            lambda h: self._end(h.save_id if h.state is SaveState.COMMITTED else None)
        )
        return handle

    def _end(self, save_id: str | None) -> None:
        """Note how the save ended; only then may its name be deleted."""
        self._root.forget(self._name)
        try:
            if save_id is not None:
                # Every file was looked at before the commit.
                self._root.found_sound(self._name, save_id)
                self._committed(self._name)
        finally:
            self._release()
