"""Entries of a Trainer's checkpoint: its small files, and the weights by their stored names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from .file_entries import FileEntries

__all__ = ["StoredNames", "resume_files"]


@dataclass(frozen=True, slots=True)
class StoredNames:
    """Under which name each entry of a model's state dict is stored; None: all as they are.

    Entries of a PEFT model are stored as PEFT spells them, so that an export is an adapter.
    """

    stored_by_own: Mapping[str, str] | None = None

    @classmethod
    def of(cls, model: Any, *, is_whole: bool) -> StoredNames:
        """Return the names of a model."""
        adapters = list(getattr(model, "peft_config", None) or {})
        if not adapters or is_whole or not hasattr(model, "get_base_model"):
            return cls()
        entries = get_model_state_dict(model)
        frozen = {
            _plain_name(name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }
        names = {name: name for name in entries if _plain_name(name) not in frozen}
        from peft import get_peft_model_state_dict  # noqa: PLC0415  # the model is PEFT's

        own_by_id = {id(value): name for name, value in entries.items()}
        for adapter in adapters:
            spelt = get_peft_model_state_dict(model, entries, adapter_name=adapter)
            if not all(id(value) in own_by_id for value in spelt.values()):
                continue  # computed values have no entry of their own; the trained ones are kept
            for name, value in spelt.items():
                own = own_by_id[id(value)]
                # Several adapters share PEFT's names.
                names[own] = name if len(adapters) == 1 else own
        return cls(names)

    def stored(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries to store, under the names that they are stored by."""
        if self.stored_by_own is None:
            return dict(entries)
        return {stored: entries[own] for own, stored in self.stored_by_own.items()}

    def own(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was loaded under the model's own names."""
        if self.stored_by_own is None:
            return dict(entries)
        return {own: entries[stored] for own, stored in self.stored_by_own.items()}


def _plain_name(name: str) -> str:
    """Return a parameter's name as `get_model_state_dict` spells it."""
    return name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "")


def resume_files() -> FileEntries:
    """Return the files that a Trainer resumes from. What an export needs is in `files`."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return FileEntries(
        key="trainer_files",
        random_states="rng_state",
        own_random_states="rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth",
        rank=rank,
    )
