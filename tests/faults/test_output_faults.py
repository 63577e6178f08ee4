"""Exports, conversions, copies and mirrors, cut at every storage operation, and called again."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import consolidate_cases
import pytest
import torch
from commit_tools import QUICK
from copy_cases import ACTIONS, attempt, files_below, flip, head_of, make, save, save_files
from dcp_cases import same, seeded
from fault_tools import Faulty, each_fault
from manager_cases import seen_in, state_of
from prune_cases import name_of
from s3_server import FaultRule, S3Server, crash_rules

import ckpt_storage
from ckpt_storage import CheckpointError, RetryPolicy, consolidate, convert, copy, thin, verify
from ckpt_storage.commit.deletion import delete
from ckpt_storage.export.removal import remove_exports
from ckpt_storage.manager.mirror import Mirror
from ckpt_storage.manager.names import StepNames
from ckpt_storage.manager.policies import KeepLatest
from ckpt_storage.manager.prune import Pruner
from ckpt_storage.manager.root import Root
from ckpt_storage.options import MIB
from ckpt_storage.store import Location, abilities, open_store
from ckpt_storage.store.backends.s3 import S3Backend
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.testing.faults import Action, Rule, SimulatedCrash

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture
def tmp_path(memory_path: Path) -> Path:
    """A folder in memory: no call that is cut waits for a disk."""
    return memory_path


Call = Callable[[Path, Path], object]

GUARD = "zz-export-under-way.safetensors"

STATE = {f"t{number}": seeded(number, 300) for number in range(3)}
OTHER = {f"t{number}": seeded(number + 9, 300) for number in range(3)}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ckpt_storage", "c10d-NullHandler-dcp_logger"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def made(kind: str, state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Make a checkpoint; of ours in several files with "shards"."""
    if kind == "shards":
        torch.save(state, folder.with_suffix(".pt"))
        convert(folder.with_suffix(".pt"), folder, to="ckpt_storage", max_file_bytes=1300)
    else:
        make(kind, state, folder)
    return folder


def converted(to: Any) -> Call:
    """Return what converts to one format, in several files."""
    return partial(convert, to=to, max_file_bytes=1300)


CASES: dict[str, tuple[str, Call]] = {
    "consolidate": ("ckpt_storage", partial(consolidate, max_file_bytes=1300)),
    "consolidate over another": ("ckpt_storage", partial(consolidate, max_file_bytes=1300)),
    "convert to dcp": ("ckpt_storage", converted("dcp")),
    "convert to dcp_safetensors": ("ckpt_storage", converted("dcp_safetensors")),
    "convert to safetensors": ("ckpt_storage", converted("safetensors")),
    "convert to ckpt_storage": ("dcp", converted("ckpt_storage")),
    "copy dcp": ("dcp", copy),
    "copy unindexed safetensors": ("unindexed", copy),
    "copy safetensors": ("safetensors", copy),
    "copy ckpt_storage": ("shards", copy),
    "copy ckpt_storage over another": ("shards", partial(copy, overwrite=True)),
    "copy a linked part": ("shards", partial(copy, exclude="t1")),
    "copy a part over another": ("shards", partial(copy, exclude="t1", overwrite=True)),
    "copy a part that is written": (
        "ckpt_storage",
        partial(copy, exclude="t1", copies="never"),
    ),
}


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
    before, dry, root = tmp_path / "before", tmp_path / "dst" / "dry", tmp_path / "dst" / "cut"
    source = made(kind, STATE, tmp_path / "src")
    if case.endswith("another"):
        call(made(kind, OTHER, tmp_path / "other"), before)
        shutil.copytree(before, dry)
    call(source, dry)
    old, whole, names = values_of(before), values_of(dry), set(files_below(dry))
    part = {name: tensor for name, tensor in (values_of(source) or {}).items() if name != "t1"}
    assert same(whole, part if "part" in case else values_of(source))
    assert not same(old, whole)
    for at, rule in each_fault(faulty.script.calls, ACTIONS, retryable=False):
        abilities.RECORDS.clear()  # as in a new process: the same calls, and probes
        if before.exists():
            shutil.copytree(before, root)
        faulty.play(rule)
        with contextlib.suppress(SimulatedCrash, CheckpointError):
            call(source, root)
        faulty.play()
        found = values_of(root)
        assert found is None or same(old, found) or same(found, whole), at
        if not same(found, whole) or kind == "shards" or (root / GUARD).exists():
            # A copy that counts already puts what stock readers need.
            call(source, root)
            # What a save under another id left, only a prune takes away.
            assert case == "convert to ckpt_storage" or not list(root.rglob("*.tmp-*")), at
            assert verify(root).ok, at
        assert same(values_of(root), whole), at
        if kind not in {"ckpt_storage", "shards"} and case.startswith("copy"):
            # What is left of a cut at the very end are the notes alone.
            left = set(files_below(root)) ^ names
            assert all(path.startswith(".ckpt-storage") for path in left), at
        faulty.close()
        shutil.rmtree(root)


