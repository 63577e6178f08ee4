"""The saves that an interpreter waits for at its end."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its hook before ours, see below
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

from ckpt_storage.options import Timeouts
from ckpt_storage.store.threads import halt_threads

from .handle import SaveStatus
from .save_state import SaveProgress

log = logging.getLogger("ckpt_storage")

STALL_S = 30.0
"""An ending interpreter waits no longer than this for a save without progress."""

_GRACE_S = 3.0
"""The time after the deadline of a phase in which a save reports its error to the other ranks."""

_POLL_S = 0.1
_JOIN_S = 5.0
_PARK_S = 0.3
"""Long enough for a running thread to reach the call in which it is parked."""

_in_flight: dict[SaveStatus, tuple[float, Timeouts]] = {}
_lost: list[SaveStatus] = []
_hooks: list[object] = []

# A child of fork has none of the threads that its parent's saves need.
os.register_at_fork(after_in_child=_in_flight.clear)


def flush_at_exit(save: SaveStatus, timeout_s: float, timeouts: Timeouts) -> None:
    """Have the interpreter wait for a save at its end, as `flush` does, and report lost saves."""
    _in_flight[save] = timeout_s, timeouts
    save.add_done_callback(lambda _: _in_flight.pop(save, None))
    if _hooks:
        return
    _hooks.append(atexit.register(_park_threads))
    # Runs before `concurrent.futures` shuts down its executors, which storage clients use: that
    # hook was registered by the import above, and hooks run in reverse order. `atexit` runs after
    # them, and is the fallback for a Python without this function.
    try:
        getattr(threading, "_register_atexit", atexit.register)(_flush_all)
    except RuntimeError:
        log.warning("The interpreter is ending: it does not wait for saves in flight.")


def flush(saves: Sequence[SaveStatus]) -> list[SaveStatus]:
    """Wait for saves in flight; return those that have not ended, which are lost.

    The wait for a save ends at the timeout of its `flush_at_exit`, and earlier if no save has made
    progress for `STALL_S`, or for the timeout of its phase and `_GRACE_S`.
    """
    limits = {save: limit for save in saves if (limit := _in_flight.get(save)) is not None}
    start_s = progress_s = time.monotonic()
    ended_count = 0
    while True:
        now_s = time.monotonic()
        progress_of = {save: save.progress() for save in limits}
        # Progress or the end of one save is progress of the saves queued behind it.
        previous_count, ended_count = ended_count, sum(save.done() for save in limits)
        if ended_count > previous_count:
            progress_s = now_s
        for progress in progress_of.values():
            for rank in progress.ranks.values():
                progress_s = max(progress_s, rank.heard_s - rank.idle_s)
        if all(
            save.done()
            or now_s
            > min(start_s + timeout_s, progress_s + _patience_s(progress_of[save], timeouts))
            for save, (timeout_s, timeouts) in limits.items()
        ):
            break
        time.sleep(_POLL_S)
    for save in limits:
        _in_flight.pop(save, None)
    lost = [save for save in limits if not save.done()]
    _lost.extend(lost)
    return lost


def _patience_s(progress: SaveProgress, timeouts: Timeouts) -> float:
    """Return how long a save may make no progress."""
    own = progress.ranks.get(progress.rank)
    if own is None:
        # The state is being copied, or the save waits for earlier saves or for the other ranks.
        phase_s = max(timeouts.stage, timeouts.plan)
    else:
        # A rank in the commit phase first waits for the slowest write.
        phase_s = getattr(timeouts, own.phase) + (timeouts.write if own.phase == "commit" else 0.0)
    return min(STALL_S, phase_s + _GRACE_S)


def _flush_all() -> None:
    for save in flush(list(_in_flight)):
        message = (
            f"ckpt_storage: the save to {save.url} is lost: the process ended while it was "
            f"{save.state.value}. Call result() or close() before the program ends."
        )
        if log.hasHandlers():
            log.critical(message)
        # Logging may be disabled or shut down by now.
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def _park_threads() -> None:
    """Park our daemon threads before the interpreter is finalized."""
    halt_threads()
    end_s = time.monotonic() + (_PARK_S if _lost else _JOIN_S)
    # A thread whose save has ended may still free tensors, in torch's C++.
    names = ("ckpt-storage save", "ckpt-storage watch")
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    if threads:
        time.sleep(_PARK_S)
