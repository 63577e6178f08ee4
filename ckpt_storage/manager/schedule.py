"""When to save: every so many steps or seconds, or on notice; the same answer on every rank.

And how: a step under its name; and work in the background, never waited for without a limit.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType, MethodType
from typing import Any
from weakref import WeakMethod

from ckpt_storage.background.handle import SaveHandle, SaveState
from ckpt_storage.background.saver import AsyncSaver
from ckpt_storage.commit.info import CheckpointInfo, user_record
from ckpt_storage.coordination.failures import locate
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.loads.resolving import plain_state
from ckpt_storage.options import Timeouts
from ckpt_storage.saves.save import save_on
from ckpt_storage.saves.session import SaveOptions
from ckpt_storage.store.deadline import Deadline, Watch

from .root import Root

log = logging.getLogger("ckpt_storage")

_POLL_S = 0.25
"""How often a rank looks whether another one calls, by one small request, and asks its hook."""

_REQUEST_S = 10.0
"""How long such a request may take."""

_HOOK_END_S = 1.0
"""How long closing waits for a hook that is running."""

_REPEATED_S = 1.0
"""A SIGINT so soon after the first is the same: launchers signal a process and its group."""

_AHEAD_TURNS = 2
_NONE = b"none"

_STOP_S = 10.0
"""How long a job that was told to stop may take; a request that hangs is then left behind."""

_Work = Callable[[Deadline], object]


class Job(Watch):
    """Runs `work(deadline)` in a named daemon thread, once for all wishes meanwhile.

    It is the `Watch` of the deadline: once told to stop it ends the requests of a run.
    """

    def __init__(self, work: _Work, *, name: str, timeout_s: float) -> None:
        # Only a run keeps its owner: a manager that is forgotten is gone at once, and its saver.
        self._work: Callable[[], _Work | None] = (
            WeakMethod(work) if isinstance(work, MethodType) else lambda: work
        )
        self._name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._wish_count = self._done_count = 0
        self._is_closing = False
        self._stopped: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def failure(self) -> CheckpointError | None:
        """Return why a run cannot go on."""
        return self._stopped

    def wake(self) -> None:
        """Ask for a run that begins from now on; without effect after `close`. Never raises."""
        work = self._work()
        with self._changed:
            if self._is_closing or work is None:
                return
            self._wish_count += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(work,), name=self._name, daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads; or the interpreter is ending
                    self._thread, self._done_count, self.error = None, self._wish_count, error
                    log.warning("%s is tried again later: %s", self._name, error)

    def wait(self, timeout_s: float) -> bool:
        """Return whether all that was asked for so far has been done, within `timeout_s`."""
        with self._changed:
            wished = self._wish_count
            return self._changed.wait_for(lambda: self._done_count >= wished, timeout_s)

    def close(self, timeout_s: float, *, stop_s: float = _STOP_S) -> None:
        """Let what was asked for end, at most `timeout_s` seconds; then stop it. Idempotent."""
        with self._changed:
            self._is_closing = True
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout_s)
        if thread.is_alive():
            self._stopped = CheckpointError(f"{self._name} was stopped; the next one goes on.")
            thread.join(stop_s)
        if thread.is_alive():
            log.warning("%s hangs and is left behind.", self._name)

    def _run(self, work: _Work) -> None:
        is_over = False
        while not is_over:
            wished = self._wish_count
            self._run_once(work)
            with self._changed:
                is_over = self._wish_count == wished or self._stopped is not None
                self._done_count = self._wish_count if is_over else wished
                self._thread = None if is_over else self._thread
                self._changed.notify_all()

    def _run_once(self, work: _Work) -> None:
        self.error = None
        try:
            work(Deadline("commit", self._timeout_s, watch=self))
        except CheckpointError as failure:
            self.error = failure
            if self._stopped is None:
                log.warning("%s failed and is tried again later: %s", self._name, failure)
        except Exception as failure:  # the next run may do better, and training goes on
            self.error = failure
            log.exception("%s failed.", self._name)


class PreemptionNotices:
    """Signals, and a hook on a thread of its own, that announce the end of this process.

    A handler that was there before is called as well, but for Python's own handler of SIGINT. It
    raises KeyboardInterrupt only at a second SIGINT, a second or more after the first.
    """

    def __init__(
        self,
        signals: Sequence[int] = (),
        hook: Callable[[], object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hook = hook
        self._hook_job = Job(self._call_hook, name="ckpt-storage preemption", timeout_s=0.0)
        self._clock = clock
        self._pid = os.getpid()
        self._is_closed = False
        self._notice: str | None = None
        self._first_s: dict[int, float] = {}
        self._handlers_before: dict[int, Any] = {}
        numbers = list(dict.fromkeys(signals))
        if numbers and threading.current_thread() is not threading.main_thread():
            raise InvalidInputError(
                "Signals can be handled in the main thread only.",
                next_step="Make the manager in the main thread, or pass preemption= instead.",
            )
        try:
            for number in numbers:
                # Recorded first: a signal that arrives at once needs it.
                self._handlers_before[number] = signal.getsignal(number)
                signal.signal(number, self._handle)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise InvalidInputError(
                f"The signals {list(signals)!r} cannot be handled: {error}.",
                next_step="Give numbers such as signal.SIGTERM; no process can handle SIGKILL and "
                "SIGSTOP.",
            ) from error

    @property
    def are_expected(self) -> bool:
        """Whether there can be a notice at all."""
        return not self._is_closed and (bool(self._handlers_before) or self._hook is not None)

    def pending(self, *, asks_hook: bool = True) -> str | None:
        """Return the first notice of this process, None before there was one.

        Never raises and never waits. `asks_hook`: call the hook, unless it is running; a later call
        of this method returns its answer.
        """
        is_asked = asks_hook and self._hook is not None and self._notice is None
        if is_asked and self._hook_job.wait(0):
            self._hook_job.wake()
        return self._notice

    def _call_hook(self, _: object) -> None:
        if self._hook is not None and self._hook():
            self._notice = self._notice or "the preemption hook"

    @property
    def _is_active(self) -> bool:
        """Whether signals of this process are notices: not after `close`, nor in a forked child."""
        return not self._is_closed and os.getpid() == self._pid

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._handler_before(number)
        if self._is_active:
            # A real-time signal has no name.
            names = (known.name for known in signal.Signals if known == number)
            self._notice = self._notice or next(names, f"signal {number}")
            since_s = self._clock() - self._first_s.setdefault(number, self._clock())
            if before == signal.default_int_handler and since_s < _REPEATED_S:
                return
        elif signal.getsignal(number) == self._handle:
            # As if this handler had never been installed.
            signal.signal(number, signal.SIG_DFL if before is None else before)
            if not callable(before):
                signal.raise_signal(number)
        if callable(before):
            before(number, frame)

    def _handler_before(self, number: int) -> Any:  # noqa: ANN401  # as the signal module's
        """Return the handler that was there before, past those of notices that are not active."""
        handler = self._handlers_before.get(number)
        while isinstance(owner := getattr(handler, "__self__", None), PreemptionNotices):
            if owner._is_active:  # noqa: SLF001  # of the same class
                break
            handler = owner._handlers_before.get(number)  # noqa: SLF001  # as above
        return handler

    def close(self) -> None:
        """Restore the earlier handlers; outside the main thread, when the next signal arrives."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hook_job.close(_HOOK_END_S, stop_s=0.0)
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._handlers_before:
            before = self._handler_before(number)
            if signal.getsignal(number) == self._handle and before is not None:
                signal.signal(number, before)


