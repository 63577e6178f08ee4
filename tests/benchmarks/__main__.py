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
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from measure import Comparison
from scenarios import SCENARIOS, measure

_CONTROL_TIMEOUT_S = 30.0


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(prog="python tests/benchmarks", description=__doc__)
    parser.add_argument("url", nargs="?", help="folder or URL; a new folder below it is used")
    parser.add_argument("--serve", action="store_true", help="an in-memory S3 server, no URL")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added by that server")
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
    with _storage(asked) as (url, options, server_url), tempfile.TemporaryDirectory() as scratch:
        mp.spawn(  # type: ignore[no-untyped-call]  # torch leaves it untyped
            measure, (asked, url, options, server_url, scratch), nprocs=asked.ranks
        )
        # Written by our own rank 0, a moment ago.
        found: list[Comparison] = torch.load(f"{scratch}/result", weights_only=False)
    facts = {
        "ranks": asked.ranks,
        "runs": asked.runs,
        "gib": asked.gib,
        "latency_ms": asked.latency_ms,
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
def _storage(asked: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yield the URL of a new folder, its storage options and the address of our server, if any."""
    folder = f"bench-{uuid.uuid4().hex[:12]}"
    if not asked.serve:
        options = dict(option.split("=", 1) for option in asked.storage_option)
        yield f"{asked.url.rstrip('/')}/{folder}", options, None
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "ckpt_storage.testing.s3_server", "--bucket", "bench"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        ready = json.loads(server.stdout.readline())  # type: ignore[union-attr]  # a pipe
        endpoint = ready["endpoint_url"]
        if asked.latency_ms:
            rule = {"action": "delay", "delay_s": asked.latency_ms / 1e3, "times": 0}
            request = urllib.request.Request(  # noqa: S310  # our own http server
                f"{endpoint}/_fault", data=json.dumps([rule]).encode(), method="POST"
            )
            urllib.request.urlopen(request, timeout=_CONTROL_TIMEOUT_S).close()  # noqa: S310  # as above
        yield f"s3://bench/{folder}", ready["storage_options"], endpoint
    finally:
        server.communicate()


if __name__ == "__main__":
    main()
