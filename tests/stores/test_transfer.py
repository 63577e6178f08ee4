"""Transfers keep to their memory and deadlines; where one fails, nothing goes on behind it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import crc32c
import dcp_cases
import pytest
import torch
from commit_tools import CAS, DictBackend, DictStore, Disk, saved
from limits import HANG_S

from ckpt_storage import (
    InvalidInputError,
    PhaseTimeoutError,
    StorageError,
    Timeouts,
    convert,
    copy,
    list_checkpoints,
    save,
)
from ckpt_storage.commit import slotlog
from ckpt_storage.coordination.terms import check_terms
from ckpt_storage.errors import IntegrityError, RankMismatchError
from ckpt_storage.options import (
    DEFAULT_PART_BYTES,
    MIB,
    RetryPolicy,
    TransferOptions,
    default_memory_limit_bytes,
)
from ckpt_storage.store import Location, endpoint_of
from ckpt_storage.store.backend import Backend, Capabilities, Range
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.threads import AbandonedError
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.transfer.budget import READ_BUDGET
from ckpt_storage.transfer.ranges import RangeRead, RangeReader
from ckpt_storage.transfer.workers import Workers
from ckpt_storage.transfer.writing import part_bytes_for


def test_a_failed_load_touches_no_target_after_it_was_raised(tmp_path: Path) -> None:
    """`run` raises when reads that were under way have ended, and hands out nothing."""
    (tmp_path / "slow").write_bytes(b"x" * 1000)

    class Ordered(LocalBackend):
        """Both reads are in flight before that of an absent file fails; the other ends later."""

        def read(self, path: str, ranges: Iterable[Range]) -> int:
            if path == "absent":
                assert faults.script.wait_hung(HANG_S)
                threading.Timer(0.3, faults.script.release).start()
            return super().read(path, ranges)

    slow = Rule(action="hang", operation="read", path="slow")
    faults = FaultBackend(Ordered(str(tmp_path)), [slow])
    done: list[str] = []
    reads = [
        RangeRead(path="absent", start=0, stop=1),
        RangeRead(path="slow", start=0, stop=1000, done=lambda _: done.append("slow")),
    ]
    with pytest.raises(StorageError, match="absent"):
        read(faults, TransferOptions(thread_count=2), reads)
    assert {call.path for call in faults.script.calls} == {"absent", "slow"}
    assert done == []
    assert READ_BUDGET.held_bytes == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("read from")]


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
    state = {"a": torch.zeros(4 << 20), "step": 1}
    with pytest.raises(PhaseTimeoutError, match=r"Timeouts\.write") as caught:
        dcp_cases.save_alone(state, tmp_path / "c", timeout=Timeouts(write=0.3))
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.rank, caught.value.phase) == (0, "write")
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
        save({"a": torch.zeros(1)}, tmp_path / step)
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


@pytest.mark.parametrize(
    ("local_size", "mib"), [("", 256), ("0", 256), ("8", 128), ("100", 64), ("x", 256)]
)
def test_ranks_of_a_node_share_what_is_the_default(
    local_size: str, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gibibyte in all, no more than one alone has, and enough for some parts."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    assert default_memory_limit_bytes() // MIB == mib
    # Of an export one part is read while another is written.
    assert default_memory_limit_bytes() >= 4 * DEFAULT_PART_BYTES

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
    with pytest.raises(StorageError, match="could not start the thread"):
        Workers(5, name="few", deadline=Deadline("write", 60.0))
    for thread in began:
        thread.join(20)
    assert not any(thread.is_alive() for thread in began)


KIB = 1024
PART_BYTES = 64 * KIB


def content(count: int) -> bytes:
    """Return as many parts of bytes that tell them apart."""
    return b"".join(bytes([number]) * PART_BYTES for number in range(count))


def reads_of(count: int, got: dict[int, bytes]) -> list[RangeRead]:
    """Return the reads of all parts through buffers, each noted in `got` by its first byte."""

    def note(view: memoryview) -> None:
        got[view[0]] = bytes(view)

    starts = range(0, count * PART_BYTES, PART_BYTES)
    return [RangeRead(path="f", start=at, stop=at + PART_BYTES, done=note) for at in starts]


def options_for(parts: int, threads: int = 16) -> TransferOptions:
    """Return options with memory for that many parts, with the client's copy of each."""
    return TransferOptions(
        thread_count=threads,
        part_bytes=PART_BYTES,
        block_bytes=KIB,
        memory_limit_bytes=2 * parts * PART_BYTES,
    )


def read(store: Backend, options: TransferOptions, reads: list[RangeRead]) -> None:
    RangeReader(Store(store, url="test://"), options).run(reads)


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_reads_of_one_process_keep_to_the_memory_limit(tmp_path: Path, parts: int) -> None:
    """Of two transfers together as many are under way as the memory allows one, and no more."""
    (tmp_path / "f").write_bytes(content(24))
    local = LocalBackend(str(tmp_path))
    local.capabilities = dataclasses.replace(local.capabilities, is_remote=True)
    faults = FaultBackend(local, [Rule(action="hang", operation="read", hit_count=parts)])
    results: list[dict[int, bytes]] = [{}, {}]
    with ThreadPoolExecutor(2) as pool:
        for got in results:
            pool.submit(read, faults, options_for(parts), reads_of(24, got))
        for _ in range(parts):
            assert faults.script.wait_hung(HANG_S)
        time.sleep(0.1)
        assert len(faults.script.calls) == parts
        faults.script.release()
    for got in results:
        assert b"".join(got[number] for number in range(24)) == content(24)


