"""What is done about ranks that hold different values under one name that is not sharded.

Stock `dcp.save` stores the value of a rank that its balancing chooses, and raises nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import rank_threads
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from front_door_cases import caught
from limits import HANG_S
from on_ranks import gathered, on_ranks
from saver_cases import quick_saver
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

import ckpt_storage
from ckpt_storage import CheckpointManager, RankMismatchError
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.saves import replicas
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.saves.planning import PLAN_CACHE
from ckpt_storage.saves.save import save_on

LARGE = 1 << 18
"""Elements of a tensor of 1 MiB."""

LOGGER = "ckpt_storage"


@pytest.fixture(autouse=True)
def _new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_warned_keys", set[str]())


class _Records(logging.Handler):
    """The messages of a logger, by level; pytest's own fixture sees no other process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelname, record.getMessage()))

    def about(self, key: str) -> list[str]:
        return [level for level, message in self.messages if key in message]


def _listen() -> _Records:
    replicas._warned_keys.clear()  # noqa: SLF001  # a pool's process outlives its tests
    records, logger = _Records(), logging.getLogger(LOGGER)
    for handler in [each for each in logger.handlers if isinstance(each, _Records)]:
        logger.removeHandler(handler)
    logger.addHandler(records)
    return records


def _loaded(path: Path, **targets: Any) -> dict[str, Any]:
    ckpt_storage.load(targets, path)
    return targets


@on_ranks()
def test_stock_dcp_mixes_the_values_of_ranks(rank: int, tmp_path: Path) -> None:
    """Stock `dcp.save` balances by size: of two values that differ it stores one of each rank."""
    state = {name: torch.full((4,), float(rank)) for name in ("mean", "var")}
    dcp.save(state, checkpoint_id=tmp_path)
    dcp.load(target := {name: torch.zeros(4) for name in state}, checkpoint_id=tmp_path)
    assert {float(value[0]) for value in target.values()} == {0.0, 1.0}


@on_ranks(2, 3)
def test_small_tensors_that_differ_come_from_the_lowest_rank(rank: int, tmp_path: Path) -> None:
    """Each is warned of once, on the coordinator, and every rank loads those of the lowest rank."""
    records = _listen()
    state = {name: torch.full((4,), float(rank)) for name in ("mean", "var", "third")}
    state["shared"] = seeded(1, 9)
    for number in range(3):
        ckpt_storage.save(state, path := tmp_path / str(number), sync_files=False)
        target = _loaded(path, **{name: torch.ones_like(value) for name, value in state.items()})
        assert all(float(target[name][0]) == 0.0 for name in ("mean", "var", "third"))
        assert same(target["shared"], state["shared"])
    for name in ("mean", "var", "third"):
        assert records.about(name) == (["WARNING"] if rank == 0 else [])
    assert not records.about("shared")


@on_ranks(3)
def test_the_lowest_rank_that_has_a_value_counts(rank: int, tmp_path: Path) -> None:
    """Of a name that rank 0 does not have, rank 1 stores its own."""
    state: dict[str, Any] = {"all": torch.ones(3)}
    if rank:
        state["some"] = torch.full((4,), float(rank))
    ckpt_storage.save(state, tmp_path, sync_files=False)
    assert float(_loaded(tmp_path, some=torch.zeros(4))["some"][0]) == 1.0


@on_ranks(2, 3)
def test_large_tensors_that_differ_are_refused(rank: int, tmp_path: Path) -> None:
    """From 1 MiB on the error has key, ranks and the ways out, and no byte is written.

    The last rank differs in one element in the middle of an expert's weights.
    """
    weight, small = torch.zeros(LARGE), torch.zeros(LARGE - 1)
    if rank == dist.get_world_size() - 1:
        weight.copy_(seeded(1, LARGE))
        small.copy_(seeded(2, LARGE - 1))
    error = caught(ckpt_storage.save, {"experts": {"w": weight}}, tmp_path / "run")
    assert type(error) is RankMismatchError
    assert "experts.w" in str(error)
    assert "PerRank" in (error.next_step or "")
    last = dist.get_world_size() - 1
    assert sorted(error.values.values()) == [list(range(last)), [last]]
    assert not (tmp_path / "run").exists()
    ckpt_storage.save({"experts": {"w": small}}, tmp_path / "small", sync_files=False)