class Call:
    """Lets any rank call all ranks to a meeting, to which all come at one turn.

    A rank that wants one puts up a call. Each rank that sees it promises the last turn that it will
    reach without an answer. The ranks meet at the highest promise. A rank that comes to its turn
    before all have promised ends the attempt, and the next one has twice as many turns.
    Turns are counted from the last meeting on, alike on all ranks.
    """

    def __init__(self, ranks: RankGroup, *, timeout_s: float) -> None:
        self._ranks = ranks
        self._keys = ranks.keys
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
        """Return the turn of the meeting, never before `turn`; None if none is agreed on."""
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
        """Begin to count turns from 0, as all met in the meeting of this unique id."""
        # The next operation removes it.
        self._ranks.debris += self._left
        self._left = []
        self._meeting_id = meeting_id
        self._attempt = 0
        self._promised = self._agreed = None

    def _joins(self, turn: int, wants: bool) -> bool:  # noqa: FBT001  # as it came
        """Call, or look for a call; promise if there is one."""
        call, own = self._key("call"), self._key(str(self._ranks.rank))
        promised = turn + (_AHEAD_TURNS << self._attempt)
        try:
            if not wants and self._keys.get(call, self._timeout_s) is None:
                return False
            self._left += [own, call] if wants else [own]
            # An answer may be lost, so it binds from the attempt on.
            self._promised = promised
            self._keys.set(own, str(promised).encode(), self._timeout_s)
            if wants:
                self._keys.set_first(call, b"1", self._timeout_s)
        except LostStoreError as error:
            if self._promised is not None:
                raise
            log.debug("whether a rank calls is not known: %s", error)
            return False
        return True

    def _word(self, turn: int) -> bytes | None:
        key = self._key("word")
        word = self._keys.get(key, self._timeout_s)
        if word is not None or self._promised is None or turn < self._promised:
            return word
        promises = [self._key(str(rank)) for rank in range(self._ranks.world_size)]
        found = _NONE
        if self._keys.has_all(promises, self._timeout_s):
            told = [self._keys.get(one, self._timeout_s) for one in promises]
            found = str(max(int(one) for one in told if one is not None)).encode()
        self._left.append(key)
        self._keys.set_first(key, found, self._timeout_s)
        return self._keys.get(key, self._timeout_s)

    def _key(self, name: str) -> str:
        return f"early/{self._meeting_id}/{self._attempt}/{name}"


