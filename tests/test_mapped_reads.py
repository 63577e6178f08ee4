"""Ranks of one host that copy columns out of what the kernel caches: each block is checked by one.

The oracle makes tensors from their seeds and slices them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import itertools
import mmap
import os
import pickle
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, integrity, loads, mappedreads, sharers
from ckpt_storage.deadline import Deadline
from ckpt_storage.errors import (
    CheckpointError,
    IntegrityError,
    RankFailedError,
    StorageError,
    UnsafeContentError,
)
from ckpt_storage.mappedreads import MappedReads
from ckpt_storage.operation import Operation
from ckpt_storage.options import Timeouts
from ckpt_storage.readplan import Request
from ckpt_storage.regions import Box
from ckpt_storage.sharedreads import SharedReads
from ckpt_storage.sharing import Key
from ckpt_storage.source import Place
from ckpt_storage.store.local import LocalStore
from ckpt_storage.store.local_root import LocalRoot
from ckpt_storage.store.posix import Posix
from ckpt_storage.store.retry import RetryStore
from ckpt_storage.testing.ranks import RankPool
from ckpt_storage.torchload import scan_blob
from ckpt_storage.unitclaims import UnitClaims, units_of

# Rows of odd length: units begin and end within them.
ROWS, WIDTH = 16_384, 1031
TOTAL_BYTES = ROWS * WIDTH * 4
MIB = 1 << 20

MOST_CHECKED = 1.5 * TOTAL_BYTES
"""Ranks that come to a unit at the same time may check it both."""


def is_told(folder: Path) -> bool:
    """Return whether the kernel tells what it caches of files in a folder."""
    file = folder / "looked-at"
    file.write_bytes(b"x" * 10_000)
    mapped = LocalStore(str(folder)).map_cached(file.name, size_bytes=10_000)
    file.unlink()
    return mapped is not None


needs_told = pytest.mark.usefixtures("saved")
"""For tests that make a checkpoint of their own: skipped where that one is."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 64 MiB in one tensor, and a small one."""
    folder = tmp_path_factory.mktemp("columns")
    if not is_told(folder):
        pytest.skip("needs Linux 6.5, and a file system whose files it caches by itself")
    path = folder / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77)}
    dcp_cases.save(state, str(path))
    return path


def evict(path: Path) -> None:
    """Let the kernel forget the files of a checkpoint."""
    for file in path.rglob("*.distcp"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def not_mapped(*_: object, **__: object) -> None:
    """Stand for a kernel that does not tell what it caches."""


def elsewhere() -> str:
    """Stand for another host."""
    return "elsewhere"


TROUBLES: dict[str, tuple[object, str, object]] = {
    "not mapped": (LocalStore, "map_cached", not_mapped),
    "another host": (sharers, "host_identity", elsewhere),
}
"""What goes wrong, and the function in whose place that is put."""


@contextlib.contextmanager
def counted(trouble: str, *, troubled: bool) -> Iterator[dict[str, int]]:
    """Count bytes that this rank checks, loads out of mapped files, units taken of others."""
    counts = {"checked": 0, "mapped": 0, "shared": 0}
    check, found, run = (
        integrity.first_wrong_block,
        SharedReads._found,  # noqa: SLF001
        MappedReads.run,
    )

    def checked(view: memoryview, *args: Any) -> int | None:
        counts["checked"] += len(view)
        return check(view, *args)

    def taken(*args: Any) -> None:
        counts["shared"] += len(args[-1])
        found(*args)

    def running(*args: Any) -> None:
        counts["mapped"] += 1
        run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integrity, "first_wrong_block", checked)
        patch.setattr(SharedReads, "_found", taken)
        patch.setattr(MappedReads, "run", running)
        if trouble and troubled:
            patch.setattr(*TROUBLES[trouble])
        yield counts


