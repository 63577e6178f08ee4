"""A reader of checkpoints written from docs/format.md alone: standard library and numpy only.

It imports nothing of the package and runs nothing that a checkpoint holds. `read` checks every byte
that counts.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import pickle
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2 bits8 bits1x8 bits2x4 bits4x2",
    2: "float16 bfloat16 uint16 int16 bits16",
    4: "float32 uint32 int32 complex32",
    8: "float64 uint64 int64 complex64",
    16: "complex128",
}
ITEM_BYTES = {name: size for size, listed in SIZES.items() for name in listed.split()}
SAVE_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}")


class RefusedError(Exception):
    """What lies there is damaged, or no document of this format."""


WRONG = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, zlib.error)


class NoCheckpointError(Exception):
    """There is nothing to read; the text says why: "none", "unfinished" or "deleted"."""


def need(good: object, what: str) -> None:
    """Refuse what is not good."""
    if not good:
        raise RefusedError(what)


TABLE = list(range(256))
for _ in range(8):
    TABLE = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in TABLE]


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def unseal(data: bytes, kind: str) -> dict[str, Any]:
    """Return the body of a sealed document."""
    need(data[:11] == b'{"crc32c":"' and data[19:28] == b'","body":', "no seal")
    need(data[-2:] == b"}\n" and data[11:19] == b"%08x" % crc32c(data[28:-2]), "checksum")
    keys: list[list[tuple[str, Any]]] = []
    body: Any = json.loads(data[28:-2].decode())
    json.loads(data[28:-2], object_pairs_hook=keys.append)
    need(all(len(dict(pairs)) == len(pairs) for pairs in keys), "a key twice")
    need(body["format"] == f"ckpt_storage.{kind}/1", "format")
    return dict(body)


def inflate(value: Any, size: int) -> bytes:
    """Return exactly `size` bytes of what a stream holds."""
    need(0 <= size <= 256 << 20, "too much")
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(value["zlib"], validate=True), size + 1)
    need(len(data) == size and stream.eof and not stream.unused_data, "stream")
    return data


def column(value: Any, count: int | None = None, least: int = 0, below: int = 1 << 63) -> list[int]:
    """Return a column: a list, or 64-bit differences that were deflated."""
    numbers: list[int] = value
    if not isinstance(value, list):
        words = np.frombuffer(inflate(value, 8 * value["count"]), dtype="<i8")
        numbers = np.cumsum(words, dtype=np.int64).tolist()
    need(count is None or len(numbers) == count, "length of a column")
    need(all(type(n) is int and least <= n < below for n in numbers), "number in a column")
    return numbers


def names(value: Any) -> list[str]:
    """Return names: a list, or its JSON text deflated."""
    if not isinstance(value, list):
        count = value["count"]
        value = json.loads(inflate(value, value["bytes"]))
        need(len(value) == count <= 1 << 24, "number of names")
    need(all(isinstance(name, str) for name in value), "names")
    return list(value)


def crcs(text: str, count: int) -> list[int]:
    """Return packed checksums."""
    data = base64.b64decode(text, validate=True)
    need(len(data) == 4 * count, "number of checksums")
    return [int(word) for word in np.frombuffer(data, dtype="<u4")]


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def boxes(value: Any) -> list[Box]:
    """Return boxes that columns spell."""
    ndim = column(value["ndim"], below=65)
    offsets, sizes = (column(value[key], sum(ndim)) for key in ("offsets", "sizes"))
    pairs = itertools.pairwise(itertools.accumulate(ndim, initial=0))
    return [(tuple(offsets[a:b]), tuple(sizes[a:b])) for a, b in pairs]


def window(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of a box."""
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


