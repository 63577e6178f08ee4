"""Saves that do not write again what has not changed: what is linked, what is written, and when."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import seeded
from limits import HANG_S
from rank_pool import run_ranks
from reuse_cases import BASE, COUNT, files_of, is_loaded, linked, manifests_of, state_of
from saver_cases import quick_saver

import ckpt_storage
from ckpt_storage import (
    CheckpointManager,
    CheckpointStorageWriter,
    InvalidInputError,
    open_checkpoint,
)
from ckpt_storage.format.rank_manifest import NO_HASH

pytest.importorskip("xxhash", reason="the extra `reuse`")


def save_steps(root: Path, count: int, **options: Any) -> list[Any]:
    """Save states that differ in `moving`, each with the one before as its base."""
    infos = []
    for step in range(count):
        base: dict[str, Any] = {"base": root / f"{step - 1}"} if step else {}
        infos.append(ckpt_storage.save(state_of(step), root / f"{step}", **base, **options))
    return infos


def test_named_values_are_linked_from_the_second_save_on(tmp_path: Path) -> None:
    """They lie in a file of their own, which both saves have; the rest is written."""
    infos = save_steps(tmp_path, 2, stable="model.base.*")
    assert linked(tmp_path / "1") == BASE
    assert [info.stats.reused_bytes > 3 * 4 * COUNT for info in infos] == [False, True]
    assert is_loaded(tmp_path / "1", state_of(1))
    listed = ckpt_storage.list_checkpoints(tmp_path)
    assert [info.stats.reused_bytes for info in listed if info.stats] == [
        info.stats.reused_bytes for info in infos
    ]


def test_values_that_stay_are_linked_from_the_fourth_save_on(tmp_path: Path) -> None:
    """Without names: the first save of a series has no hashes, the third finds what is equal."""
    save_steps(tmp_path, 4)
    assert [linked(tmp_path / f"{step}") for step in range(2)] == [set(), set()]
    assert linked(tmp_path / "3") == BASE
    assert is_loaded(tmp_path / "3", state_of(3))


def test_each_checkpoint_is_whole_by_itself(tmp_path: Path) -> None:
    """The base can be deleted, and the other loads; the file cannot be edited in place."""
    save_steps(tmp_path, 2, stable="model.base.*", sync_files=False)
    (file,) = (path for fqns, path in files_of(tmp_path / "1").items() if set(fqns) == BASE)
    assert not file.stat().st_mode & 0o222
    shutil.rmtree(tmp_path / "0")
    assert is_loaded(tmp_path / "1", state_of(1))
    save_steps_again = ckpt_storage.save(
        state_of(2), tmp_path / "2", base=tmp_path / "1", stable="model.base.*"
    )
    ckpt_storage.delete(tmp_path / "1")
    assert save_steps_again.stats is not None
    assert save_steps_again.stats.reused_bytes
    assert is_loaded(tmp_path / "2", state_of(2))


def test_verify_tells_which_files_share_storage(tmp_path: Path) -> None:
    """With how many names each has."""
    save_steps(tmp_path, 3, stable="model.base.*")
    shared = ckpt_storage.verify(tmp_path / "1", deep=False).link_counts
    (file,) = (path for fqns, path in files_of(tmp_path / "1").items() if set(fqns) == BASE)
    assert shared == {str(file.relative_to(tmp_path / "1")): 3}


def test_a_value_that_changes_leaves_the_stable_file_for_good(tmp_path: Path) -> None:
    """The others are written anew once without it, and linked from then on."""
    state = state_of()
    save: dict[str, Any] = {"stable": "model.base.*"}
    ckpt_storage.save(state, tmp_path / "0", **save)
    # Behind the first block, so that only the hash shows it.
    state["model"]["base"]["w1"][-1] += 1
    ckpt_storage.save(state, tmp_path / "1", base=tmp_path / "0", **save)
    assert linked(tmp_path / "1") == set()
    assert ("model.base.w0", "model.base.w2") in files_of(tmp_path / "1")
    assert is_loaded(tmp_path / "1", state)
    ckpt_storage.save(state, tmp_path / "2", base=tmp_path / "1", **save)
    ckpt_storage.save(state, tmp_path / "3", base=tmp_path / "2", **save)
    for step in "23":
        assert linked(tmp_path / step) == BASE - {"model.base.w1"}
    assert is_loaded(tmp_path / "3", state)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t.to(torch.float64), id="dtype"),
        pytest.param(lambda t: t.reshape(2, -1), id="shape"),
        pytest.param(lambda t: t[:-1], id="length"),
        pytest.param(lambda t: t.view(torch.int32), id="dtype of the same bytes"),
    ],
)
def test_equal_names_are_not_enough(tmp_path: Path, change: Any) -> None:
    """A value of another dtype or shape is written, whatever its bytes are."""
    state = state_of()
    ckpt_storage.save(state, tmp_path / "0", stable="model.base.*")
    state["model"]["base"]["w0"] = change(state["model"]["base"]["w0"])
    ckpt_storage.save(state, tmp_path / "1", base=tmp_path / "0", stable="model.base.*")
    assert linked(tmp_path / "1") == set()
    assert is_loaded(tmp_path / "1", state)


def test_a_value_that_is_gone_is_in_no_file(tmp_path: Path) -> None:
    """A stable file with a value that this save does not have is written anew without it."""
    state = state_of()
    ckpt_storage.save(state, tmp_path / "0", stable="model.base.*")
    del state["model"]["base"]["w2"]
    ckpt_storage.save(state, tmp_path / "1", base=tmp_path / "0", stable="model.base.*")
    assert linked(tmp_path / "1") == set()
    with open_checkpoint(tmp_path / "1") as checkpoint:
        assert "model.base.w2" not in checkpoint
    assert is_loaded(tmp_path / "1", state)


def test_a_small_value_that_joins_does_not_make_the_others_written(tmp_path: Path) -> None:
    """It lies with the moving ones."""
    state = state_of()
    ckpt_storage.save(state, tmp_path / "0", stable="model.base.*")
    state["model"]["base"]["bias"] = seeded(9, 100)
    ckpt_storage.save(state, tmp_path / "1", base=tmp_path / "0", stable="model.base.*")
    assert linked(tmp_path / "1") == BASE
    assert is_loaded(tmp_path / "1", state)


def test_less_than_two_hundredths_are_no_file(tmp_path: Path) -> None:
    """A named value with a hundredth of the bytes lies with the others."""
    state = {"model": {"base": seeded(1, COUNT), "rest": seeded(2, 99 * COUNT)}}
    ckpt_storage.save(state, tmp_path / "0", stable="model.base", sync_files=False)
    assert len(files_of(tmp_path / "0")) == 1


def test_groups_have_stable_files_of_their_own(tmp_path: Path) -> None:
    """A frozen part of the optimizer's state lies apart from that of the model, and thins away."""
    state = {
        "model": {"frozen": seeded(1, COUNT * 4), "w": seeded(2, COUNT)},
        "optimizer": {"frozen": seeded(3, COUNT * 4), "m": seeded(4, COUNT)},
    }
    for step in range(2):
        state["model"]["w"] += 1
        base: dict[str, Any] = {"base": tmp_path / f"{step - 1}"} if step else {}
        ckpt_storage.save(state, tmp_path / f"{step}", stable="*.frozen", **base)
    assert linked(tmp_path / "1") == {"model.frozen", "optimizer.frozen"}
    with open_checkpoint(tmp_path / "1") as checkpoint:
        assert [file.group for file in checkpoint.files] == [None, None, "optim*", "optim*"]
    ckpt_storage.thin(tmp_path / "1", drop="optim*")
    ckpt_storage.save(state, tmp_path / "2", stable="*.frozen", base=tmp_path / "1")
    assert linked(tmp_path / "2") == {"model.frozen"}
    assert is_loaded(tmp_path / "2", state)


