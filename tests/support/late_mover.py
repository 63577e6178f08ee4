"""A device for tests: uploads happen late, in a thread, as on a GPU."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from ckpt_storage.loads.targets import Use

_WAIT_S = 60.0


class LateMover:
    """Stands for `CudaMover`: does each upload `delay_s` after the one before, in a thread.

    A buffer that is filled again too early gives wrong values; a load that does not wait for the
    end finds none.
    """

    def __init__(self, delay_s: float = 0.002) -> None:
        self._delay_s = delay_s
        self._jobs: queue.SimpleQueue[tuple[torch.Tensor, Use, threading.Event] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="late mover", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            data, use, ended = job
            time.sleep(self._delay_s)
            use(data.clone())
            ended.set()

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, data: torch.Tensor, use: Use) -> Callable[[], None]:
        """Queue an upload."""
        ended = threading.Event()
        self._jobs.put((data, use, ended))
        return lambda: _wait(ended)

    def finish(self) -> None:
        """Return when all uploads have ended; none is begun any more."""
        self._jobs.put(None)
        self._thread.join(_WAIT_S)


def _wait(ended: threading.Event) -> None:
    if not ended.wait(_WAIT_S):
        raise TimeoutError
