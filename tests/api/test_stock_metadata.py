"""`.metadata` for torch's own readers: written quickly, or left out and said so."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import failures_of, same, zeros_like
from report_tools import SAVE_ID, Written, reports_of
from stock_samples import made_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpt_storage
from ckpt_storage import (
    CheckpointInfo,
    CheckpointStorageReader,
    CheckpointStorageWriter,
    InvalidInputError,
)
from ckpt_storage.commit.stockpickle import EntryTable, StockEntry, pickled
from ckpt_storage.commit.stockwrite import entries_of

STATE: dict[str, Any] = {
    "w": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
    "step": 5,
    "ü": torch.arange(3),
}
ENTRIES = [
    StockEntry("model.w", (0, 0), "saves/x/__0_0.distcp", 0, 1 << 40),
    StockEntry("model.w", (4, 0), "saves/x/__1_0.distcp", 1 << 31, (1 << 31) - 1),
    StockEntry("model.w", (1 << 45, 0), "saves/x/__1_0.distcp", 255, 256),
    StockEntry("scalar", (), "saves/x/__0_0.distcp", 65_536, 1577),
    StockEntry("step", None, "saves/x/ü/__0_0.distcp", 7, 0),
    StockEntry("model.w", (4, 0), "saves/x/__9_0.distcp", 5, 5),
]


def plain(entries: list[StockEntry]) -> dict[MetadataIndex, _StorageInfo]:
    """Return the table as objects, of equal keys the first."""
    table: dict[MetadataIndex, _StorageInfo] = {}
    for entry in entries:
        offset = None if entry.offsets is None else torch.Size(entry.offsets)
        info = _StorageInfo(entry.path, entry.start, entry.length)
        table.setdefault(MetadataIndex(entry.fqn, offset), info)
    return table


@pytest.mark.parametrize("count", [0, 1, 3, 6])
@pytest.mark.parametrize("ranks", [1, 100])
def test_the_pickle_written_by_hand_is_that_of_the_objects(count: int, ranks: int) -> None:
    """Whatever is around the table, and however often strings come again."""
    metadata = made_metadata(ranks)
    found = pickle.loads(pickled(metadata, EntryTable.of(ENTRIES[:count])))
    assert found == dataclasses.replace(metadata, storage_data=plain(ENTRIES[:count]))
    assert list(found.storage_data) == list(plain(ENTRIES[:count]))
    for index, info in found.storage_data.items():
        assert type(index.offset) in {torch.Size, type(None)}
        assert index.index is None
        assert info.transform_descriptors is None


KEYS = ("version", "modules", "save_id", "load_id", "x")


@pytest.mark.parametrize("tensor_count", [1, 40, *range(1597, 1640, 14)])
def test_what_the_pickle_around_remembers_is_not_overwritten(
    tmp_path: Path, tensor_count: int
) -> None:
    """However much it remembers; torch's reader gets the keys and the places that were written."""
    names = [f"{KEYS[n % 5]}.t{n}" for n in range(tensor_count)]
    metadata = Metadata(
        state_dict_metadata={
            name: TensorStorageMetadata(
                TensorProperties(torch.float32),
                torch.Size([4, 4]),
                [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([1, 4])) for n in range(4)],
            )
            for name in names
        },
        planner_data={name: (*KEYS, name) for name in names},
        storage_data={},
        storage_meta=StorageMeta("run", "save-1", "load-1", ["modules"]),
        version="1.0.0",
    )
    entries = [
        StockEntry(name, (n, 0), f"saves/x/__{n}_0.distcp", n, 16)
        for name in names
        for n in range(4)
    ]
    data = pickled(metadata, EntryTable.of(entries))
    (tmp_path / ".metadata").write_bytes(data)
    found = FileSystemReader(tmp_path).read_metadata()
    found.storage_meta = metadata.storage_meta
    assert found == dataclasses.replace(metadata, storage_data=plain(entries))
    assert vars(found).keys() == vars(metadata).keys()
    assert pickle.loads(data).storage_meta == metadata.storage_meta


def tensors(**changes: Any) -> dict[str, TensorStorageMetadata]:
    """Return three that look alike, under names that the pickle uses itself."""
    return {
        name: TensorStorageMetadata(
            TensorProperties(torch.float8_e4m3fn, memory_format=torch.channels_last, **changes),
            torch.Size([4, 2]),
            [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([2, 2])) for n in (0, 2)],
        )
        for name in ("size", "offset", "properties")
    }


