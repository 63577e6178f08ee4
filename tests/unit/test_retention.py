"""What is kept and why, against a brute-force oracle; one name for a step, one step for a name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage import (
    Candidate,
    CheckpointInfo,
    InvalidInputError,
    KeepBest,
    KeepClosest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    PruneReport,
    RetentionPolicy,
)
from ckpt_storage.manager.folders import FolderState
from ckpt_storage.manager.names import StepNames
from ckpt_storage.manager.policies import KeepAny, policies_of
from ckpt_storage.manager.retention import plan_retention


def info(
    step: int | None, *, loss: float | None = None, format_: str = "ckpt_storage"
) -> CheckpointInfo:
    return CheckpointInfo(
        url=f"memory://r/step-{step}",
        name=f"step-{step}",
        format=format_,
        save_id=f"id-{step}",
        slot=1,
        step=step,
        metrics={} if loss is None else {"loss": loss},
    )


def plan_of(
    infos: Sequence[CheckpointInfo],
    keep: Any,
    *,
    ages_s: Mapping[str, float] | None = None,
    damaged: Collection[int] = (),
    **options: Any,
) -> PruneReport:
    """Plan for what was found, as the two say who is damaged and how old each is."""
    found = [
        FolderState(
            name=one.name,
            step=one.step,
            status="committed" if one.format == "ckpt_storage" else "foreign",
            info=one,
            is_damaged=one.step in damaged,
            age_s=None if ages_s is None else ages_s.get(one.name),
        )
        for one in infos
    ]
    return plan_retention(found, keep, **options)


def steps(plan: PruneReport) -> list[int | None]:
    return [decision.step for decision in plan.kept]


RUN = [info(step, loss=abs(step - 4) / 10) for step in range(1, 9)]
"""What the tests that need no other plan for."""


def test_every_decision_has_a_reason_that_names_the_policy() -> None:
    """Kept ones name each policy that keeps them; deleted ones name the policies that do not."""
    plan = plan_of(RUN, KeepLatest(1) | KeepEvery(8) | KeepBest("loss", "min"))
    reasons = {decision.step: decision.reasons for decision in plan.kept}
    assert reasons[8] == ("KeepLatest(1)", "KeepEvery(8)", "it is the newest sound checkpoint")
    assert reasons[4] == ("KeepBest('loss', 'min', 1): loss is 0",)
    for decision in plan.planned:
        (reason,) = decision.reasons
        assert reason == "not kept by KeepLatest(1) | KeepEvery(8) | KeepBest('loss', 'min', 1)"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_metrics_the_later_step_is_better(mode: Any) -> None:
    """Ties go to the later step; NaN, infinity and absent are never best."""
    losses = enumerate([0.5, math.nan, 0.5, None, 0.5, math.nan, None], 1)
    infos = [info(step, loss=loss) for step, loss in losses]
    assert steps(plan_of(infos, KeepBest("loss", mode))) == [5, 7]
    assert steps(plan_of(infos, KeepBest("loss", mode, 2))) == [3, 5, 7]
    assert steps(plan_of(infos, KeepBest("loss", mode, 9))) == [1, 3, 5, 7]
    infinite = [info(1, loss=math.inf), info(2, loss=-math.inf), info(3, loss=0.0), info(4)]
    assert steps(plan_of(infinite, KeepBest("loss", mode, 3))) == [3, 4]


def test_what_is_not_of_the_run_is_kept_and_never_counts() -> None:
    """A folder without a step, or of another tool, is kept with that reason, however new."""
    infos = [
        info(1),
        info(2),
        info(9, format_="dcp"),
        CheckpointInfo(url="memory://r/x", name="x", format="ckpt_storage", save_id="x"),
    ]
    plan = plan_of(infos, KeepLatest(1))
    assert {decision.name: decision.reasons for decision in plan.kept} == {
        "x": ("it does not belong to this run",),
        "step-2": ("KeepLatest(1)", "it is the newest sound checkpoint"),
        "step-9": ("another tool wrote it (dcp)",),
    }
    assert ([decision.step for decision in plan.planned], plan.newest) == ([1], infos[1])


def test_damaged_ones_do_not_count() -> None:
    """A damaged checkpoint takes no place of a sound one, and stays where it would have one."""
    plan = plan_of(RUN, KeepLatest(2), damaged={8, 6, 4, 2})
    assert steps(plan) == [5, 6, 7, 8]
    assert plan.kept[-1].reasons[-1] == "it is damaged, and nothing sound is newer"
    assert plan.newest == RUN[6]
    assert plan.kept[1].reasons == ("KeepLatest(2), if it is sound after all",)
    four = next(decision for decision in plan.planned if decision.step == 4)
    assert four.reasons == ("it is damaged and not kept by KeepLatest(2)",)
    plan = plan_of(RUN, KeepBest("loss", "min"), damaged={4, 3})
    assert steps(plan) == [4, 5, 8]


def test_what_is_no_policy_is_refused() -> None:
    """A policy that keeps nothing, or nothing at all, is an error that says what to give."""
    wrong: list[tuple[Any, ...]] = [
        (KeepLatest, True),
        (KeepEvery, 0),
        (KeepBest, "loss", "least"),
        (KeepNewerThan, math.nan),
        (partial(KeepClosest, every_steps=0),),
        (partial(KeepClosest, every_s=0),),
        (partial(KeepClosest, every_s=math.inf),),
        (partial(KeepClosest, every_steps=1, every_s=1),),
        (KeepClosest,),
        (KeepNewerThan, "1h"),
        (plan_of, RUN, []),
        (plan_of, RUN, "KeepLatest"),
        (KeepLatest(1).__or__, 3),
    ]
    for kind, *arguments in wrong:
        with pytest.raises(InvalidInputError, match="Give"):
            kind(*arguments)


def test_policies_are_values() -> None:
    """Policies are equal by content, can be hashed, flatten and print as they are written."""
    keep = KeepLatest(3) | KeepEvery(1000) | KeepBest("loss", "min")
    assert keep == KeepAny((KeepLatest(3), KeepEvery(1000), KeepBest("loss", "min", 1)))
    assert len({keep, KeepLatest(3), KeepLatest(3)}) == 2
    assert str(keep) == "KeepLatest(3) | KeepEvery(1000) | KeepBest('loss', 'min', 1)"
    minute = KeepNewerThan(timedelta(minutes=1))
    assert (minute.age_s, str(minute)) == (60.0, "KeepNewerThan(60 s)")
    assert policies_of([keep, [[KeepNewerThan(60)]]]) == (*keep.policies, KeepNewerThan(60))  # type: ignore[list-item]  # nested as deep as one likes
    assert policies_of(KeepAny((KeepAny((keep,)), KeepNewerThan(60)))) == (
        *keep.policies,
        KeepNewerThan(60),
    )


def test_a_checkpoint_of_just_the_age_is_not_newer() -> None:
    """KeepNewerThan keeps what was committed less than the age ago."""
    ages_s = {"step-1": 60.0, "step-2": 59.5, "step-3": 0.0}
    plan = plan_of([info(1), info(2), info(3)], KeepNewerThan(60), ages_s=ages_s)
    assert steps(plan) == [2, 3]


VALUES = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, math.nan, math.inf, -math.inf]))
INFOS = st.dictionaries(st.integers(0, 40), VALUES, max_size=16).map(
    lambda losses: [info(step, loss=loss) for step, loss in losses.items()]
)
POLICIES = st.lists(
    st.one_of(
        st.integers(1, 5).map(KeepLatest),
        st.integers(1, 7).map(KeepEvery),
        st.builds(KeepClosest, every_steps=st.integers(1, 12)),
        st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
        st.integers(0, 50).map(KeepNewerThan),
    ),
    min_size=1,
    max_size=4,
)


def oracle(infos: Sequence[CheckpointInfo], policy: RetentionPolicy, now_s: float) -> set[str]:
    """Return what one policy keeps, each checkpoint judged by itself against all others."""
    found = set()
    for one in infos:
        step, loss = one.step or 0, one.metrics.get("loss", math.nan)
        if isinstance(policy, KeepLatest):
            kept = sum((other.step or 0) > step for other in infos) < policy.n
        elif isinstance(policy, KeepEvery):
            kept = step / policy.n == step // policy.n
        elif isinstance(policy, KeepBest):
            better = 0
            for other in infos:
                theirs = other.metrics.get("loss", math.nan)
                if math.isinf(theirs):
                    continue
                wins = theirs < loss if policy.mode == "min" else theirs > loss
                better += wins or (theirs == loss and (other.step or 0) > step)
            kept = math.isfinite(loss) and better < policy.n
        elif isinstance(policy, KeepClosest):
            kept = step in closest(
                {(other.step or 0): (other.step or 0) for other in infos}, policy.every_steps or 1
            )
        else:
            assert isinstance(policy, KeepNewerThan)
            kept = now_s - (1000.0 + step) < policy.age_s
        if kept:
            found.add(one.name)
    return found


@given(infos=INFOS, policies=POLICIES, damaged=st.sets(st.integers(0, 40)), order=st.randoms())
def test_a_plan_is_the_union_and_never_takes_the_newest(
    infos: list[CheckpointInfo], policies: list[RetentionPolicy], damaged: set[int], order: Any
) -> None:
    """Kept is the union of the policies over the sound ones, the newest sound one with it."""
    order.shuffle(infos)
    now_s = 1045.0
    ages_s = {one.name: 45.0 - (one.step or 0) for one in infos}
    plan = plan_of(infos, policies, ages_s=ages_s, damaged=damaged)
    kept = {decision.name for decision in plan.kept}
    gone = {decision.name for decision in plan.planned}
    assert kept | gone == {one.name for one in infos}
    assert not kept & gone
    assert all(decision.reasons for decision in (*plan.kept, *plan.planned))
    sound = [one for one in infos if one.step not in damaged]
    expected = set[str]().union(*(oracle(sound, policy, now_s) for policy in policies))
    assert kept & {one.name for one in sound} == expected | {
        one.name for one in sorted(sound, key=lambda one: one.step or 0)[-1:]
    }
    newest = max((one.step or 0 for one in sound), default=-1)
    assert all(-1 < (decision.step or 0) < newest for decision in plan.planned)


def steps_kept(policy: RetentionPolicy, *saved: int) -> list[int]:
    """Return the steps that the policy keeps of those that were saved at these steps."""
    names = policy.kept([Candidate.of(info(step), step) for step in sorted(saved)])
    return sorted(int(name.removeprefix("step-")) for name in names)


def test_the_closest_to_each_multiple_is_kept_of_a_run_off_the_grid() -> None:
    """A run that saved by the clock, or was preempted, has no step that is a multiple."""
    saved = (130, 410, 700, 960, 1230, 1490, 1510, 1760, 2100, 2900)
    assert steps_kept(KeepEvery(1000), *saved) == []
    assert steps_kept(KeepClosest(every_steps=1000), *saved) == [130, 960, 2100, 2900]


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ((8, 12), [12]),
        ((5, 4), [4, 5]),
        ((15, 14), [14, 15]),
        ((10, 9, 11), [10]),
        (((3 << 60) - 1, 3 << 60), [(3 << 60) - 1, 3 << 60]),
    ],
)
def test_of_two_equally_close_the_later_is_kept(saved: tuple[int, ...], kept: list[int]) -> None:
    """A step between two multiples counts for the higher; steps are compared as whole numbers."""
    assert steps_kept(KeepClosest(every_steps=10 if max(saved) < 100 else 1 << 61), *saved) == kept


def begun_at(step: int, time: str | None) -> CheckpointInfo:
    """Return the checkpoint of a save that began at a time of one day."""
    return replace(info(step), save_id=time and f"20260103T{time}Z-0123456789abcdef")


def test_the_closest_to_each_full_hour_is_kept() -> None:
    """A time is when the save began, as its id records it; without one it is kept."""
    times = {1: "095500", 2: "101000", 3: "102959", 4: "103000", 5: "105000", 6: None, 7: "x"}
    candidates = [Candidate.of(begun_at(step, time), step) for step, time in times.items()]
    for every_s in (3600, 3600.0, timedelta(hours=1)):
        policy = KeepClosest(every_s=every_s)
        assert policy.kept(candidates) == {
            "step-1": "KeepClosest(every_s=3600): 300 s from a multiple",
            "step-5": "KeepClosest(every_s=3600): 600 s from a multiple",
            "step-6": "KeepClosest(every_s=3600): when its save began is not known",
            "step-7": "KeepClosest(every_s=3600): when its save began is not known",
        }


def test_a_damaged_one_is_the_closest_only_if_it_is_sound_after_all() -> None:
    """It is kept, and so is the closest of the sound ones; what was pruned before is gone."""
    plan = plan_of(RUN, KeepClosest(every_steps=5), damaged={5})
    assert steps(plan) == [1, 5, 6, 8]
    assert plan.kept[1].reasons == (
        "KeepClosest(every_steps=5): 0 steps from a multiple, if it is sound after all",
    )


def closest(positions: Mapping[int, int], interval: int) -> set[int]:
    """Return of each multiple the step with the closest position; of equal ones the later."""
    multiples = range(0, 300, interval)
    best: dict[int, tuple[int, int, int]] = {}
    for step, position in positions.items():
        nearest = min(multiples, key=lambda multiple: (abs(position - multiple), -multiple))
        rank = (-abs(position - nearest), position, step)
        best[nearest] = max(best.get(nearest, rank), rank)
    return {step for _, _, step in best.values()}


@given(
    saves=st.lists(
        st.tuples(st.integers(0, 120), st.integers(0, 120), st.booleans()),
        unique_by=lambda save: save[0],
        max_size=40,
    ),
    interval=st.sampled_from([1, 2, 5, 8, 15, 40]),
    by_time=st.booleans(),
    latest=st.integers(1, 4),
)
def test_no_prune_loses_the_closest_of_all_that_were_saved(
    saves: list[tuple[int, int, bool]], interval: int, latest: int, *, by_time: bool
) -> None:
    """After any saves and prunes the run keeps what it would keep had it never pruned.

    Steps and times come in any order, as runs go back, and clocks; another policy keeps others.
    """
    policy = KeepClosest(every_s=interval) if by_time else KeepClosest(every_steps=interval)
    positions, present = dict[int, int](), dict[int, CheckpointInfo]()
    for step, second, prunes in saves:
        present[step] = begun_at(step, f"00{second // 60:02d}{second % 60:02d}")
        positions[step] = second if by_time else step
        if prunes:
            plan = plan_of(list(present.values()), policy | KeepLatest(latest))
            for decision in plan.planned:
                del present[decision.step or 0]
        candidates = [Candidate.of(present[one], one) for one in sorted(present)]
        kept = {int(name.removeprefix("step-")) for name in policy.kept(candidates)}
        assert kept == closest(positions, interval)


class KeepOdd(RetentionPolicy):
    """A user's own rule, with nothing but the one method."""

    def kept(self, candidates: Sequence[Candidate]) -> Mapping[str, str]:
        return {one.name: "it is odd" for one in candidates if one.step % 2}


