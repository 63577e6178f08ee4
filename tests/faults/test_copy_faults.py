"""`copy` cut at every storage operation of the target, and called again."""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from copy_cases import (
    ACTIONS,
    attempt,
    files_below,
    foreign,
    head_of,
    save,
    save_files,
    state_of,
)
from fault_tools import Faulty

import ckpt_storage.export.output
from ckpt_storage import verify
from ckpt_storage.export.convert import convert
from ckpt_storage.export.copy import CopyReport, copy
from ckpt_storage.testing.faults import Rule, SimulatedCrash


@pytest.fixture(autouse=True)
def _logs_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep hundreds of failures that are intended out of the report of one that is not."""
    for name in ("ckpt_storage", "c10d-NullHandler-dcp_logger"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Stores of targets on this disk."""
    found = Faulty(f"file://{tmp_path / 'dst'}")
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", found)
    yield found
    found.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A committed checkpoint in four shard files."""
    torch.save(state_of(1), tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "src", to="ckpt_storage", max_file_bytes=1000)
    assert len(list((tmp_path / "src").rglob("*.distcp"))) >= 3
    return tmp_path / "src"


@pytest.mark.parametrize("kind", ["fresh", "overwrite"])
def test_a_copy_cut_anywhere_is_old_or_new_and_goes_on(
    source: Path, tmp_path: Path, faulty: Faulty, kind: str
) -> None:
    """After each cut: the old checkpoint or the whole new one; the next call ends the work."""
    whole = save_files(files_below(source))
    new_id = head_of(files_below(source))
    before = tmp_path / "before"
    if kind == "overwrite":
        save(state_of(2), before)
    old_id = head_of(files_below(before)) if kind == "overwrite" else None
    numbers = itertools.count()

    def fresh() -> Path:
        root = tmp_path / "dst" / f"{next(numbers):04}"
        if kind == "overwrite":
            shutil.copytree(before, root)
        return root

    copy(source, fresh(), overwrite=True)
    calls = faulty.calls()
    assert len(calls) > 15
    kept_any = 0
    for action, (number, call) in itertools.product(ACTIONS, enumerate(calls)):
        at = f"{kind} {action} at {number} ({call.operation} {call.path})"
        root = fresh()
        faulty.rules = [Rule(action=action, skip_count=number, retryable=False)]
        error = attempt(source, root, overwrite=True)
        faulty.rules = ()
        found = files_below(root)
        assert head_of(found) in {old_id, new_id}, at
        if head_of(found) == new_id:
            assert save_files(found).items() >= whole.items(), f"{at}: committed, but not whole"
        elif error is None:
            pytest.fail(f"{at}: reported as done, but it is not")
        if ".metadata" in found and head_of(found) == old_id:
            assert found[".metadata"] == files_below(before)[".metadata"], at
        complete = {path for path in found if path.endswith(".distcp") and path in whole}
        report = copy(source, root, overwrite=True)
        resent = {one.path for one in faulty.calls() if one.operation == "complete_upload"}
        assert not resent & complete, f"{at}: sent again {resent & complete}"
        kept_any += report.kept_count
        after = files_below(root)
        assert head_of(after) == new_id, at
        assert {path: after.get(path) for path in whole} == whole, at
        assert verify(root).ok, at
        assert not [path for path in root.rglob("*") if ".tmp-" in path.name], at
        faulty.close()
        shutil.rmtree(root)
    assert kept_any > 20


def test_half_written_files_are_sent_again(source: Path, tmp_path: Path, faulty: Faulty) -> None:
    """A file whose name is there but whose bytes are not right is not believed."""
    faulty.rules = [Rule(action="crash_before", operation="put_absent", path="commits")]
    assert isinstance(attempt(source, tmp_path / "dst" / "x"), SimulatedCrash)
    faulty.rules = ()
    first, second, *_ = sorted((tmp_path / "dst" / "x").rglob("*.distcp"))
    first.write_bytes(first.read_bytes()[:-1])
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    report = copy(source, tmp_path / "dst" / "x")
    sent = {call.path for call in faulty.calls() if call.operation == "complete_upload"}
    assert sent == {str(one.relative_to(tmp_path / "dst" / "x")) for one in (first, second)}
    assert report.kept_count >= 1
    assert verify(tmp_path / "dst" / "x").ok


def test_of_two_copies_of_one_save_both_succeed(
    source: Path, tmp_path: Path, faulty: Faulty
) -> None:
    """The one that comes second finds its own save committed by the other."""
    target = tmp_path / "dst" / "x"
    done: list[CopyReport] = []
    faulty.rules = [Rule(action="hang", operation="put_absent", path="commits")]
    slow = threading.Thread(target=lambda: done.append(copy(source, target)))
    slow.start()
    script = None
    while script is None:
        script = next((backend.script for backend in faulty.made), None)
    assert script.wait_hung(20)
    faulty.rules = ()
    done.append(copy(source, target))
    script.release()
    slow.join(20)
    assert not slow.is_alive()
    assert len({report.save_id for report in done}) == 1
    assert len(done) == 2
    assert verify(target).ok


def test_a_cut_file_of_a_foreign_copy_is_sent_again(tmp_path: Path, faulty: Faulty) -> None:
    """The note vouches for what the copy put there, not for another length."""
    source, target = tmp_path / "src", tmp_path / "dst" / "x"
    foreign("safetensors", source)
    index = "model.safetensors.index.json"
    faulty.rules = [Rule(action="crash_before", operation="put", path=index, skip_count=1)]
    assert isinstance(attempt(source, target), SimulatedCrash)
    faulty.rules = ()
    (target / "b.safetensors").write_bytes(b"cut")
    copy(source, target)
    assert files_below(target) == files_below(source)
