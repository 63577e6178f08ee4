"""Transfers that fail: nothing goes on behind the caller's back, and errors name their limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_storage import (
    CheckpointStorageReader,
    CheckpointStorageWriter,
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
    Timeouts,
    convert,
    copy,
    list_checkpoints,
    save,
)
from ckpt_storage.coordination.failures import check_terms
from ckpt_storage.errors import IntegrityError, RankMismatchError
from ckpt_storage.options import MIB, TransferOptions, default_memory_limit_bytes
from ckpt_storage.store import Location, endpoint_of
from ckpt_storage.store.backend import Capabilities, Range
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.ranges import RangeRead, RangeReader
from ckpt_storage.transfer.workers import Workers
from ckpt_storage.transfer.writing import part_bytes_for


class SlowBackend(LocalBackend):
    """A local store whose read of the file "slow" waits for an event before it fills anything."""

    def __init__(self, root: str, release: threading.Event) -> None:
        super().__init__(root)
        self.release = release
        self.began = threading.Event()

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        """Read; "slow" late, "bad" not at all."""
        if path == "bad":
            self.began.wait(10)
            raise StorageError("no", kind="permission", path=path)
        if path == "slow":
            self.began.set()
            self.release.wait(10)
        return super().read(path, ranges)


def test_a_failed_load_touches_no_target_after_it_was_raised(tmp_path: Path) -> None:
    """`run` raises when reads that were under way have ended, and hands out nothing."""
    (tmp_path / "slow").write_bytes(b"x" * 1000)
    release = threading.Event()
    store = Store(SlowBackend(str(tmp_path), release), url="slow://")
    done: list[str] = []
    target = bytearray(1000)
    into, note = memoryview(target), done.append
    reads = [
        RangeRead(path="bad", start=0, stop=1),
        RangeRead(path="slow", start=0, stop=1000, into=into, done=lambda _: note("slow")),
    ]
    threading.Timer(0.3, release.set).start()
    with pytest.raises(StorageError, match="no"):
        RangeReader(store, TransferOptions(thread_count=2), Deadline("load", 60)).run(reads)
    assert release.is_set()
    assert done == []
    assert not [t for t in threading.enumerate() if t.name.startswith("read from")]


def _state() -> dict[str, Any]:
    return {"a": torch.zeros(4 << 20), "step": 1}


def _cause(action: Callable[[], object]) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        action()
    return caught.value.failures[0][0]


def test_a_write_that_passes_its_deadline_leaves_nothing_and_says_which_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is `PhaseTimeoutError` with rank and phase; the temporary file is removed."""
    real = LocalBackend.put_part

    def slow(*args: Any, **kw: Any) -> str:
        receipt = real(*args, **kw)
        time.sleep(0.6)  # the storage is slower than the phase allows
        return receipt

    monkeypatch.setattr(LocalBackend, "put_part", slow)
    writer = CheckpointStorageWriter(tmp_path / "c", timeout=Timeouts(write=0.3))
    cause = _cause(lambda: dcp.save(_state(), storage_writer=writer, no_dist=True))
    assert isinstance(cause, PhaseTimeoutError)
    assert isinstance(cause, TimeoutError)
    assert (cause.rank, cause.phase) == (0, "write")
    assert "Timeouts.write" in str(cause)
    left = [path.name for path in (tmp_path / "c").rglob("*") if path.is_file()]
    assert left == ["begun.json"]


def test_ranks_that_reach_different_servers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint, from options or environment, is among what ranks must agree on."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    one = Location.of("s3://bucket/x", {"endpoint_url": "http://u:secret@host-a:9000"})
    two = Location.of("s3://bucket/x", {"client_kwargs": {"endpoint_url": "http://host-b:9000"}})
    assert one.url == two.url
    assert (endpoint_of(one), endpoint_of(two)) == ("host-a:9000", "host-b:9000")
    monkeypatch.setenv("host", "laptop")
    assert endpoint_of(Location.of("sftp://server/x")) == "server"
    assert endpoint_of(Location.of("/tmp/x")) == ""  # noqa: S108  # nothing is written there
    terms = {rank: {"the endpoint": endpoint_of(at)} for rank, at in enumerate((one, two))}
    with pytest.raises(RankMismatchError, match=r"host-a:9000.*ranks 0.*host-b:9000.*ranks 1"):
        check_terms(terms, phase="plan")


def test_odd_folders_do_not_hide_checkpoints(tmp_path: Path) -> None:
    """A damaged record, or a folder with a name that is no URL, is left out of the list."""
    for step in ("step-9", "step-10", "~"):
        writer = CheckpointStorageWriter(tmp_path / step)
        dcp.save({"a": torch.zeros(1)}, storage_writer=writer, no_dist=True)
    for name in ("a::b", "s3:", "²", "x\\y"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "commits").mkdir(parents=True)
    (tmp_path / "damaged" / "commits" / "00000001.json").write_bytes(b"{}")
    names = [info.name for info in list_checkpoints(tmp_path)]
    assert names == ["step-9", "step-10", "~"]


def test_a_memory_limit_below_the_storages_least_part_is_refused() -> None:
    """Parts are never silently larger than the limit allows."""
    capabilities = Capabilities(kind="s3", parallel_parts=True, min_part_bytes=5 << 20)
    enough = TransferOptions(part_bytes=1 << 20, memory_limit_bytes=10 << 20)
    assert part_bytes_for(capabilities, enough, 10) == 5 << 20
    tight = TransferOptions(part_bytes=1 << 20, memory_limit_bytes=9 << 20)
    with pytest.raises(InvalidInputError, match="memory_limit_bytes"):
        part_bytes_for(capabilities, tight, 10)


def test_a_target_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    """Loading into a tensor without memory is an error, not a success."""
    writer = CheckpointStorageWriter(tmp_path / "c")
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)

    class Lazy(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.empty(tuple(read_item.lengths), device="meta")

    target = {"a": torch.zeros(3)}
    reader = CheckpointStorageReader(tmp_path / "c")
    cause = _cause(lambda: dcp.load(target, storage_reader=reader, planner=Lazy(), no_dist=True))
    assert isinstance(cause, InvalidInputError)


@pytest.mark.parametrize(("told", "mib"), [("", 256), ("8", 128), ("100", 64), ("x", 256)])
def test_ranks_of_a_node_share_what_is_the_default(
    told: str, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gibibyte in all, no more than one alone has, and enough for some parts."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    assert default_memory_limit_bytes() // MIB == mib

    def options(memory_limit_bytes: int | None) -> TransferOptions:
        return TransferOptions.for_storage(
            is_remote=True,
            local_threads=1,
            local_part_bytes=MIB,
            thread_count=None,
            part_bytes=None,
            memory_limit_bytes=memory_limit_bytes,
        )

    assert options(None).memory_limit_bytes // MIB == mib
    assert options(512 * MIB).memory_limit_bytes == 512 * MIB


def test_an_abort_that_fails_in_any_way_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several open files each is aborted, whatever the abort of another raises."""
    tried: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise IntegrityError("the copy failed", path="a", offset=0)

    def abort(upload: Upload) -> None:
        tried.append(repr(upload))
        raise ValueError("odd")

    save({f"t{i}": torch.ones(10) for i in range(3)}, tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dcp", to="dcp", max_file_bytes=40)
    monkeypatch.setattr(Upload, "complete", fail)
    monkeypatch.setattr(Upload, "abort", abort)
    with pytest.raises(IntegrityError) as caught:
        copy(tmp_path / "dcp", tmp_path / "dst", copies="never")
    assert len(caught.value.__notes__) == len(tried) > 1


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
