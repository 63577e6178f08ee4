"""Documents that somebody crafted: sound by their checksums, wrong in what they say."""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from damage_cases import (
    KINDS,
    Checkpoint,
    body_of,
    check_other_values,
    document,
    load_failure,
)
from dcp_cases import same, zeros_like

from ckpt_storage import CheckpointError, FormatError, UnsafeContentError, verify

STATE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(4),
    "empty": torch.empty(0, 2),
    "step": 5,
}

Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, saved once."""
    folder = tmp_path_factory.mktemp("crafted")
    dcp_cases.save(STATE, folder)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Checkpoint:
    """A checkpoint to change."""
    return Checkpoint(Path(shutil.copytree(saved, tmp_path / "run")))


def refusal(checkpoint: Checkpoint) -> CheckpointError:
    """Return why a checkpoint does not load; assert that verify says the same."""
    error = load_failure(checkpoint.root, zeros_like(STATE))
    assert isinstance(error, CheckpointError), repr(error)
    assert "\n" not in str(error)
    assert error.next_step
    assert str(error).endswith(error.next_step)
    report = verify(checkpoint.root, deep=False)
    messages = [f"{problem.message} {problem.next_step}" for problem in report.problems]
    assert str(error) in messages
    return error


def put(path: str, value: object) -> Change:
    """Return a change of the value at a path of keys and positions."""

    def change(body: Any) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        for key in way:
            body = body[key]
        body[last] = value

    return change


def add_unknown(value: Any) -> None:
    """Give every object in a document a key that no release knows."""
    if isinstance(value, dict):
        for item in value.values():
            add_unknown(item)
        value["of a later release"] = {"and": ["what", "it", "says", 1.5, None]}
    elif isinstance(value, list):
        for item in value:
            add_unknown(item)


@pytest.mark.parametrize("change", [lambda _: None, add_unknown], ids=["nothing", "unknown keys"])
def test_what_says_the_same_still_loads(checkpoint: Checkpoint, change: Change) -> None:
    """Documents that are sealed again, with keys that a later minor release adds, are as good."""
    for kind in reversed(KINDS):
        checkpoint.change(document(checkpoint, kind), change)
        added = b"of a later release" in document(checkpoint, kind).read_bytes()
        assert added == (change is add_unknown)
    target = zeros_like(STATE)
    assert load_failure(checkpoint.root, target) is None
    assert same(target, STATE)
    assert verify(checkpoint.root).ok


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [3, 999_999_999])
def test_an_unknown_major_version_is_refused_by_name(
    checkpoint: Checkpoint, kind: str, version: int
) -> None:
    """The error of each document names its file and the version, and says what to install."""
    name = f"ckpt_storage.{'commit' if kind == 'slot' else kind}"
    checkpoint.change(document(checkpoint, kind), put("format", f"{name}/{version}"))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert f"'{name}/{version}'" in str(error)
    assert error.next_step == "Install a newer ckpt_storage."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "format_",
    ["ckpt_storage.export/1", "x", None, 1, "{}/0", "{}/01", "{}/1.5", "{}/1\n", "{}"],
)
def test_a_document_of_another_kind_is_refused(
    checkpoint: Checkpoint, kind: str, format_: object
) -> None:
    """A document is not read as what it does not say it is, nor where it names no version."""
    if isinstance(format_, str):
        format_ = format_.format(f"ckpt_storage.{'commit' if kind == 'slot' else kind}")
    checkpoint.change(document(checkpoint, kind), put("format", format_))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert f"{format_!r}" in str(error)


def test_an_unknown_type_of_record_is_refused(checkpoint: Checkpoint) -> None:
    """A reader does not pass over a slot that it does not understand."""
    checkpoint.change(checkpoint.slot, put("type", "moved"))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert "'moved'" in str(error)


@pytest.fixture(scope="session")
def audited() -> deque[str]:
    """Every path that this process opens from now on: no audit hook can be removed."""
    paths: deque[str] = deque(maxlen=10_000)

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            paths.append(args[0])

    sys.addaudithook(hear)
    return paths


def point_elsewhere(checkpoint: Checkpoint, what: str, name: str) -> None:
    """Make one of the references lead to `name`, in all documents that have it."""
    rename = put(f"{what}/path", name)
    if what == "stock":
        checkpoint.change(checkpoint.manifest, rename)
    checkpoint.change(checkpoint.slot, rename)


@pytest.mark.parametrize("what", ["manifest", "stock"])
@pytest.mark.parametrize(
    "spelling",
    [
        "../elsewhere/file",
        "saves/../../elsewhere/file",
        "saves//file",
        "{outside}/elsewhere/file",
        "file://{outside}/elsewhere/file",
        "s3:elsewhere",
        "C:\\elsewhere",
        "saves/file\0",
        "saves/\ud800",
        "",
    ],
)
def test_no_reference_leads_out_of_the_checkpoint(
    checkpoint: Checkpoint, audited: deque[str], what: str, spelling: str
) -> None:
    """What lies there would fit: it is neither opened nor taken for the file."""
    outside = checkpoint.root.parent
    name = spelling.replace("{outside}", str(outside))
    bait = outside / "elsewhere" / "file"
    bait.parent.mkdir()
    fitting = {"manifest": checkpoint.manifest, "stock": checkpoint.stock}
    shutil.copy(fitting[what], bait)
    point_elsewhere(checkpoint, what, name)
    audited.clear()
    error = refusal(checkpoint)
    assert isinstance(error, UnsafeContentError | FormatError)
    if "\ud800" not in name:
        assert isinstance(error, UnsafeContentError)
        assert repr(name) in str(error)
    folder = str(checkpoint.root)
    assert any(path.startswith(folder) for path in audited)
    assert [path for path in audited if "elsewhere" in path or ".." in path or "\0" in path] == []


@pytest.mark.parametrize("name", ["..", "../elsewhere", "", "/", "run", "saves"])
def test_a_record_cannot_make_a_deletion_leave_the_checkpoint(
    checkpoint: Checkpoint, name: str
) -> None:
    """A deleted record that dooms what is no save of this checkpoint is refused."""
    changes = {"type": "deleted", "head": None, "fenced": [name]}
    checkpoint.change(checkpoint.slot, lambda body: body.update(changes))
    error = refusal(checkpoint)
    assert isinstance(error, UnsafeContentError)
    assert repr(name) in str(error)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("rank", "boxes", None),
        ("rank", "dtypes", ["float32", "float32", "int64"]),
        ("rank", "dtypes", ["float33"] * 9),
        ("rank", "save_id", "../other"),
        ("rank", "files/0/block_bytes", 8),
        ("rank", "files/0/block_crcs", "?"),
        ("manifest", "layouts/0", 7),
        ("manifest", "tensors/fqns", ["w", "w", "empty"]),
        ("manifest", "blobs/fqns/0", "w"),
        ("manifest", "ranks/crc32c", "AAAA"),
        ("manifest", "world_size", 2),
        ("manifest", "planner_data", ['["w",5]']),
        ("manifest", "planner_data", ['["w",[Infinity]]']),
        ("manifest", "stock_entries", -1),
    ],
)
def test_a_document_that_cannot_be_is_refused(
    checkpoint: Checkpoint, kind: str, path: str, value: object
) -> None:
    """By load and verify with the same words; columns of numbers are those of `test_manifests`."""
    checkpoint.change(document(checkpoint, kind), put(path, value))
    assert isinstance(refusal(checkpoint), FormatError)


@pytest.mark.parametrize(
    ("path", "value"),
    [("dtypes/0", "int32"), ("tensors/fqns/1", "c"), ("blobs/fqns/0", "absent")],
)
def test_documents_that_contradict_each_other_are_found(
    checkpoint: Checkpoint, path: str, value: str
) -> None:
    """Verify holds what the manifest promises against what ranks wrote."""
    checkpoint.change(checkpoint.manifest, put(path, value))
    assert verify(checkpoint.root, deep=False).problems


@pytest.mark.parametrize("slot", [1, 2, 1 << 62])
def test_a_record_that_follows_itself_is_refused(checkpoint: Checkpoint, slot: int) -> None:
    """Who walks back through superseded commits comes to an end."""
    previous = {"slot": slot, "save_id": body_of(checkpoint.slot)["save_id"]}
    checkpoint.change(checkpoint.slot, put("previous", previous))
    assert isinstance(refusal(checkpoint), FormatError)


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_another_type_breaks_more_than_the_load(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    """Whatever stands in place of any value, a load succeeds or fails as it should; verify ends."""
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    check_other_values(folder, STATE, kind, range(1))
