"""Figures of simulations as a table: names, units, and what was to be reached beside them.

Knows figures only. Called by the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .scale import ScaleFigures

__all__ = ["scale_table"]

_GOAL_RANKS = 2048
_GOALS = {
    2000: {"coordinator_s": "≤ 4 s", "written_bytes": "≤ 20 MB"},
    500: {"coordinator_s": "≤ 1 s", "written_bytes": "≤ 5 MB", "metadata_s": "≤ 0.5 s"},
}
"""What the storage's share was to be with 2,048 ranks, by the number of tensors."""

_STOCK = {
    2000: {"coordinator_s": "212 s, planner too", "written_bytes": "700 MB"},
    500: {"coordinator_s": "5.9 s", "written_bytes": "109 MB", "metadata_s": "7.5 s"},
}
"""What stock torch took, measured where the goals were set, which was not this machine."""


_KB = 1e3
_MB = 1e6


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _bytes(value: float) -> str:
    if value >= _MB:
        return f"{value / _MB:,.1f} MB"
    return f"{value / _KB:,.1f} kB" if value >= _KB else f"{value:.0f} B"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_ROWS: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("tensors", "tensor_count", _count),
    ("chunks of all ranks", "item_count", _count),
    ("a rank: making its report", "report_s", _seconds),
    ("a rank: its report", "report_bytes", _bytes),
    ("... of which its document", "inlined_bytes", _bytes),
    ("coordinator: unpickling the reports", "gather_s", _seconds),
    ("coordinator: checking them", "assemble_s", _seconds),
    ("coordinator: all storage work of a save", "coordinator_s", _seconds),
    ("coordinator: bytes written", "written_bytes", _bytes),
    ("coordinator: files written", "write_count", _count),
    ("every rank: read_metadata", "metadata_s", _seconds),
    ("every rank: bytes it reads", "metadata_bytes", _bytes),
    ("every rank: requests it takes", "metadata_read_count", _count),
    ("every rank: local load plan", "plan_s", _seconds),
    ("every rank: finding its bytes", "places_s", _seconds),
    ("memory after the commit, all reports held", "resident_bytes", _bytes),
    ("memory at its peak, worlds before it too", "peak_resident_bytes", _bytes),
)


def scale_table(found: Sequence[ScaleFigures]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows, one column for each simulation and what 2,048 ranks were to reach.

    The columns of goals are there if the simulations are of so many tensors that there are some.
    """
    counts = {figures.tensor_count for figures in found}
    count = counts.pop() if len(counts) == 1 else 0
    goals, stock = _GOALS.get(count, {}), _STOCK.get(count, {})
    head = ["figure", *(f"{figures.rank_count:,} ranks" for figures in found)]
    rows = [
        [name, *(text(getattr(figures, field)) for figures in found)] for name, field, text in _ROWS
    ]
    if goals:
        head += [f"to reach at {_GOAL_RANKS:,}", f"stock torch at {_GOAL_RANKS:,}"]
        for row, (_, field, _) in zip(rows, _ROWS, strict=True):
            row += [goals.get(field, ""), stock.get(field, "")]
    return head, rows
