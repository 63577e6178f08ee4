"""How long a rank is inside the methods of a writer or reader that DCP calls.

Knows the names of DCP's calls. Called by `small` and `meter` on every rank. What a whole call takes
beyond that is torch's: the planner's steps, the plans' way from rank to rank, what it logs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

__all__ = ["PluginClock"]

_METHODS = (
    "reset",
    "read_metadata",
    "set_up_storage_writer",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "read_data",
    "finish",
)

_Plugin = TypeVar("_Plugin", StorageWriter, StorageReader)


class PluginClock:
    """Adds up the seconds in the methods of plug-ins; None until one was called."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def forget(self) -> None:
        """Begin anew."""
        self.seconds = None

    def of(self, plugin: _Plugin) -> _Plugin:
        """Return `plugin`, whose calls by DCP are timed from now on."""
        for name in _METHODS:
            method = getattr(plugin, name, None)
            if method is not None:
                setattr(plugin, name, self._timed(method))
        return plugin

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        # With the signature, which torch looks at.
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever torch's take
            start_s = time.perf_counter()
            try:
                found = method(*args, **kwargs)
                # What `write_data` and `read_data` return may have to be waited for.
                wait = getattr(found, "wait", None)
                if wait is not None:
                    wait()
            finally:
                self.seconds = (self.seconds or 0.0) + time.perf_counter() - start_s
            return found

        return timed
