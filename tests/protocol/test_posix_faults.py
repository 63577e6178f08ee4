"""Every system call of every way to write a file, cut and failed one by one."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from fault_tools import each_fault
from limits import HANG_S
from local_stores import error_of, local_store
from posix_faults import FaultPosix
from power_cuts import PowerCutPosix

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Action, Rule, SimulatedCrash

NAME = "saves/x"
OLD = b"old content " * 3
NEW = b"new content, longer " * 5
PART_BYTES = 1 << 20
LONG = bytes(range(256)) * (10 << 10)
Lost: TypeAlias = Literal["data and names", "data"]
DRAFT = re.compile(r"\.x\.tmp-[0-9a-f]{16}")


def upload(store: Store, data: bytes = NEW, part_bytes: int = 40) -> None:
    """Upload content in three parts, the last one first, and abort if that fails, as callers do."""
    started = store.upload(NAME)
    try:
        for number in (2, 0, 1):
            start = part_bytes * number
            view = memoryview(data)[start : start + part_bytes]
            started.write_part(number, start, [view[:7], view[7:]], last=number == 2)
        started.complete(len(data))
    except Exception:
        started.abort()
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to write, what bears the name before, and what does after."""

    name: str
    run: Callable[[Store], None]
    before: bytes | None = None
    after: bytes = NEW


WAYS = (
    Way(name="write", run=lambda store: store.put(NAME, NEW)),
    Way(name="create", run=lambda store: store.create(NAME, NEW)),
    Way(name="replace-nothing", run=lambda store: store.replace(NAME, NEW)),
    Way(name="replace", run=lambda store: store.replace(NAME, NEW), before=OLD),
    Way(name="upload", run=upload),
    # The kernel begins to write this back before it is synced.
    Way(name="long-upload", run=partial(upload, data=LONG, part_bytes=PART_BYTES), after=LONG),
)
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)

CRASHES: tuple[Action, ...] = ("crash_before", "crash_after", "torn")
FAILURES: tuple[Action, ...] = ("error", "lost_answer")


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """A folder in memory: durability is simulated here, so real syncs idle."""
    return memory_path


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[Path]:
    """Fresh prepared roots, one after the other."""

    def fresh(number: int) -> Path:
        (tmp_path / str(number) / "saves").mkdir(parents=True)
        return tmp_path / str(number)

    return map(fresh, itertools.count())


def prepared(roots: Iterator[Path], way: Way) -> Path:
    """Return a fresh root with what `way` has before."""
    root = next(roots)
    if way.before is not None:
        (root / NAME).write_bytes(way.before)
    return root


def faults_of(
    roots: Iterator[Path], way: Way, action: Action, **rule: Any
) -> Iterator[tuple[str, str, Path, Rule]]:
    """Yield a fault at each system call of a run: where, at what, a fresh root, and the rule."""
    posix = FaultPosix()
    root = prepared(roots, way)
    way.run(local_store(str(root), posix=posix))
    assert (root / NAME).read_bytes() == way.after
    calls = posix.script.calls
    for at, fault in each_fault(calls, {action: "pwritev" * (action == "torn")}, **rule):
        yield at, calls[fault.skip_count].operation, prepared(roots, way), fault


def _content(root: Path) -> bytes | None:
    path = root / NAME
    return path.read_bytes() if path.exists() else None


def assert_clean_retry(root: Path, way: Way) -> None:
    """Check that a store without faults hides and sweeps leftovers and can write again."""
    store = local_store(str(root))
    visible = [entry.path for entry in store.list("")]
    assert visible == ([NAME] if _content(root) is not None else [])
    store.abort_uploads("")
    assert [path.name for path in (root / "saves").iterdir()] == (["x"] if visible else [])
    if way.name == "create" and visible:
        assert error_of(lambda: store.create(NAME, OLD)).kind == "exists"
    else:
        way.run(store)
    assert _content(root) == way.after


