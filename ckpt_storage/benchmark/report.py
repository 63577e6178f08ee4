"""Comparisons as rows, as JSON and as a picture.

Knows figures only. Called by `run` on rank 0 and by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import util
from pathlib import Path
from typing import Any

from ckpt_storage.errors import InvalidInputError

from .compare import Comparison
from .meter import Summary

COLUMNS = (
    "who",
    "median s",
    "min",
    "max",
    "net s",
    "plug-in s",
    "x floor",
    "x floor+CRC",
    "GB/s",
    "CPU s",
    "extra MiB",
    "requests",
    "sent MB",
    "received MB",
)

_MIB = 1 << 20


def rows_of(comparison: Comparison) -> list[list[str]]:
    """Return one row of `COLUMNS` for each contender, as text."""
    return [_row(comparison, name, each) for name, each in comparison.summaries.items()]


def _row(comparison: Comparison, name: str, summary: Summary) -> list[str]:
    net_s = comparison.net_s(name)
    moves = name not in comparison.idle and net_s > 0
    has_net = comparison.deducted not in {None, name}
    return [
        name,
        f"{summary.median_s:.4f}",
        f"{summary.min_s:.4f}",
        f"{summary.max_s:.4f}",
        f"{net_s:.4f}" if has_net else "",
        "" if summary.plugin_s is None else f"{summary.plugin_s:.4f}",
        _times(comparison.ratio(name)),
        _times(comparison.checked_ratio(name)),
        f"{comparison.moved_bytes / net_s / 1e9:.2f}" if moves else "",
        f"{summary.cpu_s:.2f}",
        _shown(summary.extra_bytes, _MIB),
        _shown(summary.request_count, 1),
        _shown(summary.sent_bytes, 1e6),
        _shown(summary.received_bytes, 1e6),
    ]


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _shown(value: int | None, unit: float) -> str:
    return "" if value is None else f"{value / unit:.0f}"


def heading(facts: Mapping[str, Any]) -> str:
    """Return one line that says what the figures are of; `facts` as `run_bench` returns them."""
    latency = f", {facts['latency_s'] * 1e3:.0f} ms added a request" if facts["latency_s"] else ""
    bandwidth = facts.get("bandwidth_bytes_s")
    link = f", a link of {bandwidth * 8 / 1e9:g} Gbit/s" if bandwidth else ""
    pause = f" {facts['pause_s']:g} s apart" if facts.get("pause_s") else ""
    return (
        f"{facts['storage']}{latency}{link}; {facts['rank_count']} ranks, "
        f"{facts['run_count']} runs{pause}, "
        f"{facts['processor_count']} processors, load {facts['load_average']:.1f}, "
        f"torch {facts['torch']}, Python {facts['python']}"
    )


def as_json_body(comparisons: Sequence[Comparison], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `--json` prints: `facts` of the run and all figures under `comparisons`.

    `net_s` is the median less that of `deducted`, except for the floor and those in `whole`;
    ratios are of it to the medians of `floor` and `checked_floor`, null for those in `idle`.
    """
    return {
        **facts,
        "comparisons": [
            {
                "what": comparison.what,
                "moved_bytes": comparison.moved_bytes,
                "floor": comparison.floor,
                "checked_floor": comparison.checked,
                "deducted": comparison.deducted,
                "whole": sorted(comparison.whole),
                "idle": sorted(comparison.idle),
                "contenders": {
                    name: {
                        **asdict(summary),
                        "net_s": comparison.net_s(name),
                        "floor_ratio": comparison.ratio(name),
                        "checked_floor_ratio": comparison.checked_ratio(name),
                        **_curve_of(comparison, name),
                    }
                    for name, summary in comparison.summaries.items()
                },
            }
            for comparison in comparisons
        ],
    }


def _curve_of(comparison: Comparison, name: str) -> dict[str, Any]:
    curve = comparison.curves.get(name)
    return {} if curve is None else {"memory_curve": asdict(curve)}


def check_plot(*paths: str | None) -> None:
    """Raise `InvalidInputError` if nothing can be drawn to a path, before minutes are spent.

    None stands for a picture that is not wanted.
    """
    wanted = [path for path in paths if path]
    for path in wanted:
        if Path(path).suffix not in {".png", ".svg"}:
            raise InvalidInputError(
                f"{path} is neither PNG nor SVG.", next_step="End the name in .png or .svg."
            )
    if wanted and util.find_spec("matplotlib") is None:
        raise InvalidInputError(
            "A plot needs matplotlib, which is not installed.",
            next_step="pip install matplotlib, or leave --plot out.",
        )


def draw(
    comparisons: Sequence[Comparison], title: str, *, figures: str | None, memory: str | None
) -> None:
    """Draw what is wanted of both pictures. Raises as `check_plot`."""
    if figures:
        plot(comparisons, figures, title)
    if memory:
        plot_memory(comparisons, memory, title)


def plot(comparisons: Sequence[Comparison], path: str, title: str) -> None:
    """Draw medians with their spread as bars, one panel a comparison; PNG or SVG by the name.

    Raises as `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415  # an optional package

    heights = [len(comparison.summaries) * 0.34 + 0.6 for comparison in comparisons]
    figure = Figure(figsize=(8, sum(heights) + 0.8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(
        len(comparisons), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for panel, comparison in zip(panels, comparisons, strict=True):
        names = list(comparison.summaries)
        medians = [comparison.summaries[name].median_s for name in names]
        below = [m - comparison.summaries[n].min_s for n, m in zip(names, medians, strict=True)]
        above = [comparison.summaries[n].max_s - m for n, m in zip(names, medians, strict=True)]
        bars = panel.barh(
            names,
            medians,
            xerr=[below, above],
            color=[_colour(name, comparison) for name in names],
            ecolor="#555555",
            capsize=2,
        )
        labels = [
            f"{median:.3g} s" + _of_floor(comparison, name)
            for name, median in zip(names, medians, strict=True)
        ]
        panel.bar_label(bars, labels, padding=6, fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.25)
        panel.set_title(comparison.what, loc="left", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(b=False)
    panels[-1].set_xlabel("seconds, median with minimum and maximum", fontsize=8)
    figure.savefig(path, dpi=150)


def plot_memory(comparisons: Sequence[Comparison], path: str, title: str) -> None:
    """Draw how memory went with time, one panel a comparison; PNG or SVG by the name.

    Raises as `check_plot`.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415  # an optional package

    figure = Figure(figsize=(8, 2.6 * len(comparisons) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(comparisons), 1, squeeze=False)[:, 0]
    for panel, comparison in zip(panels, comparisons, strict=True):
        for name, curve in comparison.curves.items():
            dashes = "--" if name == comparison.floor else "-"
            mebibytes = [count / 2**20 for count in curve.extra_bytes]
            panel.plot(curve.seconds, mebibytes, dashes, label=name, linewidth=1.2)
        panel.set_title(comparison.what, loc="left", fontsize=9)
        panel.set_ylabel("extra MiB", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(b=False)
        panel.legend(fontsize=7, frameon=False)
    panels[-1].set_xlabel("seconds; resident memory of the rank that takes most", fontsize=8)
    figure.savefig(path, dpi=150)


def _of_floor(comparison: Comparison, name: str) -> str:
    times = _times(comparison.ratio(name))
    return f"  ({times} x floor)" if times else ""


def _colour(name: str, comparison: Comparison) -> str:
    if name in {comparison.floor, comparison.checked}:
        return "#9e9e9e"
    return "#1f77b4" if name.startswith("ckpt_storage") else "#d8a24a"