def test_a_read_that_hangs_keeps_no_memory_from_others(tmp_path: Path) -> None:
    """A read that was given up delivers nothing, and the next transfer has the whole limit."""
    (tmp_path / "f").write_bytes(content(4))
    faults = FaultBackend(LocalBackend(str(tmp_path)), [Rule(action="hang", operation="read")])
    store = Store(faults, url="hung://", request_timeout_s=1.0)
    got: dict[int, bytes] = {}
    options = dataclasses.replace(options_for(1, threads=1), memory_limit_bytes=PART_BYTES)
    with pytest.raises(AbandonedError):
        RangeReader(store, options).run(reads_of(4, got))
    again: dict[int, bytes] = {}
    RangeReader(store, options).run(reads_of(4, again))
    assert b"".join(again[number] for number in range(4)) == content(4)
    faults.script.release()
    store.close()
    assert got == {}


class TwoFaced(DictBackend):
    """The first read breaks off after a good piece; the second brings a damaged one."""

    attempt_count = 0

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        self.attempt_count += 1
        for number, (start, view) in enumerate(ranges):
            if number and self.attempt_count == 1:
                raise ConnectionResetError
            view[:] = self.disk.files[path][start : start + len(view)]
            if not number and self.attempt_count == 2:
                view[3] ^= 1
        return len(self.disk.files[path])


def test_a_piece_that_is_read_again_is_checked_again() -> None:
    """The bytes that stay in the target are those of the last attempt, and all of them count."""
    disk, block = Disk(), bytes(range(256)) * 1024
    disk.put("x", block * 8)
    backend = TwoFaced(disk, dataclasses.replace(CAS, is_remote=False))
    store = Store(backend, url="dict://root", policy=RetryPolicy(first_delay_s=0.0))
    wrong: list[int] = []

    def check(view: memoryview, at: int) -> None:
        starts = range(0, len(view), len(block))
        crcs = [crc32c.crc32c(view[start : start + len(block)]) for start in starts]
        expected = crc32c.crc32c(block)
        wrong.extend(at + i for i, crc in zip(starts, crcs, strict=True) if crc != expected)

    size = 8 * len(block)
    into = memoryview(bytearray(size))
    whole = RangeRead(path="x", start=0, stop=size, into=into, check=check, block_bytes=len(block))
    RangeReader(store, TransferOptions(thread_count=1)).run([whole])
    store.close()
    assert backend.attempt_count == 2
    assert wrong == [0]


def test_after_a_failure_no_other_job_is_begun() -> None:
    """Jobs that wait when one fails only release what they hold."""
    queued, jobs, ended = threading.Event(), list[str](), list[str]()

    def fail() -> None:
        queued.wait(60.0)
        raise ValueError("the first job")

    deadline = Deadline("write", 60.0)
    with Workers(1, name="jobs", deadline=deadline, limit=lambda: 9) as workers:
        workers.submit(fail)
        for name in ("a", "b"):
            workers.submit(partial(jobs.append, name), ended=partial(ended.append, name))
        queued.set()
        with pytest.raises(ValueError, match="the first job"):
            workers.drain()
    assert (jobs, ended) == ([], ["a", "b"])


def test_a_check_gets_whole_blocks() -> None:
    """A piece that ends within a block is checked as far as its last whole block."""
    disk, size, block_bytes = Disk(), 9 << 20, 3 << 18
    disk.put("x", bytes(size))
    store = Store(DictBackend(disk, dataclasses.replace(CAS, is_remote=False)), url="dict://root")
    checked: list[tuple[int, int]] = []

    def check(view: memoryview, at: int) -> None:
        checked.append((at, at + len(view)))

    into = memoryview(bytearray(size))
    whole = RangeRead(path="x", start=0, stop=size, into=into, check=check, block_bytes=block_bytes)
    RangeReader(store, TransferOptions(thread_count=1)).run([whole])
    store.close()
    assert len(checked) > 1
    assert [start for start, _ in checked] == [0, *(stop for _, stop in checked[:-1])]
    assert all(stop % block_bytes == 0 for _, stop in checked[:-1])


SLOT_1, SLOT_2 = "commits/00000001.json", "commits/00000002.json"


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_slots_that_are_read_together_tell_what_they_tell_in_turn(count: int) -> None:
    """Whatever the number of slots, the log is that of `read_log`, and no slot is read twice."""
    disk, paths = Disk(), list[str]()
    store = DictStore(disk, CAS)
    save_ids = [saved(store) for _ in range(count)]
    watched = DictStore(disk, CAS, lambda _, path: paths.append(path))
    found = slotlog.read_log(watched, for_reader=True)
    assert found == slotlog.read_log(store)
    assert (found.head.save_id if found.head else None) == (save_ids[-1] if save_ids else None)
    assert found.last_slot == count
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("broken", [SLOT_1, SLOT_2])
def test_a_slot_that_cannot_be_read_is_no_absent_slot(broken: str) -> None:
    """A failed read of either slot is raised: a newer commit may lie behind it."""
    disk = Disk()
    store = DictStore(disk, CAS)
    saved(store)

    def gate(_: str, path: str) -> None:
        if path == broken:
            raise StorageError("No answer.", kind="server", retryable=False)

    with pytest.raises(StorageError, match="No answer"):
        slotlog.read_log(DictStore(disk, CAS, gate), for_reader=True)
