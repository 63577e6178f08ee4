"""A checkpoint to damage, and what tells whether the damage was found.

Where things lie is read from the documents with `json`, by docs/format.md; nothing here calls the
package but its writer and reader.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import torch
import torch.distributed.checkpoint as dcp
from crc32c import crc32c
from dcp_cases import failures_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

from ckpt_storage import CheckpointError, CheckpointStorageReader

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
            for file in body["files"]:
                table, end = file["items"], 0
                for i, name in enumerate(table["fqn"]):
                    begin, length = table["payload_start"][i], table["payload_bytes"][i]
                    cuts = [None, *range(begin, begin + length, BLOCK_BYTES)]
                    for cut in cuts:
                        start = end if cut is None else cut
                        stop = begin if cut is None else min(cut + BLOCK_BYTES, begin + length)
                        fqn = None if cut is None else body["fqns"][name]
                        found.append(self._span(file, body["rank"], fqn, start, stop))
                    end = begin + length
                found.append(self._span(file, body["rank"], None, end, file["bytes"]))
        return [span for span in found if span.start < span.stop]

    def _span(self, file: Any, rank: int, fqn: str | None, start: int, stop: int) -> Span:
        return Span(path=self.root / file["path"], rank=rank, fqn=fqn, start=start, stop=stop)

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
            if "inline_ranks" in above:
                above["inline_ranks"][number] = body
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


def save_uninlined(state: dict[str, Any], path: Path) -> None:
    """Save so that readers have to fetch rank manifests."""
    with patch("ckpt_storage.format.rankreport.INLINE_LIMIT_BYTES", 0):
        dcp_cases.save(state, path)
