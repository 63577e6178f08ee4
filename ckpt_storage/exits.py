"""When the interpreter ends with saves in flight: flush them within bounds, or say what is lost.

Knows handles and the order in which an interpreter takes itself down. Called by `saver`.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its hook before ours, see below
import contextlib
import logging
import os
import sys
import threading
import time

from .errors import CheckpointError
from .handle import SaveHandle
from .store.timed import halt_threads

__all__ = ["flush_at_exit"]

log = logging.getLogger("ckpt_storage")

STALL_S = 30.0
"""A save that has made no progress for so long does not hold up an interpreter that ends."""

_LOOK_S = 0.1
_ENDING = ("ckpt-storage save", "ckpt-storage watch")
"""Threads that end with their save."""

_END_S = 5.0
_HALT_S = 0.3
"""Long enough for threads that wait for nothing to come to rest."""

_in_flight: dict[SaveHandle, float] = {}
_lost: list[SaveHandle] = []
_lock = threading.Lock()
_is_registered = False


def _forget_all() -> None:
    """Let a child of fork wait for none of its parent's saves: it has none of their threads."""
    global _lock  # noqa: PLW0603  # its owner may be a thread that the child has not
    _lock = threading.Lock()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget_all)


def flush_at_exit(handle: SaveHandle, timeout_s: float) -> None:
    """Let an interpreter that ends wait for a save that has begun, at most `timeout_s` seconds.

    And not longer than `STALL_S` without progress. A save that does not end by then is named on
    standard error.
    """
    global _is_registered  # one hook for the whole process
    with _lock:
        _in_flight[handle] = timeout_s
        is_first, _is_registered = not _is_registered, True
    handle.add_done_callback(_forget)
    if not is_first:
        return
    # Before the executors of `concurrent.futures` are shut down, on which clients rely: their
    # hook came with the import above, and the last to register is the first to run. `atexit` runs
    # too late for that, but is all that a Python without this hook offers.
    atexit.register(_rest)
    register = getattr(threading, "_register_atexit", atexit.register)
    try:
        register(_flush)
    except RuntimeError:
        log.warning("The interpreter is ending already: no save is waited for.")


def _forget(handle: SaveHandle) -> None:
    with _lock:
        _in_flight.pop(handle, None)


def _flush() -> None:
    start = time.monotonic()
    with _lock:
        waiting = dict(_in_flight)
    lost = [handle for handle, timeout_s in waiting.items() if not _wait(handle, start + timeout_s)]
    for handle in lost:
        message = (
            f"ckpt_storage: the save to {handle.url} is lost: the process ended while it was "
            f"{handle.state.value}. Call result() or close() before the program ends."
        )
        if log.hasHandlers():
            log.critical(message)
        # Logging may be off or gone by now, and this must not be missed.
        print(message, file=sys.stderr, flush=True)  # noqa: T201
    _lost.extend(lost)


def _rest() -> None:
    """Let our daemon threads come to rest before the interpreter takes itself down.

    After `_flush`, and after threads of the user's own, which may still save.
    """
    halt_threads()
    end = time.monotonic() + (_HALT_S if _lost else _END_S)
    # One whose save has ended still lets go of tensors, in torch's C++.
    ending = [thread for thread in threading.enumerate() if thread.name.startswith(_ENDING)]
    for thread in ending:
        thread.join(max(0.0, end - time.monotonic()))
    if ending:
        time.sleep(_HALT_S)


def _wait(handle: SaveHandle, end: float) -> bool:
    """Wait for one save; return whether it ended."""
    seen: object = None
    moved = time.monotonic()
    while not handle.done():
        progress = handle.progress()
        mark = (progress.state, [(s.rank, s.phase, s.done_bytes) for s in progress.ranks.values()])
        now = time.monotonic()
        if mark != seen:
            seen, moved = mark, now
        if now > min(end, moved + STALL_S):
            return False
        with contextlib.suppress(CheckpointError):
            handle.exception(_LOOK_S)
    return True
