"""Saves that leave nothing in the kernel's cache: as safe as others, wherever that is possible."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from local_stores import local_store
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage.cli.app import app
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.store import open_store
from ckpt_storage.store.backends.posix import Posix, is_unsupported
from ckpt_storage.testing.faults import Action, Rule, SimulatedCrash
from ckpt_storage.testing.posix_faults import FaultPosix

MIB = 1 << 20
DATA = bytes(range(256)) * (12 << 10)
UNCACHED = "pwritev_uncached"
WAIT_S = 30.0


class Cached(FaultPosix):
    """A kernel or a file system that cannot write past its cache."""

    def __init__(self, rules: Sequence[Rule] = (), number: int = errno.EOPNOTSUPP) -> None:
        unknown = Rule(action="error", operation=UNCACHED, errno=number, hit_count=None)
        super().__init__([*rules, unknown])


class Uncached(FaultPosix):
    """One that can, whatever there is: such a write is any write here."""

    def pwritev_uncached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write once."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.inner, UNCACHED, self.inner.pwritev)
            return super().pwritev_uncached(fd, buffers, offset)


def upload(root: Path, posix: Posix, **options: Any) -> None:
    """Write a file in three parts."""
    store = local_store(str(root), posix=posix, page_cache="drop", **options)
    under_way = store.upload("x")
    try:
        for number, start in enumerate(range(0, len(DATA), MIB)):
            part = memoryview(DATA)[start : start + MIB]
            under_way.write_part(number, start, [part[:7], part[7:]], last=start + MIB >= len(DATA))
        under_way.complete(len(DATA))
    except BaseException:
        with contextlib.suppress(CheckpointError, SimulatedCrash):
            under_way.abort()
        raise


def operations(posix: FaultPosix) -> list[str]:
    """Return the system calls so far."""
    return [call.operation for call in posix.script.calls]


def cached_share(path: Path) -> float:
    """Return which share of a file's pages the kernel caches."""
    size_bytes = path.stat().st_size
    count = -(-size_bytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size_bytes) as memory:
        first = ctypes.c_ubyte.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = library.mincore(address, ctypes.c_size_t(size_bytes), found)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(one & 1 for one in found) / count


@pytest.fixture
def knows(tmp_path: Path) -> None:
    """Skip where kernel or file system cannot write past the cache."""
    fd = Posix().open_new(str(tmp_path / "probe"))
    try:
        Posix().pwritev_uncached(fd, [memoryview(b"x")], 0)
    except OSError as error:
        assert is_unsupported(error)  # noqa: PT017  # any other error is a failure
        pytest.skip("writes leave something in the cache here")
    finally:
        os.close(fd)


@pytest.mark.usefixtures("knows")
def test_what_was_written_is_cached_no_longer(tmp_path: Path) -> None:
    """A save of the same file the usual way leaves it in the cache."""
    upload(tmp_path, Posix())
    end_s = time.monotonic() + WAIT_S
    while cached_share(tmp_path / "x") > 0.1:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    plain = local_store(str(tmp_path)).upload("y")
    plain.write_part(0, 0, [memoryview(DATA)], last=True)
    plain.complete(len(DATA))
    assert cached_share(tmp_path / "y") > 0.9
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes() == DATA


