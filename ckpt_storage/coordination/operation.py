"""One save, load or consolidation of all ranks, as what runs in it sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError
from ckpt_storage.options import Phase, Timeouts
from ckpt_storage.store.deadline import Deadline, Watch

from .signs import Sign


class Operation(Watch, Protocol):
    """One save, load or consolidation, as one rank sees it; a `Watch` for its transfers.

    All ranks call `meet` first, and then the same steps (`gather`, `scatter`, `broadcast`,
    `all_gather`, `outcome`) in the same order. All but `failure`, `advanced`, `expect`,
    `ended_file`, `give_up` and `signs` belong to the thread that runs the operation.

    `what` names it in messages ("the save to s3://..."). `save_id` is that of the save, once it is
    known, and `committed` what was committed, while the operation goes on after that. `verdict` is
    the error that was reported first, the same on all ranks; it is set when the operation has ended
    with an error, None where the ranks had not met or cannot reach one another. `is_void`: what the
    save wrote on all ranks is to be deleted; false again once it ended without a word of one.
    """

    what: str
    rank: int
    world_size: int
    is_coordinator: bool
    timeouts: Timeouts
    save_id: str | None
    committed: CheckpointInfo | None
    verdict: CheckpointError | None
    is_void: bool

    def meet(self, terms: Mapping[str, str]) -> None:
        """Wait for all ranks and check that they mean the same; the first of all steps.

        `terms` maps the name of everything ranks must share to its value, as text. Raises
        `RankMismatchError` listing value -> ranks, `RankFailedError` if a rank failed before it
        came here, `PhaseTimeoutError` naming ranks that did not come; on all ranks that came.
        """

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank and return its deadline, which knows of others' failures.

        The default timeout is that of the operation's `Timeouts`.
        """

    @property
    def deadline(self) -> Deadline:
        """Of the phase that this rank is in."""

    @property
    def current_phase(self) -> Phase:
        """The phase that this rank is in."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Send `payload` to the coordinator; it gets all in order of rank, others an empty list.

        Others return at once. Raises `RankFailedError`, `PhaseTimeoutError` naming the missing.
        """

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Give each rank its own of the coordinator's `payloads` (others pass none)."""

    def broadcast(self, payload: bytes) -> bytes:
        """Return the coordinator's `payload` on every rank (others pass anything)."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, in order of rank, on every rank."""

    def announce(self, outcome: bytes) -> None:
        """Tell all ranks how the operation ended; the coordinator's last word, also after errors.

        A rank that fails while the coordinator commits may report it too late: then this counts.
        """

    def outcome(self) -> bytes:
        """Return what the coordinator announces; on the other ranks.

        Raises as `gather`; unless that is the coordinator's last word, only after a moment in
        which that may still come.
        """

    def is_last_word(self, error: CheckpointError) -> bool:
        """Return whether the coordinator failed, and `error`, raised by `outcome`, is how.

        It is not where the coordinator only noticed that others are silent, or where its save was
        cancelled from another thread: it may be committing.
        """

    def give_up(self, error: CheckpointError) -> None:
        """End the operation on all ranks with `error`, from any thread; one that ended stays so.

        Before all ranks have met, it takes effect when they do.
        """

    @property
    def signs(self) -> Mapping[int, Sign]:
        """The last sign of life of each rank that this rank has heard of."""
