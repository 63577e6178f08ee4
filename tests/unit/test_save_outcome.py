"""The outcome of a failed save on a rank: each row of the page *Errors*."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ckpt_storage import CommitUnknownError, list_checkpoints, save
from ckpt_storage.commit.assembly import commit_save
from ckpt_storage.saves import session
from ckpt_storage.saves.outcome import Action, Cause, Stage, StorageState, outcome_of

RANKS = {True: "coordinator", False: "member"}
SITUATIONS = list(
    itertools.product(RANKS, get_args(Stage), get_args(Cause), get_args(StorageState))
)

Expected = tuple[bool | None, Stage | None, Cause, StorageState | None, Action, bool]

ROWS: list[Expected] = [
    # coordinator, stage, cause, storage (None: any) -> action, discards
    (None, "writing", "undecided", None, "raise", False),
    (None, "reported", "undecided", "absent", "raise unknown", False),
    (None, "committing", "undecided", "absent", "raise unknown", False),
    (None, "reported", "undecided", "committed", "raise with info", False),
    (None, "committing", "undecided", "committed", "raise with info", False),
    (None, "committing", "interrupt", None, "raise unknown", False),
    (None, "writing", "interrupt", None, "raise", False),
    (None, "reported", "interrupt", None, "raise", False),
    (True, "writing", "failure", None, "raise", True),
    (False, "writing", "failure", None, "raise", False),
    (None, "reported", "failure", None, "raise", False),
    (None, "committing", "failure", None, "raise", False),
    (True, "writing", "unexpected", None, "raise", True),
    (False, "writing", "unexpected", None, "raise", False),
    (None, "reported", "unexpected", None, "raise", False),
    (None, "committing", "unexpected", None, "raise unknown", False),
    (None, None, "hang", None, "raise", False),
]


@pytest.mark.parametrize(
    ("is_coordinator", "stage", "cause", "storage", "action", "discards"), ROWS
)
def test_each_situation_has_its_outcome(
    is_coordinator: bool | None,  # noqa: FBT001  # of a row
    stage: Stage | None,
    cause: Cause,
    storage: StorageState | None,
    action: Action,
    discards: bool,  # noqa: FBT001  # of a row
) -> None:
    """As the page *Errors* lists them."""
    pattern = (is_coordinator, stage, cause, storage)
    count = 0
    for situation in SITUATIONS:
        if all(a is None or a == b for a, b in zip(pattern, situation, strict=True)):
            count += 1
            outcome = outcome_of(
                is_coordinator=situation[0],
                stage=situation[1],
                cause=situation[2],
                storage=situation[3],
            )
            assert outcome == (action, discards), situation
    assert count


def test_the_rows_cover_every_situation_once() -> None:
    """Nothing is left to chance."""
    covered = [
        situation
        for pattern in ROWS
        for situation in SITUATIONS
        if all(a is None or a == b for a, b in zip(pattern[:4], situation, strict=True))
    ]
    assert sorted(covered) == sorted(SITUATIONS)


def test_what_is_or_may_be_committed_is_never_called_failed() -> None:
    """A member that has reported and sees no outcome raises no plain failure, whatever is there."""
    for storage in get_args(StorageState):
        action, discards = outcome_of(
            is_coordinator=False, stage="reported", cause="undecided", storage=storage
        )
        assert action != "raise"
        assert not discards


def test_only_the_coordinator_discards_and_only_what_nobody_writes() -> None:
    """Neither after its claim nor where a rank may still be writing."""
    for rank, stage, cause, storage in SITUATIONS:
        _, discards = outcome_of(is_coordinator=rank, stage=stage, cause=cause, storage=storage)
        assert discards == (rank and stage == "writing" and cause in {"failure", "unexpected"})


def test_an_unexpected_error_in_the_commit_leaves_the_outcome_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save may be committed, so it is not called failed; the error is the cause."""

    def commit_and_raise(*args: Any, **options: Any) -> None:
        commit_save(*args, **options)
        raise RuntimeError("after the commit")

    monkeypatch.setattr(session, "commit_save", commit_and_raise)
    with pytest.raises(CommitUnknownError) as caught:
        save({"w": torch.ones(2)}, tmp_path / "checkpoint")
    assert isinstance(caught.value.__cause__, RuntimeError)
    (committed,) = list_checkpoints(tmp_path)
    assert committed.save_id == caught.value.save_id