def test_a_thinned_base_serves_with_what_it_has(tmp_path: Path) -> None:
    """Its rank manifests have the hashes of the files that stayed."""
    save_steps(tmp_path, 2, stable="model.base.*")
    ckpt_storage.thin(tmp_path / "1", drop="model.lora")
    ckpt_storage.save(state_of(2), tmp_path / "2", base=tmp_path / "1", stable="model.base.*")
    assert linked(tmp_path / "2") == BASE
    assert is_loaded(tmp_path / "2", state_of(2))


def test_a_checkpoint_may_be_its_own_base(tmp_path: Path) -> None:
    """An overwriting save links the files of the save that it replaces."""
    save: dict[str, Any] = {"stable": "model.base.*", "overwrite": True}
    for step in range(4):
        ckpt_storage.save(state_of(step), tmp_path / "run", base=tmp_path / "run", **save)
    assert linked(tmp_path / "run") == BASE
    assert is_loaded(tmp_path / "run", state_of(3))


def test_a_file_is_written_anew_once_so_many_checkpoints_have_it(tmp_path: Path) -> None:
    """`full_every` bounds how many checkpoints one damaged file can hurt."""
    with CheckpointManager(tmp_path, reuse=True, stable="model.base.*", full_every=3) as manager:
        for step in range(1, 8):
            manager.save(step, state_of(step))
    inodes = []
    for info in ckpt_storage.list_checkpoints(tmp_path):
        files = files_of(Path(info.url.removeprefix("file://")))
        inodes += [file.stat().st_ino for fqns, file in files.items() if set(fqns) == BASE]
    assert [inodes.count(inode) for inode in dict.fromkeys(inodes)] == [3, 3, 1]


