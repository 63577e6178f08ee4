"""What a stranger's reader and writer met, decided by docs/format.md: each point of it.

A change to one document of a checkpoint of two ranks; what loads and `verify` say of it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import commit_tools as tools
import damage_cases as cases
import dcp_cases
import pytest
import spec_reader
import torch
from rank_pool import RankPool

from ckpt_storage import (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    FormatError,
    IntegrityError,
    open_checkpoint,
    save,
    verify,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import seal, unseal
from ckpt_storage.format.names import slot_path

Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger") / "run"
    ranks.run(partial(cases.save_on_two, large=False), folder, world_size=2)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> cases.Checkpoint:
    return cases.Checkpoint(Path(shutil.copytree(saved, tmp_path / "run")))


def failure(checkpoint: cases.Checkpoint) -> BaseException | None:
    return cases.load_failure(checkpoint.root, dcp_cases.zeros_like(cases.small_state()))


def list_a_chunk_without_elements(manifest: Any) -> None:
    """Spell the grid of "rows" as a list, with a chunk behind the end that no rank wrote."""
    number = manifest["tensors"]["layout"][manifest["tensors"]["fqns"].index("rows")]
    grid = manifest["layouts"][number]
    (size,) = manifest["shapes"][manifest["tensors"]["shape"][0]]
    (starts,) = grid["cuts"]
    stops = [*starts[1:], size]
    manifest["layouts"][number] = {
        "ndim": [1] * (len(starts) + 1),
        "offsets": [*starts, size],
        "sizes": [*(b - a for a, b in zip(starts, stops, strict=True)), 0],
        "ranks": [*grid["ranks"], 0],
    }


SOUND: dict[str, tuple[str, Change]] = {
    "pid is a text": ("rank", lambda body: body.update(pid="job-7")),
    "pid of the slot is a text": ("slot", lambda body: body.update(pid="job-7")),
    "host is null": ("slot", lambda body: body.update(host=None)),
    "writer is a text": ("manifest", lambda body: body.update(writer="by hand")),
    "created_at is a number": ("manifest", lambda body: body.update(created_at=5)),
    "no ties": ("manifest", lambda body: body.update(ties=None)),
    "a chunk without elements and item": ("manifest", list_a_chunk_without_elements),
    "a user of any form": ("slot", lambda body: body.update(user={"a": [{"b": None}] * 3})),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_for_people_has_any_form(checkpoint: cases.Checkpoint, name: str) -> None:
    """Notes for people and optional keys never make a checkpoint unreadable."""
    kind, change = SOUND[name]
    checkpoint.change(cases.document(checkpoint, kind), change)
    assert failure(checkpoint) is None
    assert [problem.message for problem in verify(checkpoint.root).problems] == []
    spec_reader.read(checkpoint.root)


REFUSED: dict[str, tuple[str, Change]] = {
    "a slot without stock": ("slot", lambda body: body.pop("stock")),
    "a slot without head": ("slot", lambda body: body.pop("head")),
    "a manifest without stock": ("manifest", lambda body: body.pop("stock")),
    "a manifest without planner_data": ("manifest", lambda body: body.pop("planner_data")),
    "an unknown dtype": ("manifest", lambda body: body["dtypes"].append("float7")),
    "a dtype twice": ("manifest", lambda body: body["dtypes"].append(body["dtypes"][0])),
    "a rank manifest of another world": ("rank", lambda body: body.update(world_size=9)),
    "a slot without write_id": ("slot", lambda body: body.pop("write_id")),
    "a manifest without hosts": ("manifest", lambda body: body.pop("hosts")),
    "a rank manifest without boxes": ("rank", lambda body: body.pop("boxes")),
    "half of a surrogate pair": ("slot", lambda body: body.update(user={"a": "\ud800"})),
    "a number that is no JSON": ("slot", lambda body: body.update(user={"a": math.nan})),
    "an unknown dtype of a rank": ("rank", lambda body: body["dtypes"].append("float7")),
    "a dtype of a rank twice": ("rank", lambda body: body["dtypes"].append(body["dtypes"][0])),
    "a path twice": (
        "manifest",
        lambda body: body["planner_data"].append(body["planner_data"][0]),
    ),
    "ties of unknown names": ("rank", lambda body: body.update(ties={"none": "nobody"})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_must_be_there_is_missed(checkpoint: cases.Checkpoint, name: str) -> None:
    """A missing key, or what contradicts another document, is refused."""
    kind, change = REFUSED[name]
    checkpoint.change(cases.document(checkpoint, kind), change)
    assert isinstance(failure(checkpoint), FormatError)
    assert not verify(checkpoint.root).ok
    with pytest.raises(spec_reader.RefusedError):
        spec_reader.read(checkpoint.root)


def test_a_deleted_record_has_no_head() -> None:
    """One with a head contradicts itself."""
    body = {"format": "ckpt_storage.commit/1", "type": "deleted", "slot": 2, "write_id": "0" * 32}
    head = {"slot": 1, "save_id": "20260101T000000Z-0123456789abcdef"}
    with pytest.raises(FormatError, match="deleted"):
        SlotRecord.decode(seal({**body, "head": head, "fenced": []}), slot=2)


def test_verify_holds_whole_files_to_their_checksum(checkpoint: cases.Checkpoint) -> None:
    """A file's own checksum is that of its frames and blocks."""

    def change(body: Any) -> None:
        body["files"][0]["crc32c"] = "00000000"

    path = checkpoint.ranks[0]
    checkpoint.change(path, change)
    above = json.loads(checkpoint.manifest.read_bytes())["body"]
    crcs = spec_reader.crcs(above["files"]["crc32c"], len(above["files"]["rank"]))
    above["files"]["crc32c"] = _packed([0, *crcs[1:]])
    checkpoint.reseal(checkpoint.manifest, above)
    assert "contradicts itself" in str(verify(checkpoint.root, deep=False).problems)
    with pytest.raises(spec_reader.RefusedError):
        spec_reader.read(checkpoint.root)


