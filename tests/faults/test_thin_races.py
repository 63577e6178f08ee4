"""A thinning raced at each of its storage operations by others, and killed there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import part_cases
import pytest
from copy_cases import files_below
from dcp_cases import same, seeded
from fault_tools import Faulty, Racing

import ckpt_storage
import ckpt_storage.export.output
from ckpt_storage import errors, open_checkpoint, thin, verify
from ckpt_storage.commit import cleaning
from ckpt_storage.store import Location, abilities, open_store
from ckpt_storage.testing.faults import Script, SimulatedCrash

pytestmark = pytest.mark.usefixtures("one_core")

OVERTAKEN = (
    errors.CheckpointGoneError,
    errors.CheckpointNotFoundError,
    errors.CommitConflictError,
)
"""How a thinning may end that a rival has overtaken."""


Rival = Callable[[Any], object]

WHOLE: dict[str, Any] = {"model": seeded(1, 300), "extra": seeded(2, 40), "optim": seeded(3, 900)}
NEXT: dict[str, Any] = {name: tensor + 1 for name, tensor in WHOLE.items()}


def save(state: dict[str, Any], path: Path) -> None:
    part_cases.save(path, state, overwrite=True, sync_files=False)


def free(path: Path) -> None:
    cleaning.free_leftovers(open_store(Location.of(path)))


def thin_on_another_host(path: Path) -> None:
    """Thin as another job does; its host is in the manifest that it writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_storage.commit.assembly.socket.gethostname", lambda: "another")
        thin(path, drop="optim")


RIVALS: dict[str, Rival] = {
    "saver": partial(save, NEXT),
    "thinner": partial(thin, drop="optim"),
    "thinner on another host": thin_on_another_host,
    "thinner of more": partial(thin, drop=["optim", "extra"]),
    "cleaner": free,
    "deleter": partial(ckpt_storage.delete, missing_ok=True),
    "reader": verify,
}


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """A folder in memory."""
    return memory_path


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ckpt_storage", "c10d-NullHandler-dcp_logger"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def values_at(path: Path) -> dict[str, Any] | None:
    """Return what is there, None if nothing is; damage and mixtures raise."""
    try:
        with open_checkpoint(path) as checkpoint:
            return {name: checkpoint[name].torch() for name in checkpoint}
    except errors.CheckpointGoneError:
        return None


def is_saved(values: dict[str, Any] | None) -> bool:
    """Return whether values are of one save, all of it or what a thinning leaves."""
    names = [[*WHOLE], ["model", "extra"], ["model"]]
    return values is None or any(
        same(values, {name: state[name] for name in some})
        for state, some in itertools.product((WHOLE, NEXT), names)
    )


def check_end(path: Path, at: str) -> None:
    """Check that all is sound and, after a last thinning and cleaning, nothing is left over."""
    values = values_at(path)
    assert is_saved(values), at
    if values is None:
        save(WHOLE, path)
    thin(path, drop="optim")
    free(path)
    assert verify(path).ok, at
    with open_checkpoint(path) as checkpoint:
        head = checkpoint.save_id
        assert "optim" not in checkpoint, at
    # Another attempt that never committed may stay for a day.
    shards = {file for file in files_below(path) if file.endswith(".distcp")}
    left = {file.split("/")[1] for file in shards} - {head}
    assert [save_id for save_id in left if _has_committed(path, str(save_id))] == [], at


def _has_committed(path: Path, save_id: str) -> bool:
    """Return whether a slot commits a save."""
    slots = sorted((path / "commits").glob("*.json"))
    return any(f'"save_id":"{save_id}","manifest"' in slot.read_text() for slot in slots)


def race(
    path: Path | str, faulty: Faulty, at: int, rival: Rival, *, is_killed: bool
) -> tuple[int, BaseException | None]:
    """Thin, with a rival at one operation; return how many there were, and how it ended."""
    abilities.RECORDS.clear()
    patched = faulty.script

    def go() -> None:
        # The rival's own stores play no script.
        faulty.script = Script()
        with contextlib.suppress(errors.CheckpointError):
            rival(path)
        faulty.script = patched

    faulty.script = patched = Racing(at, go, is_killed=is_killed)
    ended: BaseException | None = None
    try:
        thin(path, drop="optim")
    except (SimulatedCrash, errors.CheckpointError) as error:
        ended = error
    count = patched.count
    faulty.play()
    return count, ended


@pytest.mark.parametrize("rival", RIVALS)
def test_whoever_comes_between_nothing_is_mixed_or_lost(
    tmp_path: Path, faulty: Faulty, rival: str, record_property: Callable[[str, object], None]
) -> None:
    """At each operation of a thinning, which then goes on or dies."""
    origin = tmp_path / "origin"
    save(WHOLE, origin)
    ends: Counter[str] = Counter()
    for is_killed in (False, True):
        at = count = 1
        while at <= count:
            path = tmp_path / "dst" / f"{is_killed}-{at}"
            shutil.copytree(origin, path)
            made, ended = race(path, faulty, at, RIVALS[rival], is_killed=is_killed)
            count = max(count, made)
            ends[type(ended).__name__] += 1
            assert is_killed or ended is None or isinstance(ended, OVERTAKEN), (at, ended)
            if rival == "saver" and not is_killed:
                assert same(values_at(path), NEXT) or ended is None
            check_end(path, f"{rival} at {at}, killed: {is_killed}, {ended!r}")
            shutil.rmtree(path)
            at += 1
    record_property("ends", dict(ends))
    assert sum(ends.values()) > 40
    faulty.close()


def test_a_deletion_while_the_storage_copies_is_no_failure_of_the_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In memory files are copied by parts, as in a bucket; a deletion may end every such copy."""
    root = f"memory://{uuid.uuid4().hex}"
    faulty = Faulty(root)
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", faulty)
    at = count = 1
    while at <= count:
        url = f"{root}/{at}"
        part_cases.save(url, WHOLE)
        made, ended = race(url, faulty, at, RIVALS["deleter"], is_killed=False)
        count = max(count, made)
        assert ended is None or isinstance(ended, OVERTAKEN), (at, ended)
        at += 1
    assert count > 20
    faulty.close()


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_them_leaves_one_save(tmp_path: Path, faulty: Faulty, seed: int) -> None:
    """Each in turn, thinnings raced or killed at random operations; readers see one save."""
    choose = random.Random(seed)
    path = tmp_path / "dst" / "run"
    save(WHOLE, path)
    for _ in range(10):
        kind = choose.choice([*RIVALS, "race", "race"])
        if kind == "race":
            rival = RIVALS[choose.choice([*RIVALS])]
            race(path, faulty, choose.randrange(1, 60), rival, is_killed=choose.random() < 0.5)
        else:
            with contextlib.suppress(errors.CheckpointError):
                RIVALS[kind](path)
        assert is_saved(values_at(path)), (seed, kind)
        if kind == "deleter":
            save(choose.choice([WHOLE, NEXT]), path)
    check_end(path, f"seed {seed}")
    faulty.close()
