"""Notices that this process is to end soon: signals, and a hook of the user."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckpt_storage.errors import InvalidInputError

from .job import BackgroundJob

_HOOK_END_S = 1.0
"""How long closing waits for a hook that is running."""

_REPEATED_S = 1.0
"""A SIGINT so soon after the first is the same: launchers signal a process and its group."""


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
        self._hook_job = BackgroundJob(
            self._call_hook, name="ckpt-storage preemption", timeout_s=0.0
        )
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
        """Return the first notice of this process, None before it.

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
