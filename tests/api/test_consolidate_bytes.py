"""Whichever way the bytes of an export take, they arrive unchanged, checked and within limits."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from consolidate_cases import check, files_in
from dcp_cases import seeded
from fault_tools import Opener

import ckpt_storage
import ckpt_storage.export.output
from ckpt_storage.errors import IntegrityError, InvalidInputError
from ckpt_storage.export.consolidate import ConsolidationReport, consolidate
from ckpt_storage.options import MIB
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.testing.s3_server import S3Server

STATE = {f"w{i}": seeded(i, 600, 1024) for i in range(5)}


def test_tensors_are_cast_on_the_way(tmp_path: Path) -> None:
    """Floating-point tensors arrive as torch converts them, bit by bit; all others as they are."""
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn)
    state = {str(dtype): seeded(1, 301, 129, dtype=dtype) for dtype in dtypes}
    ckpt_storage.save(state, tmp_path / "run")
    for dtype in (torch.float32, torch.bfloat16):
        consolidate(tmp_path / "run", dtype=dtype)
        expected = {
            name: one.to(dtype) if one.dtype in dtypes[:3] else one for name, one in state.items()
        }
        check(files_in(tmp_path / "run" / "hf"), expected)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_storage_copies_unless_it_refuses(
    monkeypatch: pytest.MonkeyPatch, *, refuses: bool
) -> None:
    """A storage that turns out not to copy costs a refusal, no failure."""
    rule = Rule(action="error", operation="copy_part", kind="unsupported", hit_count=None)
    rules = [rule] if refuses else []
    url = f"memory://{uuid.uuid4().hex}/run"
    ckpt_storage.save(STATE, url)
    opener = Opener(lambda _, backend: FaultBackend(backend, rules))
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", opener)
    report = consolidate(url)
    assert (report.copied_bytes == 0) == refuses
    assert report.sent_bytes + report.copied_bytes == report.total_bytes
    assert ckpt_storage.verify(url).ok


class InOrder(LocalBackend):
    """A folder whose files are written from front to back, by one process each."""

    capabilities = dataclasses.replace(
        LocalBackend.capabilities,
        parallel_parts=False,
        tokens_travel=False,
        lists_uploads=False,
        copy_min_bytes=None,
        is_remote=True,
    )

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.ends: dict[str, list[int]] = {}

    def put_part(
        self,
        path: str,
        token: str,
        number: int,
        offset: int,
        data: Sequence[memoryview],
        *,
        last: bool,
    ) -> str:
        """Write a part; it must be the next one."""
        ends = self.ends.setdefault(path, [0])
        assert offset == ends[-1]
        ends.append(offset + sum(map(len, data)))
        return super().put_part(path, token, number, offset, data, last=last)


@pytest.fixture
def in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InOrder:
    """Such a folder as the output, beside a checkpoint."""
    backend = InOrder(str(tmp_path / "out"))

    def wrap(location: Location, inner: Backend) -> Backend:
        return backend if location.path.endswith("out") else inner

    ckpt_storage.save(STATE, tmp_path / "run")
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", Opener(wrap))
    return backend


def export(tmp_path: Path) -> ConsolidationReport:
    """Consolidate in parts of a third of a MiB."""
    return consolidate(tmp_path / "run", tmp_path / "out", memory_limit_bytes=8 * MIB)


def test_a_storage_that_wants_parts_in_order_gets_them_so(
    tmp_path: Path, in_order: InOrder
) -> None:
    """Several threads read ahead, and parts arrive one after another."""
    report = export(tmp_path)
    (ends,) = in_order.ends.values()
    assert len(ends) > 5
    assert ends[-1] == report.total_bytes
    check(files_in(tmp_path / "out"), STATE)


@pytest.mark.usefixtures("in_order")
def test_a_failure_ends_those_that_wait_for_their_turn(tmp_path: Path) -> None:
    """Where parts go in order, the failure of one is raised at once, not at the deadline."""
    (shard,) = (tmp_path / "run").glob("saves/*/*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        export(tmp_path)
    assert (caught.value.fqn, caught.value.rank) == ("w2", 0)
    # A thread that still waited for its turn would be named in a note.
    assert not getattr(caught.value, "__notes__", [])


def test_too_little_memory_is_refused(tmp_path: Path) -> None:
    """If not even one part fits the limit, the error says how much is needed."""
    ckpt_storage.save({"w": torch.zeros(4 * MIB)}, tmp_path / "run")
    with S3Server() as server:
        server.create_bucket("bkt")
        given = server.storage_options
        with pytest.raises(InvalidInputError, match="memory_limit_bytes to"):
            consolidate(
                tmp_path / "run",
                "s3://bkt/hf",
                memory_limit_bytes=MIB,
                output_storage_options=given,
            )
