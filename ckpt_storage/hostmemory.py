"""Memory that the ranks of one host share for one load, and the words about what lies in it.

Knows processes, memory and pipes; knows no storage, no tensor and no process group. Made by
`sharers` while the ranks that share reads find one another; used by `sharedreads`.

Each rank makes one piece of memory without a name (`namelessmemory`) and one pipe, which the others
open through `/proc/PID/fd`, too. The memory is cut into buffers. Its owner fills a buffer, verifies
it and tells who waits for it; each of these copies what it wants straight out of the buffer and
says that it is done; then the buffer is filled anew.

Words are written whole, in at most `PIPE_BUF` bytes, so those of several ranks do not mix.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import select
import stat
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .deadline import Deadline
from .errors import CheckpointError, RankFailedError
from .namelessmemory import make_memory, open_memory

__all__ = ["HostMemory", "HostMemoryError", "Offer"]

log = logging.getLogger("ckpt_storage")

_PAGE_BYTES = 4096
_LOOK_S = 0.2
_CLOSE_S = 5.0

_WORD_S = 2.0
"""Within this every live rank hears why another one failed, if that one could still say so."""

_WORD_BYTES = 4096
"""Linux's `PIPE_BUF`: as many are written as one."""

_HEAD = struct.Struct("=qqqqq")
_PAIR = struct.Struct("=qq")
_PAIRS_MAX = (_WORD_BYTES - _HEAD.size) // _PAIR.size
_BYTES, _DONE = 1, 2

_WANTED_PIPE_BYTES = 1 << 20

_GIVEN_UP = "The memory of this load was given up."

Taken = Callable[[int, int, memoryview, Sequence[tuple[int, int]]], None]
"""Gets who sent, where in its memory a buffer begins, the buffer's bytes, and pairs: number of a
unit, where it begins in those bytes."""