@pytest.mark.parametrize("requires_grad", [True, False])
def test_tensors_that_look_alike_are_objects_of_their_own(*, requires_grad: bool) -> None:
    """Equal ones are written once, and read as often as they are."""
    state = tensors(requires_grad=requires_grad)
    entries = [StockEntry(name, (0, 0), "size", 1, 2) for name in state]
    found = pickle.loads(pickled(Metadata(state), EntryTable.of(entries)))  # type: ignore[arg-type]
    assert found == Metadata(state, storage_data=plain(entries))  # type: ignore[arg-type]
    held = list(found.state_dict_metadata.values())
    assert len({id(entry.properties) for entry in held}) == 3
    assert len({id(chunk) for entry in held for chunk in entry.chunks}) == 6
    assert all(type(entry.size) is torch.Size for entry in held)
    assert all(entry.properties.memory_format is torch.channels_last for entry in held)


@dataclasses.dataclass
class Chunk(ChunkStorageMetadata):
    """A chunk with one thing more."""

    label: str = ""


def test_chunks_of_a_planner_s_own_are_kept() -> None:
    """Where one entry is not of torch's classes, all are pickled as objects."""
    state = tensors()
    state["offset"].chunks[1] = Chunk(torch.Size([2, 0]), torch.Size([2, 2]), "mine")
    found = pickle.loads(pickled(Metadata(state), EntryTable.of(ENTRIES)))  # type: ignore[arg-type]
    assert found == Metadata(state, storage_data=plain(ENTRIES))  # type: ignore[arg-type]
    assert found.state_dict_metadata["offset"].chunks[1].label == "mine"


def test_a_chunk_with_elements_wins_over_an_empty_one_at_its_place() -> None:
    """Torch's reader finds the one that has what it wants, whichever was written first."""
    ranks = [
        [Written("w", (0, 0), (0, 4)), Written("e", (0,), (0,))],
        [Written("w", (0, 0), (4, 4)), Written("w", (0, 0), (0, 4))],
    ]
    found = pickle.loads(pickled(made_metadata(1), entries_of(reports_of(ranks)))).storage_data
    assert len(found) == 2
    assert found[MetadataIndex("w", [0, 0])] == _StorageInfo(
        f"saves/{SAVE_ID}/__1_0.distcp", 0, 128
    )
    assert found[MetadataIndex("e", [0])].relative_path.endswith("__0_0.distcp")


def test_other_classes_than_those_known_are_pickled_as_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch whose classes have changed still gets what it can read."""
    monkeypatch.setattr("ckpt_storage.commit.stockpickle._is_known", lambda: False)
    found = pickle.loads(pickled(made_metadata(2), EntryTable.of(ENTRIES)))
    assert found.storage_data == plain(ENTRIES)


def save(path: Path, state: dict[str, Any] = STATE, **options: Any) -> None:
    """Save by `dcp.save`."""
    dcp.save(state, storage_writer=CheckpointStorageWriter(path, **options))


@pytest.mark.parametrize("options", [{}, {"stock_metadata": "always"}])
def test_it_is_written_for_small_checkpoints(tmp_path: Path, options: dict[str, Any]) -> None:
    """Torch's reader loads them, and the checkpoint says so."""
    save(tmp_path / "run", **options)
    state = zeros_like(STATE)
    dcp_cases.load_stock(state, tmp_path / "run")
    assert same(state, STATE)
    (info,) = ckpt_storage.list_checkpoints(tmp_path)
    assert info.stock_metadata is True


def test_a_large_one_has_a_note_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Above the limit torch's reader is told why, ours loads, and everyone who is asked says so."""
    monkeypatch.setattr("ckpt_storage.saves.options.STOCK_ENTRY_LIMIT", len(STATE) - 1)
    caplog.set_level("INFO", "ckpt_storage")
    save(tmp_path / "run")
    assert "would hold 5 entries" in caplog.text
    check_note(tmp_path / "run")


def check_note(path: Path) -> None:
    """Assert that torch's reader is refused with a reason, and that all else works."""
    with pytest.raises(CheckpointException) as raised:
        dcp.load(zeros_like(STATE), storage_reader=FileSystemReader(path))
    (failure,) = failures_of(raised.value).values()
    assert "load it with ckpt_storage" in str(failure)
    with pytest.raises(ValueError, match=r"no \.metadata for torch's own readers"):
        FileSystemReader(path).read_metadata()
    state = zeros_like(STATE)
    dcp_cases.load(state, path)
    assert same(state, STATE)
    assert ckpt_storage.verify(path).ok
    (info,) = ckpt_storage.list_checkpoints(path.parent)
    assert info.stock_metadata is False


