"""`ckpt-storage stats URL FQN...`: what is in tensors, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import output
from .options import common, complete_fqn, json_option, memory_option, storage_options, url_argument
from .output import SOUND, tensor_of

if TYPE_CHECKING:
    from ckpt_storage.inspect.statistics import Histogram, TensorStats


_BARS = " ▁▂▃▄▅▆▇█"


@click.command(short_help="Mean, spread, NaN counts and histogram.")
@url_argument()
@click.argument("fqns", metavar="FQN...", nargs=-1, required=True, shell_complete=complete_fqn)
@click.option("--bins", type=click.IntRange(1, 4096), default=64, show_default=True)
@memory_option
@json_option
@storage_options()
@common
def stats(
    url: str,
    fqns: tuple[str, ...],
    *,
    bins: int,
    memory_limit_bytes: int | None,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Show mean, spread, extremes, NaN and Inf counts and a histogram of tensors.

    Reads each tensor in pieces, verified.
    """
    from ckpt_storage.inspect.checkpoint import open_checkpoint  # noqa: PLC0415  # called, not imported

    with open_checkpoint(
        url,
        storage_options=storage_options,
        memory_limit_bytes=memory_limit_bytes,
        timeout=timeout,
    ) as checkpoint:
        tensors = [tensor_of(checkpoint, fqn) for fqn in fqns]
        found = [
            checkpoint.stats(tensor.fqn, bin_count=bins, progress=output.shows_progress())
            for tensor in tensors
        ]
    if as_json:
        output.emit("stats", tensors=[_as_data(one) for one in found])
        return SOUND
    for number, one in enumerate(found):
        if number:
            output.line()
        _print(one)
    return SOUND


def _as_data(one: TensorStats) -> dict[str, object]:
    return {
        "fqn": one.fqn,
        "dtype": one.dtype,
        "shape": one.shape,
        "count": one.count,
        "finite_count": one.finite_count,
        "nan_count": one.nan_count,
        "positive_inf_count": one.positive_inf_count,
        "negative_inf_count": one.negative_inf_count,
        "zero_count": one.zero_count,
        "mean": one.mean,
        "std": one.std,
        "min": one.min,
        "max": one.max,
        "histogram": {"edges": one.histogram.edges, "counts": one.histogram.counts},
    }


def _print(one: TensorStats) -> None:
    numbers = {"mean": one.mean, "std": one.std, "min": one.min, "max": one.max}
    output.facts(
        {
            "name": one.fqn,
            "dtype": one.dtype,
            "shape": list(one.shape),
            **{name: None if value is None else f"{value:.9g}" for name, value in numbers.items()},
            "NaN": f"{one.nan_count:,}",
            "Inf": f"{one.inf_count:,}",
            "zero": f"{one.zero_count:,} of {one.count:,}",
            "histogram": _bars(one.histogram),
        }
    )


def _bars(histogram: Histogram) -> str:
    most = max(histogram.counts, default=0)
    if not most:
        return ""
    steps = len(_BARS) - 1
    return "".join(_BARS[-(-count * steps // most)] for count in histogram.counts)