def column_target(dimension: int = 1) -> dict[str, Any]:
    """Return this rank's columns of the tensor, and the small one, of zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.zeros(ROWS, WIDTH)
    return {
        "w": distribute_tensor(whole, mesh, [Shard(dimension)], src_data_rank=None),
        "b": torch.zeros(77),
    }


def load_columns(
    rank: int, path: str, trouble: str, options: dict[str, Any], door: str = "ours"
) -> dict[str, int]:
    """Load by columns, compare, and return what this rank checked and how it got it."""
    dimension = options.get("dimension", 1)
    target = column_target(dimension)
    own = options.get(f"rank {rank}", {})
    with counted(trouble, troubled=rank == 1) as counts:
        if door == "ours":
            ckpt_storage.load(target, path, **own)
        else:
            dcp.load(target, storage_reader=ckpt_storage.CheckpointStorageReader(path, **own))
    whole = seeded(1, ROWS, WIDTH, dtype=torch.float32)
    expected = torch.chunk(whole, dist.get_world_size(), dimension)[rank].contiguous()
    assert same(target["w"].to_local(), expected)
    assert same(target["b"], seeded(2, 77))
    return counts


@pytest.mark.parametrize("door", ["ours", "dcp"])
@pytest.mark.parametrize("size", [3, 4])
def test_each_block_is_checked_by_one_rank(
    ranks: RankPool, saved: Path, size: int, door: str
) -> None:
    """Ranks check little more than the file together, and nothing is sent."""
    found = ranks.run(load_columns, str(saved), "", {}, door, world_size=size)
    assert TOTAL_BYTES <= sum(counts["checked"] for counts in found) < MOST_CHECKED
    assert all((counts["mapped"], counts["shared"]) == (1, 0) for counts in found)


@pytest.mark.parametrize("door", ["ours", "dcp"])
def test_ranks_of_which_one_cannot_map_share_memory(
    ranks: RankPool, saved: Path, door: str
) -> None:
    """What they find may differ; then they go the other way, together."""
    found = ranks.run(load_columns, str(saved), "not mapped", {}, door, world_size=3)
    assert all(counts["mapped"] == 0 and counts["shared"] for counts in found)
    assert sum(counts["checked"] for counts in found) < 1.2 * TOTAL_BYTES


def load_beside_a_slow_one(rank: int, path: str, door: str) -> dict[str, int]:
    """Load by columns where rank 0 is held up at each of its checks."""
    check = Place.check

    def slowly(place: Place, view: memoryview, first_byte: int) -> None:
        time.sleep(0.2)
        check(place, view, first_byte)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Place, "check", slowly)
        return load_columns(rank, path, "", {}, door)


@pytest.mark.parametrize("door", ["ours", "dcp"])
def test_a_rank_that_is_held_up_checks_less(ranks: RankPool, saved: Path, door: str) -> None:
    """Who comes to a unit first checks it; nobody waits for another one's check."""
    found = ranks.run(load_beside_a_slow_one, str(saved), door, world_size=3)
    checked = [counts["checked"] for counts in found]
    assert TOTAL_BYTES <= sum(checked) < MOST_CHECKED
    assert checked[0] < TOTAL_BYTES / 4


def test_dcp_lets_ranks_that_are_not_on_one_host_read_for_themselves(
    ranks: RankPool, saved: Path
) -> None:
    """Trouble on one rank lets all load on their own, and check everything."""
    found = ranks.run(load_columns, str(saved), "another host", {}, "dcp", world_size=3)
    assert all((counts["mapped"], counts["shared"]) == (0, 0) for counts in found)
    assert all(counts["checked"] >= TOTAL_BYTES for counts in found)


def test_a_rank_on_another_host_checks_all_that_it_copies(ranks: RankPool, saved: Path) -> None:
    """It maps as well; those that can reach one another divide the checks."""
    found = ranks.run(load_columns, str(saved), "another host", {}, world_size=3)
    assert all((counts["mapped"], counts["shared"]) == (1, 0) for counts in found)
    assert found[1]["checked"] >= TOTAL_BYTES
    assert TOTAL_BYTES <= found[0]["checked"] + found[2]["checked"] < MOST_CHECKED


OTHERWISE: list[tuple[dict[str, Any], int, int]] = [
    ({"shared_reads": "never"}, 0, TOTAL_BYTES),
    ({"memory_limit_bytes": MIB}, 0, TOTAL_BYTES),
    ({"verify": False}, 0, 0),
    # In units of another length, which nobody else claims.
    ({"memory_limit_bytes": 4 * MIB}, 1, TOTAL_BYTES),
]
"""Options of rank 1, whether it maps, and the least that it checks."""


@pytest.mark.parametrize(("options", "mapped", "least_bytes"), OTHERWISE)
def test_nobody_relies_on_a_rank_that_may_not_share(
    ranks: RankPool, saved: Path, options: dict[str, Any], mapped: int, least_bytes: int
) -> None:
    """Options may differ between ranks: the load succeeds, and the others share among them."""
    found = ranks.run(load_columns, str(saved), "", {"rank 1": options}, world_size=3)
    assert [counts["mapped"] for counts in found] == [1, mapped, 1]
    assert all(counts["shared"] == 0 for counts in found)
    assert found[1]["checked"] >= least_bytes
    if least_bytes or not mapped:
        assert TOTAL_BYTES <= found[0]["checked"] + found[2]["checked"] < MOST_CHECKED


@pytest.mark.parametrize(
    "options", [{"shared_reads": "never"}, {"memory_limit_bytes": MIB}, {"verify": False}]
)
def test_dcp_lets_all_read_alone_if_one_may_not_share(
    ranks: RankPool, saved: Path, options: dict[str, Any]
) -> None:
    """There the coordinator has planned who reads what, for all or for none."""
    found = ranks.run(load_columns, str(saved), "", {"rank 1": options}, "dcp", world_size=3)
    assert all((counts["mapped"], counts["shared"]) == (0, 0) for counts in found)


def load_replica(rank: int, path: str, replica: str, door: str) -> dict[str, int]:
    """Load where rank 1 finds another folder under the name, as with mounts of its own."""
    full = LocalRoot.full

    def elsewhere_on_one(root: LocalRoot, name: str) -> str:
        return full(root, name).replace(path, replica)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(LocalRoot, "full", elsewhere_on_one)
        try:
            return load_columns(rank, path, "", {}, door)
        except (CheckpointError, CheckpointException) as error:
            return {"damaged": int("damaged" in str(error))}


