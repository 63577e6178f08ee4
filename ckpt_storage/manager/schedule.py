"""When to save: every so many steps or seconds, or on notice; the same answer on every rank."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt_storage.coordination.board import Board, BoardError
from ckpt_storage.coordination.failures import lost_board
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.ranks import Ranks
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import Timeouts
from ckpt_storage.store.deadline import Deadline

from .notices import Notices

log = logging.getLogger("ckpt_storage")


_AHEAD_TURNS = 2
_NONE = b"none"


class EarlyCall:
    """Lets ranks meet sooner than was agreed, all at one turn.

    A rank that wants to meet puts up a call. Each rank that sees it publishes the last turn that it
    will reach without an answer. The ranks meet at the highest one. A rank that comes to its turn
    before all have published ends the attempt, and the next one begins.

    Turns are counted from the last meeting on, alike on all ranks. Each request to the board ends
    within `timeout_s` seconds.
    """

    def __init__(self, board: Board, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._meeting_id = ""
        self._attempt = 0
        self._promised: int | None = None
        self._agreed: int | None = None
        self._left: list[str] = []

    @property
    def has_promised(self) -> bool:
        """Whether `look` must be called at the next turn."""
        return self._promised is not None

    def look(self, turn: int, *, wants: bool) -> int | None:
        """Return the turn of an early meeting, never before `turn`; None if none is agreed on.

        Raises `BoardError` if the board cannot be read after this rank has promised; before, that
        is the next meeting's to tell.
        """
        while self._agreed is None and (self._promised is not None or self._joins(turn, wants)):
            word = self._word(turn)
            if word is None:
                return None
            if word != _NONE:
                self._agreed = int(word)
            else:
                self._attempt += 1
                self._promised = None
        return self._agreed

    def anew(self, meeting_id: str) -> None:
        """Begin to count turns from 0, as all ranks met; take back what is on the board.

        `meeting_id` is that of no other meeting, also not of processes before these: what they left
        must not be taken for a call, nor for what was agreed on.
        """
        for key in self._left:
            with contextlib.suppress(BoardError):
                self._board.delete(key, self._timeout_s)
        self._left = []
        self._meeting_id = meeting_id
        self._attempt = 0
        self._promised = self._agreed = None

    def _joins(self, turn: int, wants: bool) -> bool:  # noqa: FBT001  # as it came
        """Call, or look for a call; promise if there is one."""
        call, own = self._key("call"), self._key(str(self._rank))
        promised = turn + _AHEAD_TURNS * (self._attempt + 1)
        try:
            if not wants and self._board.get(call, self._timeout_s) is None:
                return False
            self._left += [own, call] if wants else [own]
            # An answer may be lost, so it binds from the attempt on.
            self._promised = promised
            self._board.set(own, str(promised).encode(), self._timeout_s)
            if wants:
                self._board.set_first(call, b"1", self._timeout_s)
        except BoardError as error:
            if self._promised is not None:
                raise
            log.debug("whether ranks meet sooner is not known: %s", error)
            return False
        return True

    def _word(self, turn: int) -> bytes | None:
        key = self._key("word")
        word = self._board.get(key, self._timeout_s)
        if word is not None or self._promised is None or turn < self._promised:
            return word
        promises = [self._key(str(rank)) for rank in range(self._world_size)]
        found = _NONE
        if self._board.has_all(promises, self._timeout_s):
            told = [self._board.get(one, self._timeout_s) for one in promises]
            found = str(max(int(one) for one in told if one is not None)).encode()
        self._left.append(key)
        self._board.set_first(key, found, self._timeout_s)
        return self._board.get(key, self._timeout_s)

    def _key(self, name: str) -> str:
        return f"early/{self._meeting_id}/{self._attempt}/{name}"


_LOOK_S = 1.0
"""How often ranks meet, in seconds, if steps are shorter; a notice leaves half a minute or so."""

_COST_SHARE = 0.01
"""What part of the time meetings may take, where steps are short."""

_MOST_STEPS = 1000

_POLL_S = 0.25
"""How often a rank looks whether another one wants to meet sooner; that is one small request."""

_BOARD_S = 10.0
"""How long such a request may take."""

_COST_GROWTH = 1.1
"""How fast the cheapest meeting of late is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """What the coordinator decided: for all, and until when nobody needs to ask again."""

    is_due: bool
    preempted: str | None
    next_step: int