def test_a_small_full_every_leaves_time_to_find_what_stays(tmp_path: Path) -> None:
    """Two full saves find what stays, without names; then two checkpoints have each file."""
    with CheckpointManager(tmp_path, reuse=True, full_every=2) as manager:
        infos = [manager.save(step, state_of(step)) for step in range(1, 8)]
    reused = [bool(info.stats.reused_bytes) for info in infos if info.stats]
    assert reused == [False, False, True, False, True, False, True]


def test_a_run_of_which_nothing_stays_is_hashed_three_times(tmp_path: Path) -> None:
    """Then none is, until `full_every` says so."""
    hashed = []
    with CheckpointManager(tmp_path, reuse=True, full_every=6) as manager:
        for step in range(1, 9):
            manager.save(step, {"w": seeded(step, COUNT), "v": seeded(step + 50, COUNT)})
            (manifest,) = manifests_of(Path(manager.url_of(step).removeprefix("file://")))
            hashes = [file.hash_of(at) for file in manifest.files for at in range(len(file.fqn))]
            hashed.append(all(one != NO_HASH for one in hashes))
    assert hashed == [True] * 3 + [False] * 3 + [True] * 2


def test_what_stays_later_is_noticed_without_full_every(tmp_path: Path) -> None:
    """In a run of which nothing stayed at first, values are hashed again after thirty saves."""
    with CheckpointManager(tmp_path, reuse=True) as manager:
        infos = [
            manager.save(step, {"w": seeded(min(step, 5), COUNT)}, sync_files=False)
            for step in range(1, 36)
        ]
    reused = [step for step, info in enumerate(infos, 1) if info.stats and info.stats.reused_bytes]
    assert reused == [32, 33, 34, 35]


@pytest.mark.parametrize("stable", ["", "model.base.*"])
def test_a_process_that_goes_on_with_a_run_hashes_again(tmp_path: Path, stable: str) -> None:
    """The process before it had stopped; this one may freeze values, or name them."""
    with CheckpointManager(tmp_path, reuse=True, mode="process") as manager:
        for step in range(1, 6):
            manager.save_async(step, state_of(step, base=100 * step)).result()
    named: dict[str, Any] = {"stable": stable} if stable else {}
    with CheckpointManager(tmp_path, reuse=True, **named) as manager:
        manager.restore(dcp_cases.zeros_like(state_of(5)))
        infos = [manager.save(step, state_of(step)) for step in range(6, 9)]
    assert infos[-1].stats is not None
    assert infos[-1].stats.reused_bytes > 3 * 4 * COUNT


_IN_A_CONTAINER = """
import os, sys
import torch
from ckpt_storage import CheckpointManager
os.getpid = lambda: 1
path, first, stable = sys.argv[1:]
still = torch.arange(1 << 16).float()
with CheckpointManager(path, reuse=True, stable=stable or ()) as manager:
    if first != "1":
        manager.restore({"still": torch.zeros_like(still)})
    for step in range(int(first), int(first) + 4):
        info = manager.save(step, {"still": still if stable else torch.rand(1 << 16)})
print(info.stats.reused_bytes)
"""


