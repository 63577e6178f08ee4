"""Suggestions for a name that is not in a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_MAX_COMPARED = 20_000
"""With more names, only wrappers and containers are considered: a comparison takes 10 us."""

_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which `torch.compile`, DDP, FSDP and checkpointing keep the wrapped module."""


def find_near_names(name: str, names: Collection[str], *, max_count: int = 3) -> list[str]:
    """Return names like `name`: with other wrappers, in other containers, or spelt similarly."""
    plain = _unwrapped(name)
    near = [known for known in names if _unwrapped(known) == plain]
    near += [known for known in names if known.endswith(f".{plain}") or plain.endswith(f".{known}")]
    if not near and len(names) <= _MAX_COMPARED:
        near = difflib.get_close_matches(name, names, n=max_count)
    return list(dict.fromkeys(near))[:max_count]


def _unwrapped(name: str) -> str:
    """Return a name without the attributes of wrappers."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
