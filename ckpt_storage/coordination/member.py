"""What a member does in a round: it arrives, and waits for the release."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any

from ckpt_storage.errors import CheckpointError

from .conversation import Conversation
from .keyvalue import COORDINATOR, LostStoreError
from .rounds import Failed, Release, Released, Superseded, SupersededError, UndecidedError


class Member:
    """A rank of one operation that is not the coordinator."""

    def __init__(self, conversation: Conversation) -> None:
        self._talk = conversation

    def arrive(self, packed: bytes) -> None:
        """Send this member's payload of the present round.

        In a commit whose verdict cannot be read, raises `UndecidedError`.
        """
        talk = self._talk
        current = talk.current()
        with talk.changed:
            talk.has_arrived = True
        talk.lane.own(current.arrival_key)
        try:
            current.arrive(packed, talk.phases.patience_s)
        except LostStoreError as error:
            if not talk.is_commit:
                raise
            # The coordinator may have the payload: this is a failure only if the verdict says so.
            try:
                talk.fail_round(error)
            except LostStoreError as lost_store:
                talk.lose(lost_store)
                raise UndecidedError(str(error)) from error
            if talk.failure is not None:
                raise talk.failure from error

    def await_release(self) -> Any:  # noqa: ANN401  # the coordinator's answer
        """Return the coordinator's answer, and enter the next round."""
        talk = self._talk
        if talk.lane.world_size == 1:
            return None
        is_extended = False
        while (release := talk.wait_for(lambda: talk.release, self._look_end_s())) is None:
            if talk.failure is not None:
                raise talk.failure
            cause = talk.loss or talk.local_failure()
            if cause is None and time.monotonic() < talk.phases.end_s:
                talk.phases.log_late(lambda: [talk.coordinator])
                continue
            # A process that was stopped reads what has arrived before it judges.
            release = self._read_release()
            if release is not None:
                break
            is_commit = talk.is_commit and talk.has_arrived
            if cause is None and not is_extended and not is_commit and self._is_claimed():
                # All have arrived, and the coordinator has a phase's time to decide.
                is_extended = True
                talk.phases.begin(talk.phases.deadline.phase)
                continue
            if cause is None:
                elsewhere = self._elsewhere() if talk.round_number == 1 else ""
                known = elsewhere or talk.describe(talk.coordinator)
                cause = talk.phases.late([talk.coordinator], "not answered", known)
            release = self._give_up_waiting(cause, is_commit=is_commit)
            break
        return self._opened(release)

    def _elsewhere(self) -> str:
        talk = self._talk
        with contextlib.suppress(LostStoreError):
            return talk.lane.find_elsewhere([COORDINATOR], talk.phases.patience_s)
        return ""

    def _look_end_s(self) -> float:
        talk = self._talk
        return min(talk.phases.end_s, talk.phases.log_s)

    def _read_release(self) -> Release | None:
        talk = self._talk
        if talk.has_lost_store:
            return None
        try:
            return talk.current().read_release(talk.phases.patience_s)
        except LostStoreError as error:
            talk.lose(error)
            return None

    def _give_up_waiting(self, cause: CheckpointError, *, is_commit: bool) -> Release:
        """Fail for `cause`; return a release that was written meanwhile.

        In a commit that the coordinator has claimed, or whose verdict cannot be read, raises
        `UndecidedError`.
        """
        talk = self._talk
        if not talk.has_lost_store:
            try:
                talk.fail_round(cause)
            except LostStoreError as error:
                talk.lose(error)
        if talk.failure is not None:
            raise talk.failure
        if not is_commit:
            raise talk.loss or cause
        release = self._read_release()
        if release is None:
            raise UndecidedError(str(talk.loss or cause)) from talk.loss or cause
        return release

    def _is_claimed(self) -> bool:
        talk = self._talk
        try:
            return talk.current().is_claimed(talk.phases.patience_s)
        except LostStoreError as error:
            talk.lose(error)
            return False

    def _opened(self, release: Release) -> Any:  # noqa: ANN401  # the coordinator's answer
        """Return the answer of a release and enter the next round. Raises what it reports."""
        talk = self._talk
        if isinstance(release, Superseded):
            raise SupersededError
        if isinstance(release, Failed):
            if talk.round_number == 1 and talk.lane.is_superseded(talk.phases.patience_s):
                raise SupersededError
            talk.note_failed(release, talk.round_number)
            talk.raise_failure()
        assert isinstance(release, Released)  # noqa: S101  # all else has been raised
        answer = release.answer
        if release.is_by_rank:
            talk.lane.own(talk.current().answer_key)
            packed = talk.current().read_answer(talk.phases.patience_s)
            if packed is None:
                raise CheckpointError(
                    f"{talk.phases.what}: the answer to rank {talk.global_rank} is gone.",
                    next_step="Make sure that all ranks call the same operations in one order.",
                )
            answer = pickle.loads(packed)  # noqa: S301  # our own ranks
        talk.end_round(is_last=release.is_last)
        return answer
