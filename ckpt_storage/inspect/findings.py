"""What a verification found so far: what is wrong, and how much was looked at."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError

__all__ = ["Findings", "Problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, or to be known: in which file, of which rank, tensor and byte."""

    message: str
    next_step: str
    file: str | None = None
    rank: int | None = None
    fqn: str | None = None
    offset: int | None = None


class Findings:
    """Problems, collected instead of raised at the first, and what of a checkpoint was checked.

    `is_part`: of one of several processes, which ask together whether the checkpoint can be loaded.
    """

    def __init__(self, *, is_part: bool) -> None:
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.file_count = 0
        self.checked_bytes = 0
        self._is_part = is_part

    @property
    def is_settled(self) -> bool:
        """Whether more problems would change nothing."""
        return self._is_part and bool(self.problems)

    def note(
        self, error: CheckpointError, *, rank: int | None = None, path: str | None = None
    ) -> None:
        """Add what `error` says to the problems; `path` if it names the file in another way."""
        text = str(error)
        step = error.next_step or "Load another checkpoint."
        self.problems.append(
            Problem(
                message=text.removesuffix(step).strip(),
                next_step=step,
                file=path or error.path,
                rank=rank if error.rank is None else error.rank,
                fqn=getattr(error, "fqn", None),
                offset=getattr(error, "offset", None),
            )
        )

    def note_or_raise(
        self, error: CheckpointError, rank: int | None = None, path: str | None = None
    ) -> None:
        """Damage and absence are findings; a storage that does not answer is not.

        To a part, neither is what this release is too old for: no other checkpoint is better.
        """
        if isinstance(error, StorageError) and error.kind != "not-found":
            raise error
        if self._is_part and not isinstance(error, IntegrityError | StorageError):
            raise error
        self.note(error, rank=rank, path=path)
