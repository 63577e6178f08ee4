"""A reader of checkpoints written from docs/format.md alone: standard library and numpy only.

It imports nothing of the package, runs nothing that a checkpoint holds, and checks all that counts.
"""

from __future__ import annotations

import base64
import functools
import io
import itertools
import json
import math
import pickle
import re
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace
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
KEYS = {
    "commit": "slot type write_id head",
    "manifest": "save_id world_size tensors dtypes shapes layouts blobs planner_data files ranks "
    "hosts stock",
    "rank": "save_id rank world_size fqns dtypes boxes files",
}
COLUMNS = ("fqn", "dtype", "box", "item_start", "item_bytes", "payload_start", "payload_bytes")
SAVE_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}")
WRONG = (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, zlib.error)


class RefusedError(Exception):
    """What lies there is damaged, or no document of this format."""


class NoCheckpointError(Exception):
    """There is nothing to read; the text says why: "none", "unfinished" or "deleted"."""


def need(good: object, what: str) -> None:
    if not good:
        raise RefusedError(what)


TABLE = list(range(256))
for _ in range(8):
    TABLE = [crc >> 1 ^ (0x82F63B78 if crc & 1 else 0) for crc in TABLE]


@functools.lru_cache(maxsize=256)
def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def unseal(data: bytes, kind: str) -> dict[str, Any]:
    """Return the body of a sealed document."""
    need(data[:11] == b'{"crc32c":"' and data[19:28] == b'","body":', "no seal")
    need(data[-2:] == b"}\n" and data[11:19] == b"%08x" % crc32c(data[28:-2]), "checksum")
    objects: list[Any] = []
    json.loads(data[28:-2], object_pairs_hook=objects.append)
    need(all(len(dict(pairs)) == len(pairs) for pairs in objects), "a key twice")
    body: dict[str, Any] = json.loads(data[28:-2].decode())
    # Neither NaN nor half of a surrogate pair.
    json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    need(body["format"] == f"ckpt_storage.{kind}/1", "format")
    need(body.keys() >= {*KEYS[kind].split()}, "a key is missing")
    dtypes = body.get("dtypes", [])
    need(len({*dtypes}) == len(dtypes) and {*dtypes} <= ITEM_BYTES.keys(), "dtypes")
    return body


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
    if not isinstance(value, list):
        count = value["count"]
        value = json.loads(inflate(value, value["bytes"]))
        need(len(value) == count <= 1 << 24, "number of names")
    need(all(isinstance(name, str) for name in value), "names")
    return list(value)


def crcs(text: str, count: int) -> list[int]:
    data = base64.b64decode(text, validate=True)
    need(len(data) == 4 * count, "number of checksums")
    return [int(word) for word in np.frombuffer(data, dtype="<u4")]


def boxes(value: Any) -> list[Any]:
    """Return the offsets and sizes of boxes that columns spell."""
    ndim = column(value["ndim"], below=65)
    offsets, sizes = (column(value[key], sum(ndim)) for key in ("offsets", "sizes"))
    pairs = itertools.pairwise(itertools.accumulate(ndim, initial=0))
    return [(tuple(offsets[a:b]), tuple(sizes[a:b])) for a, b in pairs]


def window(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))


