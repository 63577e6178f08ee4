"""Coordinators over real process groups, each rank a process."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import front_door_cases as cases
import pytest
import torch
import torch.distributed as dist
from dcp_cases import load_stock, same, seeded

import ckpt_storage
from ckpt_storage import InvalidInputError, RankFailedError
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import store_of
from ckpt_storage.options import Timeouts
from ckpt_storage.testing.ranks import RankPool


def speak(group: Any = None) -> list[bytes]:
    """Run one operation in which every rank sends its rank in the group."""
    coordinator = RankGroup.of(group)
    with coordinator.operation("the test", timeouts=Timeouts.of(20.0)) as operation:
        operation.meet({"everything": "equal"})
        return operation.all_gather(b"%d" % operation.rank)


def everybody(world_size: int) -> list[bytes]:
    """Return what every rank sends."""
    return [b"%d" % rank for rank in range(world_size)]


def in_other_groups(rank: int, folder: str) -> list[list[bytes]]:
    """Speak in a group of our own kind, end it, and speak in its successor."""
    heard = []
    for number in range(2):
        inner = Path(folder) / str(number)
        with cases.default_group(rank, 3, str(inner), kind="tcp"):
            heard.append(speak())
            heard.append(speak())
    return heard


def test_a_group_made_anew_coordinates(ranks: RankPool, tmp_path: Path) -> None:
    """After destroy and init the new group's ranks hear each other."""
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    expected = [[everybody(3)] * 4] * 3
    assert ranks.run(in_other_groups, str(tmp_path), world_size=3) == expected


def in_sub_group(rank: int, path: str) -> str:
    """Save on ranks 1 and 3, while 0 and 2 never call anything and end at once."""
    if rank in {0, 2}:
        return "no member"
    # A short timeout is for what is tested, not for ranks that begin a moment apart.
    dist.barrier(dist.new_group([1, 3], use_local_synchronization=True))
    short = timedelta(seconds=2)
    group = dist.new_group([1, 3], timeout=short, use_local_synchronization=True)
    time.sleep(2.5 if rank == 3 else 0.0)  # longer than the group's own timeout
    assert speak(group) == everybody(2)
    info = ckpt_storage.save(
        {"w": seeded(2, 100)}, path, process_group=group, sync_files=False, timeout=20.0
    )
    target = {"w": torch.zeros(100)}
    ckpt_storage.load(target, path, process_group=group, timeout=20.0)
    assert same(target["w"], seeded(2, 100))
    return info.save_id or ""


def test_a_sub_group_saves_while_others_never_call(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks 1 and 3 of 4 save and load although 0 and 2 take no part, however late one is."""
    path = tmp_path / "run"
    first, second, third, fourth = ranks.run(in_sub_group, str(path), world_size=4)
    assert (first, third) == ("no member", "no member")
    assert second == fourth != ""
    target = {"w": torch.zeros(100)}
    load_stock(target, path)
    assert same(target["w"], seeded(2, 100))


def as_non_member(rank: int, path: str) -> str:
    """Call `save` and `load` on a rank that is not in the group."""
    group = dist.new_group([1])
    if rank == 1:
        return "member"
    names = []
    for call in (ckpt_storage.save, ckpt_storage.load):
        with pytest.raises(InvalidInputError) as caught:
            call({"w": torch.zeros(1)}, path, process_group=group)
        names.append(str(caught.value))
    return " ".join(names)


def test_a_rank_outside_the_group_is_told_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """A non-member that calls gets an error that says so, and waits for nobody."""
    told, member = ranks.run(as_non_member, str(tmp_path / "run"), world_size=2)
    assert member == "member"
    assert told.count("member of process_group") == 2


def on_the_default_store(_rank: int) -> list[list[bytes]]:
    """Speak in two groups whose backend keeps no store."""
    with patch.object(dist.ProcessGroup, "get_group_store", side_effect=RuntimeError("none")):
        group = dist.new_group([0, 1])
        heard = [speak(), speak(group)]
        assert isinstance(store_of(group), dist.PrefixStore)
    return heard


def test_a_group_without_a_store_uses_the_default_groups(ranks: RankPool) -> None:
    """Where a group has no store of its own, its ranks meet on the default store."""
    assert ranks.run(on_the_default_store, world_size=2) == [[everybody(2)] * 2] * 2


def with_backend_without_collectives(rank: int, folder: str) -> list[bytes]:
    """Speak in a default group whose backend moves nothing, as if its network were down."""
    dist.destroy_process_group()
    import torch.testing._internal.distributed.fake_pg  # noqa: F401, PLC0415  # registers it

    store = dist.FileStore(str(Path(folder) / "rendezvous"), 2)
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    try:
        ckpt_storage.save({"w": seeded(rank, 9)}, f"{folder}/run", timeout=20.0, sync_files=False)
        return speak()
    finally:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_no_collective_of_the_group_is_needed(ranks: RankPool, tmp_path: Path) -> None:
    """Over a backend whose collectives do nothing, ranks agree and save all the same."""
    heard = ranks.run(with_backend_without_collectives, str(tmp_path), world_size=2)
    assert heard == [everybody(2)] * 2
    target = {"w": torch.zeros(9)}
    load_stock(target, tmp_path / "run")
    assert same(target["w"], seeded(0, 9))


def die_before_the_next(rank: int, who: int) -> tuple[bool, int | None]:
    """Let one rank vanish after an operation; return what the others are told in the next."""
    speak()
    if rank == who:
        os._exit(3)
    try:
        speak()
    except RankFailedError as error:
        return error.is_silent, error.rank
    return False, None


def test_a_rank_that_died_between_operations_is_named_at_once(ranks: RankPool) -> None:
    """Ranks of its host need not wait until the plan phase is over: its process has ended."""
    begin_s = time.monotonic()
    for outcome in ranks.outcomes(die_before_the_next, 0, world_size=3)[1:]:
        assert outcome.value == (True, 0), outcome
    assert time.monotonic() - begin_s < 15.0