@on_ranks()
def test_replicas_chooses(rank: int, tmp_path: Path) -> None:
    """Large tensors are stored by "first", without a warning; small ones are refused by "raise"."""
    records = _listen()
    state = {"w": torch.full((LARGE,), float(rank))}
    ckpt_storage.save(state, tmp_path / "first", replicas="first", sync_files=False)
    assert float(_loaded(tmp_path / "first", w=torch.ones(LARGE))["w"][0]) == 0.0
    assert not records.about("w")
    small = {"s": torch.full((4,), float(rank))}
    error = caught(ckpt_storage.save, small, tmp_path / "raise", replicas="raise")
    assert type(error) is RankMismatchError
    odd: Any = "any"
    assert "replicas is 'any'" in str(caught(ckpt_storage.save, small, tmp_path, replicas=odd))
    told = "first" if rank else "warn"
    error = caught(ckpt_storage.save, small, tmp_path / "unlike", replicas=told)
    assert type(error) is RankMismatchError
    assert "replicas" in str(error)


@on_ranks()
def test_other_values_that_differ_are_warned_of(rank: int, tmp_path: Path) -> None:
    """Counters and timings are stored from the lowest rank; equal ones are not warned of."""
    records = _listen()
    state: dict[str, Any] = {
        "seconds": 0.5 + rank,
        "losses": [1.0, float(rank)],
        "step": 7,
        "name": "run",
        "betas": (0.9, 0.999),
        "text": ["a" + "b" * 3, "abbb"] if rank else ["abbb"] * 2,
    }
    ckpt_storage.save(state, tmp_path, replicas="raise", sync_files=False)
    assert _loaded(tmp_path, **dict.fromkeys(state)) == {
        **state,
        "seconds": 0.5,
        "losses": [1.0, 0.0],
    }
    for name in ("seconds", "losses"):
        assert records.about(name) == (["WARNING"] if rank == 0 else [])
    for name in ("step", "name", "betas", "text"):
        assert not records.about(name)


