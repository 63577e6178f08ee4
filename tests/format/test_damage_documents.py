"""Documents that somebody crafted: sound by their checksums, wrong in what they say."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from crc32c import crc32c
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


def test_documents_sealed_again_still_load(checkpoint: Checkpoint) -> None:
    """Changing nothing is no reason to refuse: what the other tests see is their change."""
    for kind in KINDS:
        checkpoint.change(document(checkpoint, kind), lambda _: None)
    target = zeros_like(STATE)
    assert load_failure(checkpoint.root, target) is None
    assert same(target, STATE)
    assert verify(checkpoint.root).ok


def add_unknown(value: Any) -> None:
    """Give every object in a document a key that no release knows."""
    if isinstance(value, dict):
        for item in value.values():
            add_unknown(item)
        value["of a later release"] = {"and": ["what", "it", "says", 1.5, None]}
    elif isinstance(value, list):
        for item in value:
            add_unknown(item)


def test_unknown_keys_are_ignored(checkpoint: Checkpoint) -> None:
    """Keys that a later minor release added anywhere change nothing."""
    for kind in reversed(KINDS):
        checkpoint.change(document(checkpoint, kind), add_unknown)
    assert b"of a later release" in checkpoint.slot.read_bytes()
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
    path = document(checkpoint, kind)
    name = f"ckpt_storage.{'commit' if kind == 'slot' else kind}"
    checkpoint.change(path, lambda body: body.update(format=f"{name}/{version}"))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert f"'{name}/{version}'" in str(error)
    assert error.next_step == "Install a newer ckpt_storage."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "format_",
    [
        *("ckpt_storage.other/1", "ckpt_storage.export/1", "x", "", None, 1),
        *("{}/0", "{}/01", "{}/1.5", "{}/1\n", "{}"),
    ],
)
def test_a_document_of_another_kind_is_refused(
    checkpoint: Checkpoint, kind: str, format_: object
) -> None:
    """A document is not read as what it does not say it is, nor where it names no version."""
    if isinstance(format_, str):
        format_ = format_.format(f"ckpt_storage.{'commit' if kind == 'slot' else kind}")
    checkpoint.change(document(checkpoint, kind), lambda body: body.update(format=format_))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert f"{format_!r}" in str(error)


@pytest.mark.parametrize("kind", ["moved", "Commit", ""])
def test_an_unknown_type_of_record_is_refused(checkpoint: Checkpoint, kind: str) -> None:
    """A reader does not pass over a slot that it does not understand."""
    checkpoint.change(checkpoint.slot, lambda body: body.update(type=kind))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert f"{kind!r}" in str(error)


class Opened:
    """Notes every path that this process opens, by Python's audit events."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.is_on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_on and event == "open" and isinstance(args[0], str):
            self.paths.append(args[0])


@pytest.fixture(scope="session")
def audit() -> Opened:
    """The one hook of this process: none can be removed."""
    return Opened()


@pytest.fixture
def opened(audit: Opened) -> Iterator[list[str]]:
    """What is opened during a test."""
    audit.paths.clear()
    audit.is_on = True
    yield audit.paths
    audit.is_on = False


def reference_to(path: Path, name: str) -> dict[str, Any]:
    """Return a reference to the content of `path` by another name."""
    data = path.read_bytes()
    return {"path": name, "bytes": len(data), "crc32c": f"{crc32c(data):08x}"}


def point_elsewhere(checkpoint: Checkpoint, what: str, name: str) -> None:
    """Make one of the references lead to `name`, in all documents that have it."""
    if what == "manifest":
        entry = reference_to(checkpoint.manifest, name)
        checkpoint.change(checkpoint.slot, lambda body: body.update(manifest=entry))
    else:
        entry = reference_to(checkpoint.stock, name)
        checkpoint.change(checkpoint.manifest, lambda body: body.update(stock=entry))
        checkpoint.change(checkpoint.slot, lambda body: body.update(stock=entry))


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
    checkpoint: Checkpoint, opened: list[str], what: str, spelling: str
) -> None:
    """What lies there would fit: it is neither opened nor taken for the file."""
    outside = checkpoint.root.parent
    name = spelling.replace("{outside}", str(outside))
    bait = outside / "elsewhere" / "file"
    bait.parent.mkdir()
    fitting = {"manifest": checkpoint.manifest, "stock": checkpoint.stock}
    shutil.copy(fitting[what], bait)
    point_elsewhere(checkpoint, what, name)
    opened.clear()
    error = refusal(checkpoint)
    assert isinstance(error, UnsafeContentError | FormatError)
    if "\ud800" not in name:
        assert isinstance(error, UnsafeContentError)
        assert repr(name) in str(error)
    folder = str(checkpoint.root)
    assert any(path.startswith(folder) for path in opened)
    assert [path for path in opened if "elsewhere" in path or ".." in path or "\0" in path] == []


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


def items(body: Any) -> Any:
    """Return the columns of the only shard file in a rank manifest."""
    return body["files"][0]["items"]


def by_one(column: str, item: int, step: int = 1) -> Change:
    """Return a change that adds to a value of a column."""

    def change(body: Any) -> None:
        items(body)[column][item] += step

    return change


def file_with(**changes: object) -> Change:
    """Return a change of keys of the file object."""
    return lambda body: body["files"][0].update(changes)


def shorter(column: str) -> Change:
    """Return a change that leaves a column one value short."""
    return lambda body: items(body)[column].pop()


