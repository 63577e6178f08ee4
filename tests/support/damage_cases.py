"""A checkpoint to damage, and what tells whether the damage was found.

Where things lie is read from the documents with `json`, by docs/format.md; nothing here calls the
package but its writer and reader.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import shutil
import struct
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
from ckpt_storage.testing.ranks import RankPool

BLOCK_BYTES = 65_536


def body_of(path: Path) -> dict[str, Any]:
    """Return the body of a sealed document."""
    body: dict[str, Any] = json.loads(path.read_bytes())["body"]
    return body


def sealed(body: object) -> bytes:
    """Return a body as a sealed document."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return b'{"crc32c":"%08x","body":%s}\n' % (crc32c(text), text)


def unpacked(text: str) -> list[int]:
    """Return packed CRCs as numbers."""
    data = base64.b64decode(text, validate=True)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def packed(crcs: list[int]) -> str:
    """Return numbers as packed CRCs."""
    return base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A frame (`fqn` None) or a block of a payload: bytes [start, stop) of a file of a rank."""

    path: Path
    rank: int
    fqn: str | None
    start: int
    stop: int


class Checkpoint:
    """The files of a checkpoint in one slot, and changes that its checksums bear out."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def slot(self) -> Path:
        """The commit record."""
        return self.root / "commits" / "00000001.json"

    @property
    def manifest(self) -> Path:
        """The manifest."""
        (path,) = self.root.rglob("manifest.json")
        return path

    @property
    def stock(self) -> Path:
        """The copy of `.metadata`."""
        (path,) = self.root.rglob("stock.metadata")
        return path

    @property
    def ranks(self) -> list[Path]:
        """The rank manifests."""
        return sorted(self.root.rglob("rank-*.json"))

    @property
    def shards(self) -> list[Path]:
        """The shard files."""
        return sorted(self.root.rglob("*.distcp"))

    @property
    def files(self) -> list[Path]:
        """All files."""
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def spans(self) -> list[Span]:
        """Return what the checksums are of, for all shard files."""
        found = []
        for path in self.ranks:
            body = body_of(path)
            for index, file in enumerate(body["files"]):
                rank, table, end = body["rank"], file["items"], 0
                place = self.manifest.parent / f"__{rank}_{index}.distcp"
                for i, name in enumerate(table["fqn"]):
                    begin, length = table["payload_start"][i], table["payload_bytes"][i]
                    cuts = [None, *range(begin, begin + length, BLOCK_BYTES)]
                    for cut in cuts:
                        start = end if cut is None else cut
                        stop = begin if cut is None else min(cut + BLOCK_BYTES, begin + length)
                        fqn = None if cut is None else body["fqns"][name]
                        found.append(Span(path=place, rank=rank, fqn=fqn, start=start, stop=stop))
                    end = begin + length
                found.append(Span(path=place, rank=rank, fqn=None, start=end, stop=file["bytes"]))
        return [span for span in found if span.start < span.stop]

    def name(self, path: Path) -> str:
        """Return the path of a file as documents have it."""
        return path.relative_to(self.root).as_posix()

    def reseal(self, path: Path, body: Any) -> None:
        """Put another body into a document, and its checksum into all that refer to it."""
        path.write_bytes(sealed(body))
        if path == self.slot:
            return
        data = path.read_bytes()
        reference = {"path": self.name(path), "bytes": len(data), "crc32c": f"{crc32c(data):08x}"}
        above = body_of(self.slot if path == self.manifest else self.manifest)
        if path == self.manifest:
            above["manifest"] = reference
            self.reseal(self.slot, above)
        else:
            number = self.ranks.index(path)
            crcs = unpacked(above["ranks"]["crc32c"])
            crcs[number] = crc32c(data)
            above["ranks"]["bytes"][number] = len(data)
            above["ranks"]["crc32c"] = packed(crcs)
            self.reseal(self.manifest, above)

    def change(self, path: Path, change: Callable[[Any], object]) -> None:
        """Let `change` edit the body of a document, and reseal it."""
        body = body_of(path)
        change(body)
        self.reseal(path, body)


