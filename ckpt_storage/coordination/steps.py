"""The steps of an operation: small messages between its ranks, in the same order on all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError

from .board import BoardError, Waits
from .failures import COORDINATOR, lost_board, name_ranks
from .signs import Signs


class Steps:
    """Messages of one operation; `Operation` sets what it needs. Keys begin with the id."""

    what: str
    rank: int
    world_size: int
    is_coordinator: bool
    id: str
    _waits: Waits
    _signs: Signs
    _step: int
    _keys: list[str]

    def gather(self, payload: bytes) -> list[bytes]:
        """Send `payload` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. Raises `RankFailedError`, `PhaseTimeoutError` naming the missing.
        """
        step = self._next_step("gather")
        with self._over_the_board():
            if not self.is_coordinator:
                self._put(f"{step}/{self.rank}", payload)
                return []
            keys = {rank: f"{step}/{rank}" for rank in self._others()}
            self._await(keys)
            got = {rank: self._take(key) for rank, key in keys.items()}
        return [got.get(rank, payload) for rank in range(self.world_size)]

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Give each rank its own of the coordinator's `payloads` (others pass none)."""
        step = self._next_step("scatter")
        with self._over_the_board():
            if self.is_coordinator:
                for rank in self._others():
                    self._put(f"{step}/{rank}", payloads[rank])
                return payloads[self.rank]
            key = f"{step}/{self.rank}"
            self._await({COORDINATOR: key})
            return self._take(key)

    def broadcast(self, payload: bytes) -> bytes:
        """Return the coordinator's `payload` on every rank (others pass anything)."""
        step = self._next_step("broadcast")
        with self._over_the_board():
            if self.is_coordinator:
                self._put(step, payload)
                return payload
            self._await({COORDINATOR: step})
            return self._read(step)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in order of rank, on every rank."""
        packed = self.broadcast(pickle.dumps(self.gather(payload)))
        together: list[bytes] = pickle.loads(packed)  # noqa: S301  # our own ranks
        return together

    @contextmanager
    def _over_the_board(self) -> Iterator[None]:
        """Raise that the store is lost as what it means for the operation."""
        try:
            yield
        except BoardError as error:
            raise self._waits.failure or lost_board(
                error, self._waits.deadline, self.what
            ) from error

    @property
    def _prefix(self) -> str:
        return f"op/{self.id}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _next_step(self, name: str) -> str:
        self._step += 1
        return f"{self._prefix}/{self._step}-{name}"

    def _put(self, key: str, payload: bytes) -> None:
        self._keys.append(key)
        self._waits.set(key, payload)

    def _read(self, key: str) -> bytes:
        data = self._waits.get(key)
        if data is None:
            raise CheckpointError(
                f"{self.what}: a message between ranks is gone ({key}).",
                next_step="Make sure that all ranks call the same operations in the same order.",
            )
        return data

    def _take(self, key: str) -> bytes:
        data = self._read(key)
        self._waits.delete(key)
        return data

    def _await(self, keys: Mapping[int, str]) -> None:
        """Wait until something lies under each key, put there by the rank it is listed for."""
        names = list(keys.values())
        self._waits.until(
            lambda: self._waits.board.has_all(names, self._waits.patience_s()) or None,
            lambda: self._late(self._waits.missing(keys)),
        )

    def _late(self, ranks: Sequence[int]) -> PhaseTimeoutError:
        deadline = self._waits.deadline
        known = "; ".join(self._signs.describe(rank) for rank in ranks[:8])
        verb = "has" if len(ranks) == 1 else "have"
        return PhaseTimeoutError(
            f"{name_ranks(ranks)} of {self.world_size} {verb} not ended it within "
            f"{deadline.timeout_s:g} s in the {deadline.phase} phase of {self.what}: {known}.",
            timeout_s=deadline.timeout_s,
            rank=ranks[0] if ranks else None,
            phase=deadline.phase,
            next_step="Look at what those ranks are doing; if they are only slow, raise "
            f"Timeouts.{deadline.phase}.",
        )
