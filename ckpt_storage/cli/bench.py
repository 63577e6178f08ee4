"""`ckpt-storage bench URL`: how fast saves and loads are, against the floor of that storage.

Called by `app`, also on every rank of a `torchrun`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import click

from . import output
from .exits import SOUND
from .options import common, json_option, memory_option, storage_options, url_argument

__all__ = ["bench"]

_SCENARIOS = (
    "save",
    "load",
    "load-cold",
    "reshard",
    "partial",
    "verify",
    "verify-cold",
    "export",
    "save-export",
    "stall",
    "small-save",
    "small-load",
)


@click.command()
@url_argument(required=False)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    type=click.Choice(_SCENARIOS),
    help="What to measure; may be repeated. Default: all that the storage allows.",
)
@click.option("--ranks", "rank_count", default=2, show_default=True, help="Processes to start.")
@click.option("--gib", default=1.2, show_default=True, help="Size of the whole state, in GiB.")
@click.option(
    "--runs", "run_count", default=5, show_default=True, help="Measured runs of each contender."
)
@click.option(
    "--pause-s", default=0.0, help="Seconds to wait before each run, so that all find things alike."
)
@click.option(
    "--small", "small_count", default=5_500, show_default=True, help="Number of small tensors."
)
@click.option("--sharding", type=click.Choice(["rows", "columns"]), default="rows")
@click.option("--peers", is_flag=True, help="Measure stock torch and the AWS connector too.")
@click.option(
    "--serve", is_flag=True, help="Measure an in-memory S3 server that is started for it, no URL."
)
@click.option(
    "--latency-ms", default=0.0, help="Milliseconds that the served S3 adds to each request."
)
@click.option(
    "--gbit-s", type=float, help="What the link of the served S3 carries, each way; else no bound."
)
@click.option(
    "--simulate-ranks",
    multiple=True,
    type=int,
    metavar="N",
    help="Simulate a save and a load by N ranks in place of measuring; may be repeated.",
)
@click.option(
    "--simulate-tensors", default=2_000, show_default=True, help="Tensors of the simulated state."
)
@click.option("--plot", "plot_path", metavar="FILE", help="Draw the figures: .png or .svg.")
@click.option(
    "--memory-plot",
    "memory_plot_path",
    metavar="FILE",
    help="Draw how memory goes in a first run of each: .png or .svg.",
)
@json_option
@memory_option
@storage_options()
@common
def bench(  # noqa: PLR0913  # one argument an option
    url: str | None,
    *,
    scenarios: Sequence[Any],
    rank_count: int,
    gib: float,
    run_count: int,
    pause_s: float,
    small_count: int,
    sharding: Any,  # noqa: ANN401  # click has checked it
    peers: bool,
    serve: bool,
    latency_ms: float,
    gbit_s: float | None,
    simulate_ranks: Sequence[int],
    simulate_tensors: int,
    plot_path: str | None,
    memory_plot_path: str | None,
    as_json: bool,
    memory_limit_bytes: int | None,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Measure saves, loads and exports on the storage at URL, against its floor.

    The floor is the same bytes moved by the plainest fast code. All contenders take turns within
    one run, so read the ratios. Works in a new folder below URL and removes it again. Alone it
    starts its ranks itself; under torchrun every rank calls it.
    """
    del timeout  # nothing here waits for one thing
    if simulate_ranks:
        return _simulate(simulate_ranks, simulate_tensors, as_json=as_json)
    if serve == (url is not None):
        raise click.UsageError("Give either a URL or --serve.")
    if latency_ms and not serve:
        raise click.UsageError("--latency-ms goes with --serve only.")
    if gbit_s is not None and not serve:
        raise click.UsageError("--gbit-s goes with --serve only.")
    from ckpt_storage.benchmark.report import (  # noqa: PLC0415  # torch loads when it is called
        COLUMNS,
        as_json_body,
        check_plot,
        draw,
        heading,
        rows_of,
    )
    from ckpt_storage.benchmark.run import SERVED, run_bench  # noqa: PLC0415  # as above
    from ckpt_storage.benchmark.settings import BenchSettings  # noqa: PLC0415  # as above

    is_local = url is not None and "://" not in url.removeprefix("file://")
    can_be_cold = is_local and hasattr(os, "posix_fadvise")
    check_plot(plot_path, memory_plot_path)
    found = run_bench(
        BenchSettings(
            url=SERVED if url is None else url,
            storage_options=storage_options or {},
            scenarios=scenarios
            or [name for name in _SCENARIOS if can_be_cold or not name.endswith("-cold")],
            rank_count=rank_count,
            gib=gib,
            small_count=small_count,
            run_count=run_count,
            pause_s=pause_s,
            sharding=sharding,
            peers=peers,
            memory_limit_bytes=memory_limit_bytes,
            latency_s=latency_ms / 1e3,
            bandwidth_bytes_s=None if gbit_s is None else gbit_s * 1e9 / 8,
            memory_curves=memory_plot_path is not None,
        )
    )
    if found is None:  # another rank prints
        return SOUND
    comparisons, facts = found
    draw(comparisons, heading(facts), figures=plot_path, memory=memory_plot_path)
    if as_json:
        output.emit("bench", **as_json_body(comparisons, facts))
        return SOUND
    output.line(heading(facts))
    for reason in facts["left_out"]:
        output.line(f"Left out: {reason}.")
    for comparison in comparisons:
        rows = rows_of(comparison)
        kept = [at for at in range(len(COLUMNS)) if any(row[at] for row in rows)]
        output.line()
        output.line(f"{comparison.what} ({comparison.moved_bytes / 1e6:.0f} MB)")
        output.table(
            [COLUMNS[at].replace(" ", "\N{NO-BREAK SPACE}") for at in kept],
            [[row[at] for at in kept] for row in rows],
            right=" ".join(COLUMNS[at].replace(" ", "\N{NO-BREAK SPACE}") for at in kept if at),
        )
    return SOUND


def _simulate(rank_counts: Sequence[int], tensor_count: int, *, as_json: bool) -> int:
    if "RANK" in os.environ and os.environ["RANK"] != "0":
        return SOUND
    from ckpt_storage.benchmark.scale import simulate  # noqa: PLC0415  # torch loads when called
    from ckpt_storage.benchmark.scaletable import scale_table  # noqa: PLC0415  # as above

    found = [simulate(count, tensor_count) for count in rank_counts]
    if as_json:
        output.emit("bench", simulated=[dataclasses.asdict(figures) for figures in found])
        return SOUND
    head, rows = scale_table(found)
    head = [name.replace(" ", "\N{NO-BREAK SPACE}") for name in head]
    output.table(head, rows, right=" ".join(head[1:]))
    return SOUND
