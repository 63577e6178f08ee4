"""Draw the medians of benchmark runs as one SVG chart.

    python tests/benchmarks FOLDER --peers --json local.json
    python tests/benchmarks --serve --peers --json s3.json
    python tests/benchmarks/chart.py local.json s3.json --out docs/site/speed.svg

Every bar is the median of the runs of one contender, in seconds, on one axis. All bars of a group
come from the same file, and so from runs that took turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from html import escape
from pathlib import Path

_GROUPS = (
    ("local", "save", "Save, local disk"),
    ("local", "load", "Load, local disk"),
    ("local", "load, rows to columns", "Load into another sharding, local disk"),
    ("local", "trainer blocked by a background save", "Trainer held by a background save"),
    ("s3", "save", "Save, S3"),
    ("s3", "load", "Load, S3"),
)
"""Which file, which comparison in it, and the title of the group."""
_NAMES = {
    "ckpt_storage": "ckpt_storage",
    "ckpt_storage, process": "ckpt_storage",
    "torch FileSystem": "torch DCP",
    "torch FileSystem, process": "torch DCP",
    "torch Fsspec": "torch DCP, fsspec",
    "torch safetensors": "torch Hugging Face writer, reader",
    "AWS connector": "AWS S3 connector",
}
"""The contenders that are drawn, and the names by which readers know them."""
_WIDTH, _LEFT, _RIGHT = 760, 250, 70
_BAR, _GAP, _TITLE = 16, 4, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The median of one contender."""

    name: str
    seconds: float


def main() -> None:
    """Read the results that the command line names and write the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("local", type=Path, help="--json output of a run on a local disk")
    parser.add_argument("s3", type=Path, help="--json output of a run with --serve")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {
        "local": json.loads(arguments.local.read_text(encoding="utf-8")),
        "s3": json.loads(arguments.s3.read_text(encoding="utf-8")),
    }
    groups = [
        (title, bars) for place, what, title in _GROUPS if (bars := find_bars(results[place], what))
    ]
    arguments.out.write_text(draw(groups), encoding="utf-8")


def find_bars(result: dict[str, list[dict[str, object]]], what: str) -> list[Bar]:
    """Return one bar for each known contender of a comparison, the fastest first."""
    bars = []
    for comparison in result["comparisons"]:
        if comparison["what"] != what:
            continue
        runs = comparison["runs"]
        assert isinstance(runs, dict)
        for contender, measured in runs.items():
            if name := _NAMES.get(contender):
                median_s = statistics.median(run["seconds"] for run in measured)
                bars.append(Bar(name=name, seconds=median_s))
    return sorted(bars, key=lambda bar: bar.seconds)


def draw(groups: list[tuple[str, list[Bar]]]) -> str:
    """Return the SVG text of grouped horizontal bars."""
    longest_s = max(bar.seconds for _, bars in groups for bar in bars)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_s
    lines: list[str] = []
    y = 8
    for title, bars in groups:
        y += _TITLE
        lines.append(f'<text class="title" x="8" y="{y - 7}">{escape(title)}</text>')
        for bar in bars:
            kind = "ours" if bar.name == "ckpt_storage" else "peer"
            width = max(bar.seconds * scale, 1)
            middle, label = y + _BAR - 4, f"{bar.seconds:.2f} s"
            lines += [
                f'<text class="{kind}-name" x="{_LEFT - 8}" y="{middle}">{escape(bar.name)}</text>',
                f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}"/>',
                f'<text class="value" x="{_LEFT + width + 6:.1f}" y="{middle}">{label}</text>',
            ]
            y += _BAR + _GAP
    return "\n".join([_HEAD.format(width=_WIDTH, height=y + 8), *lines, "</svg>", ""])


_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Seconds of saves and loads, ckpt_storage beside others; shorter is better</title>
<style>
text {{ font: 13px system-ui, sans-serif; fill: #24292f }}
.title {{ font-weight: 600 }}
.ours-name, .peer-name {{ text-anchor: end }}
.ours-name {{ font-weight: 600 }}
.ours {{ fill: #1f6feb }}
.peer {{ fill: #a8b1bb }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }}
.ours {{ fill: #4c8dff }}
.peer {{ fill: #6e7681 }}
}}
</style>"""


if __name__ == "__main__":
    main()
