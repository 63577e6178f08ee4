"""Races of pruners, savers, readers and deleters: the seeds that the quick tier leaves out."""

from __future__ import annotations

import pytest
from commit_tools import BOTH
from prune_races import RACES, check_race, quiet

from ckpt_storage.store.backend import Capabilities


@BOTH
@pytest.mark.parametrize("name", RACES)
def test_a_random_race_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities, name: str
) -> None:
    """After every operation of every schedule all that is committed is whole; readers see it."""
    quiet(monkeypatch)
    print(check_race(capabilities, name, range(4, 24), systematic=False))  # noqa: T201  # for -rP
