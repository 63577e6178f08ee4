"""The ranks of a benchmark: made here, or those that `torchrun` has made.

Knows processes and rendezvous. Called by the command line.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ckpt_storage.store import Location

from .bench import Bench
from .compare import Comparison
from .peers import left_out
from .scenarios import MEASURE
from .settings import BenchSettings

SERVED = "served"
"""In place of a URL: an in-memory S3 server of the bench's own, in a process of its own."""

_CONTROL_TIMEOUT_S = 30.0


def run_bench(settings: BenchSettings) -> tuple[list[Comparison], dict[str, Any]] | None:
    """Measure, and return the comparisons with the facts of the run; None on other ranks.

    Under `torchrun` every rank calls it; alone, it starts `rank_count` processes. Works in a new
    folder below the URL and removes it again.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ:
        return _under_torchrun(settings)
    scratch = tempfile.mkdtemp(prefix="ckpt-storage-bench-")
    try:
        with _storage(settings) as (served, server_url):
            mp.spawn(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                _spawned, (served, server_url, scratch), nprocs=settings.rank_count
            )
        # Written by our own rank 0, a moment ago.
        return torch.load(f"{scratch}/result", weights_only=False)  # type: ignore[no-any-return]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _under_torchrun(
    settings: BenchSettings,
) -> tuple[list[Comparison], dict[str, Any]] | None:
    dist.init_process_group("gloo")
    try:
        name = [uuid.uuid4().hex[:12]]
        dist.broadcast_object_list(name)
        root = Location.of(settings.url, settings.storage_options).join(f"bench-{name[0]}")
        return _measure(replace(settings, url=root.target, rank_count=dist.get_world_size()), None)
    finally:
        dist.destroy_process_group()


@contextmanager
def _storage(settings: BenchSettings) -> Iterator[tuple[BenchSettings, str | None]]:
    """Yield settings whose URL is a new folder on the storage, and the bench's server, if any."""
    folder = f"bench-{uuid.uuid4().hex[:12]}"
    if settings.url != SERVED:
        root = Location.of(settings.url, settings.storage_options).join(folder)
        yield replace(settings, url=root.target), None
        return
    bounds = []
    if settings.bandwidth_bytes_s is not None:
        bounds = ["--bandwidth", str(settings.bandwidth_bytes_s)]
    server = subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-m", "ckpt_storage.testing.s3server", "--bucket", "bench", *bounds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ready = json.loads(server.stdout.readline())  # type: ignore[union-attr]  # a pipe
        endpoint = ready["endpoint_url"]
        if settings.latency_s:
            rule = {"action": "delay", "delay_s": settings.latency_s, "times": 0}
            request = urllib.request.Request(  # noqa: S310  # our own http server
                f"{endpoint}/_fault", data=json.dumps([rule]).encode(), method="POST"
            )
            urllib.request.urlopen(request, timeout=_CONTROL_TIMEOUT_S).close()  # noqa: S310  # the same
        yield (
            replace(settings, url=f"s3://bench/{folder}", storage_options=ready["storage_options"]),
            endpoint,
        )
    finally:
        server.communicate()


def _spawned(rank: int, settings: BenchSettings, server_url: str | None, scratch: str) -> None:
    # torch's own background saves start a group that looks for these.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{scratch}/rendezvous", settings.rank_count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.rank_count)
    try:
        found = _measure(settings, server_url)
        if found is not None:
            torch.save(found, f"{scratch}/result")
    finally:
        dist.destroy_process_group()


def _measure(
    settings: BenchSettings, server_url: str | None
) -> tuple[list[Comparison], dict[str, Any]] | None:
    bench = Bench.of(settings, server_url)
    if bench.root.is_local and bench.rank == 0:
        Path(bench.root.target).mkdir(parents=True)
    dist.barrier()
    try:
        comparisons = [MEASURE[name](bench) for name in settings.scenarios]
    finally:
        if bench.rank == 0:
            bench.plain.clear("")
    dist.barrier()
    return (comparisons, _facts(settings, bench.root)) if bench.rank == 0 else None


def _facts(settings: BenchSettings, root: Location) -> dict[str, Any]:
    return {
        "storage": root.protocol,
        "left_out": left_out(root) if settings.peers else [],
        "rank_count": settings.rank_count,
        "run_count": settings.run_count,
        "pause_s": settings.pause_s,
        "latency_s": settings.latency_s,
        "bandwidth_bytes_s": settings.bandwidth_bytes_s,
        "sharding": settings.sharding,
        "memory_limit_bytes": settings.memory_limit_bytes,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
