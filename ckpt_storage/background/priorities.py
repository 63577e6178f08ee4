"""The scheduling of a worker process: how nice it is to other processes, and its class of I/O."""

from __future__ import annotations

import logging
import os
import subprocess
from typing import Literal, get_args

from ckpt_storage.errors import InvalidInputError

log = logging.getLogger("ckpt_storage")

IoClass = Literal["best-effort", "idle"]
"""As in ionice(1): "best-effort" is at its lowest level, 7; "idle" waits for an idle disk."""

_IONICE = {"best-effort": ["-c", "2", "-n", "7"], "idle": ["-c", "3"]}
_IONICE_S = 5.0


def check_priorities(nice: int | None, io_class: IoClass | None, *, has_worker: bool) -> None:
    """Raise `InvalidInputError` for values out of range, or for a saver without a worker."""
    if (nice is not None or io_class is not None) and not has_worker:
        raise InvalidInputError(
            "worker_nice and worker_ionice are of a worker process, and mode='thread' has none.",
            next_step="Omit them, or use mode='process'.",
        )
    if nice is not None and (type(nice) is not int or not -20 <= nice <= 19):  # noqa: PLR2004  # setpriority(2)
        raise InvalidInputError(
            f"worker_nice is {nice!r}.", next_step="Give a number from -20 to 19; 19 is the nicest."
        )
    if io_class is not None and io_class not in get_args(IoClass):
        raise InvalidInputError(
            f"worker_ionice is {io_class!r}.", next_step="Give 'best-effort' or 'idle'."
        )


def apply_priorities(nice: int | None, io_class: IoClass | None) -> None:
    """Set them for this thread, and all threads that it starts; None changes nothing.

    An error of the system is logged, because a save is better slow to others than lost.
    """
    try:
        if nice is not None:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
        if io_class is not None:
            command = ["ionice", *_IONICE[io_class], "-p", str(os.getpid())]
            subprocess.run(command, check=True, capture_output=True, timeout=_IONICE_S)  # noqa: S603  # no input of others
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "Worker process %d keeps its priority: nice %s, I/O class %s cannot be set: %s.",
            *(os.getpid(), nice, io_class, error),
        )