def put(path: str, value: object) -> Change:
    """Return a change of the value at a path of keys and positions."""

    def change(body: Any) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        for key in way:
            body = body[key]
        body[last] = value

    return change


def exchange_items(body: Any) -> None:
    """Describe two items in the wrong order."""
    for column in items(body).values():
        column[0], column[1] = column[1], column[0]


TABLES: dict[str, Change] = {
    "overlap-items": by_one("item_start", 1, -64),
    "out-of-order": exchange_items,
    "item-behind-file": by_one("item_bytes", -1, 1),
    "payload-too-long": by_one("payload_bytes", 0),
    "dtype-of-a-blob": by_one("dtype", 0, -1),
    "volume": put("boxes/sizes/0", 5),
    "negative-size": put("boxes/sizes/0", -1),
    "boxes-none": lambda body: body.pop("boxes"),
    "dtype-twice": lambda body: body["dtypes"].append(body["dtypes"][0]),
    "elsewhere": put("save_id", "../other"),
    "dtype-name": lambda body: body.update(dtypes=["float33"] * 9),
    "tiny-blocks": file_with(block_bytes=8),
    "no-base64": file_with(block_crcs="?"),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES.keys())
def test_a_table_that_cannot_be_is_refused(checkpoint: Checkpoint, change: Change) -> None:
    """Items that overlap, leave the file or hold another volume are found before any is read."""
    checkpoint.change(checkpoint.ranks[0], change)
    assert isinstance(refusal(checkpoint), FormatError)


LISTS = {"dtype": "dtypes", "shape": "shapes", "layout": "layouts"}


def tensor(name: str, **changes: object) -> Change:
    """Return a change of the description of a tensor in the manifest."""

    def change(body: Any) -> None:
        table = body["tensors"]
        at = table["fqns"].index(name)
        for key, value in changes.items():
            if key == "fqn":
                table["fqns"][at] = value
            else:
                table[key][at] = len(body[LISTS[key]])
                body[LISTS[key]].append(value)

    return change


def grid(cuts: object, ranks: list[int]) -> dict[str, Any]:
    """Return a layout of a regular cut."""
    return {"cuts": cuts, "ranks": ranks}


def chunks_of_w(*chunks: Any) -> Change:
    """Return a change that describes `w` by chunks (offsets, sizes, rank) instead of a grid."""
    layout = {
        "ndim": [len(offsets) for offsets, _, _ in chunks],
        "offsets": [n for offsets, _, _ in chunks for n in offsets],
        "sizes": [n for _, sizes, _ in chunks for n in sizes],
        "ranks": [rank for _, _, rank in chunks],
    }
    return tensor("w", layout=layout)


def blob(fqn: str) -> Change:
    """Return a change that adds a blob to the manifest."""

    def change(body: Any) -> None:
        body["blobs"]["fqns"].append(fqn)
        body["blobs"]["rank"].append(0)

    return change


MANIFESTS: dict[str, Change] = {
    "grid-descends": tensor("w", layout=grid([[0, 1], [0]], [0])),
    "grid-behind": tensor("w", layout=grid([[0, 2], [0]], [0, 0])),
    "grid-no-object": tensor("w", layout=7),
    "owner-missing": tensor("w", layout=grid([[0], [0]], [])),
    "owner-unknown": tensor("w", layout=grid([[0], [0]], [1])),
    "chunk-behind": chunks_of_w(([0, 0], [3, 3], 0)),
    "gap": chunks_of_w(([0, 0], [1, 3], 0)),
    "twice": chunks_of_w(([0, 0], [2, 3], 0), ([0, 0], [2, 3], 0)),
    "two-tensors": tensor("b", fqn="w"),
    "blob-and-tensor": blob("w"),
    "rank-checksums": put("ranks/crc32c", "AAAA"),
    "world": put("world_size", 2),
    "file-owner": put("files/rank", [1]),
    "planner-data": put("planner_data", ['["w",5]']),
    "planner-data-nan": put("planner_data", ['["w",[Infinity]]']),
    "stock-entries": put("stock_entries", -1),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_that_cannot_be_is_refused(checkpoint: Checkpoint, change: Change) -> None:
    """Chunks that are not there once each, unknown owners and names given twice are found."""
    checkpoint.change(checkpoint.manifest, change)
    assert isinstance(refusal(checkpoint), FormatError)


@pytest.mark.parametrize(
    "change",
    [tensor("w", dtype="int32"), tensor("b", fqn="c"), blob("absent")],
    ids=["dtype", "name", "blob"],
)
def test_documents_that_contradict_each_other_are_found(
    checkpoint: Checkpoint, change: Change
) -> None:
    """Verify holds what the manifest promises against what ranks wrote."""
    checkpoint.change(checkpoint.manifest, change)
    assert verify(checkpoint.root, deep=False).problems


@pytest.mark.parametrize("slot", [1, 2, 1 << 62])
def test_a_record_that_follows_itself_is_refused(checkpoint: Checkpoint, slot: int) -> None:
    """Who walks back through superseded commits comes to an end."""
    previous = {"slot": slot, "save_id": body_of(checkpoint.slot)["save_id"]}
    checkpoint.change(checkpoint.slot, lambda body: body.update(previous=previous))
    assert isinstance(refusal(checkpoint), FormatError)


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_another_type_breaks_more_than_the_load(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    """Whatever stands in place of any value, a load succeeds or fails as it should; verify ends."""
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    check_other_values(folder, STATE, kind, range(1))
