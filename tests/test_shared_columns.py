"""Ranks of one host that cut the same local file into columns: each block is checked by one.

Here through memory that they share; out of the kernel's cache in `test_mapped_reads`. The oracle
makes tensors from their seeds and slices them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed as dist
from dcp_cases import same, seeded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import hostmemory, integrity, sharers, sharing, tensorsinks
from ckpt_storage.namelessmemory import host_identity
from ckpt_storage.sharedreads import SharedReads
from ckpt_storage.store.local import LocalStore
from ckpt_storage.testing.ranks import RankPool

# Rows of odd length: units begin and end within them.
ROWS, WIDTH = 16_384, 1031

pytestmark = pytest.mark.skipif(not host_identity(), reason="needs Linux's memory without a name")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 64 MiB in one tensor, and a small one."""
    path = tmp_path_factory.mktemp("columns") / "model"
    state = {"w": seeded(1, ROWS, WIDTH, dtype=torch.float32), "b": seeded(2, 77)}
    dcp_cases.save(state, str(path))
    return path


def refused(*_: object) -> Any:
    """Stand for a kernel that lets nobody look into other processes."""
    raise PermissionError(errno.EACCES, "Permission denied")


def full(*_: object) -> None:
    """Stand for a kernel without memory."""
    raise OSError(errno.ENOSPC, "No space left on device")


def unmapped(*_: object, **__: object) -> None:
    """Stand for a kernel that does not tell what it caches."""


TROUBLES: dict[str, tuple[object, str, object]] = {
    "no room": (os, "posix_fallocate", full),
    "another host": (sharers, "host_identity", lambda: "elsewhere"),
    "no such kernel": (sharers, "host_identity", str),
    "cannot look": (hostmemory.HostMemory, "_reached", refused),
}
"""What goes wrong, and the function in whose place that is put."""


@contextlib.contextmanager
def counted(trouble: str, rank: int) -> Iterator[dict[str, int]]:
    """Count bytes that this rank checks and units that it takes; make `trouble` on rank 1."""
    counts = {"checked": 0, "shared": 0, "put": 0}
    check, found = integrity.first_wrong_block, SharedReads._found  # noqa: SLF001
    put = tensorsinks._RowPut.put  # noqa: SLF001

    def checked(view: memoryview, *args: Any) -> int | None:
        counts["checked"] += len(view)
        return check(view, *args)

    def taken(*args: Any) -> None:
        counts["shared"] += len(args[-1])
        found(*args)

    def putting(*args: Any) -> bool:
        is_done = put(*args)
        counts["put"] += is_done
        return is_done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorsinks._RowPut, "put", putting)  # noqa: SLF001
        patch.setattr(integrity, "first_wrong_block", checked)
        patch.setattr(SharedReads, "_found", taken)
        patch.setattr(LocalStore, "map_cached", unmapped)
        if trouble and rank == 1:
            patch.setattr(*TROUBLES[trouble])
        yield counts


def load_columns(rank: int, path: str, trouble: str, options: dict[str, Any]) -> dict[str, int]:
    """Load by columns, compare, and return what this rank checked and took of others."""
    count, dim = dist.get_world_size(), options.get("dimension", 1)
    mesh = init_device_mesh("cpu", (count,))
    whole = seeded(1, ROWS, WIDTH, dtype=torch.float32)
    target: dict[str, Any] = {
        "w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(dim)], src_data_rank=None),
        "b": torch.zeros(77),
    }
    own = options.get(f"rank {rank}", {})
    with counted(trouble, rank) as counts:
        ckpt_storage.load(target, path, **own)
    assert same(target["w"].to_local(), torch.chunk(whole, count, dim)[rank].contiguous())
    assert same(target["b"], seeded(2, 77))
    return counts