@EACH_WAY
@pytest.mark.parametrize("action", CRASHES)
@pytest.mark.parametrize("lost", [None, "data and names", "data"])
def test_a_crash_at_any_call_leaves_old_or_new(
    roots: Iterator[Path], tmp_path: Path, way: Way, action: Action, lost: Lost | None
) -> None:
    """Dying before, after or within any call tears no file, also if what was not synced is lost."""
    cut_count = 0
    for at, _, root, fault in faults_of(roots, way, action):
        disk = PowerCutPosix(tmp_path / f"graveyard-{root.name}") if lost else None
        posix = FaultPosix([fault], disk)
        with pytest.raises(SimulatedCrash):
            way.run(local_store(str(root), posix=posix))
        assert posix.open_count == 0
        if disk is not None and lost is not None:
            disk.power_cut(lost)
        assert _content(root) in {way.before, way.after}, at
        assert_clean_retry(root, way)
        cut_count += 1
    assert cut_count >= (1 if action == "torn" else 6)


@EACH_WAY
@pytest.mark.parametrize("action", FAILURES)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EPERM])
def test_a_failure_of_any_call_leaves_old_or_new(
    roots: Iterator[Path], way: Way, action: Action, number: int
) -> None:
    """A failed call is an error or harmless, and leaves no temporary file and no descriptor."""
    for at, operation, root, fault in faults_of(roots, way, action, errno=number):
        posix = FaultPosix([fault])
        try:
            way.run(local_store(str(root), posix=posix))
        except CheckpointError:
            is_early = operation in {"pwritev", "fsync", "close", "fstat"}
            assert _content(root) in ({way.before} if is_early else {way.before, way.after}), at
        else:
            assert _content(root) == way.after, at
            # Only these may fail without the operation failing, each for a reason.
            assert operation in {"open_new", "link", "rename", "unlink"}, at
        assert posix.open_count == 0
        drafts = [path.name for path in (root / "saves").iterdir() if path.name != "x"]
        assert drafts == [] or operation == "unlink", at
        assert all(DRAFT.fullmatch(name) for name in drafts)
        assert_clean_retry(root, way)


@EACH_WAY
def test_a_failed_fsync_is_never_tried_again(roots: Iterator[Path], way: Way) -> None:
    """After an fsync that failed the file is given up: a second one could lie."""
    root = prepared(roots, way)
    posix = FaultPosix([Rule(action="error", operation="fsync", errno=errno.EIO)])
    with pytest.raises(StorageError):
        way.run(local_store(str(root), posix=posix))
    operations = [call.operation for call in posix.script.calls]
    assert operations.count("fsync") == 1
    assert not {"rename", "link"} & set(operations)
    assert _content(root) == way.before


@pytest.mark.parametrize("operation", ["fsync", "close", "fsync_folder"])
def test_a_failed_completion_is_final(roots: Iterator[Path], operation: str) -> None:
    """An upload whose sync failed says so, cannot be completed again, and is not retried."""
    root = next(roots)
    posix = FaultPosix([Rule(action="error", operation=operation, errno=errno.EIO)])
    store = local_store(str(root), posix=posix)
    started = store.upload(NAME)
    started.write_part(0, 0, [memoryview(NEW)], last=True)
    for _ in range(2):
        assert not error_of(lambda: started.complete(len(NEW))).retryable
    assert not [path for path in (root / "saves").iterdir() if path.name != "x"]
    started.abort()
    assert _content(root) == (NEW if operation == "fsync_folder" else None)


def test_a_write_that_was_not_carried_out_is_noticed(roots: Iterator[Path]) -> None:
    """A file system that reports more bytes than it keeps does not get the file a name."""
    root = next(roots)

    class Liar(Posix):
        """Loses the last byte of everything."""

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            data = b"".join(buffers)
            return super().pwritev(fd, [memoryview(data)[:-1]], offset) + 1

    for way in WAYS:
        if way.name in {"write", "create", "upload"}:
            with pytest.raises(StorageError, match="bytes instead of"):
                way.run(local_store(str(root), posix=Liar()))
            assert list((root / "saves").iterdir()) == []