class Spy(dcp.DefaultLoadPlanner):
    """A load planner that notes what it was given for good."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note a tensor."""
        self.given.append(read_item.dest_index.fqn)
        super().commit_tensor(read_item, tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Note a blob."""
        self.given.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


def load_failure(path: Path, state: dict[str, Any]) -> BaseException | None:
    """Return what a load raised before anything was handed out, None if it succeeded."""
    spy = Spy()
    reader = CheckpointStorageReader(path)
    try:
        # torch makes a failure here an AssertionError of its own.
        reader.read_metadata()
        dcp.load(state, storage_reader=reader, planner=spy)
    except CheckpointError as error:
        return error
    except CheckpointException as error:
        assert spy.given == []
        (failure,) = failures_of(error).values()
        return failure
    return None


def small_state() -> dict[str, Any]:
    """Return little of each kind: a tensor to shard, one to replicate, a blob."""
    return {"rows": seeded(1, 4), "mask": torch.tensor([True, False]), "step": 7}


def large_state() -> dict[str, Any]:
    """Return tensors of one and of several blocks, of every way to be read, and blobs."""
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


def save_on_two(_rank: int, path: Path, options: dict[str, bool]) -> None:
    """Save one of the states, its larger tensors sharded over the ranks."""
    mesh = init_device_mesh("cpu", (2,))

    def sharded(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sharded(name, item) for key, item in value.items()}
        if name not in {"rows", "columns", "twins"}:
            return value
        placement = Shard(1 if name == "columns" else 0)
        return distribute_tensor(value, mesh, [placement], src_data_rank=None)

    state = large_state() if options["large"] else small_state()
    dcp_cases.save({name: sharded(name, value) for name, value in state.items()}, path)


class Saver:
    """Gives copies of checkpoints that two ranks saved once."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder

    def copy(self, target: Path, *, large: bool = True) -> Checkpoint:
        """Return a checkpoint that may be damaged."""
        source = self._folder / f"{large}"
        if not source.exists():
            options = {"large": large}
            self._ranks.run(save_on_two, source, options, world_size=2)
        return Checkpoint(Path(shutil.copytree(source, target)))


def assert_close(checkpoint: Checkpoint, spans: list[Span], problem: Problem, at: int) -> None:
    """Assert that a finding leads to byte `at` of its file as closely as its checksums allow."""
    assert problem.file is not None
    path = checkpoint.root / problem.file
    assert problem.offset is not None
    if path in checkpoint.shards:
        (span,) = [s for s in spans if s.path == path and s.start <= at < s.stop]
        assert (problem.offset, problem.rank) == (span.start, span.rank)
        # A frame belongs to no tensor alone; one beside it is named.
        assert problem.fqn == span.fqn or (span.fqn is None and problem.fqn)
    elif problem.file == ".metadata":
        assert problem.offset == at
    else:
        assert 0 <= problem.offset <= at
        assert problem.rank == (checkpoint.ranks.index(path) if path in checkpoint.ranks else None)


KINDS = ("slot", "manifest", "rank")


def document(checkpoint: Checkpoint, kind: str) -> Path:
    """Return the file of one of `KINDS`."""
    return {"slot": checkpoint.slot, "manifest": checkpoint.manifest}.get(kind, checkpoint.ranks[0])


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(item, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a document with one value replaced."""
    if not path:
        return value
    body = copy.deepcopy(body)
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return body


VALUES: tuple[object, ...] = (None, True, -1, 1 << 64, "x", "\ud800", [], [[None]], {})
FROM_TORCH = ("Missing key in checkpoint", "Size mismatch between")


def check_other_values(folder: Path, state: dict[str, Any], kind: str, turns: range) -> None:
    """Put values in place of each value of a document; all of `VALUES` where `turns` has nine.

    `folder` has the state. A load succeeds or fails as it should.
    """
    checkpoint = Checkpoint(folder)
    path = document(checkpoint, kind)
    body = body_of(path)
    above = {file: file.read_bytes() for file in (checkpoint.slot, checkpoint.manifest, path)}
    count = 0
    found = list(nodes(body))
    for turn, (at, node) in itertools.product(turns, enumerate(found)):
        value = VALUES[(at + turn) % len(VALUES)]
        checkpoint.reseal(path, replaced(body, node, value))
        error = load_failure(checkpoint.root, dcp_cases.zeros_like(state))
        if not isinstance(error, CheckpointError | None):
            # The planner compares what the manifest says with the targets.
            assert str(error).startswith(FROM_TORCH), (node, value, error)
        verify(checkpoint.root, deep=False)
        count += error is not None
        for file, content in above.items():
            file.write_bytes(content)
    assert 2 * count > len(found) * len(turns)
