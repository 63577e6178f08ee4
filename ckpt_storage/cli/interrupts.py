"""Running a command so that Ctrl-C ends it, whatever it waits for.

Python hands signals to the main thread alone, and only between two steps of its own: a request that
waits inside a client written in another language would hold it up. So the command runs in a thread,
and the main thread waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable

__all__ = ["InterruptedRunError", "leave_at_once", "run_interruptibly"]

_LOOK_S = 0.1
_GRACE_S = 4.0
"""For discarding uploads that are under way; what stays is freed by a later save or copy."""


class InterruptedRunError(Exception):
    """The user interrupted the run; `is_running` if it could not be ended."""

    def __init__(self, *, is_running: bool) -> None:
        self.is_running = is_running
        super().__init__("interrupted")


class _Run(threading.Thread):
    """One command on its way."""

    def __init__(self, command: Callable[[], int]) -> None:
        super().__init__(name="ckpt-storage command", daemon=True)
        self._command = command
        self.code = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.code = self._command()
        except BaseException as error:  # noqa: BLE001  # raised again by the main thread
            self.error = error

    def interrupt(self) -> None:
        """Have `KeyboardInterrupt` raised in this thread at its next step of Python."""
        if self.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.ident), ctypes.py_object(KeyboardInterrupt)
            )


def run_interruptibly(command: Callable[[], int]) -> int:
    """Run a command and return its code; raise what it raised, or `InterruptedRunError`."""
    run = _Run(command)
    run.start()
    try:
        while run.is_alive():
            run.join(_LOOK_S)
    except KeyboardInterrupt:
        run.interrupt()
        with contextlib.suppress(KeyboardInterrupt):
            run.join(_GRACE_S)
        raise InterruptedRunError(is_running=run.is_alive()) from None
    if run.error is not None:
        raise run.error
    return run.code


def leave_at_once(code: int) -> None:
    """End the process although a thread still runs, which might hold up an orderly end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
