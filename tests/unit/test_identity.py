"""Which operation ranks came for, and which of them are behind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage.coordination.identity import Abandonment, Identity, find_disagreement
from ckpt_storage.errors import RankMismatchError


def last(step: int | None, restores: int | None = None) -> Identity:
    return Identity(kind="the save", url="/last", step=step, restores=restores)


def numbered(step: int) -> Identity:
    return Identity(kind="the save", url=f"/step-{step}")


def disagreement(
    identities: Mapping[int, Identity],
    earlier: Mapping[int, Identity] | None = None,
    *,
    is_complete: bool = True,
) -> Abandonment | None:
    return find_disagreement(
        identities,
        {},
        earlier=[earlier or {}],
        phase="plan",
        is_complete=is_complete,
    )


@pytest.mark.parametrize(
    ("a", "b", "agree"),
    [
        (last(1), last(1), True),
        (last(1), last(2), False),
        (last(1), last(None), True),
        (last(1, 0), last(1, 1), False),
        (last(1, None), last(1, 1), True),
        (last(1, 1), last(2, None), False),
        (numbered(1), numbered(2), False),
        (last(1), Identity(kind="the load", url="/last", step=1), False),
    ],
)
def test_what_is_not_known_agrees_with_any_value(a: Identity, b: Identity, *, agree: bool) -> None:
    """All else must be equal, whichever rank asks."""
    assert a.agrees_with(b) == b.agrees_with(a) == agree


def test_equal_identities_go_on() -> None:
    """Also with a rank that knows no step."""
    assert disagreement({0: last(7), 1: last(None), 2: last(7)}) is None


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_lowest_step_is_abandonment(*, is_complete: bool) -> None:
    """As soon as two are seen; the error names steps and ranks."""
    abandonment = disagreement({0: last(300), 4: last(100), 7: last(200)}, is_complete=is_complete)
    assert abandonment is not None
    assert abandonment.identity == last(100)
    assert isinstance(abandonment.error, RankMismatchError)
    assert abandonment.error.values == {"300": [0], "100": [4], "200": [7]}
    assert "the step" in str(abandonment.error)


def test_a_run_that_went_back_is_behind_nobody() -> None:
    """The number of restores counts before the step."""
    abandonment = disagreement({0: last(900, 0), 1: last(100, 1)})
    assert abandonment is not None
    assert abandonment.identity == last(900, 0)


def test_a_step_that_one_rank_does_not_know_hides_no_difference_of_others() -> None:
    """A rank that agrees with each of two ranks does not make these agree."""
    abandonment = disagreement({0: last(None), 1: last(100), 2: last(200)})
    assert abandonment is not None
    assert abandonment.identity == last(100)


def test_different_urls_fail_all_unless_one_has_been_left_behind() -> None:
    """A rank that comes now for what another one came for before is behind."""
    identities = {0: numbered(1), 1: numbered(2)}
    abandonment = disagreement(identities)
    assert abandonment is not None
    assert abandonment.identity is None
    earlier = {0: numbered(1), 1: numbered(2)}
    abandonment = disagreement({0: numbered(2), 1: numbered(3)}, earlier)
    assert abandonment is not None
    assert abandonment.identity == numbered(2)
    assert disagreement(identities, is_complete=False) is None


def test_ranks_that_disagree_each_time_all_fail_each_time() -> None:
    """What ranks repeat leaves nobody behind."""
    abandonment = disagreement({0: numbered(1), 1: numbered(2)}, {0: numbered(1), 1: numbered(2)})
    assert abandonment is not None
    assert abandonment.identity is None


def test_a_rank_that_repeats_its_own_operation_is_not_behind() -> None:
    """It tried the operation before, as the rank that has moved on: all fail."""
    earlier = {0: numbered(1), 1: numbered(1)}
    abandonment = disagreement({0: numbered(1), 1: numbered(2)}, earlier)
    assert abandonment is not None
    assert abandonment.identity is None


IDENTITIES = st.builds(
    Identity,
    kind=st.just("the save"),
    url=st.sampled_from(["/a", "/b"]),
    step=st.sampled_from([None, 1, 2]),
    restores=st.sampled_from([None, 0, 1]),
)


@given(
    identities=st.dictionaries(st.integers(0, 4), IDENTITIES, min_size=2),
    earlier=st.dictionaries(st.integers(0, 4), IDENTITIES),
)
def test_only_what_agrees_pairwise_goes_on_and_somebody_fails_otherwise(
    identities: Mapping[int, Identity], earlier: Mapping[int, Identity]
) -> None:
    """Whatever came before; what is given up is what a rank holds."""
    abandonment = disagreement(identities, earlier)
    agree = all(a.agrees_with(b) for a, b in itertools.combinations(identities.values(), 2))
    assert (abandonment is None) == agree
    if abandonment is not None and abandonment.identity is not None:
        assert abandonment.identity in identities.values()
        # Somebody keeps its call, or all fail: nothing goes on that is mixed.
        kept = [one for one in identities.values() if not one.agrees_with(abandonment.identity)]
        assert len(kept) < len(identities)