@pytest.mark.parametrize("completes", [False, True])
def test_a_descriptor_outlives_an_abort_while_a_thread_writes(
    roots: Iterator[Path], *, completes: bool
) -> None:
    """Its number must not go to another file under a hanging thread, nor the upload complete."""
    root = next(roots)
    posix = FaultPosix([Rule(action="hang", operation="pwritev", skip_count=int(completes))])
    started = local_store(str(root), posix=posix).upload(NAME)

    def write() -> None:
        with contextlib.suppress(StorageError):  # the upload has ended meanwhile
            started.write_part(0, 0, [memoryview(NEW)], last=True)

    if completes:
        write()
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert posix.script.wait_hung(HANG_S)
    if completes:
        with pytest.raises(StorageError, match="still being written"):
            started.complete(len(NEW))
    started.abort()
    assert list((root / "saves").iterdir()) == []
    assert posix.open_count == 1
    posix.script.release()
    thread.join(30)
    assert posix.open_count == 0


def test_a_lost_link_is_not_confused_with_a_backup(roots: Iterator[Path]) -> None:
    """A second link of the temporary file proves nothing: the name must lead to it."""
    root = next(roots)
    (root / NAME).write_bytes(OLD)

    class Backup(Posix):
        """A backup program links every file just before ours is linked."""

        def link(self, source: str, target: str) -> None:
            os.link(source, f"{root}/backup")
            super().link(source, target)

    store = local_store(str(root), posix=Backup())
    assert error_of(lambda: store.create(NAME, NEW)).kind == "exists"
    assert _content(root) == OLD


@EACH_WAY
@pytest.mark.parametrize("lost", ["data and names", "data"])
def test_what_was_reported_done_survives_a_power_cut(
    roots: Iterator[Path], tmp_path: Path, way: Way, lost: Lost
) -> None:
    """Then the content is durable under its name; without syncs it is lost, as the disk forgets."""
    for sync_files in (True, False):
        root = prepared(roots, way)
        disk = PowerCutPosix(tmp_path / f"graveyard-{sync_files}")
        way.run(local_store(str(root), sync_files=sync_files, posix=disk))
        disk.power_cut(lost)
        zeros = bytes(len(way.after)) if lost == "data" else way.before
        assert _content(root) == (way.after if sync_files else zeros)
        if sync_files:
            assert [path.name for path in (root / "saves").iterdir()] == ["x"]


def test_prepared_folders_survive_a_power_cut(tmp_path: Path) -> None:
    """Those that `prepare` makes, the root's missing parents too; and those that were there.

    Who made these may have died before it synced their names.
    """
    root, disk = tmp_path / "a" / "b" / "root", PowerCutPosix(tmp_path / "graveyard")
    store = local_store(str(root), posix=disk)
    store.make_folders(["saves/1/ranks", "commits"])
    store.put("saves/1/ranks/0", NEW)
    disk.power_cut("data and names")
    assert (root / "saves/1/ranks/0").read_bytes() == NEW
    assert (root / "commits").is_dir()
    for folder in ("others", "others/2"):
        disk.mkdir(str(root / folder))
    local_store(str(root), posix=disk).make_folders(["others/2"])
    disk.power_cut("data and names")
    assert (root / "others/2").is_dir()


def test_a_delete_is_durable_when_it_returns(tmp_path: Path) -> None:
    """What was deleted does not come back, so that deletes keep their order over power cuts."""
    (tmp_path / "saves").mkdir()
    (tmp_path / NAME).write_bytes(OLD)
    (tmp_path / "saves" / "y").write_bytes(OLD)
    disk = PowerCutPosix(tmp_path / "graveyard")
    store = local_store(str(tmp_path), posix=disk)
    store.delete([NAME])
    disk.power_cut("data and names")
    assert [path.name for path in (tmp_path / "saves").iterdir()] == ["y"]
    store.delete_folder("saves")
    disk.power_cut("data and names")
    assert not (tmp_path / "saves").exists()


