"""Names of a checkpoint that a missing name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_MAX_COMPARED = 20_000
"""Above so many names only wrappers and containers are looked for: a comparison takes 10 us."""

_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which `torch.compile`, DDP, FSDP and checkpointing keep the wrapped module."""


def find_near_names(name: str, names: Collection[str], *, max_count: int = 3) -> list[str]:
    """Return names like `name`: those without or with wrappers, in other containers, misspelt."""
    plain = _unwrapped(name)
    found = [known for known in names if _unwrapped(known) == plain]
    found += [
        known for known in names if known.endswith(f".{plain}") or plain.endswith(f".{known}")
    ]
    if not found and len(names) <= _MAX_COMPARED:
        found = difflib.get_close_matches(name, names, n=max_count)
    return list(dict.fromkeys(found))[:max_count]


def _unwrapped(name: str) -> str:
    """Return a name without the attributes of wrappers."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
