"""The notice that this process will be ended soon: a signal, or what a hook of the user's says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckpt_storage.errors import InvalidInputError

from .job import Job

_ANSWER_S = 0.05
"""How long a look waits for a hook that was just asked; the next look has what comes later."""

_END_S = 1.0


class Notices:
    """Takes signals, for handlers before it as well, and asks a hook on its own thread."""

    def __init__(
        self, signals: Sequence[int] = (), hook: Callable[[], object] | None = None
    ) -> None:
        self._hook = hook
        self._asking = Job(self._ask, name="ckpt-storage preemption", timeout_s=0.0)
        self._pid = os.getpid()
        self._is_closed = False
        self._noted: str | None = None
        self._before: dict[int, Any] = {}
        numbers = list(dict.fromkeys(signals))
        if numbers and threading.current_thread() is not threading.main_thread():
            raise InvalidInputError(
                "Signals can be taken in the main thread only.",
                next_step="Make the manager there, or pass preemption= instead of signals=.",
            )
        try:
            for number in numbers:
                # Kept first: it must be called by a signal that comes at once.
                self._before[number] = signal.getsignal(number)
                signal.signal(number, self._take)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise InvalidInputError(
                f"The signals {list(signals)!r} cannot be taken: {error}.",
                next_step="Give numbers such as signal.SIGTERM; SIGKILL and SIGSTOP never come.",
            ) from error

    def _take(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if not self._is_closed and os.getpid() == self._pid:
            self._noted = self._noted or _name_of(number)
        elif signal.getsignal(number) == self._take:
            # As had this handler never been installed.
            signal.signal(number, signal.SIG_DFL if before is None else before)
            if not callable(before):
                signal.raise_signal(number)
        if callable(before):
            before(number, frame)

    @property
    def are_asked_for(self) -> bool:
        """Whether there can be a notice at all."""
        return not self._is_closed and (bool(self._before) or self._hook is not None)

    def given(self, *, asks_hook: bool = True) -> str | None:
        """Return what the notice was, None if there was none yet. Never raises."""
        if asks_hook and self._hook is not None and self._noted is None and self._asking.wait(0):
            self._asking.wake()
            self._asking.wait(_ANSWER_S)
        return self._noted

    def _ask(self, _: object) -> None:
        if self._hook is not None and self._hook():
            self._noted = self._noted or "the preemption hook"

    def close(self) -> None:
        """Put back the handlers that were there; outside the main thread, when the signal comes."""
        if self._is_closed:
            return
        self._is_closed = True
        self._asking.close(_END_S if self._asking.wait(0) else 0.0, stop_s=0.0)
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            while isinstance(owner := getattr(before, "__self__", None), Notices):
                if not owner._is_closed:  # noqa: SLF001  # one of us
                    break
                before = owner._before.get(number)  # noqa: PLW2901, SLF001  # the same
            if signal.getsignal(number) == self._take and before is not None:
                signal.signal(number, before)


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name of its own
