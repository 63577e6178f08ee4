"""What is given up leaves nothing behind, and takes away nothing that is another's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from remote_tools import plain

from ckpt_storage.export.filecopies import FileCopier
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.s3_server import S3Server
from ckpt_storage.transfer.workers import Workers


@pytest.fixture(scope="module")
def shared() -> Iterator[S3Server]:
    """One server for all tests, so that they share clients."""
    with S3Server() as running:
        running.create_bucket("bkt")
        yield running


class Stubborn:
    """An upload that cannot be aborted at first."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]
        self.aborted_count = 0

    def abort(self) -> None:
        """Fail once."""
        if self._errors:
            raise self._errors.pop()
        self.aborted_count += 1


class OpenFile:
    """What a copier knows of a file on its way."""

    def __init__(self, path: str, upload: Stubborn) -> None:
        self.file = self
        self.target = path
        self.upload = upload


def copier_of(shared: S3Server, files: Sequence[OpenFile]) -> Any:
    """Return a copier that has these files open."""
    store = plain(shared)
    made: Any = FileCopier(
        store, store, options=TransferOptions(), deadline=Deadline("write", 60.0)
    )
    made._open = {one.target: one for one in files}  # noqa: SLF001
    return made


def test_an_upload_whose_abort_failed_is_aborted_again(shared: S3Server) -> None:
    """What was to be given up stays open until it is, and is cleared up with the rest."""
    one = OpenFile("a", Stubborn(OSError("lost")))
    copier = copier_of(shared, [one])
    with pytest.raises(OSError, match="lost"), copier._aborting():  # noqa: SLF001
        copier._give_up(one)  # noqa: SLF001
    assert one.upload.aborted_count == 1


def test_an_abort_that_fails_in_any_way_keeps_no_other_open(shared: S3Server) -> None:
    """Of several open files each is aborted, whatever the abort of another raises."""
    files = [OpenFile("a", Stubborn(ValueError("odd"))), OpenFile("b", Stubborn(OSError("lost")))]
    files.append(OpenFile("c", Stubborn(KeyError("x"))))
    files[2].upload._errors.clear()  # noqa: SLF001  # it can be aborted
    with pytest.raises(RuntimeError) as caught, copier_of(shared, files)._aborting():  # noqa: SLF001
        raise RuntimeError("the copy failed")
    assert files[2].upload.aborted_count == 1
    assert len(caught.value.__notes__) == 2


def test_workers_that_cannot_all_be_started_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may have no more threads keeps none that waits for jobs for ever."""
    began: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(began) == 3:
            raise RuntimeError("can't start new thread")
        began.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        Workers(5, name="few", deadline=Deadline("write", 60.0))
    for thread in began:
        thread.join(20)
    assert not any(thread.is_alive() for thread in began)