@pytest.mark.parametrize("door", ["ours", "dcp"])
@pytest.mark.parametrize("at", [1 << 20, 5 << 20, 9 << 20])
def test_nobody_relies_on_a_check_of_another_file(
    ranks: RankPool, saved: Path, tmp_path: Path, door: str, at: int
) -> None:
    """Of two containers with a copy of the checkpoint each, one copy is damaged.

    The three places are in units that three ranks check.
    """
    replica = tmp_path / "replica"
    shutil.copytree(saved, replica)
    (file,) = replica.rglob("*.distcp")
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    found = ranks.run(load_replica, str(saved), str(replica), door, world_size=3)
    # Who has the copy checks all of it: the others' claims are of another file.
    assert found == [{"damaged": 1}] * 3


def damage_by_link(path: Path, how: str) -> None:
    """Let the file of rank 1 be the one of rank 0, as after a repair that went wrong."""
    first, second = sorted(path.rglob("*.distcp"))
    assert first.stat().st_size == second.stat().st_size
    second.unlink()
    if how == "hard":
        os.link(first, second)
    else:
        second.symlink_to(first)


@needs_told
@pytest.mark.parametrize("door", ["ours", "dcp"])
@pytest.mark.parametrize("how", ["hard", "soft"])
def test_a_file_that_another_path_leads_to_is_checked_for_each(
    ranks: RankPool, tmp_path: Path, door: str, how: str
) -> None:
    """It is as saved for one of them only; who checked it for that one did not for the other."""
    path = tmp_path / "model"
    # Without the small tensor, which one of them would hold: their files are of one length.
    ranks.run(save_rows, str(path), ["w"], world_size=2)
    damage_by_link(path, how)
    for size in (3, 4):
        for was_mapped, text in ranks.run(error_of, str(path), door, ["w"], world_size=size):
            assert was_mapped
            assert "damaged" in text


def travelling_reader(_rank: int, path: str) -> bool:
    """Send a reader through a pickle right before it reads; return whether it had mapped files."""
    target, read_data = column_target(), CheckpointStorageReader.read_data
    had: list[bool] = []

    def travelled(reader: CheckpointStorageReader, *args: Any) -> Any:
        had.append(reader._mapped is not None)  # noqa: SLF001
        copy = pickle.loads(pickle.dumps(reader))
        assert copy._mapped is copy._leave is None  # noqa: SLF001
        return read_data(reader, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStorageReader, "read_data", travelled)
        ckpt_storage.load(target, path)
    return had == [True]


def test_a_reader_travels_without_what_it_has_mapped(ranks: RankPool, saved: Path) -> None:
    """Mapped files and tables of claims are a process's own."""
    assert all(ranks.run(travelling_reader, str(saved), world_size=3))


def load_often(_rank: int, path: str) -> list[int]:
    """Load by columns some times; return how many descriptors were open before and after each."""
    target = column_target()
    ckpt_storage.load(target, path)
    counts = []
    for _ in range(4):
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
        ckpt_storage.load(target, path)
    return counts


def test_no_descriptor_is_left_of_a_load(ranks: RankPool, saved: Path) -> None:
    """Neither of mapped files nor of the table of claims."""
    for counts in ranks.run(load_often, str(saved), world_size=3):
        assert len(set(counts)) == 1


def load_beside_one_that_wants_little(
    rank: int, path: str, more: dict[str, Any] | None = None
) -> dict[str, int]:
    """Load by columns on three ranks; the fourth wants only the small tensor, and all of `more`."""
    count = 3
    target: dict[str, Any] = {"b": torch.zeros(77), **dict.fromkeys(more or {}, 0)}
    mesh = DeviceMesh("cpu", list(range(count)))
    if rank < count:
        target["w"] = DTensor.from_local(
            torch.zeros(ROWS, torch.chunk(torch.empty(WIDTH), count)[rank].numel()),
            mesh,
            [Shard(1)],
            shape=torch.Size([ROWS, WIDTH]),
            stride=(WIDTH, 1),
        )
    with counted("", troubled=False) as counts:
        ckpt_storage.load(target, path, timeout=60)
    assert same(target["b"], seeded(2, 77))
    assert all(target[name] == value for name, value in (more or {}).items())
    if rank < count:
        whole = seeded(1, ROWS, WIDTH, dtype=torch.float32)
        assert same(target["w"].to_local(), torch.chunk(whole, count, 1)[rank].contiguous())
    return counts


@pytest.mark.parametrize("is_cached", [True, False])
def test_one_that_has_nothing_to_share_stands_in_nobodys_way(
    ranks: RankPool, saved: Path, *, is_cached: bool
) -> None:
    """It takes part either way."""
    if not is_cached:
        evict(saved)
    found = ranks.run(load_beside_one_that_wants_little, str(saved), world_size=4)
    assert [counts["mapped"] for counts in found] == [int(is_cached)] * 3 + [0]
    assert all((counts["shared"] == 0) == is_cached for counts in found[:3])
    assert sum(counts["checked"] for counts in found) < 1.2 * TOTAL_BYTES


@needs_told
def test_one_that_has_nothing_to_share_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    """Where values come that are no tensors any rank may still fail, one that maps none, too."""
    path, more = tmp_path / "model", {"step": 7}
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77), **more}
    dcp_cases.save(state, str(path))
    found = ranks.run(load_beside_one_that_wants_little, str(path), more, world_size=4)
    assert [counts["mapped"] for counts in found] == [1, 1, 1, 0]