def _packed(crcs: list[int]) -> str:
    import base64  # noqa: PLC0415  # here alone

    return base64.b64encode(b"".join(crc.to_bytes(4, "little") for crc in crcs)).decode()


def test_verify_holds_the_slot_to_the_manifest(checkpoint: cases.Checkpoint) -> None:
    """`stock` and `stock_entries` of both are equal."""
    checkpoint.change(checkpoint.slot, lambda body: body.update(stock=None))
    files = {problem.file for problem in verify(checkpoint.root).problems}
    assert slot_path(1) in files


def test_verify_misses_the_published_metadata(checkpoint: cases.Checkpoint) -> None:
    """If the head has `stock`, `.metadata` exists."""
    (checkpoint.root / ".metadata").unlink()
    assert {problem.file for problem in verify(checkpoint.root).problems} == {".metadata"}
    spec_reader.read(checkpoint.root)


def test_verify_reports_the_metadata_of_an_older_save(checkpoint: cases.Checkpoint) -> None:
    """Otherwise there is none: stock torch would load another save."""
    for path in (checkpoint.manifest, checkpoint.slot):
        checkpoint.change(path, lambda body: body.update(stock=None, stock_entries=None))
    assert {problem.file for problem in verify(checkpoint.root).problems} == {".metadata"}
    (checkpoint.root / ".metadata").unlink()
    assert verify(checkpoint.root).ok


@pytest.mark.parametrize("key", ["format", "save_id"])
def test_verify_holds_the_marker_to_its_save(checkpoint: cases.Checkpoint, key: str) -> None:
    """A marker of another save or kind is damage; a missing one is not."""
    marker = checkpoint.manifest.with_name("begun.json")
    body = unseal(marker.read_bytes(), path="begun.json")
    other = {"format": "ckpt_storage.rank/1", "save_id": "20260101T000000Z-0123456789abcdef"}
    marker.write_bytes(seal({**body, key: other[key]}))
    assert not verify(checkpoint.root).ok
    marker.unlink()
    assert verify(checkpoint.root).ok


def test_a_gap_in_the_slots_is_a_problem(tmp_path: Path) -> None:
    """Only a deleted checkpoint loses slots."""
    for step in (1, 2, 3):
        save({"w": torch.zeros(2)}, tmp_path / "run", overwrite=step > 1, step=step)
    (tmp_path / "run" / slot_path(1)).unlink()
    (problem,) = verify(tmp_path / "run").problems
    assert problem.file == slot_path(1)


def test_a_wrong_checksum_of_the_manifest_is_damage(checkpoint: cases.Checkpoint) -> None:
    """Length and checksum that a document names are those of all bytes."""
    checkpoint.manifest.write_bytes(checkpoint.manifest.read_bytes() + b"\n")
    assert isinstance(failure(checkpoint), IntegrityError)


GONE = "20260101T000000Z-0123456789abcdef"


def make_lost(store: tools.DictStore) -> None:
    tools.saved(store)
    tools.saved(store)
    store.disk.drop(slot_path(2))


def make_lost_behind_a_tombstone(store: tools.DictStore) -> None:
    tools.saved(store)
    tools.deleted(store)
    tools.saved(store)
    store.disk.drop(slot_path(3))


def make_deleted(store: tools.DictStore) -> None:
    tools.saved(store)
    tools.deleted(store)
    tools.fenced(store, GONE)


def make_begun(store: tools.DictStore) -> None:
    tools.fenced(store, GONE)
    tools.attempted(store)


def make_fenced(store: tools.DictStore) -> None:
    tools.fenced(store, GONE)
    store.put("saves/.ckpt-storage-probe-0123456789abcdef", b"probe")


STATES: dict[str, tuple[Callable[[tools.DictStore], None], type[Exception], str]] = {
    "lost": (make_lost, FormatError, "slots were lost"),
    "lost behind a tombstone": (make_lost_behind_a_tombstone, FormatError, "slots were lost"),
    "deleted": (make_deleted, CheckpointGoneError, "deleted"),
    "in progress": (make_begun, CheckpointInProgressError, "unfinished"),
    "nothing": (make_fenced, CheckpointNotFoundError, "none"),
}


@pytest.mark.parametrize("name", STATES)
def test_both_readers_find_the_state_of_the_table(tmp_path: Path, name: str) -> None:
    """Ours and the one of the page agree on each row that is no checkpoint."""
    make, error, why = STATES[name]
    store = tools.DictStore(tools.Disk())
    make(store)
    for path, data in store.disk.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    with pytest.raises(error):
        open_checkpoint(tmp_path)
    with pytest.raises((spec_reader.RefusedError, spec_reader.NoCheckpointError), match=why):
        spec_reader.read(tmp_path)
