"""Outputs of one process, cut at every storage operation of the target, and called again."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from copy_cases import ACTIONS, files_below, make, save
from dcp_cases import same, seeded
from fault_tools import Faulty

import ckpt_storage
import ckpt_storage.export.output
from ckpt_storage import CheckpointError, consolidate, convert, copy, verify
from ckpt_storage.commit.cleaning import delete
from ckpt_storage.export.folder import remove_exports
from ckpt_storage.store import Location
from ckpt_storage.testing.faults import Rule, SimulatedCrash

Call = Callable[[Path, Path], object]

STATE = {f"t{number}": seeded(number, 300) for number in range(3)}


OTHER = {f"t{number}": seeded(number + 9, 300) for number in range(3)}


def made(kind: str, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Make a checkpoint; of ours in several files with "shards"."""
    if kind == "shards":
        torch.save(state, folder.with_suffix(".pt"))
        convert(folder.with_suffix(".pt"), folder, to="ckpt_storage", max_file_bytes=1300)
    else:
        make(kind, state, folder)


def converted(to: str, source: Path, target: Path) -> None:
    """Convert to one format, in several files."""
    kwargs = {"to": to, "max_file_bytes": 1300}
    convert(source, target, **kwargs)  # type: ignore[arg-type]  # formats are texts here


CASES: dict[str, tuple[str, Call]] = {
    "consolidate": ("ckpt_storage", partial(consolidate, max_file_bytes=1300)),
    "consolidate over another": ("ckpt_storage", partial(consolidate, max_file_bytes=1300)),
    "convert to dcp": ("ckpt_storage", partial(converted, "dcp")),
    "convert to dcp_safetensors": ("ckpt_storage", partial(converted, "dcp_safetensors")),
    "convert to safetensors": ("ckpt_storage", partial(converted, "safetensors")),
    "convert to ckpt_storage": ("dcp", partial(converted, "ckpt_storage")),
    "copy dcp": ("dcp", copy),
    "copy unindexed safetensors": ("unindexed", copy),
    "copy safetensors": ("safetensors", copy),
    "copy ckpt_storage": ("shards", copy),
    "copy ckpt_storage over another": ("shards", partial(copy, overwrite=True)),
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ckpt_storage", "c10d-NullHandler-dcp_logger"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def values_of(folder: Path) -> dict[str, torch.Tensor] | None:
    """Return what our reader finds, which follows metadata and index; None for no checkpoint."""
    try:
        found = ckpt_storage.open_checkpoint(folder)
        return {name: tensor.torch() for name, tensor in found.items() if hasattr(tensor, "torch")}
    except CheckpointError:
        return None


@pytest.mark.parametrize("case", CASES)
def test_an_output_cut_anywhere_is_none_or_whole_and_goes_on(
    tmp_path: Path, faulty: Faulty, case: str
) -> None:
    """What is found is what was there before or the whole new one; the next call ends the work."""
    kind, call = CASES[case]
    source, before, dry = tmp_path / "src", tmp_path / "before", tmp_path / "dst" / "dry"
    made(kind, STATE, source)
    if case.endswith("another"):
        made(kind, OTHER, tmp_path / "other")
        call(tmp_path / "other", before)
        shutil.copytree(before, dry)
    call(source, dry)
    calls = faulty.calls()
    old, whole, names = values_of(before), values_of(dry), set(files_below(dry))
    assert same(whole, values_of(source))
    assert not same(old, whole)
    for action, (number, one) in itertools.product(ACTIONS, enumerate(calls)):
        at = f"{case} {action} at {number} ({one.operation} {one.path})"
        root = tmp_path / "dst" / f"{action}-{number}"
        if before.exists():
            shutil.copytree(before, root)
        faulty.rules = [Rule(action=action, skip_count=number, retryable=False)]
        with contextlib.suppress(SimulatedCrash, CheckpointError):
            call(source, root)
        faulty.rules = ()
        found = values_of(root)
        assert found is None or same(old, found) or same(found, whole), at
        if not same(found, whole) or kind == "shards":
            # A copy that counts already puts what stock readers need.
            call(source, root)
            # What a save under another id left, only a prune takes away.
            assert case == "convert to ckpt_storage" or not list(root.rglob("*.tmp-*")), at
            assert verify(root).ok, at
        assert same(values_of(root), whole), at
        if kind not in {"ckpt_storage", "shards"} and case.startswith("copy"):
            # What is left of a cut at the very end are the notes alone.
            left = {path for path in files_below(root) if not path.startswith(".ckpt-storage")}
            assert left == {path for path in names if not path.startswith(".ckpt-storage")}, at
        faulty.close()
        shutil.rmtree(root)


def test_what_is_deleted_needs_no_list_of_uploads(tmp_path: Path, faulty: Faulty) -> None:
    """Who may not list open uploads removes exports and checkpoints all the same."""
    root = tmp_path / "dst" / "run"
    save(STATE, root)
    consolidate(root)
    faulty.rules = [
        Rule(action="error", operation="list_uploads", kind="permission", hit_count=None)
    ]
    store = faulty(Location.of(root))
    assert remove_exports(store) == []
    assert delete(store)
    assert [path for path in files_below(root) if not path.startswith("commits/")] == []
