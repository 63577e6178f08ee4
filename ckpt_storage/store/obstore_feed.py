"""Parts handed to obstore in order and without a copy, by one thread or by several.

obstore takes an object as an iterator of buffers, cuts it into parts of one size and sends several
at a time from where they lie. It says nothing of a part; but it lets go of its buffers once the
part is on the storage, and that can be seen. Knows buffers and threads; knows no storage. Called by
`obstore_upload`.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ckpt_storage.errors import InvalidInputError

__all__ = ["MOST_VIEWS", "Feed", "StoppedError"]

_TURN_S = 0.05
"""How long a part waits for the one before it, which another thread is usually about to bring."""

_EARLY_CHUNKS = 2
"""How many chunks of parts that came before their turn are copied, beside any budget of memory."""

MOST_VIEWS = 64
"""A chunk of more views is joined: each view costs obstore a call into Python at its end."""


class StoppedError(Exception):
    """The feed was stopped: what obstore has sent so far is to be discarded."""


class Feed:
    """An iterator for obstore over the bytes that `put` brings; ends after `end`.

    `chunk_bytes` is the size of obstore's parts. What does not fill one is copied, as it stays in
    obstore's hands until more bytes come. Bytes that come before those that precede them
    are copied as well if these do not come within a moment, up to two chunks of them; what goes
    beyond that waits for its turn. It comes for callers who begin parts in order: the
    first part that is not here yet is then in the hands of a thread that waits for none.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._changed = threading.Condition()
        self._ready: deque[memoryview | bytes] = deque()
        self._loans: set[_Loan] = set()
        self._moved_s = time.monotonic()
        self._early: dict[int, bytes] = {}
        self._most_early_bytes = _EARLY_CHUNKS * chunk_bytes
        self._end_bytes = 0
        self._is_ended = False
        self._is_stopped = False
        self._is_exhausted = False

    def __iter__(self) -> Iterator[memoryview | bytes]:
        return self

    def __next__(self) -> memoryview | bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_ended or self._is_stopped)
            if self._is_stopped:
                raise StoppedError
            if self._ready:
                self._moved_s = time.monotonic()
                # In no variable: a reference that stays here would look like one of obstore's.
                return self._ready.popleft()
            self._is_exhausted = True
            raise StopIteration

    @property
    def is_stopped(self) -> bool:
        """Whether no more is taken: `put` returns then, whatever became of its bytes."""
        return self._is_stopped

    @property
    def is_exhausted(self) -> bool:
        """Whether obstore has taken all there is and was told that no more comes."""
        return self._is_exhausted

    @property
    def end_bytes(self) -> int:
        """How many bytes were brought without a gap from the start."""
        return self._end_bytes

    @property
    def is_ended(self) -> bool:
        """Whether all has been brought."""
        return self._is_ended

    @property
    def idle_s(self) -> float:
        """For how many seconds bytes have been on their way of which obstore let none go; else 0.

        Nor has it taken any.
        """
        with self._changed:
            return time.monotonic() - self._moved_s if self._loans else 0.0

    def lend(
        self,
        offset: int,
        views: Sequence[memoryview],
        *,
        last: bool,
        freed: Callable[[], None],
    ) -> bool:
        """Bring the bytes of `views` that belong at `offset`, which must be next; wait for nothing.

        `freed` is called once, soon and by any thread, when nobody reads them any more: they are on
        the storage then, or the feed was stopped. `last` ends the feed. Return False, and take
        nothing, once it was stopped. Raises `InvalidInputError` for bytes that are not next.
        """
        loan = _Loan(self._returned, freed)
        with self._changed:
            if self._is_stopped:
                return False
            if offset != self._end_bytes or self._is_ended:
                raise InvalidInputError(
                    f"Bytes at {offset} of an upload came where {self._end_bytes} is next.",
                    next_step="Queue parts in order; this is a mistake in a program.",
                )
            if not self._loans:
                self._moved_s = time.monotonic()
            self._loans.add(loan)
            self._queue(views, sum(view.nbytes for view in views), loan, last=last)
            self._is_ended = last
            self._changed.notify_all()
        loan.close()
        return True

    def _returned(self, loan: _Loan) -> None:
        # By whichever thread drops the last reference, also one that holds the lock: nothing here
        # may wait.
        self._moved_s = time.monotonic()
        self._loans.discard(loan)

    def put(self, offset: int, views: Sequence[memoryview], *, timeout_s: float) -> None:
        """Bring the bytes of `views` that belong at `offset`; return once nobody reads them.

        They are on the storage then, or they were copied, or the feed was stopped. Bytes that
        were brought before are not brought again. Raises `InvalidInputError` for bytes of which
        some were, and `TimeoutError`, also if the bytes before them do not come.
        """
        end_s = time.monotonic() + timeout_s
        lent = _Loans()
        size = sum(view.nbytes for view in views)
        with self._changed:
            if not self._await_turn(offset, size, timeout_s):
                raise TimeoutError(f"The bytes before byte {offset} did not come")
            if self._is_stopped or offset + size <= self._end_bytes:
                return
            if offset < self._end_bytes:
                raise InvalidInputError(
                    f"Some of the bytes at {offset} of an upload were sent before.",
                    next_step="Send each part with one length; this is a mistake in a program.",
                )
            if offset > self._end_bytes:
                self._early[offset] = b"".join(views)
                return
            self._queue(views, size, lent)
            while (data := self._early.pop(self._end_bytes, None)) is not None:
                self._queue([memoryview(data)], len(data), None)
            self._changed.notify_all()
        lent.wait(end_s)

    def _await_turn(self, offset: int, size: int, timeout_s: float) -> bool:
        """Wait until bytes are next, or may be kept until they are; return whether they are."""

        def is_next() -> bool:
            return self._end_bytes >= offset or self._is_stopped

        def has_room() -> bool:
            others = sum(len(data) for at, data in self._early.items() if at != offset)
            return others + size <= self._most_early_bytes

        if self._changed.wait_for(is_next, min(_TURN_S, timeout_s)):
            return True
        return self._changed.wait_for(lambda: is_next() or has_room(), timeout_s)

    def end(self) -> None:
        """Let obstore complete the object once it has taken all that was brought."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Make obstore discard what it has; idempotent, and nobody waits in `put` any more."""
        with self._changed:
            self._is_stopped = True
            self._ready.clear()
            self._early.clear()
            self._changed.notify_all()

    def _queue(
        self,
        views: Sequence[memoryview],
        size: int,
        lent: _Loans | _Loan | None,
        *,
        last: bool = False,
    ) -> None:
        """Queue bytes that are next: whole chunks as they lie, the rest as a copy if more come."""
        end_bytes = self._end_bytes + size
        full_bytes = end_bytes if last else end_bytes // self._chunk_bytes * self._chunk_bytes
        at = self._end_bytes
        self._end_bytes += size
        chunk: list[memoryview] = []
        for piece in _cut(views, at, self._chunk_bytes):
            chunk.append(piece)
            at += len(piece)
            if at % self._chunk_bytes == 0:
                self._lend(chunk, lent, is_full=True)
                chunk = []
        self._lend(chunk, lent, is_full=at <= full_bytes)

    def _lend(self, chunk: list[memoryview], lent: _Loans | _Loan | None, *, is_full: bool) -> None:
        if not is_full or len(chunk) > MOST_VIEWS:
            data = b"".join(chunk)
            chunk.clear()
            if not is_full or not isinstance(lent, _Loan):
                if data:
                    self._ready.append(data)
                return
            # The copy takes memory until it is sent.
            chunk.append(memoryview(data))
            del data
        while chunk:
            view = chunk.pop(0)
            if lent is not None:
                lent.add(view)
            self._ready.append(view)


