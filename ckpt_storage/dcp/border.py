"""The border to DCP: what its calls tell, and that nothing leaves ours that hangs other ranks."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ckpt_storage.errors import CheckpointError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def at_dcp_border(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let only exceptions out that pickle both ways: others would hang the ranks they are sent to.

    Ours say what happened, so they come without the frames inside this package.
    """

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except CheckpointError as error:
            raise error.with_traceback(None)  # noqa: B904  # the same error, so no other cause
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
            except Exception:  # noqa: BLE001  # any failure means: cannot travel
                raise CheckpointError(
                    f"{type(error).__name__}: {error}",
                    next_step="The traceback of the failing rank says where.",
                ) from error
            raise

    return wrapped


def rank_of_call(kwargs: Mapping[str, Any]) -> int:
    """Return the rank that DCP set a plug-in up for: torch tells it only those that take it."""
    rank: int | None = kwargs.get("rank")
    if rank is not None:
        return rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