def test_nothing_else_changes_where_it_is_known(tmp_path: Path) -> None:
    """All bytes go that way, none is written back twice, and the file is synced as any other."""
    posix = Uncached()
    upload(tmp_path, posix)
    calls = operations(posix)
    assert calls.count(UNCACHED) == 3
    assert not {"pwritev", "start_write_back", "forget"} & set(calls)
    assert calls.index(UNCACHED) < calls.index("fsync") < calls.index("rename")
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_where_it_is_not_known_the_file_is_dropped_once_it_is_durable(
    tmp_path: Path, number: int
) -> None:
    """It is asked for once; the parts are written as ever, and dropped after the fsync."""
    posix = Cached(number=number)
    upload(tmp_path, posix)
    calls = operations(posix)
    assert calls.count(UNCACHED) == 1
    assert calls.count("pwritev") == calls.count("start_write_back") == 3
    assert calls.index("fsync") < calls.index("forget") < calls.index("rename")
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("action", ["crash_before", "crash_after", "torn", "error", "lost_answer"])
@pytest.mark.parametrize("kind", [Uncached, Cached])
def test_a_fault_at_any_call_leaves_old_or_new(
    tmp_path: Path, action: Action, kind: Callable[..., FaultPosix]
) -> None:
    """As with the cache; and a call that fails with EIO is an error of the save."""
    dry = kind()
    upload(tmp_path, dry)
    calls = operations(dry)
    cut_count = 0
    for n, operation in enumerate(calls):
        if action == "torn" and operation not in {UNCACHED, "pwritev"}:
            continue
        root = tmp_path / str(n)
        root.mkdir()
        (root / "x").write_bytes(b"old")
        posix = kind([Rule(action=action, skip_count=n, errno=errno.EIO)])
        if kind is Cached and operation == UNCACHED and action == "torn":
            continue
        try:
            upload(root, posix)
        except (CheckpointError, SimulatedCrash):
            assert (root / "x").read_bytes() in {b"old", DATA}, (n, operation)
            if operation in {UNCACHED, "pwritev", "fsync", "forget"}:
                assert (root / "x").read_bytes() == b"old", (n, operation)
        else:
            assert (root / "x").read_bytes() == DATA, (n, operation)
            assert operation not in {UNCACHED, "pwritev", "fsync"}, (n, operation)
        assert posix.open_count == 0
        cut_count += 1
    assert cut_count >= 3


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are written past the cache."""
    names: list[str] = []
    real = Posix.pwritev

    def write(self: Posix, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)  # noqa: PTH115  # of a number
        return real(self, fd, buffers, offset)

    monkeypatch.setattr(Posix, UNCACHED, write)
    return names


def inside(made: Any, call: Callable[[Any], object]) -> None:
    """Call with a manager or saver, and close it."""
    with made:
        call(made)


manager = functools.partial(ckpt_storage.CheckpointManager, mode="thread")
WAYS: dict[str, Callable[..., object]] = {
    "save": ckpt_storage.save,
    "save_async": lambda *given, **more: ckpt_storage.save_async(*given, **more).result(),
    "saver": lambda *given, **more: inside(
        ckpt_storage.AsyncSaver(mode="thread"), lambda saver: saver.save(*given, **more).result()
    ),
    "manager": lambda state, path, **more: inside(
        manager(path), lambda made: made.save(1, state, **more)
    ),
    "manager-async": lambda state, path, **more: inside(
        manager(path), lambda made: made.save_async(1, state, **more).result()
    ),
    "dcp": lambda state, path, **more: torch.distributed.checkpoint.save(
        state, storage_writer=ckpt_storage.CheckpointStorageWriter(path, **more)
    ),
}


@pytest.mark.parametrize("page_cache", ["keep", "drop"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_of_saving_has_the_option(
    tmp_path: Path, seen: list[str], way: Callable[..., object], page_cache: str
) -> None:
    """Shard files are written so, documents are not; the default keeps all."""
    way({"a": torch.arange(MIB)}, tmp_path / "a", page_cache=page_cache)
    shards = {name for name in seen if ".distcp" in name}
    assert bool(shards) == (page_cache == "drop")
    assert set(seen) == shards


def test_another_word_is_refused(tmp_path: Path) -> None:
    """And says which there are."""
    word: Any = "away"
    with pytest.raises(InvalidInputError, match="page_cache is 'away'") as caught:
        open_store(tmp_path, page_cache=word)
    assert "'drop'" in str(caught.value.next_step)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("page-cache") / "a"
    ckpt_storage.save({"a": torch.arange(MIB), "b": torch.arange(10.0)}, path, sync_files=False)
    return path


def is_weight(name: str) -> bool:
    """Return whether a file holds tensors, by its name or that of its draft."""
    return ".safetensors" in name or ".distcp" in name


def by_command(name: str, *between: str) -> Callable[..., None]:
    """Return what runs a command, with words between its two places and the options."""

    def run(source: Path, target: Path, *, page_cache: str | None = None) -> None:
        words = [name, str(source), *between, str(target)]
        words += [] if page_cache is None else ["--page-cache", page_cache]
        with pytest.raises(SystemExit) as ended:
            app.main(words)
        assert not ended.value.code

    return run


@pytest.mark.parametrize("page_cache", [None, "keep", "drop"])
@pytest.mark.parametrize(
    "way",
    [
        ckpt_storage.consolidate,
        # Within a file system the kernel would copy.
        functools.partial(ckpt_storage.copy, copies="never"),
        functools.partial(ckpt_storage.convert, to="dcp"),
        by_command("consolidate"),
        by_command("cp", "--copies", "never"),
        by_command("convert", "--to", "dcp"),
    ],
    ids=["consolidate", "copy", "convert", "$ consolidate", "$ cp", "$ convert"],
)
def test_what_else_writes_weights_has_the_option(
    checkpoint: Path,
    tmp_path: Path,
    seen: list[str],
    way: Callable[..., object],
    page_cache: str | None,
) -> None:
    """From Python and from the command line; what is written is the same."""
    target = tmp_path / "out"
    way(checkpoint, target, **({} if page_cache is None else {"page_cache": page_cache}))
    assert any(is_weight(name) for name in seen) == (page_cache == "drop")
    weights = [load_file(path)["a"] for path in target.glob("*.safetensors")]
    if not weights:
        weights = [torch.zeros(MIB, dtype=torch.int64)]
        ckpt_storage.load({"a": weights[0]}, target)
    assert torch.equal(weights[0], torch.arange(MIB))


@pytest.mark.parametrize("of_save", ["keep", "drop"])
@pytest.mark.parametrize("of_export", [None, "keep", "drop"])
def test_an_export_after_a_save_is_as_the_save_unless_told(
    tmp_path: Path, seen: list[str], of_save: str, of_export: Any
) -> None:
    """What the save leaves in the cache the export reads; its own files may go all the same."""
    ckpt_storage.save(
        {"a": torch.arange(MIB)},
        tmp_path / "a",
        page_cache=of_save,  # type: ignore[arg-type]  # a parameter
        consolidate=ConsolidateOptions(page_cache=of_export),
    )
    assert any(".distcp" in name for name in seen) == (of_save == "drop")
    assert any(".safetensors" in name for name in seen) == ((of_export or of_save) == "drop")
