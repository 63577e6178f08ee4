"""Savers, pruners, openers and deleters interleaved: what the quick tier leaves out."""

from __future__ import annotations

import pytest
from commit_model import SCENARIOS, Scenario, check_schedules
from commit_tools import BOTH, IN_TURN, take_in_turn

from ckpt_storage.store.backend import Capabilities

pytestmark = pytest.mark.usefixtures("one_core")


@BOTH
@pytest.mark.parametrize("order", IN_TURN)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_other_schedule_breaks_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities, scenario: Scenario, order: str
) -> None:
    """After every operation of every schedule both views of the checkpoint are whole."""
    take_in_turn(monkeypatch, order)
    is_new = order != IN_TURN[0]
    seeds = range(0 if is_new else scenario.seeds // 10, scenario.seeds)
    systematic = is_new and scenario.ends != "removes"
    print(check_schedules(capabilities, scenario, seeds, systematic=systematic))  # noqa: T201  # for -rP
