"""One part that fails lets go those that wait in the same upload, before anybody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from commit_tools import DictStore, Disk

from ckpt_storage.errors import IntegrityError
from ckpt_storage.export.consolidation.work import RankWork
from ckpt_storage.export.copyparts import FileToCopy
from ckpt_storage.export.filecopies import FileCopier
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.base import Arrived, Upload
from ckpt_storage.store.deadline import Deadline

PART_BYTES = 64 << 10
WAIT_S = 60.0


class Waiting:
    """An upload whose later parts wait for the first, as a stream does."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._has_stopped = threading.Event()
        self.entered = threading.Event()

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Wait until stopped."""
        del offset, buffers, last
        self.entered.set()
        self._log.append(f"let go {self._has_stopped.wait(WAIT_S)} {number}")

    def complete(self, total_bytes: int) -> None:
        """Never come to this."""
        raise AssertionError(total_bytes)

    def stop(self) -> None:
        """Let go."""
        self._log.append("stop")
        self._has_stopped.set()

    def abort(self) -> None:
        """Note it."""
        self._log.append("abort")


class Target(DictStore):
    """A store whose uploads wait."""

    def __init__(self) -> None:
        super().__init__(Disk())
        self.log: list[str] = []
        self.upload = Waiting(self.log)

    def start_upload(  # type: ignore[override]  # no upload of a dict
        self, path: str, *, part_bytes: int
    ) -> Upload:
        """Begin."""
        del path, part_bytes
        return self.upload


class Source(DictStore):
    """A store whose file cannot be read from its start, once a later part waits."""

    def __init__(self, entered: threading.Event) -> None:
        super().__init__(Disk())
        self._entered = entered

    def read_into(
        self,
        path: str,
        start: int,
        target: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> None:
        """Fail for the first bytes."""
        del target, size_bytes, arrived
        if start == 0:
            assert self._entered.wait(WAIT_S)
            raise IntegrityError("damaged", path=path, offset=0)


def test_a_copy_that_fails_stops_the_parts_that_wait_before_it_waits_for_them() -> None:
    """The failure is raised, all siblings have been let go by then, and the abort comes last."""
    target = Target()
    copier = FileCopier(
        Source(target.upload.entered),
        target,
        options=TransferOptions(
            thread_count=4, part_bytes=PART_BYTES, memory_limit_bytes=64 * PART_BYTES
        ),
        deadline=Deadline("write", WAIT_S),
        copies="never",
    )
    with pytest.raises(IntegrityError):
        copier.copy([FileToCopy(path="a", target="a", size_bytes=4 * PART_BYTES)])
    assert target.log[0] == "stop"
    assert target.log[-1] == "abort"
    let_go = target.log[1:-1]
    assert let_go
    assert all(entry.startswith("let go True") for entry in let_go)


def test_an_export_that_fails_stops_all_its_uploads_before_it_aborts_one() -> None:
    """An abort may take long; no thread of another upload waits for it."""
    target = Target()
    work = RankWork.__new__(RankWork)
    work._open, work._kept = [target.upload, target.upload], {}  # noqa: SLF001  # no plan needed
    work.__exit__()
    assert target.log == ["stop", "stop", "abort", "abort"]
