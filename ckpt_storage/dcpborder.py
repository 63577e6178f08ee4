"""The border to DCP: nothing leaves our methods that would hang the other ranks.

Knows exceptions and pickle only. Called by `writer` and `reader`.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .errors import CheckpointError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def at_dcp_border(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let only exceptions out that pickle both ways.

    DCP sends a rank's exception to all others by pickle; one that does not survive it hangs them.
    """

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except CheckpointError:
            raise
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
