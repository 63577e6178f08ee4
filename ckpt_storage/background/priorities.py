"""The scheduling of a worker process: how nice it is to other processes, and its class of I/O."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
import sys
from typing import Literal, get_args

from ckpt_storage.errors import InvalidInputError

log = logging.getLogger("ckpt_storage")

IoClass = Literal["best-effort", "idle"]
"""As in ionice(1): "best-effort" is at its lowest level, 7; "idle" waits for an idle disk."""

# The number of ioprio_set in the kernel's table of system calls, which libc has no function for.
# arm64, riscv64 and loongarch64 have the table of include/uapi/asm-generic/unistd.h.
_IOPRIO_SET = {
    "x86_64": 251,
    "aarch64": 30,
    "riscv64": 30,
    "loongarch64": 30,
    "ppc64le": 273,
    "s390x": 282,
}

# include/uapi/linux/ioprio.h
_WHO_PROCESS = 1
_CLASS_SHIFT = 13
_IO_PRIORITY = {"best-effort": 2 << _CLASS_SHIFT | 7, "idle": 3 << _CLASS_SHIFT}


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
            _set_io_class(io_class)
    except OSError as error:
        log.warning(
            "Worker process %d keeps its priority: nice %s, I/O class %s cannot be set: %s.",
            *(os.getpid(), nice, io_class, error),
        )


def _set_io_class(io_class: IoClass) -> None:
    # A 32-bit process on a 64-bit kernel has another table.
    is_64_bit = struct.calcsize("P") == 8  # noqa: PLR2004  # bytes
    number = _IOPRIO_SET.get(platform.machine()) if sys.platform == "linux" and is_64_bit else None
    if number is None:
        raise OSError(f"the system call of {sys.platform} {platform.machine()} is not known")
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, _WHO_PROCESS, 0, _IO_PRIORITY[io_class]):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
