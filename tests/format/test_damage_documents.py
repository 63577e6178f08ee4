"""Documents that were lost, or that somebody crafted: sound by checksums, and wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from damage_cases import KINDS, Checkpoint, check_other_values, document, load_failure
from dcp_cases import same, zeros_like
from s3_server import S3Server

import ckpt_storage
from ckpt_storage import CheckpointError, FormatError, InvalidInputError, UnsafeContentError, verify
from ckpt_storage.format.names import slot_path
from ckpt_storage.store import open_store

STATE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.arange(4),
    "empty": torch.empty(0, 2),
    "step": 5,
}

OTHER_ID = "20200101T000000Z-0123456789abcdef"

Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crafted")
    dcp_cases.save(STATE, folder)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Checkpoint:
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
    def change(body: Any) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        for key in way:
            body = body[key]
        body[last] = value

    return change


def add_unknown(value: Any) -> None:
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


NEWER = ("{}/3", "{}/999999999")
OTHERS = ("ckpt_storage.export/1", "x", None, 1, "{}/0", "{}/01", "{}/1.5", "{}/1\n", "{}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelt", [*NEWER, *OTHERS])
def test_a_document_of_another_kind_or_version_is_refused(
    checkpoint: Checkpoint, kind: str, spelt: object
) -> None:
    """It is not read as what it does not say it is; a newer version is told what to install."""
    name = f"ckpt_storage.{'commit' if kind == 'slot' else kind}"
    value = spelt.format(name) if isinstance(spelt, str) else spelt
    checkpoint.change(document(checkpoint, kind), put("format", value))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert repr(value) in str(error)
    assert (error.next_step == "Install a newer ckpt_storage.") == (spelt in NEWER)


@pytest.fixture(scope="session")
def audited() -> deque[str]:
    """Every path that this process opens from now on: no audit hook can be removed."""
    paths: deque[str] = deque(maxlen=10_000)

    def hear(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str):
            paths.append(args[0])

    sys.addaudithook(hear)
    return paths


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
        "saves/./file",
        "saves/file\n",
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
    rename = put(f"{what}/path", name)
    if what == "stock":
        checkpoint.change(checkpoint.manifest, rename)
    checkpoint.change(checkpoint.slot, rename)
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
        ("slot", "type", "moved"),
        ("slot", "previous", {"slot": 0, "save_id": "../../other"}),
        *(("slot", "previous", {"slot": slot, "save_id": OTHER_ID}) for slot in (1, 2, 1 << 62)),
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
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert path != "type" or "'moved'" in str(error)


def test_a_rank_manifest_of_another_save_is_refused(checkpoint: Checkpoint) -> None:
    """Its save id must be that of the manifest that names it."""
    checkpoint.change(document(checkpoint, "rank"), put("save_id", OTHER_ID))
    error = refusal(checkpoint)
    assert isinstance(error, FormatError)
    assert OTHER_ID in str(error)


def test_a_chunk_of_another_shape_is_refused(checkpoint: Checkpoint) -> None:
    """A rank manifest with 3x2 elements where the manifest has 2x3 contradicts it."""

    def transpose(body: Any) -> None:
        sizes = body["boxes"]["sizes"]
        at = sizes.index(3)
        sizes[at - 1 : at + 1] = [3, 2]

    checkpoint.change(document(checkpoint, "rank"), transpose)
    assert "[2, 3]" in str(refusal(checkpoint))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("dtypes/0", "int32"),
        ("tensors/fqns/1", "c"),
        ("blobs/fqns/0", "absent"),
        ("files/crc32c", "AAAAAA=="),
    ],
)
def test_documents_that_contradict_each_other_are_found(
    checkpoint: Checkpoint, path: str, value: str
) -> None:
    """Verify holds what the manifest promises against what ranks wrote."""
    checkpoint.change(checkpoint.manifest, put(path, value))
    assert verify(checkpoint.root, deep=False).problems


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_of_another_type_breaks_more_than_the_load(
    saved: Path, tmp_path: Path, kind: str
) -> None:
    """Whatever stands in place of any value, a load succeeds or fails as it should; verify ends."""
    folder = Path(shutil.copytree(saved, tmp_path / "run"))
    check_other_values(folder, STATE, kind, range(1))


@pytest.mark.parametrize("in_record", [False, True])
@pytest.mark.parametrize("place", ["hf/model.safetensors", "commits/notes.json", ".metadata"])
def test_a_copy_writes_nowhere_but_in_its_own_attempt(
    tmp_path: Path, place: str, *, in_record: bool
) -> None:
    """A source that names a file of the target as its own `stock.metadata` is refused."""
    source, target = tmp_path / "source", tmp_path / "target"
    ckpt_storage.save({"a": torch.ones(2)}, source)
    ckpt_storage.save({"a": torch.zeros(3)}, target)
    (target / place).parent.mkdir(exist_ok=True)
    if not (target / place).exists():
        (target / place).write_bytes(b"precious")
    before = (target / place).read_bytes()
    (stock,) = source.glob("saves/*/stock.metadata")
    (source / place).parent.mkdir(exist_ok=True)
    shutil.copy(stock, source / place)

    checkpoint = Checkpoint(source)
    for path in (checkpoint.manifest, checkpoint.slot)[: 1 + in_record]:
        checkpoint.change(path, put("stock/path", place))
    with pytest.raises(FormatError, match="not a document of this save"):
        ckpt_storage.copy(source, target, overwrite=True)
    assert (target / place).read_bytes() == before


@pytest.mark.parametrize("place", ["manifest.json", "saves/{}/begun.json"])
def test_a_record_that_names_another_manifest_is_refused(
    checkpoint: Checkpoint, place: str
) -> None:
    """The manifest of a save lies in one place."""
    place = place.format(checkpoint.manifest.parent.name)
    shutil.copy(checkpoint.manifest, checkpoint.root / place)
    checkpoint.change(checkpoint.slot, put("manifest/path", place))
    with pytest.raises(FormatError, match="not a document of this save"):
        ckpt_storage.open_checkpoint(checkpoint.root)


@pytest.mark.parametrize("path", [["a", 400_000_000], ["a", -1], ["a", 10**12, "b"]])
def test_one_number_of_a_path_takes_no_memory(tmp_path: Path, path: list[str | int]) -> None:
    """I10: a list is about as long as what is in it, whatever its highest index says."""
    ckpt_storage.save({"a": [torch.ones(2)]}, tmp_path / "c")
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.change(checkpoint.manifest, put("planner_data", [json.dumps(["a.0", path])]))
    with pytest.raises(InvalidInputError, match="far longer"):
        ckpt_storage.convert(tmp_path / "c", tmp_path / "out.pt", to="torch_save")
    assert not (tmp_path / "out.pt").exists()


def many(count: int) -> dict[str, Any]:
    return {"count": count, "bytes": 2, "zlib": ""}


NOWHERE: dict[str, list[int]] = {"ndim": [], "offsets": [], "sizes": [], "ranks": []}


@pytest.mark.parametrize(
    ("hostile", "told"),
    [
        ({"world_size": (1 << 20) + 1}, "declares more than"),
        ({"blobs": {"fqns": many((1 << 24) + 1), "rank": []}}, "declares more than"),
        ({"files": {"rank": many((1 << 25) + 1)}}, "declares more than"),
        ({"shapes": [[1] * 3000], "layouts": [NOWHERE]}, "each of its elements once"),
    ],
    ids=["ranks", "names", "bytes", "dimensions"],
)
def test_no_document_makes_a_reader_allocate_much(
    tmp_path: Path, hostile: dict[str, Any], told: str
) -> None:
    """I10: at most 2^20 ranks, 2^24 names, 256 MiB of columns; shapes do not exhaust the stack."""
    ckpt_storage.save({"a": torch.ones(2)}, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.change(checkpoint.manifest, lambda body: body.update(hostile))
    with pytest.raises(FormatError, match=told):
        ckpt_storage.open_checkpoint(tmp_path)


SAVES = 3
DOORS = ("load", "open_checkpoint", "verify")

Place = tuple[str, dict[str, Any]]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Place:
    url, options = str(tmp_path), dict[str, Any]()
    if request.param == "s3":
        url, options = "s3://bkt/run", {"storage_options": server.storage_options}
    for value in range(1, SAVES + 1):
        state = {"w": torch.full((4,), float(value))}
        ckpt_storage.save(state, url, overwrite=True, **options)
    return url, options


def look(door: str, place: Place) -> None:
    """Go through a door; what came is of the newest save, or the reason is raised."""
    url, options = place
    state = {"w": torch.zeros(4)}
    if door == "verify":
        report = ckpt_storage.verify(url, **options)
        told = " ".join(f"{one.message} {one.next_step}" for one in report.problems)
        if not report.ok:
            raise CheckpointError(told)
        return
    if door == "load":
        ckpt_storage.load(state, url, **options)
    else:
        state["w"] = ckpt_storage.open_checkpoint(url, **options)["w"].torch()
    assert state["w"][0] == SAVES, "an older save, in silence"


@pytest.mark.parametrize("lost", [1, *range(2, SAVES + 1)])
def test_a_lost_slot_is_told_unless_it_is_the_first(place: Place, lost: int) -> None:
    """The error says that `commits/` lost files; without the first a listing finds the others.

    `verify` misses the first, too.
    """
    told = r"commits/.*lost files|lost files.*commits/"
    for door in DOORS:
        look(door, place)
    with closing(open_store(place[0], **place[1])) as store:
        # As somebody who copies a folder by hand may.
        store.delete([slot_path(lost)])
        if lost == 1:
            for door in ("load", "open_checkpoint"):
                look(door, place)
            with pytest.raises(CheckpointError, match=told):
                look("verify", place)
            store.delete([slot_path(slot) for slot in range(2, SAVES + 1)])
            told = "slot 1 cannot be found"
    for door in DOORS:
        with pytest.raises(CheckpointError, match=told):
            look(door, place)
