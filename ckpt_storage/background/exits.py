"""The end of an interpreter with saves in flight: they are waited for within bounds, or named."""

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
from ckpt_storage.store.calls import halt_threads

from .handle import SaveProgress, SaveStatus

log = logging.getLogger("ckpt_storage")

STALL_S = 30.0
"""A save that has made no progress for so long does not hold up an interpreter that ends."""

_GRACE_S = 3.0
"""What a save may take beyond the deadline of its phase, to give up and to tell the other ranks."""

_LOOK_S = 0.1
_END_S = 5.0
_HALT_S = 0.3
"""Long enough for threads that wait for nothing to come to rest."""

_in_flight: dict[SaveStatus, tuple[float, Timeouts]] = {}
_lost: list[SaveStatus] = []
_hooks: list[object] = []

# A child of fork has none of the threads that its parent's saves need.
os.register_at_fork(after_in_child=_in_flight.clear)


def flush_at_exit(save: SaveStatus, timeout_s: float, timeouts: Timeouts) -> None:
    """Let an interpreter that ends wait for a save, as `flush` does, and name what it loses."""
    _in_flight[save] = timeout_s, timeouts
    save.add_done_callback(lambda _: _in_flight.pop(save, None))
    if _hooks:
        return
    _hooks.append(atexit.register(_rest))
    # Before the executors of `concurrent.futures` are shut down, on which clients rely: their
    # hook came with the import above, and the last to register is the first to run. `atexit` runs
    # too late for that, but is all that a Python without this hook offers.
    try:
        getattr(threading, "_register_atexit", atexit.register)(_flush_all)
    except RuntimeError:
        log.warning("The interpreter is ending already: no save is waited for.")


def flush(saves: Sequence[SaveStatus]) -> list[SaveStatus]:
    """Wait for saves in flight; return those that have not ended: nobody waits for them again.

    Each is waited for as long as `flush_at_exit` was told; and no longer without progress than
    `STALL_S`, or than its phase may take and `_GRACE_S`.
    """
    limits = {save: limit for save in saves if (limit := _in_flight.get(save)) is not None}
    start = moved = time.monotonic()
    ended = 0
    while True:
        now, told = time.monotonic(), {save: save.progress() for save in limits}
        # What moves or ends one save brings those behind it nearer, too.
        ranks = [one for progress in told.values() for one in progress.ranks.values()]
        before, ended = ended, sum(save.done() for save in limits)
        moved = max([now if ended > before else moved, *(r.heard_s - r.idle_s for r in ranks)])
        if all(
            save.done() or now > min(start + timeout_s, moved + _patience_s(told[save], timeouts))
            for save, (timeout_s, timeouts) in limits.items()
        ):
            break
        time.sleep(_LOOK_S)
    lost = [save for save in limits if _in_flight.pop(save, None) is not None]
    _lost.extend(lost)
    return lost


def _patience_s(told: SaveProgress, timeouts: Timeouts) -> float:
    """Return how long a save may stand still."""
    own = told.ranks.get(told.rank)
    if own is None:
        # It is staged, or waits for its turn or for the other ranks.
        phase_s = max(timeouts.stage, timeouts.plan)
    else:
        # Who waits for a commit waits first for the slowest write.
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
        # Logging may be off or gone by now, and this must not be missed.
        print(message, file=sys.stderr, flush=True)  # noqa: T201


def _rest() -> None:
    """Let our daemon threads come to rest before the interpreter takes itself down."""
    halt_threads()
    end = time.monotonic() + (_HALT_S if _lost else _END_S)
    # One whose save has ended still lets go of tensors, in torch's C++.
    names = ("ckpt-storage save", "ckpt-storage watch")
    ending = [thread for thread in threading.enumerate() if thread.name.startswith(names)]
    for thread in ending:
        thread.join(max(0.0, end - time.monotonic()))
    if ending:
        time.sleep(_HALT_S)
