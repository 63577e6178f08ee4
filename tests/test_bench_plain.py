"""The bench's floor on a disk moves every byte, however few a call of the system takes."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_storage import CheckpointStorageReader, save
from ckpt_storage.benchmark import run, scale
from ckpt_storage.benchmark.peers import PlainReader, stock_metadata
from ckpt_storage.benchmark.plain import PlainDisk
from ckpt_storage.benchmark.scenarios import MEASURE
from ckpt_storage.benchmark.settings import BenchSettings, ScenarioName
from ckpt_storage.cli.app import app
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.store import Location

MOST_BYTES = 1000


def short(call: Callable[..., int]) -> Callable[..., int]:
    """Return `call` as Linux has it for more than 2 GiB: it takes a part of what it is given."""

    def take(descriptor: int, views: Sequence[memoryview], *rest: int) -> int:
        taken, left = [], MOST_BYTES
        for view in views:
            taken.append(view[:left])
            left -= len(taken[-1])
        return call(descriptor, taken, *rest)

    return take


def bytes_of(state: dict[str, torch.Tensor]) -> list[memoryview]:
    """Return the memory of each tensor."""
    return [
        memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11
        for tensor in state.values()
    ]


@pytest.mark.parametrize(("count", "piece_bytes"), [(3, 2500), (1500, 10)])
def test_a_floor_writes_and_reads_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, piece_bytes: int
) -> None:
    """What one call leaves over, the next ones do, for few large views and for many small ones."""
    for name in ("writev", "preadv"):
        monkeypatch.setattr(os, name, short(getattr(os, name)))
    sent = [memoryview(os.urandom(piece_bytes)) for _ in range(count)]
    disk = PlainDisk(str(tmp_path))
    disk.put("a/b", sent)
    assert (tmp_path / "a" / "b").read_bytes() == b"".join(sent)
    found = [memoryview(bytearray(len(view))) for view in sent]
    disk.get("a/b", found)
    assert found == sent
    seen: list[bytes] = []
    disk.get("a/b", found[1:], len(sent[0]), seen=lambda piece: seen.append(bytes(piece)))
    assert b"".join(seen) == b"".join(sent[1:])


def test_the_plainest_plug_in_loads_what_its_read_reads(tmp_path: Path) -> None:
    """Torch's `dcp.load` takes the metadata of our reader, and the bytes of the floor's files."""
    saved = {"a": torch.arange(40.0).view(8, 5), "b": torch.ones(3, dtype=torch.int32)}
    save(saved, tmp_path / "ours")
    metadata = stock_metadata(CheckpointStorageReader(tmp_path / "ours").read_metadata())
    for entry in metadata.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        assert type(entry.chunks) is list
    target = {fqn: torch.zeros_like(tensor) for fqn, tensor in saved.items()}
    disk = PlainDisk(str(tmp_path))
    disk.put("plain", bytes_of(saved))
    reader = PlainReader(metadata, lambda: disk.get("plain", bytes_of(target)))
    dcp.load(dict(target), storage_reader=reader, no_dist=True)
    assert all(torch.equal(target[fqn], saved[fqn]) for fqn in saved)


def test_a_file_that_is_too_short_is_no_floor(tmp_path: Path) -> None:
    """A part of the bytes in a part of the time is an error, not a figure."""
    disk = PlainDisk(str(tmp_path))
    disk.put("a", [memoryview(b"0123")])
    with pytest.raises(EOFError):
        disk.get("a", [memoryview(bytearray(5))])


@pytest.mark.parametrize("name", ["load-cold", "verify-cold"])
def test_a_system_that_empties_no_cache_measures_nothing_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: ScenarioName
) -> None:
    """Without `posix_fadvise`, as on macOS, a warm figure must not be called a cold one."""
    root = Location.of(tmp_path)
    bench: Any = SimpleNamespace(root=root, plain=PlainDisk(root.target))
    # With the call the scenario begins, and misses what this bench lacks.
    with pytest.raises(AttributeError):
        MEASURE[name](bench)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with pytest.raises(InvalidInputError, match="empties the cache") as caught:
        MEASURE[name](bench)
    assert name in str(caught.value.next_step)


@pytest.mark.parametrize(("can_be_cold", "wanted"), [(True, 2), (False, 0)])
def test_what_cannot_be_cold_is_left_out_of_what_is_measured_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, can_be_cold: bool, wanted: int
) -> None:
    """Unless it is named, it is no error that the system cannot do it."""
    asked: list[BenchSettings] = []
    monkeypatch.setattr(run, "run_bench", asked.append)
    if not can_be_cold:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    result = CliRunner().invoke(app, ["bench", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sum(name.endswith("-cold") for name in asked[0].scenarios) == wanted


def test_memory_is_told_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts the peak in KiB, macOS in bytes; without /proc what is resident is not known."""
    used = SimpleNamespace(ru_maxrss=1000)
    monkeypatch.setattr(resource, "getrusage", lambda _: used)
    monkeypatch.setattr(sys, "platform", "linux")
    assert scale._peak_resident_bytes() == 1_024_000  # noqa: SLF001  # what `simulate` reports
    monkeypatch.setattr(sys, "platform", "darwin")
    assert scale._peak_resident_bytes() == 1000  # noqa: SLF001  # what `simulate` reports

    def absent(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert scale._resident_bytes() is None  # noqa: SLF001  # what `simulate` reports
