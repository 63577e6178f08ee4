"""Savers, pruners, openers and deleters interleaved: all schedules in order, some at random."""

from __future__ import annotations

import pytest
from commit_model import SCENARIOS, Scenario, check_schedules
from commit_tools import BOTH, IN_TURN, take_in_turn

from ckpt_storage.store.backend import Capabilities


@BOTH
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_schedule_breaks_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities, scenario: Scenario
) -> None:
    """After every operation of every schedule both views of the checkpoint are whole."""
    take_in_turn(monkeypatch, IN_TURN[0])
    seeds = range(scenario.seeds // 10)
    print(check_schedules(capabilities, scenario, seeds, systematic=True))  # noqa: T201  # for -rP