def _cut(views: Sequence[memoryview], at: int, chunk_bytes: int) -> Iterator[memoryview]:
    """Yield new views of the same bytes, none of which goes beyond a chunk; `at` is the first's."""
    for view in views:
        flat = view.cast("B") if view.nbytes else view
        start = 0
        while start < view.nbytes:
            stop = min(view.nbytes, start + chunk_bytes - at % chunk_bytes)
            at += stop - start
            yield flat[start:stop]
            start = stop


class _Loan:
    """Views that were lent out together; `freed` is called when the last one has come back.

    And `returned` right before it, with the loan.
    """

    def __init__(self, returned: Callable[[_Loan], None], freed: Callable[[], None]) -> None:
        self._ended = returned
        self._freed = freed
        self._watched: list[weakref.ref[memoryview]] = []
        # Counting is one step of the interpreter's: views come back in several threads.
        self._count = itertools.count(1)

    def add(self, view: memoryview) -> None:
        """Watch a view that nobody else refers to for long."""
        self._watched.append(weakref.ref(view, self._returned))

    def close(self) -> None:
        """Take no more views; until then the loan itself counts as one that is out."""
        self._returned(None)

    def _returned(self, _: weakref.ref[memoryview] | None) -> None:
        # All are watched by the time that the last one comes back.
        if next(self._count) > len(self._watched):
            self._watched.clear()
            self._ended(self)
            self._freed()


class _Loans:
    """Views that were lent out; each comes back when the last reference to it is dropped."""

    def __init__(self) -> None:
        # Put into by whichever thread drops the last reference, perhaps within a lock.
        self._returned: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._watched: list[weakref.ref[memoryview]] = []

    def add(self, view: memoryview) -> None:
        """Watch a view that nobody else refers to for long."""
        returned = self._returned
        self._watched.append(weakref.ref(view, lambda _: returned.put(None)))

    def wait(self, end_s: float) -> None:
        """Wait until all are back, or for this moment (monotonic); raises `TimeoutError`."""
        for _ in itertools.repeat(None, len(self._watched)):
            try:
                self._returned.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{len(self._watched)} pieces are still being sent") from None
        self._watched.clear()