@on_ranks()
def test_ddp_with_batch_norm_is_saved(rank: int, tmp_path: Path) -> None:
    """Running statistics differ on every rank; they are warned of, and of one rank throughout."""
    records = _listen()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        model(seeded(10 * rank + step, 6, 4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        ckpt_storage.save(state, path := tmp_path / str(step), sync_files=False)
    names = ("running_mean", "running_var")
    target = {"model": {key: torch.zeros_like(value) for key, value in state["model"].items()}}
    ckpt_storage.load(target, path)
    for name in names:
        of_rank = gathered(state["model"][f"module.1.{name}"])
        assert same(target["model"][f"module.1.{name}"], of_rank[0])
        assert not same(of_rank[0], of_rank[1])
        assert records.about(name) == (["WARNING"] if rank == 0 else [])


@pytest.mark.parametrize("mode", ["thread", "process"])
@on_ranks()
def test_a_background_save_compares_what_it_copied(rank: int, tmp_path: Path, mode: Any) -> None:
    """Values are compared as they were at the call; large ones fail the save on all ranks."""
    state: dict[str, Any] = {"mean": torch.full((4,), float(rank)), "seconds": float(rank)}
    state["w"] = torch.zeros(LARGE)
    with quick_saver(mode) as saver:
        saver.save(state, tmp_path / "1", sync_files=False).result()
        state["w"].add_(rank)
        handle = saver.save(state, tmp_path / "2", sync_files=False)
        state["w"].zero_()
        with pytest.raises(RankMismatchError, match=r"\bw\b"):
            handle.result()
        saver.save(state, tmp_path / "3", sync_files=False).result()
    target = _loaded(tmp_path / "3", mean=torch.ones(4), seconds=None)
    assert float(target["mean"][0]) == target["seconds"] == 0.0


@on_ranks()
def test_a_preemption_save_is_never_refused(rank: int, tmp_path: Path) -> None:
    """What differs by 1 MiB is stored from the lowest rank, with an error in the log."""
    records = _listen()
    state = {"w": torch.full((LARGE,), float(rank))}
    with CheckpointManager(tmp_path, preemption=lambda: True, timeout=HANG_S) as manager:
        assert type(caught(manager.save, 1, state, sync_files=False)) is RankMismatchError
        step = next(filter(manager.should_save, count(2)))
        manager.save(step, state, replicas="raise", sync_files=False)
        target = {"w": torch.ones(LARGE)}
        manager.restore(target)
    assert float(target["w"][0]) == 0.0
    assert records.about("differ in w ") == (["ERROR"] if rank == 0 else [])


@on_ranks()
def test_dcp_save_refuses_before_the_commit(rank: int, tmp_path: Path) -> None:
    """Under `dcp.save` the writer sees values only as it writes: what is large is not committed."""
    records = _listen()

    def save(name: str, **options: Any) -> None:
        writer = ckpt_storage.CheckpointStorageWriter(tmp_path / name, sync_files=False, **options)
        dcp.save(
            {"w": torch.full((LARGE,), float(rank)), "m": torch.ones(2) + rank},
            storage_writer=writer,
        )

    with pytest.raises(CheckpointException) as raised:
        save("refused")
    (failure, *_) = [error for error, _ in raised.value.failures.values()]
    assert isinstance(failure, RankMismatchError)
    assert "w" in str(failure)
    dist.barrier()
    assert ckpt_storage.list_checkpoints(tmp_path) == []
    save("first", replicas="first")
    assert records.about("m") == []


def test_each_rank_is_asked_for_details_only_where_digests_differ(tmp_path: Path) -> None:
    """Equal replicas cost no further round; those that differ cost one."""
    rounds = []
    PLAN_CACHE.clear()
    for number, unlike in enumerate([0.0, 0.0, 1.0, 1.0]):
        if number == 2:
            PLAN_CACHE.clear()
        store = rank_threads.SharedStore()
        ranks = rank_threads.group(store, 2)

        def body(rank: RankGroup, unlike: float = unlike, number: int = number) -> None:
            state = {"w": torch.full((4,), unlike * rank.rank)}
            options = SaveOptions(sync_files=False)
            save_on(rank, lambda: state, tmp_path / str(number), options)

        rank_threads.values(rank_threads.run(ranks, body))
        releases = [each for each in store.requests if each.key.endswith("release")]
        rounds.append(sum(each.method == "set" for each in releases))
    assert rounds == [rounds[0], rounds[0], rounds[0] + 1, rounds[0] + 1]


def test_ranks_may_hold_values_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of one rank alone are no replicas: nothing is warned of, as in a pipeline."""
    ranks = rank_threads.group(rank_threads.SharedStore(), 3)

    def body(rank: RankGroup) -> None:
        state = {"all": torch.ones(3), f"layer {rank.rank}": torch.full((LARGE,), float(rank.rank))}
        save_on(rank, lambda: state, tmp_path / "run", SaveOptions(sync_files=False))

    with caplog.at_level(logging.WARNING, LOGGER):
        rank_threads.values(rank_threads.run(ranks, body))
    assert not caplog.records
    loaded = ckpt_storage.open_checkpoint(tmp_path / "run").load()
    assert [float(loaded[f"layer {rank}"][0]) for rank in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "tensor",
    [
        seeded(1, 300, 70).t(),
        seeded(2, 8, 6, 50, 50).to(memory_format=torch.channels_last),
        seeded(3, 1, 5).expand(9000, 5),
        seeded(4, 90, 90, dtype=torch.complex64).conj(),
        seeded(5, 40_000)[::2],
    ],
)
def test_how_a_tensor_lies_in_memory_does_not_matter(tensor: torch.Tensor) -> None:
    """Strides, conjugation and views change no sample: only elements do."""
    plain = tensor.resolve_conj().contiguous()
    assert replicas.sample_of({"t": tensor}).digest == replicas.sample_of({"t": plain}).digest
    other = plain.clone()
    other[-1] = 7
    assert replicas.sample_of({"t": other}).digest != replicas.sample_of({"t": plain}).digest


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith("bits")])
def test_every_kind_of_number_is_sampled(name: str) -> None:
    """Contiguous or not: torch itself indexes not every kind."""
    tensor = seeded(1, 40, 30, dtype=getattr(torch, name))
    for each in (tensor, tensor.t()):
        assert replicas.sample_of({"t": each}).names == ("t",)


def test_samples_that_agree_are_compared_by_columns() -> None:
    """Rank 0 compares the samples of all ranks in each `dcp.save`, and reads no name of them."""

    class Names(tuple[str, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[str]:
            pytest.fail("a name was read")

    sample = replicas.sample_of({"t": torch.ones(3), "n": 5})
    other = replace(sample, names=Names(sample.names))
    assert replicas.find_differences([sample, other, other]) == []


def test_a_sample_is_bounded() -> None:
    """Of a large tensor at most `SAMPLE_BYTES` are read, its first and its last block included."""
    length = 1 << 22
    where = replicas.blocks_of(length)
    assert sum(stop - start for start, stop in where) <= replicas.SAMPLE_BYTES
    assert (where[0][0], where[-1][1]) == (0, length)
    assert replicas.blocks_of(100) == [(0, 100)]
