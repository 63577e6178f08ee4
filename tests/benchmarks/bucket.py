"""The in-memory S3 server with bounded bandwidth and with figures that other processes can read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from bandwidth import Bandwidth

# Where the server of the tests lies; pytest has it on its path.
sys.path.append(str(Path(__file__).parents[1] / "support"))

from s3_objects import Answer, Request
from s3_server import FaultRule, RequestRecord, S3Server

_START_S = 60.0
_COPIES = frozenset({"copy", "part_copy"})
_COPY_BYTES_PER_S = 100e6
"""How fast a request copies within the bucket, beside all others; services publish no figure."""


class CountingServer(S3Server):
    """Counts requests and received bytes.

    `bandwidth` bounds what all clients send and receive together; with it, a request that copies
    within the bucket takes the time that `_COPY_BYTES_PER_S` gives.
    """

    def __init__(self, bandwidth: Bandwidth | None, *, received: Any = None) -> None:
        super().__init__()
        self._bandwidth = bandwidth
        context: Any = mp.get_context("spawn")
        self.count = context.Value("q", 0)
        self.received = context.Value("q", 0) if received is None else received

    def begin(self, op: str, bucket: str, key: str) -> tuple[RequestRecord, FaultRule]:
        with self.count.get_lock():
            self.count.value += 1
        return super().begin(op, bucket, key)

    def note(self, record: RequestRecord, **figures: int) -> None:
        super().note(record, **figures)
        with self.received.get_lock():
            self.received.value += figures.get("bytes_in", 0)
        moved_bytes = figures.get("bytes_in", 0) + figures.get("bytes_out", 0)
        if self._bandwidth is not None and moved_bytes:
            self._bandwidth.take(moved_bytes)

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        if self._bandwidth is not None and request.op in _COPIES and answer.status == 200:
            time.sleep(self._copied_bytes(request) / _COPY_BYTES_PER_S)
        return answer

    def _copied_bytes(self, request: Request) -> int:
        _, _, asked = request.headers.get("x-amz-copy-source-range", "").partition("=")
        if asked:
            start, _, last = asked.partition("-")
            return int(last) - int(start) + 1
        return len(self._source(request).body)


@contextmanager
def served_bucket(
    name: str, bandwidth: Bandwidth | None
) -> Iterator[tuple[dict[str, Any], Callable[[], int]]]:
    """Run a server with one bucket in a process; yield storage options and the received bytes."""
    context = mp.get_context("spawn")
    received: Any = context.Value("q", 0)
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve, args=(name, bandwidth, received, child_end))
    process.start()
    child_end.close()
    try:
        if not parent_end.poll(_START_S):
            raise TimeoutError(f"the server did not start within {_START_S} s")
        yield parent_end.recv(), lambda: int(received.value)
    finally:
        parent_end.close()
        process.join(_START_S)
        process.kill()


def _serve(name: str, bandwidth: Bandwidth | None, received: Any, parent: Connection) -> None:
    """Serve until the other end of the connection is closed."""
    with CountingServer(bandwidth, received=received) as server:
        server.create_bucket(name)
        parent.send(server.storage_options)
        parent.poll(None)
