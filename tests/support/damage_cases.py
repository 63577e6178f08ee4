"""A checkpoint to damage, and checks of how the damage is reported.

Where things lie is read from the documents with `json`, by docs/format.md; nothing here calls the
package but its writer and reader.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dcp_cases
import torch
import torch.distributed.checkpoint as dcp
from crc32c import crc32c
from dcp_cases import failures_of, seeded
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt_storage import CheckpointError, CheckpointStorageReader, verify
from ckpt_storage.inspect.checks import Problem

BLOCK_BYTES = 65_536
KINDS = ("slot", "manifest", "rank")


def body_of(path: Path) -> Any:
    return json.loads(path.read_bytes())["body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A frame (`fqn` None) or a block of a payload: bytes [start, stop) of a file of a rank."""

    path: Path
    rank: int
    fqn: str | None
    start: int
    stop: int


class Checkpoint:
    """The files of a checkpoint with one slot, and changes to them with valid checksums."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slot = root / "commits" / "00000001.json"
        self.manifest = next(root.glob("saves/*/manifest.json"))
        self.stock = self.manifest.with_name("stock.metadata")
        self.ranks = sorted(root.rglob("rank-*.json"))
        self.shards = sorted(root.rglob("*.distcp"))

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def spans(self) -> list[Span]:
        """Return what the checksums are of, for all shard files."""
        rows = []
        for rank, body in enumerate(map(body_of, self.ranks)):
            for index, file in enumerate(body["files"]):
                place, end = self.manifest.with_name(f"__{rank}_{index}.distcp"), 0
                columns = ("fqn", "payload_start", "payload_bytes")
                for name, begin, length in zip(*map(file["items"].get, columns), strict=True):
                    edges = [*range(begin, begin + length, BLOCK_BYTES), begin + length]
                    cuts = [(None, end, begin)]
                    cuts += [(body["fqns"][name], *pair) for pair in itertools.pairwise(edges)]
                    rows += [(place, rank, *cut) for cut in cuts]
                    end = begin + length
                rows.append((place, rank, None, end, file["bytes"]))
        return [
            Span(path=path, rank=rank, fqn=fqn, start=start, stop=stop)
            for path, rank, fqn, start, stop in rows
            if start < stop
        ]

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def reseal(self, path: Path, body: Any) -> None:
        """Put another body into a document, and its checksum into all that refer to it."""
        text = json.dumps(body, separators=(",", ":")).encode()
        data = b'{"crc32c":"%08x","body":%s}\n' % (crc32c(text), text)
        path.write_bytes(data)
        if path == self.manifest:
            above = body_of(self.slot)
            above["manifest"] |= {"bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
            self.reseal(self.slot, above)
        elif path != self.slot:
            number, above = self.ranks.index(path), body_of(self.manifest)
            crcs = bytearray(base64.b64decode(above["ranks"]["crc32c"]))
            crcs[4 * number : 4 * number + 4] = crc32c(data).to_bytes(4, "little")
            above["ranks"]["bytes"][number] = len(data)
            above["ranks"]["crc32c"] = base64.b64encode(crcs).decode()
            self.reseal(self.manifest, above)

    def change(self, path: Path, change: Callable[[Any], object]) -> None:
        """Let `change` edit the body of a document, and reseal it."""
        body = body_of(path)
        change(body)
        self.reseal(path, body)


def load_failure(path: Path, state: dict[str, Any]) -> BaseException | None:
    """Return what a load raised before anything was handed out, None if it succeeded."""
    fqns: list[str] = []

    def noted(step: Callable[..., None], item: ReadItem, value: Any) -> None:
        fqns.append(item.dest_index.fqn)
        step(item, value)

    reader = CheckpointStorageReader(path)
    planner = dcp_cases.planner(dcp.DefaultLoadPlanner, commit_tensor=noted, load_bytes=noted)
    try:
        # torch makes a failure here an AssertionError of its own.
        reader.read_metadata()
        dcp.load(state, storage_reader=reader, planner=planner)
    except CheckpointError as error:
        return error
    except CheckpointException as error:
        assert fqns == []
        (failure,) = failures_of(error).values()
        return failure
    return None


def small_state() -> dict[str, Any]:
    return {"rows": seeded(1, 4), "mask": torch.tensor([True, False]), "step": 7}


def large_state() -> dict[str, Any]:
    return {
        # Read straight into the target, in several blocks.
        "rows": seeded(1, 6, 40_000),
        # Cut by columns: read into windows and copied out of them.
        "columns": seeded(2, 300, 301, dtype=torch.bfloat16),
        "twins": {"a": seeded(3, 100, dtype=torch.int64), "b": seeded(4, 100, dtype=torch.int64)},
        "mask": torch.arange(7) % 3 == 0,
        "scalar": torch.tensor(42),
        "empty": torch.empty(0, 3),
        "step": 7,
        "note": "damaged",
    }


def save_on_two(_rank: int, path: Path, *, large: bool) -> None:
    """Save one of the states, its larger tensors sharded over the ranks."""
    mesh = init_device_mesh("cpu", (2,))

    def sharded(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sharded(name, item) for key, item in value.items()}
        if name not in {"rows", "columns", "twins"}:
            return value
        placement = Shard(1 if name == "columns" else 0)
        return distribute_tensor(value, mesh, [placement], src_data_rank=None)

    state = large_state() if large else small_state()
    dcp_cases.save({name: sharded(name, value) for name, value in state.items()}, path)


def assert_close(checkpoint: Checkpoint, spans: list[Span], problem: Problem, at: int) -> None:
    """Assert that a finding leads to byte `at` of its file as closely as its checksums allow."""
    assert problem.file is not None
    assert problem.offset is not None
    path = checkpoint.root / problem.file
    if path in checkpoint.shards:
        (span,) = [s for s in spans if s.path == path and s.start <= at < s.stop]
        assert (problem.offset, problem.rank) == (span.start, span.rank)
        # A frame is not part of a tensor; a tensor beside it is named.
        assert problem.fqn == span.fqn or (span.fqn is None and problem.fqn)
    elif problem.file == ".metadata":
        assert problem.offset == at
    else:
        assert 0 <= problem.offset <= at
        assert problem.rank == (checkpoint.ranks.index(path) if path in checkpoint.ranks else None)


def document(checkpoint: Checkpoint, kind: str) -> Path:
    return {"slot": checkpoint.slot, "manifest": checkpoint.manifest}.get(kind, checkpoint.ranks[0])


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(item, (*path, key))


VALUES: tuple[object, ...] = (None, True, -1, 1 << 64, "x", "\ud800", [], [[None]], {})
FROM_TORCH = ("Missing key in checkpoint", "Size mismatch between")


def check_other_values(folder: Path, state: dict[str, Any], kind: str, turns: range) -> None:
    """Put `VALUES` in place of each value: a load of `state` succeeds or fails as it should."""
    checkpoint = Checkpoint(folder)
    path = document(checkpoint, kind)
    above = {file: file.read_bytes() for file in (checkpoint.slot, checkpoint.manifest, path)}
    count = 0
    all_nodes = list(nodes(body_of(path)))
    for turn, (at, node) in itertools.product(turns, enumerate(all_nodes)):
        value = VALUES[(at + turn) % len(VALUES)]
        whole = {"body": body_of(path)}
        keys = ["body", *node]
        holder: Any = whole
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value
        checkpoint.reseal(path, whole["body"])
        error = load_failure(checkpoint.root, dcp_cases.zeros_like(state))
        if not isinstance(error, CheckpointError | None):
            # The planner compares what the manifest says with the targets.
            assert str(error).startswith(FROM_TORCH), (node, value, error)
        verify(checkpoint.root, deep=False)
        count += error is not None
        for file, content in above.items():
            file.write_bytes(content)
    assert 2 * count > len(all_nodes) * len(turns)
