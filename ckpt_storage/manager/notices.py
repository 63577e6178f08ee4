"""The notice that this process will be ended soon: a signal, or what a hook of the user's says."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from ckpt_storage.errors import InvalidInputError

log = logging.getLogger("ckpt_storage")

_ANSWER_S = 0.05
"""How long a look waits for a hook that was just asked: most answer at once. The next look has
what comes later, so one that hangs costs this once."""

_END_S = 1.0


class Notices:
    """Takes signals and asks a hook; owned by a `CheckpointManager`.

    A handler that was there before is called after ours has taken note. Where there was none, the
    signal no longer ends the process: whoever asked for it ends it after the save. `close` puts
    back what was there, unless another handler has taken our place. Closed, or in a forked child,
    a handler of ours that is still installed steps aside: what was there before it decides.

    Raises `InvalidInputError` outside the main thread, where Python sets no handlers.
    """

    def __init__(
        self, signals: Sequence[int] = (), hook: Callable[[], object] | None = None
    ) -> None:
        self._hook = None if hook is None else _Hook(hook)
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
        if self._is_closed or os.getpid() != self._pid:
            self._step_aside(number, frame)
            return
        self._noted = self._noted or _name_of(number)
        before = self._predecessor(number)
        if callable(before):
            before(number, frame)

    def _step_aside(self, number: int, frame: FrameType | None) -> None:
        """Do with a signal what would be done had this handler never been installed."""
        before = self._predecessor(number)
        is_installed = signal.getsignal(number) == self._take
        if is_installed:
            signal.signal(number, before)
        if callable(before):
            before(number, frame)
        elif is_installed:
            # The default, or nothing: as the system does it.
            signal.raise_signal(number)

    def _predecessor(self, number: int) -> Any:  # noqa: ANN401  # as `signal.getsignal`
        """Return the handler before ours, past those of managers that are closed."""
        before = self._before.get(number)
        owner = getattr(before, "__self__", None)
        while isinstance(owner, Notices) and owner._is_closed:  # noqa: SLF001  # one of us
            before = owner._before.get(number)  # noqa: SLF001  # the same
            owner = getattr(before, "__self__", None)
        # None: C code installed it, and Python cannot.
        return signal.SIG_DFL if before is None else before

    @property
    def are_asked_for(self) -> bool:
        """Whether there can be a notice at all."""
        return not self._is_closed and (bool(self._before) or self._hook is not None)

    def given(self, *, asks_hook: bool = True) -> str | None:
        """Return what the notice was, None if there was none yet. Never raises."""
        if self._noted is None and asks_hook and self._hook is not None and self._hook.ask():
            self._noted = "the preemption hook"
        return self._noted

    def close(self) -> None:
        """Put back the handlers that were there; idempotent.

        Outside the main thread they are put back when the signal comes.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._hook is not None:
            self._hook.close()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take and before is not None:
                signal.signal(number, self._predecessor(number))


class _Hook:
    """Asks a function of the user's on a thread of its own: one that hangs keeps nobody waiting."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._changed = threading.Condition()
        self._is_asked = False
        self._is_closing = False
        self._answer = False
        self._thread: threading.Thread | None = None

    def ask(self) -> bool:
        """Return whether it has ever said yes; ask it again, unless it has not answered yet."""
        with self._changed:
            if self._answer or self._is_asked or self._is_closing:
                return self._answer
            self._is_asked = True
            if self._thread is None:
                name = "ckpt-storage preemption"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_asked, _ANSWER_S)
            return self._answer

    def close(self) -> None:
        """End the thread; one in a hook that hangs is left behind."""
        with self._changed:
            self._is_closing = True
            thread = None if self._is_asked else self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_asked or self._is_closing)
                if self._is_closing:
                    return
            answer = False
            try:
                answer = bool(self._function())
            except Exception:  # training must not end because a metadata server did not answer
                log.exception("The preemption hook failed; it counts as no notice.")
            with self._changed:
                self._answer = self._answer or answer
                self._is_asked = False
                self._changed.notify_all()


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name of its own
