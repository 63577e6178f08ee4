"""Savers, pruners, openers and deleters interleaved: the seeds that the quick tier leaves out."""

from __future__ import annotations

import pytest
from commit_model import SCENARIOS, Scenario, check_schedules
from commit_tools import BOTH, IN_TURN, take_in_turn

from ckpt_storage.store.base import Capabilities


@BOTH
@pytest.mark.parametrize("order", IN_TURN)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_random_schedule_breaks_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities, scenario: Scenario, order: str
) -> None:
    """After every operation of every schedule both views of the checkpoint are whole."""
    take_in_turn(monkeypatch, order)
    seeds = range(scenario.seeds // 10, scenario.seeds)
    print(check_schedules(capabilities, scenario, seeds, systematic=False))  # noqa: T201  # for -rP