def load_beside_one_that_is_refused(rank: int, path: str) -> str:
    """Load where a rank that maps nothing cannot take a value; return the error."""
    scan = scan_blob

    def refused(buffer: bytearray, place: Place) -> None:
        if rank == 3:
            raise UnsafeContentError("not taken")
        scan(buffer, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "scan_blob", refused)
        try:
            load_beside_one_that_wants_little(rank, path, {"step": 7} if rank == 3 else None)
        except CheckpointError as error:
            return str(error)
    return "loaded"


@needs_told
def test_what_one_that_maps_nothing_fails_with_is_told(ranks: RankPool, tmp_path: Path) -> None:
    """Also where it alone wants what may fail after the reads."""
    path = tmp_path / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77), "step": 7}
    dcp_cases.save(state, str(path))
    for text in ranks.run(load_beside_one_that_is_refused, str(path), world_size=4):
        assert "not taken" in text


def test_ranks_that_check_nothing_share_nothing(ranks: RankPool, saved: Path) -> None:
    """What is divided is the checking: with `verify=False` each reads what it wants."""
    options = {f"rank {rank}": {"verify": False} for rank in range(3)}
    found = ranks.run(load_columns, str(saved), "", options, world_size=3)
    assert [(c["mapped"], c["checked"]) for c in found] == [(0, 0)] * 3


def load_unlike(rank: int, path: str) -> dict[str, int]:
    """Load on two hosts of two ranks each, of which the second host's kernel tells nothing."""
    host = "ab"[rank // 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        patch.setattr(sharers, "host_identity", lambda: host)
        if host == "b":
            patch.setattr(LocalStore, "map_cached", not_mapped)
        return load_columns(rank, path, "", {})


def test_each_host_goes_its_own_way(ranks: RankPool, saved: Path) -> None:
    """Ranks of one host map, those of another share memory; each host checks all of the file."""
    found = ranks.run(load_unlike, str(saved), world_size=4)
    assert [counts["mapped"] for counts in found] == [1, 1, 0, 0]
    assert [counts["shared"] > 0 for counts in found] == [False, False, True, True]
    for pair in (found[:2], found[2:]):
        assert TOTAL_BYTES <= sum(counts["checked"] for counts in pair) < 1.2 * TOTAL_BYTES


def test_what_is_not_cached_is_read(ranks: RankPool, saved: Path) -> None:
    """From a disk, reads by calls are faster, and their errors are errors."""
    evict(saved)
    found = ranks.run(load_columns, str(saved), "", {}, world_size=3)
    assert all(counts["mapped"] == 0 and counts["shared"] for counts in found)


def error_of(
    _rank: int, path: str, door: str, names: Sequence[str] = ("w", "b")
) -> tuple[int, str]:
    """Load some tensors by columns; return whether it was mapped, and the error."""
    target = {name: value for name, value in column_target().items() if name in names}
    with counted("", troubled=False) as counts:
        try:
            if door == "ours":
                ckpt_storage.load(target, path)
            else:
                dcp.load(target, storage_reader=ckpt_storage.CheckpointStorageReader(path))
        except (CheckpointError, CheckpointException) as error:
            return counts["mapped"], str(error)
    return counts["mapped"], "loaded"


@needs_told
@pytest.mark.parametrize("door", ["ours", "dcp"])
@pytest.mark.parametrize("at", [1 << 20, 5 << 20, 9 << 20, TOTAL_BYTES])
def test_a_bit_turned_in_the_file_ends_the_load_of_all(
    ranks: RankPool, tmp_path: Path, at: int, door: str
) -> None:
    """Whichever rank checks the block: those that have only copied of it raise, too."""
    path = tmp_path / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77)}
    dcp_cases.save(state, str(path))
    (file,) = path.rglob("*.distcp")
    with file.open("r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)
        handle.seek(at)
        handle.write(bytes([byte[0] ^ 4]))
    for was_mapped, text in ranks.run(error_of, str(path), door, world_size=3):
        assert was_mapped
        assert "damaged" in text


def save_rows(_rank: int, path: str, names: Sequence[str] = ("w", "b")) -> None:
    """Save the tensor in rows, a file of each rank, and the small one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = seeded(1, ROWS, WIDTH, dtype=torch.float32)
    state = {
        "w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "b": seeded(2, 77),
    }
    ckpt_storage.save({name: state[name] for name in names}, path)


@needs_told
def test_rows_of_several_files_become_columns(ranks: RankPool, tmp_path: Path) -> None:
    """Each file is mapped, and what lies at one place of several is not mixed up."""
    path = str(tmp_path / "model")
    ranks.run(save_rows, path, world_size=3)
    found = ranks.run(load_columns, path, "", {}, world_size=3)
    assert [counts["mapped"] for counts in found] == [1, 1, 1]
    assert TOTAL_BYTES <= sum(counts["checked"] for counts in found) < 1.2 * TOTAL_BYTES


class Noting(DefaultLoadPlanner):
    """Notes what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.handed: list[str] = []

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note it."""
        self.handed.append(read_item.storage_index.fqn)
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Note it."""
        self.handed.append(read_item.storage_index.fqn)
        super().load_bytes(read_item, value)


def handed_over(_rank: int, path: str, door: str) -> list[str]:
    """Load by columns; return what the planner got before the load failed."""
    target, planner = {**column_target(), "step": 0}, Noting()

    def load() -> None:
        if door == "ours":
            ckpt_storage.load(target, path, planner=planner)
        else:
            reader = ckpt_storage.CheckpointStorageReader(path)
            dcp.load(target, storage_reader=reader, planner=planner)

    with pytest.raises((CheckpointError, CheckpointException)):
        load()
    return planner.handed


class Refusing(DefaultLoadPlanner):
    """Does not take what it is handed."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Fail."""
        del read_item, tensor
        raise ValueError("not taken")


def load_refused(rank: int, path: str, what: str) -> tuple[str, int]:
    """Load by columns; return what came of it, and how often all ranks told one another."""
    target: dict[str, Any] = column_target()
    if what == "blobs":
        target["step"] = 0
    planner = Refusing() if what == "refused" and rank == 1 else None
    told = 0
    all_gather = Operation.all_gather

    def counting(operation: Operation, payload: bytes) -> list[bytes]:
        nonlocal told
        told += 1
        return all_gather(operation, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operation, "all_gather", counting)
        try:
            ckpt_storage.load(target, path, planner=planner)
        except CheckpointError as error:
            return str(error), told
    return "loaded", told


@needs_told
def test_who_may_still_fail_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    """Else all is over once all have checked: no rank's planner does anything then."""
    path = tmp_path / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77), "step": 7}
    dcp_cases.save(state, str(path))
    plain = ranks.run(load_refused, str(path), "", world_size=3)
    blobs = ranks.run(load_refused, str(path), "blobs", world_size=3)
    assert plain == [("loaded", 1)] * 3
    assert blobs == [("loaded", 2)] * 3
    for text, _ in ranks.run(load_refused, str(path), "refused", world_size=3):
        assert "not taken" in text
        assert "rank 1" in text


