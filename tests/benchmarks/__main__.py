"""How fast saves, loads and exports are on a storage, against its floor and against others.

`python tests/benchmarks FOLDER --peers`, or `--serve` in place of FOLDER for an S3 server of its
own. All contenders take turns within one run, so read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bandwidth import Bandwidth
from bucket import CountingServer
from measure import Comparison
from s3_server import FaultRule
from scenarios import SCENARIOS, measure


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks", description=__doc__)
    parser.add_argument("url", nargs="?", help="folder or URL; a new folder below it is used")
    parser.add_argument("--serve", action="store_true", help="an in-memory S3 server, no URL")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added by that server")
    parser.add_argument(
        "--bandwidth-mb",
        type=float,
        default=0.0,
        help="bound of that server's connections, or of reads from a folder, in MB/s",
    )
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.2, help="size of the whole state")
    parser.add_argument("--small", type=int, default=5_500, help="number of small tensors")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", action="store_true", help="stock torch, the AWS connector")
    parser.add_argument("--storage-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    if asked.serve == (asked.url is not None):
        parser.error("give either a URL or --serve")
    bandwidth = Bandwidth(asked.bandwidth_mb * 1e6) if asked.bandwidth_mb else None
    with (
        _storage(asked, bandwidth) as (url, options, count),
        tempfile.TemporaryDirectory() as scratch,
    ):
        # As under torchrun, whose agent holds the store of the ranks.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            measure,
            (asked, url, options, count, scratch, bandwidth, store.port),
            nprocs=asked.ranks,
        )
        # Written by our own rank 0, a moment ago.
        found: list[Comparison] = torch.load(f"{scratch}/result", weights_only=False)
    facts = {
        **{
            name: vars(asked)[name]
            for name in ("ranks", "runs", "gib", "latency_ms", "bandwidth_mb")
        },
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    _print(", ".join(f"{name} {value}" for name, value in facts.items()), found)
    if asked.json:
        body = {**facts, "comparisons": [dataclasses.asdict(each) for each in found]}
        Path(asked.json).write_text(json.dumps(body, indent=1), encoding="utf-8")


def _print(heading: str, found: list[Comparison]) -> None:
    print(heading)
    for comparison in found:
        rows = comparison.rows()
        kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
        widths = [max(len(row[at]) for row in rows) for at in kept]
        print(f"\n{comparison.what} ({comparison.moved_bytes / 1e6:.0f} MB)")
        for row in rows:
            cells = [row[at].rjust(width) for at, width in zip(kept, widths, strict=True)]
            print("  ".join([row[0].ljust(widths[0]), *cells[1:]]))


@contextmanager
def _storage(
    asked: argparse.Namespace, bandwidth: Bandwidth | None
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield the URL of a new folder, its storage options and our server's count of requests."""
    folder = f"bench-{uuid.uuid4().hex[:12]}"
    if not asked.serve:
        options = dict(option.split("=", 1) for option in asked.storage_option)
        yield f"{asked.url.rstrip('/')}/{folder}", options, None
        return
    with CountingServer(bandwidth) as server:
        server.create_bucket("bench")
        delay_s = asked.latency_ms / 1e3
        server.faults([FaultRule(action="delay", delay_s=delay_s, times=0)] if delay_s else [])
        yield f"s3://bench/{folder}", server.storage_options, server.count


if __name__ == "__main__":
    main()
