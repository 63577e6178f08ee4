"""torchtitan's checkpointer over this package's storage: a `CheckpointManager` of its own kind.

Its own checkpointer takes neither a storage writer nor a reader, so this is a subclass that
replaces the methods which call DCP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torchtitan.components.checkpointer import CheckpointManager as TitanManager

from ckpt_storage.background.saver import Mode
from ckpt_storage.errors import CheckpointError
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.loads.load import load
from ckpt_storage.manager.manager import CheckpointManager
from ckpt_storage.manager.policies import KeepLatest
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.save import save

__all__ = ["CheckpointStorageManager"]

_MODES: dict[str, Mode] = {"async": "thread", "async_with_pinned_mem": "process"}


class CheckpointStorageManager(TitanManager):
    """torchtitan's checkpoint manager with our commits; use its `Config` in a trainer's config.

    `folder` may be any URL, also for the last step as Hugging Face files (`last_save_in_hf`): all
    ranks write them to `step-<number>`, of a checkpoint in its folder `sharded`. `async_mode`
    "async" saves in a thread, "async_with_pinned_mem" in a worker process of each rank.
    `keep_latest_k` counts committed checkpoints only. Without a `load_step`, the newest
    `step-<number>` that is whole is loaded; a damaged one is passed over with a warning.

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
            given: Any = self
            asked = given.last_save_in_hf, given.initial_load_in_hf
            given.last_save_in_hf &= not given.last_save_model_only
            given.initial_load_in_hf &= (
                given.initial_load_in_hf_quantized or not given.initial_load_model_only
            )
            try:
                TitanManager.Config.__post_init__(self)
            finally:
                given.last_save_in_hf, given.initial_load_in_hf = asked

    def __init__(self, config: Config, **kwargs: Any) -> None:
        keep = KeepLatest(config.keep_latest_k) if config.keep_latest_k > 0 else None
        # Its own thread that deletes would remove folders without regard to commits. The
        # configuration is a copy that `build` made.
        config.keep_latest_k = 0
        super().__init__(config, **kwargs)
        if not self.enable:
            return
        self._timeouts = Timeouts.of(config.timeout_s)
        self._resumed_step: int | None = None
        self._is_async = config.async_mode in _MODES
        self._manager = CheckpointManager(
            self.folder,
            keep=keep,
            names="step-{step}",
            storage_options=self.storage_options,
            timeout=self._timeouts,
            mode=_MODES.get(config.async_mode, "thread"),
        )

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
        """Return whether `step` is above the one that this run resumed from: it may be replaced."""
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
        found = self.sd_adapter.from_hf(target) if from_hf else target
        self.states["model"].load_state_dict(found)

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
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
        if step != -1 or self._newest_step() == 0:
            return self._restore(max(step, 0))
        try:
            found = self._restore(None)
        except CheckpointError:
            # Having passed over what is damaged, it may have come to the seed.
            if self._newest_step() != 0:
                raise
            found = self._restore(0)
        return found or self._load_initial()

    def _restore(self, step: int | None) -> bool:
        """Load a step, or the newest that is whole, on all ranks the same. False if none is."""
        # As torchtitan has it, step 0 is the seed, the model alone.
        states = self._states_to_load(step == 0)
        restored = self._manager.restore(states, step=step)
        if restored is None:
            return False
        self._resumed_step = restored.step
        self.states["model"].load_state_dict(states)
        return True

    def _newest_step(self) -> int | None:
        newest = self._manager.resume_info()
        return None if newest is None else newest.step

    def _load_initial(self) -> bool:
        url = self.initial_load_path
        if self.initial_load_in_hf and not url:
            url = self.sd_adapter.hf_assets_path
        if not url:
            return False
        self.dcp_load(
            self._states_to_load(self.initial_load_model_only),
            url,
            self.initial_load_in_hf,
            self.initial_load_in_hf_quantized,
        )
        return True

    def _close(self) -> None:
        if hasattr(self, "_manager"):
            self._manager.close()
        super()._close()