@needs_told
@pytest.mark.parametrize("door", ["ours", "dcp"])
def test_nothing_is_handed_over_before_all_have_checked(
    ranks: RankPool, tmp_path: Path, door: str
) -> None:
    """Not by ranks either that have found nothing wrong."""
    path = tmp_path / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77), "step": 7}
    dcp_cases.save(state, str(path))
    (file,) = path.rglob("*.distcp")
    with file.open("r+b") as handle:
        handle.seek(60 << 20)
        handle.write(b"otherwise")
    assert ranks.run(handed_over, str(path), door, world_size=3) == [[], [], []]


@needs_told
@pytest.mark.parametrize("change", ["cut", "longer"])
def test_a_file_of_another_length_is_not_mapped(
    ranks: RankPool, tmp_path: Path, change: str
) -> None:
    """The read says what is wrong with it."""
    path = tmp_path / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77)}
    dcp_cases.save(state, str(path))
    (file,) = path.rglob("*.distcp")
    size_bytes = file.stat().st_size
    os.truncate(file, size_bytes // 2 if change == "cut" else size_bytes + 1)
    for was_mapped, text in ranks.run(error_of, str(path), "ours", world_size=3):
        assert not was_mapped
        assert f"instead of {size_bytes}" in text


def load_and_let_go(rank: int, path: str) -> list[str]:
    """Load by columns without the collector; return what is left of it without the target."""
    gc.collect()
    gc.disable()
    try:
        load_columns(rank, path, "", {})
        lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
        left = [line for line in lines if ".distcp" in line]
        return left + [str(one) for one in gc.get_objects() if isinstance(one, MappedReads)]
    finally:
        gc.enable()


def test_what_was_mapped_does_not_wait_for_the_collector(ranks: RankPool, saved: Path) -> None:
    """With it would wait the targets, which are as large as a model."""
    assert ranks.run(load_and_let_go, str(saved), world_size=3) == [[], [], []]


def killed(*_: object) -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def load_beside_one_that_dies(rank: int, path: str, when: str) -> str:
    """Load; rank 1 is killed before or after its part. Return what the others raise."""
    target = column_target()
    run = MappedReads.run

    def run_and_die(*args: Any) -> None:
        if when == "after":
            run(*args)
        killed()

    try:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(MappedReads, "run", run_and_die)
            ckpt_storage.load(target, path, timeout=Timeouts(load=60, silence=4))
    except RankFailedError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_dies_ends_the_load_of_all(ranks: RankPool, saved: Path, when: str) -> None:
    """Nobody counts on checks that were not told of."""
    outcomes = ranks.outcomes(load_beside_one_that_dies, str(saved), when, world_size=3)
    assert outcomes[1].failure is not None
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.failure
        assert "rank 1" in outcome.value.lower()


# One rank's part, by itself.

KEY: Key = ("w", (0,))
UNIT_BYTES = MIB
CHUNK_BYTES = 6 * UNIT_BYTES - 100
AT_BYTES = 64


def mapped_part(
    store: LocalStore | RetryStore,
    request: Request,
    *,
    rank: int = 0,
    span: tuple[int, int] = (0, CHUNK_BYTES),
) -> MappedReads | None:
    """Return one rank's part, of a request for the whole chunk or for some of it."""
    return MappedReads.of(store, {KEY: span}, {KEY: [request]}, unit_bytes=UNIT_BYTES, rank=rank)


def request_for(content: bytes, target: bytearray, *, start: int = AT_BYTES) -> Request:
    """Return the wish for the whole chunk, whose checksums are of `content`."""
    crcs = [integrity.crc32c_of(content[at : at + 65536]) for at in range(0, len(content), 65536)]
    place = Place(
        path="file",
        fqn="w",
        start=start,
        size_bytes=CHUNK_BYTES,
        file_bytes=AT_BYTES + CHUNK_BYTES + 3,
        block_bytes=65536,
        crcs=crcs,
    )

    def sink(window: memoryview, copies: Any) -> None:
        raise AssertionError((len(window), copies))

    return Request(
        place=place,
        item_bytes=1,
        chunk_sizes=(CHUNK_BYTES,),
        region=None,
        sink=sink,
        target=memoryview(target),
    )


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    """The bytes of a chunk that lies in a file, with others before and behind it."""
    if not is_told(tmp_path):
        pytest.skip("needs Linux 6.5, and a file system whose files it caches by itself")
    data = os.urandom(CHUNK_BYTES)
    (tmp_path / "file").write_bytes(bytes(AT_BYTES) + data + b"end")
    return data


def deadline_of(seconds: float = 60.0) -> Deadline:
    """Return the deadline of a load."""
    return Deadline.of(Timeouts(load=seconds), "load")


def noted_checks(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return where the pieces of the payload that are checked from now on begin and end."""
    checked: list[tuple[int, int]] = []
    check = Place.check

    def noted(place: Place, view: memoryview, first_byte: int) -> None:
        checked.append((first_byte, first_byte + len(view)))
        check(place, view, first_byte)

    patch.setattr(Place, "check", noted)
    return checked


@pytest.mark.parametrize("claimed", [[], [0], [1, 3, 5], [0, 1, 2, 3, 4, 5]])
def test_units_that_nobody_claimed_are_checked_and_all_are_copied(
    tmp_path: Path, content: bytes, claimed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every unit is checked by one rank, in pieces that are cached."""
    checked = noted_checks(monkeypatch)
    monkeypatch.setattr(mappedreads, "_PIECE_BYTES", 300_000)
    monkeypatch.setattr(mappedreads, "_KEPT_BYTES", MIB)
    monkeypatch.setattr(mappedreads, "_MOST_BYTES", MIB)
    target = bytearray(CHUNK_BYTES)
    store = LocalStore(str(tmp_path))
    reads = mapped_part(store, request_for(content, target))
    assert reads is not None
    with closing(UnitClaims(6)) as mate, closing(reads.claims):
        (identity,) = (store.map_cached("file", size_bytes=AT_BYTES + CHUNK_BYTES + 3),)
        assert identity is not None
        units = units_of("file", KEY, identity.identity, UNIT_BYTES)
        for number in claimed:
            assert mate.claim(units, number * UNIT_BYTES)
        reads.claims.join(mate.offer)
        seen: list[int] = []
        reads.run(store, deadline_of(), seen.append)
    assert bytes(target) == content
    own = [at for at in range(-(-CHUNK_BYTES // 65536)) if at * 65536 // UNIT_BYTES not in claimed]
    assert [at for start, stop in checked for at in range(start // 65536, -(-stop // 65536))] == own
    assert all(stop - start <= 300_000 for start, stop in checked)
    assert sum(seen) == reads.total_bytes == CHUNK_BYTES


def test_two_ranks_divide_the_checks(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first has claimed the second does not check; both have all of it."""
    checked = noted_checks(monkeypatch)
    store, targets = LocalStore(str(tmp_path)), [bytearray(CHUNK_BYTES), bytearray(CHUNK_BYTES)]
    parts = [mapped_part(store, request_for(content, target)) for target in targets]
    first, second = parts
    assert first is not None
    assert second is not None
    with closing(first.claims), closing(second.claims):
        second.claims.join(first.claims.offer)
        first.run(store, deadline_of(), lambda _: None)
        assert sum(stop - start for start, stop in checked) == CHUNK_BYTES
        second.run(store, deadline_of(), lambda _: None)
    assert sum(stop - start for start, stop in checked) == CHUNK_BYTES
    assert all(bytes(target) == content for target in targets)


def test_who_wants_little_claims_and_checks_whole_units(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So another rank can rely on it for all of the unit; no further ones are looked at."""
    checked = noted_checks(monkeypatch)
    store, target = LocalStore(str(tmp_path)), bytearray(CHUNK_BYTES)
    low, high = UNIT_BYTES + 5, 2 * UNIT_BYTES + 7
    some = dataclasses.replace(
        request_for(content, target),
        region=Box((low,), (high - low,)),
        target=memoryview(target)[low:high],
    )
    reads = mapped_part(store, some, span=(low, high))
    assert reads is not None
    with closing(reads.claims):
        reads.run(store, deadline_of(), lambda _: None)
    assert sum(stop - start for start, stop in checked) == 2 * UNIT_BYTES
    assert (checked[0][0], checked[-1][1]) == (UNIT_BYTES, 3 * UNIT_BYTES)
    assert bytes(target) == bytes(low) + content[low:high] + bytes(CHUNK_BYTES - high)


def test_a_look_that_is_repeated_checks_again(tmp_path: Path, content: bytes) -> None:
    """What this rank has claimed itself is no other rank's to check."""
    wrong = bytearray(content)
    wrong[5 * UNIT_BYTES] ^= 1

    class Repeating(LocalStore):
        def look(self, path: str, action: Callable[[], None]) -> None:
            with contextlib.suppress(IntegrityError):
                action()
            super().look(path, action)

    store = Repeating(str(tmp_path))
    reads = mapped_part(store, request_for(bytes(wrong), bytearray(CHUNK_BYTES)))
    assert reads is not None
    with closing(reads.claims), pytest.raises(IntegrityError, match="damaged"):
        reads.run(store, deadline_of(), lambda _: None)


def test_damage_of_own_units_is_told_and_of_others_is_not(tmp_path: Path, content: bytes) -> None:
    """Who does not check a block does not find it; that is why all end together."""
    wrong = bytearray(content)
    wrong[0] ^= 1
    store, target = LocalStore(str(tmp_path)), bytearray(CHUNK_BYTES)
    first = mapped_part(store, request_for(bytes(wrong), target))
    second = mapped_part(store, request_for(bytes(wrong), bytearray(CHUNK_BYTES)), rank=1)
    assert first is not None
    assert second is not None
    with closing(first.claims), closing(second.claims):
        second.claims.join(first.claims.offer)
        with pytest.raises(IntegrityError, match="damaged") as caught:
            first.run(store, deadline_of(), lambda _: None)
        assert caught.value.fqn == "w"
        assert bytes(target) == bytes(CHUNK_BYTES)
        second.run(store, deadline_of(), lambda _: None)


def test_a_chunk_that_lies_beyond_its_file_is_not_mapped(tmp_path: Path, content: bytes) -> None:
    """A read says what is wrong."""
    store = LocalStore(str(tmp_path))
    request = request_for(content, bytearray(CHUNK_BYTES), start=AT_BYTES + 4)
    assert mapped_part(store, request) is None


def test_one_that_is_late_is_left_behind_and_writes_nothing(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer ends at the deadline; the targets are the caller's again."""
    waits, ended = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        waits.wait(60)
        ended.set()

    monkeypatch.setattr(Place, "check", hangs)
    target = bytearray(CHUNK_BYTES)
    store = RetryStore(LocalStore(str(tmp_path)), request_timeout_s=0.5)
    reads = mapped_part(store, request_for(content, target))
    assert reads is not None
    with pytest.raises(CheckpointError):
        reads.run(store, deadline_of(), lambda _: None)
    before = bytes(target)
    waits.set()
    assert ended.wait(60)
    for thread in threading.enumerate():
        if "abandoned" in thread.name:
            thread.join(10)
    assert bytes(target) == before


# What the kernel caches.


class Cold(Posix):
    """A kernel that caches all but some pieces of 1 MiB, until they are read."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing
        self.read: list[int] = []

    def is_own_disk(self, fd: int) -> bool:
        """Say yes."""
        return fd >= 0

    def cached_bytes(self, fd: int, offset: int, length: int) -> int:
        """Leave out the pieces that are missing."""
        del fd
        gone = [
            min(offset + length, (at + 1) * MIB) - max(offset, at * MIB)
            for at in self.missing
            if at * MIB < offset + length and offset < (at + 1) * MIB
        ]
        return length - sum(gone)

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        """Read, and note it."""
        self.read.append(offset)
        return super().preadv(fd, buffers, offset)


def test_what_little_is_missing_is_read(tmp_path: Path) -> None:
    """By calls, whose errors are errors."""
    data = os.urandom(33 * MIB + 5)
    (tmp_path / "file").write_bytes(data)
    posix = Cold({3, 33})
    mapped = LocalStore(str(tmp_path), posix=posix).map_cached("file", size_bytes=len(data))
    assert mapped is not None
    assert bytes(mapped.memory) == data
    assert posix.read == [3 * MIB, 33 * MIB]


def test_what_is_mostly_missing_is_not_mapped(tmp_path: Path) -> None:
    """More than a sixteenth."""
    data = bytes(32 * MIB)
    (tmp_path / "file").write_bytes(data)
    posix = Cold({1, 2, 3})
    assert LocalStore(str(tmp_path), posix=posix).map_cached("file", size_bytes=len(data)) is None
    assert posix.read == []


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("cached_bytes", errno.ENOSYS),
        ("cached_bytes", errno.EPERM),
        ("map_private", errno.ENODEV),
        ("map_private", errno.ENOMEM),
    ],
)
def test_a_kernel_that_cannot_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    """Then files are read."""

    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").write_bytes(b"content")
    posix = Cold(set())
    monkeypatch.setattr(posix, method, refuses)
    assert LocalStore(str(tmp_path), posix=posix).map_cached("file", size_bytes=7) is None


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a fault of the process: what is missing is read before it is looked at."""
    data = bytes(32 * MIB)
    (tmp_path / "file").write_bytes(data)
    posix = Cold({1})

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(posix, "preadv", fails)
    with pytest.raises(StorageError, match="Input/output error"):
        LocalStore(str(tmp_path), posix=posix).map_cached("file", size_bytes=len(data))


def test_files_of_other_lengths_and_of_none_are_not_mapped(tmp_path: Path) -> None:
    """An empty file has nothing to map."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "empty").write_bytes(b"")
    store = LocalStore(str(tmp_path), posix=Cold(set()))
    assert store.map_cached("file", size_bytes=8) is None
    assert store.map_cached("empty", size_bytes=0) is None
    with pytest.raises(StorageError) as caught:
        store.map_cached("absent", size_bytes=7)
    assert caught.value.kind == "not-found"


def test_a_network_mount_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose files others may change, and whose cached pages then go away."""
    (tmp_path / "file").write_bytes(b"content")
    monkeypatch.setattr("ckpt_storage.store.posix._file_system", lambda _: 0x6969)  # NFS
    assert LocalStore(str(tmp_path)).map_cached("file", size_bytes=7) is None


def test_the_kernel_is_asked_for_what_it_caches(tmp_path: Path) -> None:
    """Of a file that was just written all, and nothing of what it was told to forget."""
    if not is_told(tmp_path):
        pytest.skip("needs Linux 6.5, and a file system whose files it caches by itself")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(3 * MIB + 1))
    posix = Posix()
    fd = posix.open_read(str(file))
    try:
        assert posix.cached_bytes(fd, 0, 3 * MIB + 1) == 3 * MIB + 1
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert posix.cached_bytes(fd, 0, 3 * MIB + 1) == 0
        os.pread(fd, 1, 2 * MIB)
        assert posix.cached_bytes(fd, 2 * MIB, 4096) == 4096
    finally:
        posix.close(fd)


def test_descriptors_and_maps_end_with_the_file(tmp_path: Path) -> None:
    """One of each while it is mapped, none after."""
    (tmp_path / "file").write_bytes(b"content")
    before = len(list(Path("/proc/self/fd").iterdir()))
    posix = Cold(set())
    mapped = LocalStore(str(tmp_path), posix=posix).map_cached("file", size_bytes=7)
    assert mapped is not None
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    del mapped
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_identity_is_of_the_file_and_its_content(tmp_path: Path) -> None:
    """The same for all who map it; another one's, or a later one's, is not."""
    store = LocalStore(str(tmp_path), posix=Cold(set()))

    def identity(name: str) -> str:
        mapped = store.map_cached(name, size_bytes=7)
        assert mapped is not None
        return mapped.identity

    for name in ("file", "other"):
        (tmp_path / name).write_bytes(b"content")
    first = identity("file")
    assert identity("file") == first
    assert identity("other") != first
    (tmp_path / "other").replace(tmp_path / "file")
    assert identity("file") != first


@pytest.mark.parametrize(
    "trouble", ["no descriptors", "a failing disk", "too many", "no checksums"]
)
def test_what_cannot_be_mapped_is_left_to_reads(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """They say what is wrong, within what all ranks hear of."""
    store, request = LocalStore(str(tmp_path)), request_for(content, bytearray(CHUNK_BYTES))

    def fails(*_: object) -> None:
        number = errno.EMFILE if trouble == "no descriptors" else errno.EIO
        raise OSError(number, os.strerror(number))

    if trouble in {"no descriptors", "a failing disk"}:
        monkeypatch.setattr(Posix, "open_read", fails)
    elif trouble == "too many":
        monkeypatch.setattr(mappedreads, "_MOST_FILES", 0)
    else:
        place = dataclasses.replace(request.place, crcs=None)
        request = dataclasses.replace(request, place=place)
    assert mapped_part(store, request) is None


def test_what_is_behind_is_no_memory_of_the_process(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page by page, as the tables of a whole model would be long; locked memory stays."""
    monkeypatch.setattr(mappedreads, "_KEPT_BYTES", MIB)
    monkeypatch.setattr(mappedreads, "_MOST_BYTES", MIB)
    forgotten: list[tuple[int, int]] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            assert option == mmap.MADV_DONTNEED
            forgotten.append((start, start + length))
            raise OSError(errno.EINVAL, "locked")

    def mapped(_posix: Posix, fd: int, length: int) -> mmap.mmap:
        return Memory(fd, length, flags=mmap.MAP_PRIVATE)

    monkeypatch.setattr(Posix, "map_private", mapped)
    target = bytearray(CHUNK_BYTES)
    store = LocalStore(str(tmp_path))
    reads = mapped_part(store, request_for(content, target))
    assert reads is not None
    reads.run(store, deadline_of(), lambda _: None)
    assert bytes(target) == content
    assert forgotten[0][0] == 0
    assert forgotten[-1][1] == AT_BYTES + CHUNK_BYTES + 3
    assert len(forgotten) > 3
    for (_, stop), (start, _) in itertools.pairwise(forgotten):
        assert stop - mmap.PAGESIZE <= start <= stop


def test_long_stretches_are_cut(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the deadline is looked at in between."""
    monkeypatch.setattr(mappedreads, "_MOST_BYTES", MIB)
    looks: list[str] = []
    target = bytearray(CHUNK_BYTES)

    class Looking(LocalStore):
        def look(self, path: str, action: Callable[[], None]) -> None:
            looks.append(path)
            action()

    store = Looking(str(tmp_path))
    reads = mapped_part(store, request_for(content, target))
    assert reads is not None
    reads.run(store, deadline_of(), lambda _: None)
    assert bytes(target) == content
    assert len(looks) == 6
