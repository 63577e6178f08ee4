"""How messages name ranks."""

from __future__ import annotations

from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for the beginning of a sentence."""
    return f"Rank{'s' if len(ranks) != 1 else ''} {spell_ranks(ranks) if ranks else '?'}"


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, runs folded: 0-3, 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
