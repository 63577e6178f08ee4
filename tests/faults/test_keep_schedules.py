"""Schedules at one root in short; `python tests/faults/keep_schedules.py` is the whole run."""

from __future__ import annotations

import logging

import keep_schedules  # a script beside this file
import pytest

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.mark.parametrize("storage", ["local", "memory"])
def test_no_schedule_loses_or_leaks(
    storage: keep_schedules.Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints stay readable and unmixed, and after a last prune no file is left over."""
    monkeypatch.setattr(logging.getLogger("ckpt_storage"), "disabled", True)
    totals = keep_schedules.run_schedules(storage, range(40))
    print(totals.count, totals.operations, dict(totals.ends))  # noqa: T201  # for -rP
    assert totals.violations == {}
    assert totals.operations > 1000
    assert {end.partition(":")[0] for end in totals.ends} >= {"thinner", "pruner", "reader"}