@pytest.mark.parametrize("action", ["crash_before", "crash_after", "error", "lost_answer"])
def test_a_deletion_cut_anywhere_can_be_repeated(tmp_path: Path, action: Action) -> None:
    """Files and folders left by a deletion that failed go with the next one."""

    def filled(name: str) -> Path:
        root = tmp_path / name
        (root / "saves" / "1" / "ranks").mkdir(parents=True)
        for path in ("saves/1/x", "saves/1/ranks/0", "saves/y"):
            (root / path).write_bytes(OLD)
        return root

    dry = FaultPosix()
    local_store(str(filled("dry")), posix=dry).delete_folder("saves/1")
    for n in range(len(dry.script.calls)):
        root = filled(str(n))
        posix = FaultPosix([Rule(action=action, skip_count=n)])
        try:
            local_store(str(root), posix=posix).delete_folder("saves/1")
        except (CheckpointError, SimulatedCrash):
            local_store(str(root)).delete_folder("saves/1")
        assert [path.name for path in (root / "saves").iterdir()] == ["y"]


def linked(root: Path, posix: Posix | None = None) -> None:
    """Give a shard file of one root a name in another, as a copy of a part does."""
    store = local_store(str(root), posix=posix)
    source = store.copy_source("saves/source")
    assert source is not None
    store.copy_object(NAME, source, size_bytes=len(NEW))


def with_source(roots: Iterator[Path]) -> Path:
    root = next(roots)
    (root / "saves" / "source").write_bytes(NEW)
    return root


@pytest.mark.parametrize("action", [*CRASHES[:2], *FAILURES])
@pytest.mark.parametrize("number", [errno.EIO, errno.EPERM, errno.ESTALE])
def test_a_link_that_is_cut_or_fails_at_any_call_can_be_made_again(
    roots: Iterator[Path], action: Action, number: int
) -> None:
    """The name is absent or whole, the source as it was, and no temporary file is seen."""
    posix = FaultPosix()
    linked(with_source(roots), posix)
    calls = posix.script.calls
    assert {"link", "fchmod", "fsync", "rename", "fsync_folder"} <= {c.operation for c in calls}
    for at, fault in each_fault(calls, {action: ""}, errno=number):
        root = with_source(roots)
        posix = FaultPosix([fault])
        with contextlib.suppress(SimulatedCrash, CheckpointError):
            linked(root, posix)
        assert posix.open_count == 0, at
        assert _content(root) in {None, NEW}, at
        assert (root / "saves" / "source").read_bytes() == NEW, at
        linked(root)
        assert (root / NAME).samefile(root / "saves" / "source"), at
        assert (root / NAME).stat().st_mode & 0o222 == 0, at
        store = local_store(str(root))
        assert {one.path for one in store.list("")} == {NAME, "saves/source"}, at
        store.abort_uploads("")
        assert len(list((root / "saves").iterdir())) == 2, at


def test_a_link_is_durable_though_its_source_was_not(roots: Iterator[Path], tmp_path: Path) -> None:
    """Of a base that was saved with `sync_files=False` a power cut takes nothing that is named."""
    root = next(roots)
    disk = PowerCutPosix(tmp_path / "graveyard")
    unsynced = local_store(str(root), posix=disk, sync_files=False)
    unsynced.put("saves/source", NEW)
    linked(root, disk)
    disk.power_cut("data")
    assert _content(root) == NEW


def test_a_symbolic_link_is_not_linked(roots: Iterator[Path], tmp_path: Path) -> None:
    """What it leads to may be anybody's: its bytes are copied."""
    root = with_source(roots)
    (root / "saves" / "source").rename(tmp_path / "elsewhere")
    (root / "saves" / "source").symlink_to(tmp_path / "elsewhere")
    assert error_of(lambda: linked(root)).kind == "unsupported"
    assert (tmp_path / "elsewhere").stat().st_mode & 0o200