@pytest.mark.parametrize("groups", ["split", "mixed"])
def test_a_thinning_cut_anywhere_leaves_the_whole_or_the_thin_one(
    tmp_path: Path, faulty: Faulty, groups: str
) -> None:
    """For every reader; the next call ends the work, and it can be saved over and deleted."""
    whole, dry, root = tmp_path / "whole", tmp_path / "dst" / "dry", tmp_path / "dst" / "cut"
    made("shards" if groups == "split" else "ckpt_storage", STATE, whole)
    shutil.copytree(whole, dry)
    faulty.play()
    thin(dry, drop="t1")
    kept = {name: tensor for name, tensor in STATE.items() if name != "t1"}
    assert same(values_of(dry), kept)
    calls = list(faulty.script.calls)
    seen = set()
    for at, rule in each_fault(calls, ACTIONS, retryable=False):
        abilities.RECORDS.clear()
        shutil.copytree(whole, root)
        faulty.play(rule)
        with contextlib.suppress(SimulatedCrash, CheckpointError):
            thin(root, drop="t1")
        faulty.play()
        found = values_of(root)
        assert same(found, kept) or same(found, STATE), at
        seen.add(same(found, kept))
        report = thin(root, drop="t1")
        assert same(values_of(root), kept), at
        assert verify(root).ok, at
        # A folder without a file may stay.
        held = {path.split("/")[1] for path in files_below(root) if path.startswith("saves/")}
        assert held == {report.save_id}, at
        assert not list(root.rglob("*.tmp-*")), at
        save(STATE, root, overwrite=True)
        assert same(values_of(root), STATE), at
        ckpt_storage.delete(root)
        assert not list(root.rglob("*.distcp")), at
        shutil.rmtree(root)
    assert seen == {True, False}
    faulty.close()


def test_an_export_whose_copy_was_cut_is_completed_by_the_next(
    tmp_path: Path, faulty: Faulty
) -> None:
    """After a cut it is no export, or the whole one, and the next call copies what is missing."""
    source, root = made("shards", STATE, tmp_path / "src"), tmp_path / "dst" / "cut"
    consolidate(source)
    hf = source / "hf"
    (hf / "config.json").write_text("{}")
    faulty.target = root.as_uri()
    copy(hf, root)
    calls = faulty.script.calls
    assert consolidate_cases.INDEX in {call.path for call in calls}
    assert len(calls) > 15
    # A copy has the same bytes, but for who holds the folder.
    whole = {path: data for path, data in files_below(hf).items() if not path.endswith("job.json")}
    for at, rule in each_fault(calls, ["crash_before"]):
        shutil.rmtree(root)
        faulty.play(rule)
        assert isinstance(attempt(hf, root), SimulatedCrash), at
        faulty.play()
        values = values_of(root)
        assert values is None or same(values, STATE), at
        # A copy that is complete but for the notes of its run is a checkpoint in the way.
        copy(hf, root, overwrite=True)
        assert files_below(root).items() >= whole.items(), at
        assert verify(root).ok, at


def test_half_written_files_are_sent_again(tmp_path: Path, faulty: Faulty) -> None:
    """A file whose name is there but whose bytes are not right is not believed."""
    source, root = made("shards", STATE, tmp_path / "src"), tmp_path / "dst" / "x"
    faulty.play(Rule(action="crash_before", operation="put_absent", path="commits"))
    assert isinstance(attempt(source, root), SimulatedCrash)
    faulty.play()
    first, second, *_ = sorted(root.rglob("*.distcp"))
    first.write_bytes(first.read_bytes()[:-1])
    flip(second, -1)
    report = copy(source, root)
    calls = faulty.script.calls
    sent = {call.path for call in calls if call.operation == "complete_upload"}
    assert sent == {str(one.relative_to(root)) for one in (first, second)}
    assert report.kept_count >= 1
    assert verify(root).ok


def test_what_is_deleted_needs_no_list_of_uploads(tmp_path: Path, faulty: Faulty) -> None:
    """Who may not list open uploads removes exports and checkpoints all the same."""
    root = tmp_path / "dst" / "run"
    save(STATE, root)
    consolidate(root)
    refusal = {"operation": "list_uploads", "kind": "permission", "hit_count": None}
    faulty.play(Rule(action="error", **refusal))  # type: ignore[arg-type]  # of several types
    store = faulty(Location.of(root))
    assert remove_exports(store) == []
    assert delete(store)
    assert [path for path in files_below(root) if not path.startswith("commits/")] == []