def test_a_policy_of_the_users_own_combines_on_both_sides() -> None:
    """`|` works with the user's policy on the left and on the right, and keeps what either does."""
    infos = [info(step) for step in (1, 2, 3, 4, 5, 6, 7, 8)]
    for keep in (KeepOdd() | KeepLatest(2), KeepLatest(2) | KeepOdd()):
        plan = plan_of(infos, keep)
        assert [one.step for one in plan.planned] == [2, 4, 6]


def test_the_last_is_so_by_the_storages_clock_and_else_by_the_savers() -> None:
    """One storage tells times, another none; what was committed last stays, whatever its step."""
    ids = {5: "20260103T000000Z-0", 7: "20260102T000000Z-0", 8: "?", 9: None}
    infos = [replace(info(step), save_id=save_id) for step, save_id in ids.items()]
    ages_s = {"step-5": 30.0, "step-7": 10.0, "step-8": 20.0, "step-9": 40.0}
    assert steps(plan_of(infos, KeepLatest(1), ages_s=ages_s)) == [7, 9]
    del ages_s["step-8"]
    assert steps(plan_of(infos, KeepLatest(1), ages_s=ages_s)) == [5, 9]


TEMPLATES = ("step-{step:08d}", "{step}", "epoch_{step:02d}", "run.{step}.ckpt", "a{step:012d}-b")