class Schedule:
    """Answers, at each step, whether to save. Every rank asks at the same steps."""

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
            "signals or preemption": "given" if notices.are_expected else "not given",
        }
        self._clock = clock
        self._saved_s = clock()
        self._polled_s = float("-inf")
        self._has_met = ranks.world_size == 1
        self._asked_step: int | None = None
        self._answer = False
        self._turn = 0
        self._call = Call(ranks, timeout_s=min(_REQUEST_S, timeouts.plan))
        self.preempted: str | None = None

    def saved(self) -> None:
        """Note that a save begins now: the seconds count anew."""
        self._saved_s = self._clock()

    def is_due(self, step: int) -> bool:
        """Return whether to save at `step`; the same for a step that is asked for again."""
        if step == self._asked_step:
            return self._answer
        self._asked_step = step
        self._turn += 1
        self._answer = bool(self._every_steps and step > 0 and step % self._every_steps == 0)
        if not self._has_met:
            self._meet(step)
        elif self._every_s is not None or self._notices.are_expected:
            now_s = self._clock()
            is_time = now_s - self._polled_s >= _POLL_S
            if is_time:
                self._polled_s = now_s
            notice = self._notices.pending(asks_hook=is_time)
            if self._ranks.world_size == 1:
                self._decide([notice or ""])
            elif (is_time or self._call.has_promised) and self._is_called(step, notice):
                self._meet(step)
        return self._answer

    def _is_called(self, step: int, notice: str | None) -> bool:
        """Return whether ranks meet at this step; call them if this rank has news for all."""
        has_news = notice is not None and self.preempted is None
        wants = has_news or (self._ranks.is_coordinator and self._is_late())
        try:
            return self._call.look(self._turn, wants=wants) == self._turn
        except LostStoreError as error:
            what = f"the look whether to save at step {step}"
            locate(error, what, rank=self._ranks.rank, phase="plan")
            raise

    def _is_late(self) -> bool:
        return self._every_s is not None and self._clock() - self._saved_s >= self._every_s

    def _meet(self, step: int) -> None:
        what = f"the look whether to save at step {step}"
        notice = self._notices.pending(asks_hook=False) or ""
        with self._ranks.operation(what, timeouts=self._timeouts) as operation:
            operation.meet({"the step": str(step), **({} if self._has_met else self._terms)})
            notices = operation.gather(notice)
            if operation.is_coordinator:
                self._decide(notices)
            word = (self._answer, self.preempted)
            self._answer, self.preempted = operation.broadcast(word)
            meeting_id = operation.id
        self._has_met = True
        self._call.anew(meeting_id)
        self._turn = 0

    def _decide(self, notices: list[str]) -> None:
        """Decide for all, by the coordinator's clock and the notices in the order of ranks."""
        first = next((f"{text} on rank {rank}" for rank, text in enumerate(notices) if text), None)
        is_news = first is not None and self.preempted is None
        self._answer = self._answer or self._is_late() or is_news
        self.preempted = self.preempted or first