@pytest.mark.parametrize("size", [3, 4])
def test_each_block_is_checked_by_one_rank(ranks: RankPool, saved: Path, size: int) -> None:
    """Ranks check little more than the file together, and take the rest from one another."""
    found = ranks.run(load_columns, str(saved), "", {}, world_size=size)
    total = ROWS * WIDTH * 4
    checked = [counts["checked"] for counts in found]
    assert total <= sum(checked) < 1.2 * total
    assert max(checked) < 1.5 * total / size
    assert all(counts["shared"] for counts in found)
    # What is read here, and what others read: no unit goes the longer way.
    units = -(-total // sharing._LOCAL.unit_bytes)  # noqa: SLF001
    assert all(counts["put"] == units for counts in found)


@pytest.mark.parametrize("trouble", ["no room", "another host", "no such kernel", "cannot look"])
def test_ranks_that_cannot_share_memory_read_for_themselves(
    ranks: RankPool, saved: Path, trouble: str
) -> None:
    """Trouble on one rank lets all load on their own, and check everything."""
    found = ranks.run(load_columns, str(saved), trouble, {}, world_size=3)
    assert all(counts["shared"] == 0 for counts in found)
    assert all(counts["checked"] >= ROWS * WIDTH * 4 for counts in found)


@pytest.mark.parametrize(
    "options",
    [
        {"rank 1": {"shared_reads": "never"}},
        {"rank 0": {"shared_reads": "never"}},
        {"rank 1": {"memory_limit_bytes": 1 << 20}},
        {"rank 1": {"verify": False}},
        {f"rank {rank}": {"shared_reads": "never"} for rank in range(3)},
    ],
)
def test_one_rank_that_may_not_share_lets_all_read_alone(
    ranks: RankPool, saved: Path, options: dict[str, Any]
) -> None:
    """Options may differ between ranks: the load succeeds, and nobody shares."""
    found = ranks.run(load_columns, str(saved), "", options, world_size=3)
    assert all(counts["shared"] == 0 for counts in found)


def test_ranks_that_read_unlike_numbers_at_a_time_share(ranks: RankPool, saved: Path) -> None:
    """One with several threads and one with another memory limit take part."""
    options = {"rank 1": {"thread_count": 4}, "rank 2": {"memory_limit_bytes": 64 << 20}}
    found = ranks.run(load_columns, str(saved), "", options, world_size=3)
    assert all(counts["shared"] for counts in found)


def test_rows_are_read_by_who_wants_them(ranks: RankPool, saved: Path) -> None:
    """What lies together in the file goes straight into each rank's target, by itself."""
    found = ranks.run(load_columns, str(saved), "", {"dimension": 0}, world_size=3)
    assert all(counts["shared"] == 0 for counts in found)


def load_damaged(_rank: int, path: str) -> str:
    """Load by columns; return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "map_cached", unmapped)
        return error_of_columns(path)


def error_of_columns(path: str) -> str:
    """Load by columns; return the error."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.zeros(ROWS, WIDTH)
    target = {"w": distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)}
    try:
        ckpt_storage.load(target, path)
    except ckpt_storage.CheckpointError as error:
        return f"{type(error).__name__} {error}"
    return "loaded"


def test_a_bit_turned_in_the_file_ends_the_load_of_all(ranks: RankPool, tmp_path: Path) -> None:
    """The rank that checks the block tells all, whoever else wants it."""
    path = tmp_path / "model"
    dcp_cases.save({"w": seeded(1, ROWS, WIDTH, dtype=torch.float32)}, str(path))
    (file,) = path.rglob("*.distcp")
    with file.open("r+b") as handle:
        handle.seek(40 << 20)
        byte = handle.read(1)
        handle.seek(40 << 20)
        handle.write(bytes([byte[0] ^ 4]))
    for text in ranks.run(load_damaged, str(path), world_size=3):
        assert "damaged" in text


def load_and_let_go(rank: int, path: str) -> list[str]:
    """Load by columns without the collector; return what is left of it without the target."""
    gc.collect()
    gc.disable()
    try:
        load_columns(rank, path, "", {})
        left = [
            line
            for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
            if "memfd:ckpt_storage" in line
        ]
        return left + [str(one) for one in gc.get_objects() if isinstance(one, SharedReads)]
    finally:
        gc.enable()


def test_the_memory_of_a_load_does_not_wait_for_the_collector(ranks: RankPool, saved: Path) -> None:
    """With it would wait the targets, which are as large as a model."""
    assert ranks.run(load_and_let_go, str(saved), world_size=3) == [[], [], []]