def test_a_name_is_spelt_by_the_template() -> None:
    """Steps get the digits that the template asks for, more where they need more."""
    for template, step, name in (
        ("step-{step:08d}", 1000, "step-00001000"),
        ("step-{step:08d}", 123456789, "step-123456789"),
        ("{step}", 0, "0"),
        ("{step:024d}", 7, "000000000000000000000007"),
        ("run.{step}.ckpt", 12, "run.12.ckpt"),
    ):
        names = StepNames(template)
        assert names.name_of(step) == names.name_of(np.int64(step)) == name
        assert names.step_of(name) == step


@given(template=st.sampled_from(TEMPLATES), name=st.text(max_size=20))
def test_a_name_is_one_that_a_step_has_or_none(template: str, name: str) -> None:
    """What is read as a step's name is exactly what that step is called."""
    names = StepNames(template)
    step = names.step_of(name)
    assert step is None or names.name_of(step) == name


def test_another_spelling_of_a_number_is_no_step() -> None:
    """Two folders would be one step: a name is spelt with just the zeros of the template."""
    for template, name in (
        ("step-{step:08d}", "step-7"),
        ("s{step}", "s07"),
        ("s{step:02d}", "s7"),
    ):
        assert StepNames(template).step_of(name) is None
        assert StepNames(template).step_of(StepNames(template).name_of(7)) == 7


def test_what_is_no_name_template_or_step_is_refused() -> None:
    """A name that differs in any way is nobody's to delete; other errors say what to give."""
    others = ("step-1000", "step-0000001000", "step--0001000", "step-00001000.tmp")
    for name in ("", *others, "step-0000\uff11000", "step-" + "9" * 30):
        assert StepNames("step-{step:08d}").step_of(name) is None
    for template in ("step", "{step}-{step}", "a/{step}", ".{step}", "{step:8d}", "v2{step}"):
        with pytest.raises(InvalidInputError, match="step-"):
            StepNames(template)
    wrong: list[Any] = [-1, True, 1.0, "1", None, 1 << 63]
    for step in wrong:
        with pytest.raises(InvalidInputError, match="no step"):
            StepNames().name_of(step)