def layout(value: Any, shape: tuple[int, ...], world_size: int) -> list[tuple[Box, int]]:
    """Return the chunks of a tensor of `shape`, each with the rank that wrote it."""
    found = boxes(value) if "cuts" not in value else []
    if "cuts" in value:
        sides = []
        for cut, size in zip(map(column, value["cuts"]), shape, strict=True):
            rising = all(a < b for a, b in itertools.pairwise(cut))
            need(cut and cut[0] == 0 and rising and cut[-1] < max(size, 1), "cuts")
            sides.append([(a, b - a) for a, b in itertools.pairwise([*cut, size])])
        cells = itertools.product(*sides)
        found = [(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in cells]
    held = np.zeros(shape, dtype=np.int8)
    for offsets, sizes in found:
        need(all(a + n <= s for a, n, s in zip(offsets, sizes, shape, strict=True)), "chunk")
        held[window(offsets, sizes)] += 1
    need((held == 1).all(), "not each element once")
    ranks = column(value["ranks"], len(found), below=world_size)
    return list(zip(found, ranks, strict=True))


@dataclass
class Checkpoint:
    """Dtype and raw elements of tensors, byte streams of other values."""

    save_id: str
    slot: int
    tensors: dict[str, tuple[str, Any]]
    blobs: dict[str, bytes]
    ties: dict[str, str]
    lost_slots: bool


class Reader:
    """Reads the checkpoint in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def slot(self, number: int) -> dict[str, Any]:
        """Return the record of a slot, {} if there is none."""
        path = self.root / f"commits/{number:08d}.json"
        if not path.is_file():
            return {}
        need(path.stat().st_size <= 4 << 20, "a record too long")
        body = unseal(path.read_bytes(), "commit")
        need(body["slot"] == number and body["type"] in {"commit", "fence", "deleted"}, "record")
        return body

    def last_slot(self) -> int:
        """Return the number of the highest slot: gallop, then halve."""
        listed = sorted(self.root.glob("commits/*.json"))
        first = 1 if self.slot(1) or not listed else int(listed[0].stem)
        low, high = first - 1, first
        while self.slot(high):
            low, high = high, 2 * high - first + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.slot(middle) else (low, middle)
        return low

    def file(self, path: str, size: int, crc: int) -> bytes:
        """Return the bytes of a file that a document names."""
        place = self.root / path
        need(place.is_file() and place.stat().st_size == size, f"{path} is missing or too long")
        data = place.read_bytes()
        need(crc32c(data) == crc, f"checksum of {path}")
        return data

    def head(self) -> tuple[dict[str, Any], bool]:
        """Return the record of the newest commit, and whether slots were lost."""
        last = self.last_slot()
        stock = self.root / ".metadata"
        data = stock.read_bytes() if stock.is_file() else b""
        footer = {"slot": 0}
        if data[-8:] == b"CKPTSTO1" and data[-16:-8].isdigit():
            footer = json.loads(data[-16 - int(data[-16:-8]) : -16])
        lost = footer["slot"] > last
        if last == 0:
            need(not lost, "slots were lost")
            raise NoCheckpointError("unfinished" if (self.root / "saves").is_dir() else "none")
        record = self.slot(last)
        head = record["head"]
        if head is None:
            raise NoCheckpointError("deleted" if record["type"] == "deleted" else "unfinished")
        found = record if head["slot"] == last else self.slot(head["slot"])
        need(found.get("type") == "commit" and found["save_id"] == head["save_id"], "head")
        need(SAVE_ID.fullmatch(found["save_id"]), "save id")
        return found, lost

    def read(self) -> Checkpoint:
        """Return everything, after checking every byte of it."""
        record, lost = self.head()
        save_id = record["save_id"]
        named = record["manifest"]
        need(named["path"] == f"saves/{save_id}/manifest.json", "place of the manifest")
        data = self.file(named["path"], named["bytes"], int(named["crc32c"], 16))
        manifest = unseal(data, "manifest")
        world_size = manifest["world_size"]
        need(manifest["save_id"] == save_id and world_size <= 1 << 20, "manifest")
        table = manifest["tensors"]
        fqns = names(table["fqns"])
        keys = [column(table[key], len(fqns)) for key in ("dtype", "shape", "layout")]
        held: dict[Any, Any] = {}
        arrays: dict[str, Any] = {}
        kinds: dict[str, str] = {}
        for fqn, dtype, form, cut in zip(fqns, *keys, strict=True):
            kinds[fqn], shape = manifest["dtypes"][dtype], tuple(manifest["shapes"][form])
            arrays[fqn] = np.zeros((*shape, ITEM_BYTES[kinds[fqn]]), dtype=np.uint8)
            for box, rank in layout(manifest["layouts"][cut], shape, world_size):
                held[fqn, box[0]] = (rank, box)
        blobs = names(manifest["blobs"]["fqns"])
        owners = column(manifest["blobs"]["rank"], len(blobs), below=world_size)
        held.update(((name, None), (rank, None)) for name, rank in zip(blobs, owners, strict=True))
        need(len({*fqns, *blobs}) == len(fqns) + len(blobs), "a name twice")
        found: dict[Any, Any] = {}
        files: list[tuple[int, int, int]] = []
        documents = manifest["ranks"]
        sums = crcs(documents["crc32c"], world_size)
        for rank, size in enumerate(column(documents["bytes"], world_size)):
            crc = sums[rank]
            data = self.file(f"saves/{save_id}/ranks/rank-{rank:05d}.json", size, crc)
            files += self.rank(unseal(data, "rank"), save_id, rank, found)
        listed = manifest["files"]
        ranks = column(listed["rank"])
        rows = zip(ranks, column(listed["bytes"]), crcs(listed["crc32c"], len(ranks)), strict=True)
        need(list(rows) == files, "manifest and rank manifests list other files")
        values: dict[str, bytes] = {}
        for (fqn, offsets), (rank, box) in held.items():
            need((rank, fqn, offsets) in found, f"{fqn} is not where it should be")
            dtype, at, payload = found[rank, fqn, offsets]
            if box is None:
                values[fqn] = payload
                continue
            need(dtype == kinds[fqn] and at == box, f"{fqn} is another chunk")
            target = arrays[fqn][window(*box)]
            target[...] = np.frombuffer(payload, dtype=np.uint8).reshape(target.shape)
        tensors = {fqn: (kinds[fqn], arrays[fqn]) for fqn in fqns}
        return Checkpoint(save_id, record["slot"], tensors, values, manifest.get("ties", {}), lost)

    def rank(
        self, body: dict[str, Any], save_id: str, rank: int, found: dict[Any, Any]
    ) -> list[tuple[int, int, int]]:
        """Check the files of a rank, and note the payloads of its items."""
        need((body["save_id"], body["rank"]) == (save_id, rank), "another rank's manifest")
        fqns, table = names(body["fqns"]), boxes(body["boxes"])
        files = []
        for index, file in enumerate(body["files"]):
            crc, block = int(file["crc32c"], 16), file["block_bytes"]
            need(block >= 1024 and block % 64 == 0, "block length")
            data = self.file(f"saves/{save_id}/__{rank}_{index}.distcp", file["bytes"], crc)
            files.append((rank, file["bytes"], crc))
            items = file["items"]
            fqn = column(items["fqn"], below=len(fqns))
            count = len(fqn)
            dtype = column(items["dtype"], count, -1, len(body["dtypes"]))
            box = column(items["box"], count, -1, len(table))
            keys = ("item_start", "item_bytes", "payload_start", "payload_bytes")
            spans = list(zip(*(column(items[key], count) for key in keys), strict=True))
            frames = iter(crcs(file["frame_crcs"], count + 1))
            blocks = iter(crcs(file["block_crcs"], sum(-(-span[3] // block) for span in spans)))
            end = stop = 0
            for i, (start, length, payload, size) in enumerate(spans):
                inside = stop <= start <= payload <= payload + size <= start + length <= len(data)
                need(inside and (dtype[i] < 0) == (box[i] < 0), f"item {i} of rank {rank}")
                need(crc32c(data[end:payload]) == next(frames), f"frame {i} of rank {rank}")
                end, stop = payload + size, start + length
                for at in range(payload, end, block):
                    need(crc32c(data[at : min(at + block, end)]) == next(blocks), "block")
                name, kind, place = fqns[fqn[i]], None, None
                if box[i] >= 0:
                    kind, place = body["dtypes"][dtype[i]], table[box[i]]
                    need(size == math.prod(place[1]) * ITEM_BYTES[kind], f"payload of {name}")
                key = (rank, name, place and place[0])
                # Of several items at one place the first that is not empty counts.
                if key not in found or (not found[key][2] and size):
                    found[key] = (kind, place, data[payload:end])
            need(crc32c(data[end:]) == next(frames), f"last frame of rank {rank}")
        return files


class Inert(pickle.Unpickler):
    """Makes plain values, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse whatever a pickle names."""
        raise RefusedError(f"{module}.{name}")


def plain(blob: bytes) -> Any:
    """Return the value of a blob that `torch.save` wrote and that is made of plain values."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return Inert(io.BytesIO(archive.read(member))).load()


def read(root: Path) -> Checkpoint:
    """Return what the checkpoint in a folder holds."""
    try:
        return Reader(root).read()
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OSError,
        RecursionError,
        zlib.error,
    ) as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