class StepSave:
    """One save; `given` are the arguments of the call. `committed` gets the name, in any thread."""

    def __init__(
        self, root: Root, given: Mapping[str, Any], committed: Callable[[str], None]
    ) -> None:
        self._root = root
        self._committed = committed
        self._release: Callable[[], None] = lambda: None
        self._refusal: Exception | None = None
        self._name, place, user = "", root.location, {}
        try:
            self._name = root.names.name_of(given["step"])
            place = place.child(self._name)
            user = user_record(given["step"], given["metrics"] or {})
        except Exception as error:  # noqa: BLE001  # raised by `_prepare`, when all ranks are there
            self._refusal = error
        self._target = place.target
        self._options = replace(
            SaveOptions.of(given, timeouts=root.timeouts),
            retry=root.retry,
            storage_options=place.storage_options,
            user=user,
            replaces=root.damaged_ids(self._name),
        )

    def _prepare(self) -> None:
        """Take the name; waits while it is deleted. Raises `PhaseTimeoutError`, and refusals."""
        if self._refusal is not None:
            raise self._refusal
        limit_s = self._options.timeouts.plan
        self._release = self._root.uses.take(self._name, "it is being saved", timeout_s=limit_s)

    def run(self, ranks: RankGroup, state: Mapping[str, Any]) -> CheckpointInfo:
        """Save now, and return what was committed; as `ckpt_storage.save`."""

        def prepared() -> dict[str, Any]:
            self._prepare()
            return plain_state(state)

        committed: CheckpointInfo | None = None
        try:
            committed = save_on(ranks, prepared, self._target, self._options)
        except CheckpointError as error:
            # The checkpoint counts, whatever went wrong after its commit.
            committed = getattr(error, "info", None)
            raise
        finally:
            self._end(None if committed is None else committed.save_id)
        return committed

    def begin(
        self, saver: AsyncSaver, state: Mapping[str, Any], *, block_until_staged: bool
    ) -> SaveHandle:
        """Begin to save in the background; as `AsyncSaver.save`."""
        given: dict[str, Any] = {"block_until_staged": block_until_staged, "prepare": self._prepare}
        try:
            handle = saver.begin(state, self._target, self._options, **given)
        except BaseException:
            self._end(None)
            raise
        handle.add_done_callback(
            lambda h: self._end(h.save_id if h.state is SaveState.COMMITTED else None)
        )
        return handle

    def _end(self, save_id: str | None) -> None:
        """Note how the save ended; only then may its name be deleted."""
        self._root.forget(self._name)
        try:
            if save_id is not None:
                # Every file was looked at before the commit.
                self._root.found_sound(self._name, save_id)
                self._committed(self._name)
        finally:
            self._release()
