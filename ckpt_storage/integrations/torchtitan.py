"""torchtitan's checkpointer over this package's storage: a `CheckpointManager` of its own kind.

Its own checkpointer takes neither a storage writer nor a reader, so this is a subclass that
replaces the methods which call DCP.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchtitan.components.checkpointer import CheckpointManager as TitanManager
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from ckpt_storage.background.saver import Mode
from ckpt_storage.dcp.reader import CheckpointStorageReader
from ckpt_storage.errors import CheckpointError
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.loads.load import load
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.policies import KeepLatest
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.save import save
from ckpt_storage.store import Location, open_store

__all__ = ["CheckpointStorageManager"]

_NAMES = "step-{step}"
_MODES: dict[str, Mode] = {"async": "thread", "async_with_pinned_mem": "process"}


_MODEL_ALONE = (
    "That step holds the model alone, as last_save_model_only (torchtitan's default) has it. "
    "Resume an earlier step by load_step, or begin from its weights: set initial_load_path to it, "
    "and folder to a new folder. Next time set last_save_model_only=False."
)
_OTHER_DEGREE = (
    "With another data parallel degree, set "
    'exclude_from_loading=["dataloader"]: the data begin anew.'
)


class CheckpointStorageManager(TitanManager):
    """torchtitan's checkpoint manager with our commits; use its `Config` in a trainer's config.

    `folder` may be any URL, also for the last step as Hugging Face files (`last_save_in_hf`): all
    ranks write them to `step-<number>`, of a checkpoint in its folder `sharded`. `async_mode`
    "async" saves in a thread, "async_with_pinned_mem" in a worker process of each rank.
    `keep_latest_k` counts committed checkpoints only. Without a `load_step`, the newest
    `step-<number>` that is whole is loaded; a damaged step is passed over with a warning.

    `folder` and `keep_latest_k` are read at each call: engines such as verl's set them later.

    Set `storage_options` on a subclass rather than in a configuration, which torchtitan logs.
    """

    storage_options: ClassVar[Mapping[str, Any] | None] = None
    save_future: Any

    @dataclass(kw_only=True, slots=True)
    class Config(TitanManager.Config):
        """torchtitan's settings, and ours."""

        timeout_s: float = 3600.0
        """Seconds that one phase of a save or load may take."""

        def __post_init__(self) -> None:
            # torchtitan refuses weights at URLs, which its functions cannot reach; ours can.
            config: Any = self
            in_hf = config.last_save_in_hf, config.initial_load_in_hf
            config.last_save_in_hf &= not config.last_save_model_only
            config.initial_load_in_hf &= (
                config.initial_load_in_hf_quantized or not config.initial_load_model_only
            )
            try:
                TitanManager.Config.__post_init__(self)
            finally:
                config.last_save_in_hf, config.initial_load_in_hf = in_hf

    def __init__(self, config: Config, **kwargs: Any) -> None:
        keep_latest_k = config.keep_latest_k
        # Its own thread that deletes would remove folders without regard to commits. The
        # configuration is a copy that `build` made.
        config.keep_latest_k = 0
        super().__init__(config, **kwargs)
        if not self.enable:
            return
        self.keep_latest_k = keep_latest_k
        self._timeouts = Timeouts.of(config.timeout_s)
        self._resumed_step: int | None = None
        self._mode = _MODES.get(config.async_mode, "thread")
        self._is_async = config.async_mode in _MODES
        self._made: tuple[str, int, CheckpointManager] | None = None

    @property
    def _manager(self) -> CheckpointManager:
        """The manager of the present folder and limit."""
        folder, keep_latest_k = self.folder, self.keep_latest_k
        if self._made is not None and self._made[:2] == (folder, keep_latest_k):
            return self._made[2]
        if self._made is not None:
            self._made[2].close()
            if self._made[0] != folder:
                self._resumed_step = None
        manager = CheckpointManager(
            folder,
            keep=KeepLatest(keep_latest_k) if keep_latest_k > 0 else None,
            names=_NAMES,
            storage_options=self.storage_options,
            timeout=self._timeouts,
            mode=self._mode,
        )
        self._made = (folder, keep_latest_k, manager)
        return manager

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> None:
        """Save `state_dict`, as Hugging Face files too, and wait. Raises as `ckpt_storage.save`."""
        step = int(checkpoint_id.rpartition("-")[2])
        url, overwrite = self._manager.target_of(step), self._is_above(step)
        if not to_hf:
            self._manager.save(step, state_dict, overwrite=overwrite)
            return
        files = ConsolidateOptions(
            output=url,
            output_storage_options=self.storage_options,
            include="*",
            fqn_to_index_mapping=self.sd_adapter.fqn_to_index_mapping or None,
        )
        save(
            self.sd_adapter.to_hf(state_dict),
            f"{url}/sharded",
            overwrite=overwrite,
            consolidate=files,
            timeout=self._timeouts,
            storage_options=self.storage_options,
        )

    def _is_above(self, step: int) -> bool:
        """Return whether `step` is above the resumed step, so that it may be replaced."""
        return self._resumed_step is not None and step > self._resumed_step

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load into `state_dict` and the model. Raises as `ckpt_storage.load`."""
        if from_quantized:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        target = self.sd_adapter.to_hf(state_dict) if from_hf else state_dict
        load(target, checkpoint_id, timeout=self._timeouts, storage_options=self.storage_options)
        # The model's tensors stand at the top of the state, beside everything else.
        weights = self.sd_adapter.from_hf(target) if from_hf else target
        self.states["model"].load_state_dict(weights)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        structured_logger.add_step_tag("checkpoint_save")
        self.maybe_wait_for_saving()
        what = "Staging" if self._is_async and not last_step else "Saving"
        with _logged(f"{what} the checkpoint of step {curr_step} below {self._manager.url}"):
            # torchtitan turns the automatic collection off.
            GarbageCollection.collect("GC collection invoked by checkpointer.")
            if last_step:
                self._save_last_step(curr_step)
                return True
            state, overwrite = self._flattened_model_states_sd(), self._is_above(curr_step)
            if self._is_async:
                self.save_future = self._manager.save_async(
                    curr_step, state, overwrite=overwrite, block_until_staged=False
                )
            else:
                self._manager.save(curr_step, state, overwrite=overwrite)
        return True

    def _maybe_wait_for_staging(self) -> None:
        if self.save_future is not None:
            self.save_future.wait_staged()

    def _wait_for_saving(self) -> None:
        try:
            self.save_future.result()
        finally:
            self.save_future = None

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        with _logged(f"Loading from {self._manager.url}"):
            if step != -1 or self._newest_step() == 0:
                return self._restore(max(step, 0))
            try:
                is_restored = self._restore(None)
            except CheckpointError:
                # All later steps are damaged, and the seed at step 0 holds the model alone.
                if self._newest_step() != 0:
                    raise
                is_restored = self._restore(0)
            if is_restored:
                return True
            self._warn_of_exports()
            return self._load_initial()

    def _restore(self, step: int | None) -> bool:
        """Load a step, or the newest sound step, the same on all ranks. False if there is none."""
        # As torchtitan has it, step 0 is the seed, the model alone.
        states = self._states_to_load(step == 0)
        try:
            restored = self._manager.restore(states, step=step)
        except Exception as error:
            if "dp_degree is inconsistent" in f"{error} {error.__cause__}":
                error.add_note(_OTHER_DEGREE)
            elif step != 0 and self._holds_model_alone(step):
                error.add_note(_MODEL_ALONE)
            raise
        if restored is None:
            return False
        self._resumed_step = restored.step
        self.states["model"].load_state_dict(states)
        logger.info("Resumed from %s.", restored.info.url)
        return True

    def _holds_model_alone(self, step: int | None) -> bool:
        """Return whether a step, or the newest, lacks all that a run resumes from but the model."""
        info = self._manager.latest()
        number = step if step is not None or info is None else info.step
        if number is None:
            return False
        url = self._manager.target_of(number)
        reader = CheckpointStorageReader(url, storage_options=self.storage_options)
        try:
            names = reader.read_metadata().state_dict_metadata
        except CheckpointError:
            return False
        return not any(name.startswith("train_state") for name in names)

    def _warn_of_exports(self) -> None:
        """Warn if the folder has steps, but none that can be resumed from."""
        store = open_store(Location.of(self.folder, self.storage_options), timeouts=self._timeouts)
        paths = [entry.path.rstrip("/") for entry in store.list("", recursive=False)]
        store.close()
        if steps := [path for path in paths if re.fullmatch(r"step-\d+", path)]:
            logger.warning(
                "%s holds %s, none of which can be resumed from: a step that last_save_in_hf wrote "
                "has the weights alone. This run begins anew. To begin from those weights, set "
                "initial_load_path to that folder, and initial_load_in_hf.",
                *(self._manager.url, ", ".join(sorted(steps))),
            )

    def _newest_step(self) -> int | None:
        newest = self._manager.resume_info()
        return None if newest is None else newest.step

    def _load_initial(self) -> bool:
        url = self.initial_load_path
        if self.initial_load_in_hf and not url:
            url = self.sd_adapter.hf_assets_path
        if not url:
            logger.info("No checkpoint was provided, this is a fresh start.")
            return False
        self.dcp_load(
            self._states_to_load(self.initial_load_model_only),
            url,
            self.initial_load_in_hf,
            self.initial_load_in_hf_quantized,
        )
        return True

    def _close(self) -> None:
        made = getattr(self, "_made", None)
        if made is not None:
            made[2].close()
        super()._close()


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log that something begins, and how long it took."""
    begin_s = time.monotonic()
    logger.info("%s.", what)
    yield
    logger.info("%s took %.2f seconds.", what, time.monotonic() - begin_s)