class HostMemoryError(Exception):
    """Memory cannot be shared here; the caller goes another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a rank tells the others of its memory and its pipe."""

    pid: int
    memory_fd: int
    inbox_fd: int
    inbox_inode: int
    name: str
    size_bytes: int

    def pack(self) -> str:
        """Return text for the board."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Offer:
        """Return what `pack` made text of."""
        return cls(**json.loads(text))


@dataclass(slots=True)
class _Mate:
    """Another rank of this host: its memory, its pipe, its process."""

    pid: int
    memory: memoryview
    inbox_fd: int
    process_fd: int
    backlog: deque[bytes]


class HostMemory:
    """One rank's memory and pipe, and those of its mates; for one load.

    Args:
        rank: of the process in the load.
        buffer_bytes: length of a buffer.
        buffer_count: number of buffers; 0 for a rank that only takes.

    Raises `HostMemoryError` where there is no such memory, or too little.

    """

    def __init__(self, rank: int, *, buffer_bytes: int, buffer_count: int) -> None:
        self._rank = rank
        self._buffer_bytes = buffer_bytes + -buffer_bytes % _PAGE_BYTES
        self._size_bytes = max(_PAGE_BYTES, self._buffer_bytes * buffer_count)
        self._fds: list[int] = []
        self._mates: dict[int, _Mate] = {}
        self._free = deque(range(0, self._buffer_bytes * buffer_count, max(1, self._buffer_bytes)))
        self._pending: dict[int, int] = {}
        # By identity: a memoryview does not tell where in its memory it begins.
        self._lent: dict[int, tuple[int, memoryview]] = {}
        # Taken as itself where nothing is waited for: a condition's own way to it is longer.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pumping = threading.Lock()
        self._writing = threading.Lock()
        self._is_closed = False
        self._unread = b""
        self._taken: Taken = _nobody
        self._name = f"ckpt_storage-{os.urandom(12).hex()}"
        try:
            self._memory = self._made()
            self._inbox, self._own_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._fds += [self._inbox, self._own_end]
        except (OSError, ValueError) as error:
            self.close()
            raise HostMemoryError(f"no memory to share: {error}") from error
        try:
            _widen(self._own_end)
        except OSError as error:
            # Only slower: writers wait more often.
            log.debug("The pipe keeps its size: %s", error)
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)

    def _made(self) -> memoryview:
        fd = make_memory(self._name, self._size_bytes)
        self._fds.append(fd)
        return memoryview(mmap.mmap(fd, self._size_bytes))

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank's memory."""
        return self._size_bytes

    @property
    def mates(self) -> frozenset[int]:
        """The ranks that were reached."""
        return frozenset(self._mates)

    @property
    def offer(self) -> Offer:
        """What the mates need to know."""
        return Offer(
            pid=os.getpid(),
            memory_fd=self._fds[0],
            inbox_fd=self._own_end,
            inbox_inode=os.fstat(self._own_end).st_ino,
            name=self._name,
            size_bytes=self._size_bytes,
        )

    def reach(self, offers: Mapping[int, Offer]) -> None:
        """Open what the other ranks of this host offer.

        All must call it before any of them closes. Raises `HostMemoryError`.
        """
        for rank, offer in offers.items():
            try:
                self._mates[rank] = self._reached(offer)
            except (OSError, ValueError) as error:
                raise HostMemoryError(
                    f"rank {rank} (process {offer.pid}) cannot be reached: {error}"
                ) from error
            self._poll.register(self._mates[rank].process_fd, select.POLLIN)

    def _reached(self, offer: Offer) -> _Mate:
        process_fd = os.pidfd_open(offer.pid)
        self._fds.append(process_fd)
        memory = open_memory(
            pid=offer.pid, fd=offer.memory_fd, name=offer.name, size_bytes=offer.size_bytes
        )
        folder = f"/proc/{offer.pid}/fd"
        if str(Path(f"{folder}/{offer.inbox_fd}").readlink()) != f"pipe:[{offer.inbox_inode}]":
            raise ValueError("its pipe is another")
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
        inbox_fd = os.open(f"{folder}/{offer.inbox_fd}", flags)
        self._fds.append(inbox_fd)
        if not stat.S_ISFIFO(os.fstat(inbox_fd).st_mode):
            raise ValueError("its pipe is none")
        return _Mate(offer.pid, memory, inbox_fd, process_fd, deque())

    def takes(self, taken: Taken) -> None:
        """Let `taken` have what mates announce; it runs in the thread that pumps."""
        self._taken = taken

    def borrow(self, length: int, deadline: Deadline) -> memoryview:
        """Return `length` bytes of a free buffer; waits for one, and pumps meanwhile.

        The buffer is free again once all that it was announced to, and its owner, are done with it.
        """
        while True:
            with self._lock:
                if self._free:
                    # The one that was used last is still in the processor's cache.
                    at = self._free.pop()
                    view = self._memory[at : at + length]
                    self._lent[id(view)] = at, view
                    return view
            deadline.check("Waiting for the other ranks of this host to take what was read")
            self._pump_or_wait(deadline)

    def place_of(self, view: memoryview) -> int:
        """Return where in this rank's memory `view`, which `borrow` returned, begins."""
        return self._lent[id(view)][0]

    def memory_of(self, rank: int) -> memoryview:
        """Return the whole memory of this rank or of a mate."""
        return self._memory if rank == self._rank else self._mates[rank].memory

    def _pump_or_wait(self, deadline: Deadline) -> None:
        """Do one round of pumping, or wait for who does it."""
        if self._pumping.acquire(blocking=False):
            try:
                self._pump(_LOOK_S, deadline)
            finally:
                self._pumping.release()
        else:
            with self._changed:
                if not self._free:
                    self._changed.wait(_LOOK_S / 4)

    def announce(
        self,
        view: memoryview,
        pairs: Sequence[tuple[int, int]],
        ranks: Sequence[int],
        deadline: Deadline,
    ) -> None:
        """Tell `ranks` which units lie where in `view`, which `borrow` returned.

        The caller says `done` when it needs the view no more.
        """
        at = self.place_of(view)
        words = [pairs[start : start + _PAIRS_MAX] for start in range(0, len(pairs), _PAIRS_MAX)]
        with self._lock:
            self._pending[at] = len(words) * len(ranks) + 1
        for some in words:
            numbers = b"".join([_PAIR.pack(*pair) for pair in some])
            word = _HEAD.pack(_BYTES, self._rank, at, len(view), len(some)) + numbers
            for rank in ranks:
                self._tell(rank, word, deadline)

    def done(self, view: memoryview) -> None:
        """Say that the owner of `view`, which was announced, needs it no more."""
        with self._lock:
            self._freed(self._lent.pop(id(view))[0])

    def _tell(self, rank: int, word: bytes, deadline: Deadline) -> None:
        """Write a word to a rank's pipe; waits while that is full, and pumps meanwhile."""
        while not self._written(rank, word):
            deadline.check(f"Telling rank {rank} of what was read")
            if self._pumping.acquire(blocking=False):
                try:
                    self._pump(_LOOK_S / 100, deadline)
                finally:
                    self._pumping.release()
            else:
                deadline.sleep(_LOOK_S / 100)

    def _written(self, rank: int, word: bytes) -> bool:
        """Write a word if there is room; a rank that is gone needs none."""
        with self._writing:
            if self._is_closed:
                raise CheckpointError(_GIVEN_UP)
            try:
                return os.write(self._mates[rank].inbox_fd, word) == len(word)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    # It ended its load: by an error that will be heard of, or by its process.
                    return True
                if error.errno != errno.EAGAIN:
                    raise
                return False

    def pump(self, seconds: float, deadline: Deadline) -> None:
        """Take what mates have said; wait at most `seconds` for the first word.

        Raises `RankFailedError` naming a mate whose process ended, `CheckpointError`s of the
        operation, and what `taken` raises.
        """
        with self._pumping:
            self._pump(seconds, deadline)

    def glance(self, deadline: Deadline) -> None:
        """Take what mates have said, unless another thread is at it, which may wait for them.

        That a mate ended shows only where one waits. Raises what `taken` raises.
        """
        if self._pumping.acquire(blocking=False):
            try:
                self._pump(0, deadline)
            finally:
                self._pumping.release()

    def settle(self, deadline: Deadline) -> None:
        """Give the answers that found pipes full; called last, when no thread pumps any more.

        Raises as `pump`.
        """
        while self._mates_owed():
            deadline.check("Answering the other ranks of this host")
            # Not only written: another one that settles waits for room in this rank's pipe.
            self.pump(_LOOK_S / 100, deadline)

    def _pump(self, seconds: float, deadline: Deadline) -> None:
        if self._is_closed:
            raise CheckpointError(_GIVEN_UP)
        if self._mates_owed():
            seconds = min(seconds, _LOOK_S / 100)
        # Mostly there is something: to ask first would be a call more.
        if self._read():
            self._handle_all()
        elif seconds:
            ready = dict(self._poll.poll(int(seconds * 1000)))
            if self._inbox in ready:
                self._read()
                self._handle_all()
            elif ready:
                self._name_dead(ready, deadline)

    def _mates_owed(self) -> bool:
        """Write what did not fit into pipes before; return whether some still does not."""
        owed = False
        for rank, mate in self._mates.items():
            while mate.backlog and self._written(rank, mate.backlog[0]):
                mate.backlog.popleft()
            owed = owed or bool(mate.backlog)
        return owed

    def _read(self) -> bool:
        """Take what lies in the pipe; return whether there was anything."""
        try:
            self._unread += os.read(self._inbox, _WANTED_PIPE_BYTES)
        except BlockingIOError:
            return False
        return True

    def _handle_all(self) -> None:
        start = 0
        while len(self._unread) - start >= _HEAD.size:
            kind, rank, at, length, count = _HEAD.unpack_from(self._unread, start)
            mate = self._mates.get(rank)
            if mate is None or not 0 <= count <= _PAIRS_MAX or kind not in {_BYTES, _DONE}:
                raise self._nonsense(rank)
            stop = start + _HEAD.size + _PAIR.size * count
            if len(self._unread) < stop:
                break
            if kind == _DONE:
                with self._lock:
                    self._freed(at)
            else:
                if at < 0 or length <= 0 or at + length > len(mate.memory):
                    raise self._nonsense(rank)
                pairs = list(_PAIR.iter_unpack(self._unread[start + _HEAD.size : stop]))
                self._taken(rank, at, mate.memory[at : at + length], pairs)
                done = _HEAD.pack(_DONE, self._rank, at, 0, 0)
                # Never waits here: two ranks with full pipes would wait for one another.
                if mate.backlog or not self._written(rank, done):
                    mate.backlog.append(done)
            start = stop
        self._unread = self._unread[start:]

    def _freed(self, at: int) -> None:
        """Count one word on the buffer at `at` as answered; the caller holds the lock."""
        left = self._pending.get(at, 0) - 1
        if left > 0:
            self._pending[at] = left
            return
        if self._pending.pop(at, None) is not None:
            self._free.append(at)
            self._changed.notify_all()

    def _name_dead(self, ready: Mapping[int, int], deadline: Deadline) -> None:
        rank = next(rank for rank, mate in self._mates.items() if mate.process_fd in ready)
        # It may have told why, on a slower way.
        deadline.sleep(_WORD_S)
        deadline.check(f"Waiting for rank {rank}")
        process = f"rank {rank} (process {self._mates[rank].pid} of this host)"
        raise RankFailedError(
            f"{process[0].upper()}{process[1:]} ended while it shared reads with this one.",
            failures={rank: f"{process} ended"},
            rank=rank,
            phase=deadline.phase,
            next_step="See what ended that process (out of memory?).",
        )

    def _nonsense(self, rank: int) -> CheckpointError:
        return CheckpointError(
            f"Rank {rank} said to rank {self._rank} what it was not to say.",
            rank=rank,
            phase="load",
            next_step="Check that all ranks run one version; or pass shared_reads='never'.",
        )

    def close(self) -> None:
        """End the use of the pipes; the memory goes when nobody looks into it any more."""
        self._is_closed = True
        # Who takes knows this memory: together they would wait for the collector.
        self._taken = _closed
        # A thread that is late must not find its descriptors used for something else.
        if not self._pumping.acquire(timeout=_CLOSE_S):
            log.warning("A thread that shares reads has not ended; its pipes stay open.")
            return
        with self._writing:
            fds, self._fds = self._fds, []
            for fd in fds:
                os.close(fd)
        self._pumping.release()


def _nobody(_rank: int, _at: int, _view: memoryview, _pairs: Sequence[tuple[int, int]]) -> None:
    raise AssertionError("nobody takes what is announced")


def _closed(_rank: int, _at: int, _view: memoryview, _pairs: Sequence[tuple[int, int]]) -> None:
    raise CheckpointError(_GIVEN_UP)


def _widen(pipe: int) -> None:
    import fcntl  # noqa: PLC0415  # Windows has none

    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _WANTED_PIPE_BYTES)