def _stored(server: S3Server, folder: str) -> dict[str, bytes]:
    prefix = f"{folder}/"
    objects = server.dump("bkt").items()
    return {key.removeprefix(prefix): data for key, data in objects if key.startswith(prefix)}


def test_copies_within_s3_cut_anywhere_go_on(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the storage copying by itself: nothing commits half, no upload stays open."""
    monkeypatch.setattr("ckpt_storage.export.copy_base._COPY_PART_BYTES", MIB)
    options = server.storage_options
    state = {"a": torch.arange(3 * MIB, dtype=torch.float32)}
    save(state, "s3://bkt/src", storage_options=options)
    faulty = Faulty("s3://bkt/dst")
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", faulty)
    whole, new_id = save_files(_stored(server, "src")), head_of(_stored(server, "src"))
    copy("s3://bkt/src", "s3://bkt/dst", storage_options=options)
    calls = faulty.script.calls
    # A first copy is tried beside the file.
    assert [call.operation for call in calls].count("copy_part") == 3
    for number, (at, rule) in enumerate(each_fault(calls, ["crash_after"])):
        root = f"dst-{number}"
        faulty.play(rule)
        attempt("s3://bkt/src", f"s3://bkt/{root}", storage_options=options)
        faulty.play()
        found = _stored(server, root)
        assert head_of(found) is None or save_files(found) == whole, at
        copy("s3://bkt/src", f"s3://bkt/{root}", storage_options=options)
        found = _stored(server, root)
        assert (head_of(found), save_files(found)) == (new_id, whole), at
        plain = open_store(Location.of(f"s3://bkt/{root}", options))
        assert plain.abort_uploads("") == 0, f"{at}: an upload stayed open"
        plain.delete_folder("saves")
        plain.close()
    faulty.close()


S3_FAULTS: dict[str, Callable[[int], list[FaultRule]]] = {
    "lost answer": lambda number: [FaultRule(after=number, action="lost")],
    "passing error": lambda number: [FaultRule(after=number, action="status", status=503)],
    "death": lambda number: crash_rules(number + 1, "after"),
}


@pytest.mark.parametrize("fault", S3_FAULTS)
def test_a_thinning_on_s3_survives_every_fault_at_every_request(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """What passes is not noticed; after a death there is the whole or the thin one; all goes on."""
    monkeypatch.setattr("ckpt_storage.saves.groups._GROUP_MIN_BYTES", 1000)
    retry = RetryPolicy(attempt_count=3, first_delay_s=0.001, max_delay_s=0.002)
    options = server.storage_options
    given: dict[str, Any] = {"storage_options": options, "retry": retry, "drop": "optim*"}
    kept = {"w": seeded(1, 300)}
    whole = {**kept, "optim": seeded(2, 900)}
    ckpt_storage.save(whole, "s3://bkt/whole", storage_options=options)
    objects = _stored(server, "whole")

    def fresh(root: str) -> None:
        for path, data in objects.items():
            server.put("bkt", f"{root}/{path}", data)

    def found_at(root: str) -> dict[str, torch.Tensor]:
        with ckpt_storage.open_checkpoint(f"s3://bkt/{root}", storage_options=options) as found:
            return {name: found[name].torch() for name in found}

    fresh("dry")
    server.reset_counters()
    report = thin("s3://bkt/dry", **given)
    assert report.sent_bytes == 0
    count = len(server.requests)
    for number in range(count):
        root = f"cut-{number}"
        fresh(root)
        server.faults(S3_FAULTS[fault](number))
        # What passes is no error.
        refused = (CheckpointError,) if fault == "death" else ()
        with contextlib.suppress(*refused):
            thin(f"s3://bkt/{root}", **given)
        server.faults([])
        assert same(found := found_at(root), kept) or same(found, whole), number
        last = thin(f"s3://bkt/{root}", **given)
        assert same(found_at(root), kept), number
        assert verify(f"s3://bkt/{root}", storage_options=options).ok, number
        held = {path.split("/")[1] for path in _stored(server, root) if path.startswith("saves/")}
        assert held == {last.save_id}, number
        plain = open_store(Location.of(f"s3://bkt/{root}", options))
        # Of an upload whose beginning got no answer nobody knows the token.
        assert plain.abort_uploads("") == 0 or fault == "lost answer", number
        plain.delete_folder("saves")
        plain.close()


def version_in(files: dict[str, bytes]) -> int | None:
    """Return to which version of the model the index leads; fails for a mixture."""
    index = json.loads(files.get(consolidate_cases.INDEX, b'{"weight_map": {}}'))
    if not files.keys() & index["weight_map"].values():
        return None
    found = consolidate_cases.tensors_of(files)
    models = {v: consolidate_cases.small_model(v) for v in (1, 2)}
    (version,) = [v for v in models if consolidate_cases.expected_of(models[v]) == found]
    return version


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("first", "lost answer"),
        ("replace", "passing error"),
        ("first", "death"),
        ("replace", "death"),
    ],
)
def test_an_export_to_s3_survives_every_fault_at_every_request(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    """What passes is not noticed; after a death the index leads to old or new, and all goes on."""
    parts = replace(S3Backend.capabilities, max_put_bytes=20_000)
    monkeypatch.setattr(S3Backend, "capabilities", parts)
    retry = RetryPolicy(attempt_count=3, first_delay_s=0.001, max_delay_s=0.002)
    given: dict[str, Any] = {"storage_options": server.storage_options, "retry": retry}
    for version in (1, 2):
        state = consolidate_cases.small_model(version)
        ckpt_storage.save(state, f"s3://bkt/run{version}", **given)
    if kind == "replace":
        consolidate("s3://bkt/run1", "s3://bkt/before", **given)
    before = _stored(server, "before")

    def export(url: str) -> None:
        consolidate("s3://bkt/run2", url, max_file_bytes=60_000, **given)

    def fresh(output: str) -> str:
        for path, data in before.items():
            server.put("bkt", f"{output}/{path}", data)
        server.reset_counters()
        return f"s3://bkt/{output}"

    export(fresh("out-dry"))
    # Of several requests alike the first.
    requests: dict[str, int] = {}
    for number, request in enumerate(server.requests):
        requests.setdefault(re.sub(r"[0-9a-f]{5,}", "#", f"{request.op} {request.key}"), number)
    assert {"create_upload", "part", "complete", "put"} <= {one.split()[0] for one in requests}
    for asked, number in requests.items():
        output, at = f"out-{number}", f"{fault} at {number} ({asked})"
        url = fresh(output)
        server.faults(S3_FAULTS[fault](number))
        with contextlib.suppress(*([CheckpointError] if fault == "death" else [])):
            export(url)
        server.faults([])
        # A single file goes before several are named: then readers of the index fail.
        left = {version_in(before), 2, None} if fault == "death" else {2}
        assert version_in(_stored(server, output)) in left, at
        export(url)
        files = _stored(server, output)
        assert version_in(files) == 2, at
        assert len([path for path in files if path.startswith("model-")]) == 2, at
        assert server.open_upload_count == 0, at


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Stores of both roots, as a mirror and a pruner open them."""
    found = Faulty()
    for module in ("export.output", "manager.root"):
        monkeypatch.setattr(f"ckpt_storage.{module}.open_store", found)
    yield found
    found.close()


def one_turn(run: Path) -> None:
    """Do what a manager does after a save, as a new process: copy, prune there, prune here."""
    abilities.RECORDS.clear()  # as in a new process
    fast, slow = (
        Root(Location.of(run / name), StepNames(), retry=QUICK) for name in ("fast", "slow")
    )
    mirror = Mirror(fast, slow, KeepLatest(2))
    with contextlib.suppress(CheckpointError):  # a manager prunes all the same
        mirror.fill(Deadline("commit", 60))
    Pruner(fast, KeepLatest(1), protect=mirror.pending).prune(Deadline("commit", 60))


def _steps_in(root: Path) -> set[int]:
    found = seen_in(root)
    assert all(step == held for step, held in found.items())
    return set(found)


@pytest.mark.parametrize("action", ACTIONS)
def test_a_mirror_cut_anywhere_loses_nothing_and_goes_on(
    tmp_path: Path, opened: Faulty, action: Action
) -> None:
    """After each cut every step is whole in one of the roots, and the next turn ends the work.

    Steps 2 and 3 wait for their copies; the mirror has 1, and has pruned 0.
    """
    origin, run = tmp_path / "origin", tmp_path / "run"
    for step in (1, 2, 3):
        ckpt_storage.save(state_of(step), origin / "fast" / name_of(step), sync_files=False)
    copy(origin / "fast" / name_of(1), origin / "slow" / name_of(1))
    shutil.copytree(origin, run)
    opened.play()
    one_turn(run)
    calls = opened.script.calls
    assert len(calls) > 60
    for at, rule in each_fault(
        calls, {action: ".*(put|delete|upload|folder|part).*"}, retryable=False
    ):
        shutil.rmtree(run)
        shutil.copytree(origin, run)
        opened.play(rule)
        with contextlib.suppress(CheckpointError, SimulatedCrash):
            one_turn(run)
        opened.close()
        opened.play()
        fast, slow = _steps_in(run / "fast"), _steps_in(run / "slow")
        assert 3 in fast, at
        assert {2, 3} <= fast | slow, at
        assert slow, at
        one_turn(run)
        one_turn(run)
        assert (_steps_in(run / "fast"), _steps_in(run / "slow")) == ({3}, {2, 3}), at
        opened.close()