def test_a_container_that_starts_again_hashes_again(tmp_path: Path) -> None:
    """Its first process has the host name and the process id of the process before."""
    reused = []
    for first, stable in ((1, ""), (5, "still")):
        command = [sys.executable, "-c", _IN_A_CONTAINER, str(tmp_path), str(first), stable]
        ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S)
        reused.append(int(ended.stdout))
    assert reused[0] == 0
    assert reused[1] > 4 << 16


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_manager_takes_its_newest_checkpoint_as_the_base(tmp_path: Path, mode: Any) -> None:
    """Background saves, too: also the next one, which waits for the one before."""
    with CheckpointManager(tmp_path, reuse=True, stable="model.base.*", mode=mode) as manager:
        for step in range(1, 4):
            manager.save_async(step, state_of(step))
        manager.wait()
        last = Path(manager.url_of(3).removeprefix("file://"))
    assert linked(last) == BASE
    assert is_loaded(last, state_of(3))


def test_a_manager_takes_what_it_restored_as_the_base(tmp_path: Path) -> None:
    """So a run that was resumed goes on without a full save."""
    options: dict[str, Any] = {"reuse": True, "stable": "model.base.*"}
    with CheckpointManager(tmp_path, **options) as manager:
        manager.save(1, state_of(1))
    with CheckpointManager(tmp_path, **options) as manager:
        manager.restore(dcp_cases.zeros_like(state_of(1)))
        info = manager.save(2, state_of(2))
    assert info.stats is not None
    assert info.stats.reused_bytes


def test_a_damaged_save_of_a_step_that_was_sound_before_is_no_base(tmp_path: Path) -> None:
    """The manager knows an earlier save of that step as sound; its damage must not be linked."""
    with CheckpointManager(tmp_path, reuse=True, stable="model.base.*") as manager:
        ckpt_storage.save(state_of(1), manager.url_of(1))
        for moving in range(2):
            manager.save(2, state_of(moving), overwrite=True)
        path = Path(manager.url_of(2).removeprefix("file://"))
        (file,) = (file for fqns, file in files_of(path).items() if set(fqns) == BASE)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.chmod(0o600)
        file.write_bytes(data)
        restored = manager.restore(dcp_cases.zeros_like(state_of(1)))
        assert restored is not None
        assert restored.step == 1
        manager.save(2, state_of(2))
    assert is_loaded(path, state_of(2))


def test_a_saver_reuses_too(tmp_path: Path) -> None:
    """`AsyncSaver.save` and `save_async` take `base` and `stable`; the worker hashes."""
    with quick_saver("process") as saver:
        saver.save(state_of(0), tmp_path / "0", stable="model.base.*").result()
        saver.save(state_of(1), tmp_path / "1", base=tmp_path / "0", stable="model.base.*").result()
    ckpt_storage.save_async(
        state_of(2), tmp_path / "2", base=tmp_path / "1", stable=["model.base.*"]
    ).result()
    assert linked(tmp_path / "1") == linked(tmp_path / "2") == BASE
    assert is_loaded(tmp_path / "2", state_of(2))


def test_a_writer_reuses_too(tmp_path: Path) -> None:
    """`dcp.save` with a `CheckpointStorageWriter`."""
    for step in range(2):
        base: dict[str, Any] = {"base": tmp_path / f"{step - 1}"} if step else {}
        writer = CheckpointStorageWriter(tmp_path / f"{step}", stable="model.base.*", **base)
        dcp.save(state_of(step), storage_writer=writer)
    assert linked(tmp_path / "1") == BASE
    assert is_loaded(tmp_path / "1", state_of(1))


def save_on_rank(rank: int, url: Path, first: Path | None, second: Path | None) -> None:
    """Save with one base on rank 0, and another one on rank 1."""
    base = second if rank else first
    ckpt_storage.save(state_of(), url, stable="model.base.*", base=base)


def test_another_number_of_ranks_writes_all(tmp_path: Path) -> None:
    """Each of two ranks wrote a stable file with some of the values; one rank has no such file."""
    for base, url in (None, "0"), ("0", "1"):
        of = None if base is None else tmp_path / base
        assert not any(o.failure for o in run_ranks(2, save_on_rank, tmp_path / url, of, of))
    save_on_rank(0, tmp_path / "2", tmp_path / "1", None)
    assert linked(tmp_path / "1") == BASE
    assert linked(tmp_path / "2") == set()
    assert is_loaded(tmp_path / "2", state_of())


def test_the_base_of_rank_0_counts(tmp_path: Path) -> None:
    """Ranks that know another base, or none, use its."""
    bases = [(None, None), (tmp_path / "0", tmp_path / "none")]
    for step, (first, second) in enumerate(bases):
        outcomes = run_ranks(2, save_on_rank, tmp_path / f"{step}", first, second)
        assert not any(outcome.failure for outcome in outcomes)
    assert linked(tmp_path / "1") == BASE
    assert is_loaded(tmp_path / "1", state_of())


