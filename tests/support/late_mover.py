"""A device for tests: uploads happen late, in a thread, as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
        self._thread = ThreadPoolExecutor(1)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """Return plain memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def start(self, data: torch.Tensor, use: Use) -> Callable[[], None]:
        """Queue an upload."""

        def upload() -> None:
            time.sleep(self._delay_s)
            use(data.clone())

        job = self._thread.submit(upload)
        return lambda: job.result(_WAIT_S)

    def finish(self) -> None:
        """Return when all uploads have ended; none is begun any more."""
        self._thread.shutdown()
