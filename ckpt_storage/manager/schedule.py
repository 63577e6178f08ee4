"""When to save: every so many steps or seconds, or on notice of a preemption."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from ckpt_storage.coordination.failures import add_context
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Timeouts

from .early_rendezvous import EarlyRendezvous
from .notices import PreemptionNotices

_POLL_S = 0.25
"""How often a rank calls the hook, and reads whether a rank wants a meeting, by one request."""

_REQUEST_S = 10.0
"""How long a request about meetings may take."""


class Schedule:
    """Returns at each step whether to save: the same on every rank. All ask at the same steps."""

    def __init__(
        self,
        ranks: RankGroup,
        notices: PreemptionNotices,
        *,
        every_steps: int | None,
        every_s: float | None,
        timeouts: Timeouts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise InvalidInputError(
                f"every_steps is {every_steps!r}.", next_step="Give a whole number of 1 or more."
            )
        self._ranks = ranks
        self._notices = notices
        self._every_steps = every_steps
        self._every_s = every_s
        self._timeouts = timeouts
        self._terms = {
            "every_steps": str(every_steps),
            "every_s": str(every_s),
            "signals or preemption": "set" if notices.are_expected else "not set",
        }
        self._clock = clock
        self._saved_s = clock()
        self._polled_s = float("-inf")
        self._has_met = ranks.world_size == 1
        self._last_step: int | None = None
        self._answer = False
        self._turn = 0
        self._early = EarlyRendezvous(ranks, timeout_s=min(_REQUEST_S, timeouts.plan))
        self.preempted: str | None = None

    def restart_timer(self) -> None:
        """Count `every_s` from now on: a save begins."""
        self._saved_s = self._clock()

    def is_due(self, step: int) -> bool:
        """Return whether to save at `step`; the same if a step is asked for again."""
        if step == self._last_step:
            return self._answer
        self._last_step = step
        self._turn += 1
        self._answer = bool(self._every_steps and step > 0 and step % self._every_steps == 0)
        if not self._has_met:
            self._meet(step)
        elif self._every_s is not None or self._notices.are_expected:
            now_s = self._clock()
            is_poll_time = now_s - self._polled_s >= _POLL_S
            if is_poll_time:
                self._polled_s = now_s
            notice = self._notices.pending(asks_hook=is_poll_time)
            if self._ranks.world_size == 1:
                self._decide([notice or ""])
            elif is_poll_time or self._early.is_committed:
                self._meet_if_agreed(step, notice)
        return self._answer

    def _meet_if_agreed(self, step: int, notice: str | None) -> None:
        """Meet if the ranks agreed on this turn; request a meeting if this rank wants it."""
        has_news = notice is not None and self.preempted is None
        wants_meeting = has_news or (self._ranks.is_coordinator and self._is_time_over())
        try:
            agreed_turn = self._early.poll(self._turn, wants_meeting=wants_meeting)
        except LostStoreError as error:
            add_context(error, _operation_at(step), rank=self._ranks.global_rank, phase="plan")
            raise error.public() from error.__cause__
        if agreed_turn == self._turn:
            self._meet(step)

    def _is_time_over(self) -> bool:
        return self._every_s is not None and self._clock() - self._saved_s >= self._every_s

    def _meet(self, step: int) -> None:
        """Take the coordinator's decision on all ranks."""
        notice = self._notices.pending(asks_hook=False) or ""
        terms = {"the step": str(step), **({} if self._has_met else self._terms)}
        # Ranks that fail to meet, and go on, meet at their next step.
        self._has_met = False
        with self._ranks.operation(_operation_at(step), timeouts=self._timeouts) as operation:
            operation.meet(terms)
            notices = operation.gather(notice)
            if operation.is_coordinator:
                self._decide(notices)
            decision = (self._answer, self.preempted, secrets.token_hex(8))
            self._answer, self.preempted, meeting_id = operation.broadcast(decision)
        self._has_met = True
        self._early.reset(meeting_id)
        self._turn = 0

    def _decide(self, notices: list[str]) -> None:
        """Decide for all ranks, by the coordinator's clock and the notice of the lowest rank."""
        texts = zip(self._ranks.lane.global_ranks, notices, strict=True)
        first = next((f"{text} on rank {rank}" for rank, text in texts if text), None)
        is_news = first is not None and self.preempted is None
        self._answer = self._answer or self._is_time_over() or is_news
        self.preempted = self.preempted or first


def _operation_at(step: int) -> str:
    return f"the decision whether to save at step {step}"
