"""All executions of the coordination protocol, within bounds, and what each of its rules is for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from coordination_model import DROPPED, SHORT, Search, drop, search
from coordination_protocol import OK, UNKNOWN, Identity, Rules, Scenario, decide

SKIP = Scenario(name="skip", faults=("skip",))


@pytest.mark.parametrize("scenario", SHORT, ids=lambda scenario: scenario.name)
def test_every_invariant_holds(scenario: Scenario) -> None:
    """No order of requests and no placement of the faults breaks an invariant."""
    result = search(scenario)
    assert not result.violation, result
    assert result.states > 20


@pytest.mark.parametrize("rule", DROPPED)
def test_no_rule_can_be_dropped(rule: str) -> None:
    """Without the rule there is a counter-example, to the invariant that the rule is for."""
    result = drop(rule)
    assert result.violation.startswith(DROPPED[rule][1]), result
    assert result.trace


def test_every_rule_is_dropped() -> None:
    """Each rule of the model has its counter-example."""
    assert list(DROPPED) == [field.name for field in fields(Rules)]


@pytest.mark.parametrize("rule", DROPPED)
def test_a_rule_is_dropped_where_the_protocol_holds(rule: str) -> None:
    """The scenario of a counter-example has none with all rules, up to where the search stops."""
    assert not Search(DROPPED[rule][0], Rules()).run(most=5_000).violation


def test_the_counter_example_of_a_skipped_call() -> None:
    """Where the step is no part of the identity, one skipped call commits two steps."""
    result = drop("step")
    assert result.violation == "I1: a commit holds [(100, 0), (100, 0), (200, 0)]"
    assert [step for step in result.trace if "call" in step] == [
        "rank 0 calls save (100, 0)",
        "rank 1 calls save (100, 0)",
        "FAULT rank 2: skips call 0",
        "rank 2 calls save (200, 0)",
    ]


def test_merged_members_change_no_verdict() -> None:
    """A search that keeps the members apart visits more states, and comes to the same end."""
    merged = Search(SKIP, Rules()).run()
    apart = Search(SKIP, Rules(), merge=False).run()
    assert merged.states < apart.states
    assert merged.violation == apart.violation == ""


def test_a_skipped_call_of_one_url_without_steps_is_not_healed() -> None:
    """Where steps are unknown, a rank that skipped a call looks like a rank that is late."""
    scenario = replace(SKIP, operations="none", lockstep=True, calls=4)
    assert search(scenario).violation.startswith("I2")
    assert not search(replace(scenario, is_live=False)).violation


A, B, C = (0, 1), (0, 2), (0, 3)


@pytest.mark.parametrize(
    ("now", "before", "decision"),
    [
        ([(100, 0), (100, 0), None], [], None),
        ([(100, 0), (100, 0), (100, 0)], [], OK),
        ([(100, 0), (0, 0), (100, 0)], [], OK),
        ([(200, 0), (100, 0), None], [], (100, 0)),
        ([(0, 0), (100, 0), (200, 0)], [], (100, 0)),
        ([A, A, B], [], UNKNOWN),
        ([A, A, B], [[A, A, B]], UNKNOWN),
        ([B, B, C], [[A, A, B]], B),
        ([B, B, C], [[A, A, B], [B, B, None]], B),
    ],
    ids=[
        "not all are there",
        "all are equal",
        "one knows no step",
        "two are ordered",
        "not all pairs are equal",
        "unordered",
        "unordered as before",
        "one rank is ahead",
        "kept since",
    ],
)
def test_the_decision_of_the_coordinator(
    now: list[Identity | None], before: list[list[Identity | None]], decision: object
) -> None:
    """The coordinator waits, goes on, or gives the number up for those who are behind."""
    assert decide(now, before, Rules()) == decision