def cells(cuts: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the boxes that cuts make of a tensor of `shape`."""
    sides = []
    for cut, size in zip(map(column, cuts), shape, strict=True):
        need(cut[0] == 0 and cut == sorted(set(cut)) and cut[-1] < max(size, 1), "cuts")
        sides.append([(a, b - a) for a, b in itertools.pairwise([*cut, size])])
    pairs = itertools.product(*sides)
    return [(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in pairs]


def layout(value: Any, shape: tuple[int, ...], world_size: int) -> list[Any]:
    """Return the chunks of a tensor of `shape`, each with the rank that wrote it."""
    found = boxes(value) if "cuts" not in value else cells(value["cuts"], shape)
    held = np.zeros(shape, dtype=np.int8)
    for offsets, sizes in found:
        need(all(a + n <= s for a, n, s in zip(offsets, sizes, shape, strict=True)), "chunk")
        held[window(offsets, sizes)] += 1
    need((held == 1).all(), "not each element once")
    ranks = column(value["ranks"], len(found), below=world_size)
    return list(zip(found, ranks, strict=True))


def slot_path(root: Path, number: int) -> Path:
    return root / f"commits/{number:08d}.json"


def slot(root: Path, number: int) -> dict[str, Any]:
    """Return the record of a slot."""
    path = slot_path(root, number)
    need(path.stat().st_size <= 4 << 20, "a record too long")
    body = unseal(path.read_bytes(), "commit")
    need(body["slot"] == number and body["type"] in {"commit", "fence", "deleted"}, "record")
    return body


def last_slot(root: Path) -> int:
    """Return the number of the highest slot: gallop, then halve."""
    listed = sorted(root.glob("commits/*.json"))
    first = 1 if slot_path(root, 1).is_file() or not listed else int(listed[0].stem)
    low, high = first - 1, first
    while slot_path(root, high).is_file():
        low, high = high, 2 * high - first + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slot_path(root, middle).is_file() else (low, middle)
    return low


def checked(root: Path, path: str, size: int, crc: int) -> bytes:
    data = (root / path).read_bytes()
    need(len(data) == size and crc32c(data) == crc, f"length or checksum of {path}")
    return data


def head(root: Path) -> dict[str, Any]:
    """Return the record of the newest commit."""
    last = last_slot(root)
    stock = root / ".metadata"
    data = stock.read_bytes() if stock.is_file() else b""
    footer = {"slot": 0}
    if data[-8:] == b"CKPTSTO1" and data[-16:-8].isdigit():
        footer = json.loads(data[-16 - int(data[-16:-8]) : -16])
    need(footer["slot"] <= last, "slots were lost")
    record: dict[str, Any] = slot(root, last) if last else {"head": None, "type": "fence"}
    at, head = last, record["head"]
    if head is None:
        while record["type"] == "fence" and at > 1 and slot_path(root, at - 1).is_file():
            at -= 1
            record = slot(root, at)
        attempts = [path for path in root.glob("saves/*") if SAVE_ID.fullmatch(path.name)]
        why = "unfinished" if attempts else "none"
        raise NoCheckpointError("deleted" if record["type"] == "deleted" else why)
    found = record if head["slot"] == last else slot(root, head["slot"])
    need(found.get("type") == "commit" and found["save_id"] == head["save_id"], "head")
    need(SAVE_ID.fullmatch(found["save_id"]), "save id")
    return found


def whole(root: Path) -> SimpleNamespace:
    """Return dtype and raw elements of tensors, bytes of blobs, and more; every byte is checked."""
    record = head(root)
    save_id, named = record["save_id"], record["manifest"]
    path = f"saves/{save_id}/manifest.json"
    data = checked(root, path, named["bytes"], int(named["crc32c"], 16))
    manifest = unseal(data, "manifest")
    world_size = manifest["world_size"]
    need((named["path"], manifest["save_id"]) == (path, save_id) and world_size <= 1 << 20, "other")
    paths = names(manifest["planner_data"] or [])
    need(len({*paths}) == len(paths) and "stock" in record, "a path twice, or no stock")
    dtypes = manifest["dtypes"]
    table, listed, documents = (manifest[key] for key in ("tensors", "files", "ranks"))
    fqns = names(table["fqns"])
    keys = [column(table[key], len(fqns)) for key in ("dtype", "shape", "layout")]
    held: dict[Any, Any] = {}
    tensors: dict[str, tuple[str, Any]] = {}
    for fqn, dtype, form, cut in zip(fqns, *keys, strict=True):
        kind, shape = dtypes[dtype], tuple(manifest["shapes"][form])
        tensors[fqn] = kind, np.zeros((*shape, ITEM_BYTES[kind]), dtype=np.uint8)
        for box, rank in layout(manifest["layouts"][cut], shape, world_size):
            if all(box[1]):
                held[fqn, box[0]] = (rank, box)
    blobs = names(manifest["blobs"]["fqns"])
    owners = column(manifest["blobs"]["rank"], len(blobs), below=world_size)
    held.update(((name, None), (rank, None)) for name, rank in zip(blobs, owners, strict=True))
    need(len({*fqns, *blobs}) == len(fqns) + len(blobs), "a name twice")
    found: dict[Any, Any] = {}
    files: list[Any] = []
    sums = zip(column(documents["bytes"]), crcs(documents["crc32c"], world_size), strict=True)
    for rank, (size, crc) in enumerate(sums):
        data = checked(root, f"saves/{save_id}/ranks/rank-{rank:05d}.json", size, crc)
        body = unseal(data, "rank")
        need(body["world_size"] == world_size, "another world size")
        files += rank_files(root, body, save_id, rank, found)
    ranks = column(listed["rank"])
    rows = zip(ranks, column(listed["bytes"]), crcs(listed["crc32c"], len(ranks)), strict=True)
    need(list(rows) == files, "manifest and rank manifests list other files")
    groups = ["", *listed.get("groups", [])]
    of = column(listed.get("group", [-1] * len(ranks)), len(ranks), least=-1, below=len(groups) - 1)
    values: dict[str, bytes] = {}
    for (fqn, offsets), (rank, box) in held.items():
        need((rank, fqn, offsets) in found, f"{fqn} is not where it should be")
        dtype, at, payload = found[rank, fqn, offsets]
        if box is None:
            values[fqn] = payload
            continue
        need(dtype == tensors[fqn][0] and at == box, f"{fqn} is another chunk")
        target = tensors[fqn][1][window(*box)]
        target[...] = np.frombuffer(payload, dtype=np.uint8).reshape(target.shape)
    more = {"slot": record["slot"], "ties": manifest.get("ties") or {}}
    more["groups"] = [groups[n + 1] for n in of]
    more["int_keys"] = [json.loads(path) for path in names(manifest.get("int_keys") or [])]
    return SimpleNamespace(save_id=save_id, tensors=tensors, blobs=values, **more)


def rank_files(root: Path, body: Any, save_id: str, rank: int, found: Any) -> list[Any]:
    """Check the files of a rank, and note the payloads of its items."""
    need((body["save_id"], body["rank"]) == (save_id, rank), "another rank's manifest")
    fqns, table = names(body["fqns"]), boxes(body["boxes"])
    ties = body.get("ties") or {}
    need({*ties, *ties.values()} <= {*fqns}, "ties of other names")
    files = []
    for index, file in enumerate(body["files"]):
        crc, block = int(file["crc32c"], 16), file["block_bytes"]
        need(block >= 1024 and block % 64 == 0, "block length")
        data = checked(root, f"saves/{save_id}/__{rank}_{index}.distcp", file["bytes"], crc)
        files.append((rank, file["bytes"], crc))
        rows = list(zip(*(column(file["items"][key], least=-1) for key in COLUMNS), strict=True))
        need(len(base64.b64decode(file.get("hashes", ""))) in {0, 16 * len(rows)}, "hashes")
        need(column(file.get("moving", []), below=len(rows)) is not None, "moving values")
        frames = iter(crcs(file["frame_crcs"], len(rows) + 1))
        blocks = iter(crcs(file["block_crcs"], sum(-(-row[-1] // block) for row in rows)))
        end = stop = 0
        for number, dtype, box, start, length, payload, size in rows:
            inside = stop <= start <= payload <= payload + size <= start + length <= len(data)
            need(inside and number >= 0 and (dtype < 0) == (box < 0), f"item of rank {rank}")
            need(crc32c(data[end:payload]) == next(frames), f"frame of rank {rank}")
            end, stop = payload + size, start + length
            for at in range(payload, end, block):
                need(crc32c(data[at : min(at + block, end)]) == next(blocks), "block")
            kind, place = (body["dtypes"][dtype], table[box]) if box >= 0 else ("", None)
            if place:
                need(size == math.prod(place[1]) * ITEM_BYTES[kind], f"payload of {fqns[number]}")
            key = (rank, fqns[number], place and place[0])
            # Of several items at one place the first that is not empty counts.
            if key not in found or (not found[key][2] and size):
                found[key] = (kind, place, data[payload:end])
        need(crc32c(data[end:]) == next(frames), f"last frame of rank {rank}")
    return files


class Inert(pickle.Unpickler):
    """Makes plain values, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise RefusedError(f"{module}.{name}")


def plain(blob: bytes) -> Any:
    """Return the value of a blob that `torch.save` wrote and that is made of plain values."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return Inert(io.BytesIO(archive.read(member))).load()


def read(root: Path) -> SimpleNamespace:
    """Return what the checkpoint in a folder holds, as `whole` does."""
    try:
        return whole(root)
    except WRONG as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error