def truncated(file: Path) -> None:
    file.chmod(0o644)
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        pytest.param(truncated, "were written", id="truncated"),
        pytest.param(Path.unlink, "", id="deleted"),
    ],
)
def test_a_damaged_file_is_not_linked(
    tmp_path: Path, harm: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is written, whole."""
    ckpt_storage.save(state_of(), tmp_path / "0", stable="model.base.*")
    (file,) = (path for fqns, path in files_of(tmp_path / "0").items() if set(fqns) == BASE)
    harm(file)
    with caplog.at_level(logging.WARNING):
        ckpt_storage.save(state_of(1), tmp_path / "1", base=tmp_path / "0", stable="model.base.*")
    assert reason in caplog.text
    assert linked(tmp_path / "1") == set()
    assert is_loaded(tmp_path / "1", state_of(1))


def rank_manifest_gone(base: Path) -> None:
    for path in base.glob("saves/*/ranks/*"):
        path.unlink()


def rank_manifest_damaged(base: Path) -> None:
    for path in base.glob("saves/*/ranks/*"):
        path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("harm", "is_reported"),
    [
        pytest.param(shutil.rmtree, True, id="gone"),
        pytest.param(rank_manifest_gone, False, id="freed"),
        pytest.param(rank_manifest_damaged, True, id="damaged"),
    ],
)
def test_a_save_without_its_base_is_a_full_one(
    tmp_path: Path, harm: Any, *, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not fail, and says why it writes all, unless the base was just superseded."""
    ckpt_storage.save(state_of(), tmp_path / "0", stable="model.base.*")
    harm(tmp_path / "0")
    with caplog.at_level(logging.WARNING):
        ckpt_storage.save(state_of(1), tmp_path / "1", base=tmp_path / "0", stable="model.base.*")
    assert ("No file of the base" in caplog.text) is is_reported
    assert is_loaded(tmp_path / "1", state_of(1))


def test_a_base_on_another_kind_of_storage_serves_nothing(tmp_path: Path) -> None:
    """The save is a full one, and prepares the next."""
    ckpt_storage.save(state_of(), "memory://reuse/0", stable="model.base.*")
    ckpt_storage.save(state_of(), tmp_path / "1", base="memory://reuse/0", stable="model.base.*")
    ckpt_storage.save(state_of(), tmp_path / "2", base=tmp_path / "1", stable="model.base.*")
    assert linked(tmp_path / "2") == BASE


def test_a_storage_copies_what_cannot_be_linked() -> None:
    """In memory as in S3: a part of an upload is copied from the base's file."""
    ckpt_storage.save(state_of(), "memory://copies/0", stable="model.base.*")
    info = ckpt_storage.save(
        state_of(1), "memory://copies/1", base="memory://copies/0", stable="model.base.*"
    )
    assert info.stats is not None
    assert info.stats.reused_bytes > 3 * 4 * COUNT
    ckpt_storage.delete("memory://copies/0")
    ckpt_storage.load(found := dcp_cases.zeros_like(state_of(1)), "memory://copies/1")
    assert dcp_cases.same(found, state_of(1))


def test_without_the_package_for_hashes_the_save_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a byte is written."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "xxhash" else find(name)
    )
    with pytest.raises(InvalidInputError, match=r"ckpt-storage\[reuse\]"):
        ckpt_storage.save(state_of(), tmp_path / "0", stable="model.base.*")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stable", [["a", "a"], [""], [1]])
def test_patterns_that_are_none_are_refused(tmp_path: Path, stable: Any) -> None:
    """As those of groups."""
    with pytest.raises(InvalidInputError, match="stable is"):
        ckpt_storage.save(state_of(), tmp_path / "0", stable=stable)


@pytest.mark.parametrize(
    "options", [{"stable": "a"}, {"full_every": 5}, {"reuse": True, "full_every": 0}]
)
def test_a_manager_refuses_what_has_no_effect(tmp_path: Path, options: dict[str, Any]) -> None:
    """`stable` and `full_every` without `reuse`, and a file that no checkpoint may have."""
    with pytest.raises(InvalidInputError):
        CheckpointManager(tmp_path, **options)