def test_a_limit_is_not_passed_by_as_many_as_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit itself is still written."""
    monkeypatch.setattr("ckpt_storage.saves.options.STOCK_ENTRY_LIMIT", len(STATE))
    save(tmp_path / "run")
    dcp_cases.load_stock(zeros_like(STATE), tmp_path / "run")


def test_never_and_always_are_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size."""
    save(tmp_path / "never" / "run", stock_metadata="never")
    check_note(tmp_path / "never" / "run")
    monkeypatch.setattr("ckpt_storage.saves.options.STOCK_ENTRY_LIMIT", 0)
    save(tmp_path / "run", stock_metadata="always")
    dcp_cases.load_stock(zeros_like(STATE), tmp_path / "run")
    with pytest.raises(InvalidInputError, match="'sometimes'"):
        CheckpointStorageWriter(tmp_path, stock_metadata="sometimes")  # type: ignore[arg-type]


def test_a_note_replaces_what_an_older_save_published(tmp_path: Path) -> None:
    """Torch's reader never gets the older checkpoint instead; a later save publishes again."""
    path = tmp_path / "run"
    save(path, {"w": torch.zeros(2, 3)})
    save(path, stock_metadata="never", overwrite=True)
    check_note(path)
    save(path, {"w": torch.ones(2, 3)}, overwrite=True)
    state = {"w": torch.zeros(2, 3)}
    dcp_cases.load_stock(state, path)
    assert same(state, {"w": torch.ones(2, 3)})


def test_an_opener_puts_the_note_in_place(tmp_path: Path) -> None:
    """Where the saver died before it published, the next load does."""
    path = tmp_path / "run"
    save(path, stock_metadata="never")
    note = (path / ".metadata").read_bytes()
    (path / ".metadata").unlink()
    dcp_cases.load(zeros_like(STATE), path)
    assert (path / ".metadata").read_bytes() == note


def test_the_front_door_passes_it_on(tmp_path: Path) -> None:
    """And says in what it returns whether torch can load it."""
    info = ckpt_storage.save(STATE, tmp_path / "run", stock_metadata="never")
    assert info.stock_metadata is False
    check_note(tmp_path / "run")
    assert ckpt_storage.save(STATE, tmp_path / "other").stock_metadata is True


def later(path: Path, **options: Any) -> CheckpointInfo:
    """Save by the function for the background."""
    return ckpt_storage.save_async(STATE, path, **options).result()


def by_thread(path: Path, **options: Any) -> CheckpointInfo:
    """Save by a saver's thread."""
    with ckpt_storage.AsyncSaver(mode="thread") as saver:
        return saver.save(STATE, path, **options).result()


def by_process(path: Path, **options: Any) -> CheckpointInfo:
    """Save by a saver's process."""
    with ckpt_storage.AsyncSaver(mode="process") as saver:
        return saver.save(STATE, path, **options).result()


def by_manager(path: Path, **options: Any) -> CheckpointInfo:
    """Save a step."""
    with ckpt_storage.CheckpointManager(path.parent) as manager:
        return manager.save(1, STATE, **options)


def by_manager_later(path: Path, **options: Any) -> CheckpointInfo:
    """Save a step in the background."""
    with ckpt_storage.CheckpointManager(path.parent, mode="thread") as manager:
        return manager.save_async(1, STATE, **options).result()


@pytest.mark.parametrize("saved", [later, by_thread, by_process, by_manager, by_manager_later])
def test_every_other_front_door_passes_it_on(
    tmp_path: Path, saved: Callable[..., CheckpointInfo]
) -> None:
    """The background's and the manager's too."""
    info = saved(tmp_path / "never" / "run", stock_metadata="never")
    assert info.stock_metadata is False
    check_note(tmp_path / "never" / info.name)
    assert saved(tmp_path / "auto" / "run").stock_metadata is True


def test_plans_that_a_planner_keeps_do_not_hide_items(tmp_path: Path) -> None:
    """With torch's plan caching the second save writes it as the first did."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    # Torch keeps them for the whole process.
    planner._cached_plans_key = f"stock {tmp_path}"  # noqa: SLF001
    for name in ("first", "second"):
        writer = CheckpointStorageWriter(tmp_path / name)
        dcp.save(STATE, storage_writer=writer, planner=planner)
        state = zeros_like(STATE)
        dcp_cases.load_stock(state, tmp_path / name)
        assert same(state, STATE)
    reader = CheckpointStorageReader(tmp_path / "second")
    assert isinstance(reader.read_metadata(), Metadata)