class Schedule:
    """Answers, at each step, whether to save. Every rank asks at the same steps.

    A multiple of `every_steps` is due on each rank by itself. For the rest the coordinator's clock
    and the notices of all ranks decide. Ranks meet for that about once a second, or at each step
    where steps are longer. All agree on the step of the next meeting, as no rank may go to one
    alone. Where steps become long meanwhile, a rank that has a notice calls for a meeting sooner:
    see `EarlyCall`. One process alone looks at every step, and asks the hook as often as others
    meet.

    At the first step all ranks meet in any case: `terms`, what each was made with, must be alike.
    """

    def __init__(
        self,
        coordinator: Ranks,
        notices: Notices,
        *,
        every_steps: int | None,
        every_s: float | None,
        timeouts: Timeouts,
        terms: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise InvalidInputError(
                f"every_steps is {every_steps!r}.", next_step="Give a whole number of 1 or more."
            )
        self._coordinator = coordinator
        self._notices = notices
        self._every_steps = every_steps
        self._every_s = every_s
        self._timeouts = timeouts
        self._terms = {
            **(terms or {}),
            "every_steps": str(every_steps),
            "every_s": str(every_s),
            "signals or preemption": "given" if notices.are_asked_for else "not given",
        }
        self._has_met = coordinator.world_size == 1
        self._clock = clock
        self._saved_s = clock()
        self._asked_step: int | None = None
        self._answer = False
        self._met_step = 0
        self._met_s = self._saved_s
        self._asked_s: float | None = None
        self._next_step = 0
        self._cost_s = 0.0
        self._turn = 0
        self._last_s = 0.0
        self._polled_s = self._saved_s
        self._early = EarlyCall(
            coordinator.board,
            rank=coordinator.rank,
            world_size=coordinator.world_size,
            timeout_s=min(_BOARD_S, timeouts.plan),
        )
        self.preempted: str | None = None

    def saved(self) -> None:
        """Note that a save begins now: the seconds count anew."""
        self._saved_s = self._clock()

    def is_due(self, step: int) -> bool:
        """Return whether to save at `step`; collective at first, and where time or notices count.

        The same for a step that is asked for again. Raises `RankMismatchError` if ranks ask for
        different steps, or were made with different arguments, `PhaseTimeoutError`,
        `RankFailedError`.
        """
        if step == self._asked_step:
            return self._answer
        if self._asked_s is not None:
            self._last_s = self._clock() - self._asked_s
        self._turn += 1
        if self._asked_step is None or step < self._asked_step:
            # Training began, perhaps from a checkpoint: no step was measured yet.
            self._next_step = self._met_step = step
        self._asked_step = step
        every = self._every_steps
        self._answer = every is not None and step > 0 and step % every == 0
        asks = self._every_s is not None or self._notices.are_asked_for
        is_alone = self._coordinator.world_size == 1
        is_time = is_alone or step >= self._next_step or not self._has_met
        if (asks or not self._has_met) and (is_time or self._is_called(step)):
            word = self._meet(step)
            self._answer = self._answer or word.is_due
            self.preempted = word.preempted
            self._next_step = word.next_step
        self._asked_s = self._clock()
        return self._answer

    def _is_called(self, step: int) -> bool:
        """Return whether ranks meet at this step although they agreed on a later one."""
        now_s = self._clock()
        is_long = now_s - self._polled_s >= _POLL_S
        if not (is_long or self._early.has_promised):
            return False
        wants = False
        if is_long:
            self._polled_s = now_s
            is_far = (self._next_step - step) * self._last_s > 2 * _LOOK_S
            wants = is_far and self._has_news(now_s)
        try:
            return self._early.look(self._turn, wants=wants) == self._turn
        except BoardError as error:
            deadline = Deadline("plan", self._timeouts.plan)
            raise lost_board(error, deadline, f"the look whether to save at step {step}") from error

    def _has_news(self, now_s: float) -> bool:
        """Return whether there is something on this rank that all must hear of."""
        if self._coordinator.is_coordinator and self._is_late(now_s):
            return True
        return self.preempted is None and self._notices.given() is not None

    def _is_late(self, now_s: float) -> bool:
        return self._every_s is not None and now_s - self._saved_s >= self._every_s

    def _meet(self, step: int) -> _Word:
        is_time = step >= self._next_step
        notice = self._notices.given(asks_hook=is_time) or ""
        if self._coordinator.world_size == 1:
            return self._decide(step, [notice], is_time=is_time)
        what = f"the look whether to save at step {step}"
        with self._coordinator.operation(what, timeouts=self._timeouts) as operation:
            terms = {} if self._has_met else self._terms
            operation.meet({"the step": str(step), **terms})
            begin_s = self._clock()
            word = self._agree(operation, step, notice)
            meeting_id = operation.id
        # The least of late: the rest is waiting for ranks that are slower. To meet costs as much.
        took_s = 2 * (self._clock() - begin_s)
        self._cost_s = min(took_s, self._cost_s * _COST_GROWTH) if self._cost_s else took_s
        self._has_met = True
        self._early.anew(meeting_id)
        self._turn = 0
        self._polled_s = self._clock()
        return word

    def _agree(self, operation: Operation, step: int, notice: str) -> _Word:
        notices = [text.decode() for text in operation.gather(notice.encode())]
        packed = b""
        if operation.is_coordinator:
            word = self._decide(step, notices, is_time=True)
            packed = json.dumps([word.is_due, word.preempted, word.next_step]).encode()
        is_due, preempted, next_step = json.loads(operation.broadcast(packed))
        return _Word(is_due=is_due, preempted=preempted, next_step=next_step)

    def _decide(self, step: int, notices: list[str], *, is_time: bool) -> _Word:
        """Decide for all; on the coordinator, whose clock and earlier words these are."""
        now_s = self._clock()
        is_late = self._is_late(now_s)
        first = next((f"{text} on rank {rank}" for rank, text in enumerate(notices) if text), None)
        is_news = first is not None and self.preempted is None
        return _Word(
            is_due=is_late or is_news,
            preempted=self.preempted or first,
            next_step=step + self._steps_to_next(step, now_s) if is_time else self._next_step,
        )

    def _steps_to_next(self, step: int, now_s: float) -> int:
        """Return after how many steps to meet again, and note that ranks meet now."""
        gap = max(step - self._met_step, 1)
        step_s = max((now_s - self._met_s) / gap, self._last_s, 1e-9)
        self._met_step, self._met_s = step, now_s
        look_s = max(_LOOK_S, self._cost_s / _COST_SHARE)
        # At most twice the last gap: the first steps are slow, and one must not judge by them.
        return max(1, min(int(look_s / step_s), 2 * gap, _MOST_STEPS))
