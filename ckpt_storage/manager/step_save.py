"""The save of one step under its name, in the foreground or in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt_storage.background.handle import SaveHandle
from ckpt_storage.background.save_state import SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import CheckpointError
from ckpt_storage.loads.states import plain_state
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.save import save_on

from .root import Root


class StepSave:
    """The save of one step; `arguments` are those of `CheckpointManager.save` or `save_async`.

    `restores` counts the restores of the manager so far: a run that went back to an earlier step is
    not behind other ranks. `on_commit` is called with the name of the checkpoint once it is
    committed, in any thread.
    """

    def __init__(
        self,
        root: Root,
        arguments: Mapping[str, Any],
        on_commit: Callable[[str], None],
        *,
        restores: int,
    ) -> None:
        self._root = root
        self._on_commit = on_commit
        self._release: Callable[[], None] = lambda: None
        self._argument_error: Exception | None = None
        self._damage_count = root.damage_count
        self._name, place, user = "", root.location, {}
        try:
            self._name = root.names.name_of(arguments["step"])
            place = place.child(self._name)
            user = user_record(arguments["step"], arguments["metrics"] or {})
        except Exception as error:  # noqa: BLE001  # raised by `_reserve`, so that all ranks get it
            self._argument_error = error
        self._target = place.target
        identity = {"step": root.names.step_of(self._name), "restores": restores}
        self._options = replace(
            SaveOptions.of({**arguments, **identity}, timeouts=root.timeouts),
            retry=root.retry,
            storage_options=place.storage_options,
            user=user,
            replaces=root.damaged_ids(self._name),
        )

    def _reserve(self) -> None:
        """Reserve the name; waits while it is deleted.

        Raises what is wrong with the arguments, or `PhaseTimeoutError`.
        """
        if self._argument_error is not None:
            raise self._argument_error
        self._release = self._root.in_use.acquire(
            self._name, "it is being saved", timeout_s=self._options.timeouts.plan
        )

    def _prepare(self, options: SaveOptions) -> SaveOptions:
        self._reserve()
        return self._with_base(options)

    def _with_base(self, options: SaveOptions) -> SaveOptions:
        """Return options whose base is that of the root, if files are to be reused."""
        name = self._root.base if options.has_reuse else None
        self._damage_count = self._root.damage_count
        return (
            options
            if name is None
            else replace(options, base=self._root.location.child(name).target)
        )

    def run(self, ranks: RankGroup, state: Mapping[str, Any]) -> CheckpointInfo:
        """Save now, and return what was committed; as `ckpt_storage.save`."""
        options = self._with_base(self._options)

        def prepared_state() -> dict[str, Any]:
            self._reserve()
            return plain_state(state)

        committed: CheckpointInfo | None = None
        try:
            committed = save_on(ranks, prepared_state, self._target, options)
        except CheckpointError as error:
            # A save may fail after its commit.
            committed = getattr(error, "info", None)
            raise
        finally:
            self._finish(None if committed is None else committed.save_id)
        return committed

    def begin(
        self, saver: AsyncSaver, state: Mapping[str, Any], *, block_until_staged: bool
    ) -> SaveHandle:
        """Begin to save in the background; returns and raises as `AsyncSaver.save`."""
        try:
            handle = saver.begin(
                state,
                self._target,
                self._options,
                block_until_staged=block_until_staged,
                prepare=self._prepare,
            )
        except BaseException:
            self._finish(None)
            raise
        handle.add_done_callback(
            lambda ended: self._finish(
                ended.save_id if ended.state is SaveState.COMMITTED else None
            )
        )
        saver.raise_earlier(handle)
        return handle

    def _finish(self, save_id: str | None) -> None:
        """Record the committed save, or None; then the name may be deleted."""
        self._root.forget(self._name)
        try:
            if save_id is not None:
                # A file of the base may be the damaged file.
                if self._root.damage_count == self._damage_count:
                    # The save has verified every file before its commit.
                    self._root.record_sound(self._name, save_id)
                    self._root.base = self._name
                self._on_commit(self._name)
        finally:
            self._release()
