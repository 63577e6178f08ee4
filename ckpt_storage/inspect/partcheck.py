"""Whether a checkpoint can be loaded, by one process or by many, each of which reads a part of it.

Unlike `verify`, which reports all that is wrong with a folder, this asks for a reason to pass the
checkpoint over. That torch's own readers would not find it, or that an export of it is damaged, is
none: a job that went back for it would lose work.
"""

from __future__ import annotations

from ckpt_storage.commit.slotlog import read_log
from ckpt_storage.errors import IntegrityError
from ckpt_storage.source.model import gone, read_manifest
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .shardspots import Part
from .verification import verification_of


def check_part(store: Store, part: Part, *, deep: bool, deadline: Deadline) -> str | None:
    """Check one part of a checkpoint; return the id of the save that was checked, None without one.

    `deep` reads every byte of the part, otherwise only documents and file lengths count. What
    another tool wrote has no checksums: the first part checks that it can be read. `store` is
    bounded by `deadline`. Not collective; changes nothing.

    Raises `IntegrityError` that names the first problem, `CheckpointGoneError` if the save was
    replaced or deleted meanwhile, what opening raises if there is nothing, `StorageError`,
    `PhaseTimeoutError`.
    """
    with deadline.governs(f"Checking {store.url}"):
        check = verification_of(store, deadline, deep=deep, part=part)
        check.run(lambda _, __: None)
        if not check.findings.problems:
            return check.save_id
        if check.save_id is not None:
            replaced = gone(store, check.save_id, store.url)
            if replaced is not None:
                raise replaced
        problem = check.findings.problems[0]
        raise IntegrityError(
            problem.message,
            path=problem.file,
            fqn=problem.fqn,
            offset=problem.offset,
            next_step=problem.next_step,
        )


def part_bytes(store: Store, part: Part, deadline: Deadline) -> int:
    """Return how many bytes a deep check of this part reads; 0 for what another tool wrote.

    Costs three small reads. Raises `IntegrityError`, `StorageError`, `PhaseTimeoutError`.
    """
    with deadline.governs(f"Checking {store.url}"):
        head = read_log(store).head
        if head is None:
            return 0
        files = [(ref.path, ref.size_bytes) for ref, _ in read_manifest(store, head).files]
        return sum(map(len, part.stretches(files).values()))
