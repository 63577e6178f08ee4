"""The golden checkpoint with manifests of version 2 stays readable, byte for byte."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
from crc32c import crc32c
from dcp_cases import files_below, raw_bytes, same, zeros_like

import ckpt_storage

GOLDEN = Path(__file__).parent / "golden" / "v2"


def expected() -> dict[str, Any]:
    """Return the state that was saved, as golden/README.md says."""
    return {
        "model": {
            "rows": torch.tensor([[(5 * i + j) / 2 for j in range(5)] for i in range(6)]),
            "uneven": torch.tensor(
                [[3 * i + j - 7 for j in range(3)] for i in range(5)], dtype=torch.bfloat16
            ),
            "columns": torch.tensor(
                [[100 * (4 * i + j) for j in range(4)] for i in range(3)], dtype=torch.int16
            ),
            # The bytes 0 to 15 by the definition of the kind: k/8 * 2^-6, then (1 + k/8) * 2^-6.
            "float8": torch.tensor([byte / 512 for byte in range(16)]).to(torch.float8_e4m3fn),
            "replicated": torch.tensor([0.0, 0.125, 0.25, 0.375], dtype=torch.float64),
            "mask": torch.tensor([True, False, False, True, False, False, True]),
            # The first imaginary part is a negative zero.
            "complex": torch.tensor(
                [[complex(i, -float(i)) for i in row] for row in ([0, 1], [2, 3])],
                dtype=torch.complex64,
            ),
            "scalar": torch.tensor(42),
            "empty": torch.empty(0, 3, dtype=torch.float16),
            "many": {
                f"layer {i}": torch.tensor([4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3])
                for i in range(70)
            },
        },
        "step": 7,
        "data": {"epoch": 1.5, "order": [3, 1, 2], "name": "ü"},
    }


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "v2"))


def test_our_reader_gives_what_was_saved(golden: Path) -> None:
    """Every value is equal bit by bit, and loading changes no file."""
    state = zeros_like(expected())
    reader = dcp_cases.load(state, golden)
    assert reader.format == "ckpt_storage"
    assert same(state, expected())
    assert files_below(golden) == files_below(GOLDEN)
    for name in files_below(golden):
        assert (golden / name).read_bytes() == (GOLDEN / name).read_bytes()


def test_stock_torch_gives_what_was_saved(golden: Path) -> None:
    """The published metadata leads torch's own reader to the same values."""
    state = zeros_like(expected())
    dcp_cases.load_stock(state, golden)
    assert same(state, expected())


@pytest.mark.parametrize("deep", [True, False])
def test_it_verifies(golden: Path, *, deep: bool) -> None:
    """No problem is reported, and a deep look takes in every byte of the shard files."""
    report = ckpt_storage.verify(golden, deep=deep)
    assert report.problems == []
    assert report.ok
    assert report.format == "ckpt_storage"
    shards = sum(path.stat().st_size for path in golden.rglob("*.distcp"))
    assert report.checked_bytes == (shards if deep else 0)


def test_it_is_listed(golden: Path) -> None:
    """The commit record tells what `list_checkpoints` shows."""
    (info,) = ckpt_storage.list_checkpoints(golden.parent)
    body = unsealed(GOLDEN / "commits" / "00000001.json")
    assert (info.name, info.slot, info.format) == ("v2", 1, "ckpt_storage")
    assert (info.save_id, info.created_at) == (body["save_id"], body["created_at"])


def test_it_can_be_overwritten(golden: Path) -> None:
    """A new save supersedes it, and keeps it as the previous one."""
    dcp_cases.save({"step": 8}, golden, overwrite=True)
    state: dict[str, Any] = {"step": None}
    dcp_cases.load(state, golden)
    assert state == {"step": 8}
    assert files_below(GOLDEN) <= files_below(golden)
    assert ckpt_storage.verify(golden).ok


def unsealed(path: Path) -> dict[str, Any]:
    """Return the body of a sealed document, checked by the rules of docs/format.md."""
    data = path.read_bytes()
    assert data[:11] == b'{"crc32c":"'
    assert data[19:28] == b'","body":'
    assert data[-2:] == b"}\n"
    assert data[11:19] == b"%08x" % crc32c(data[28:-2])
    body: dict[str, Any] = json.loads(data[28:-2])
    return body


def referenced(reference: dict[str, Any]) -> Path:
    """Return the file that a document refers to, which has the length and checksum it gives."""
    path: Path = GOLDEN / reference["path"]
    data = path.read_bytes()
    assert len(data) == reference["bytes"]
    assert f"{crc32c(data):08x}" == reference["crc32c"]
    return path


def unpacked(text: str) -> list[int]:
    """Return packed CRCs as numbers."""
    data = base64.b64decode(text, validate=True)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def integers(value: Any) -> list[int]:
    """Return a column as docs/format.md spells it."""
    if isinstance(value, list):
        return value
    data = zlib.decompress(base64.b64decode(value["zlib"], validate=True))
    letter = {1: "b", 2: "h", 4: "i", 8: "q"}[value["width"]]
    words = list(struct.unpack(f"<{value['count']}{letter}", data))
    return list(itertools.accumulate(words)) if value["delta"] else words


def strings(value: Any) -> list[str]:
    """Return names as docs/format.md spells them."""
    if isinstance(value, list):
        return value
    data = zlib.decompress(base64.b64decode(value["zlib"], validate=True))
    assert len(data) == value["bytes"]
    names: list[str] = json.loads(data)
    assert len(names) == value["count"]
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a shard file as its rank manifest describes it; `offsets` None for a blob."""

    fqn: str
    dtype: str | None
    offsets: list[int] | None
    sizes: list[int] | None
    payload: bytes


def boxes_of(value: Any) -> list[tuple[list[int], list[int]]]:
    """Return offsets and sizes of the boxes that columns spell."""
    offsets, sizes = iter(integers(value["offsets"])), iter(integers(value["sizes"]))
    return [
        ([next(offsets) for _ in range(ndim)], [next(sizes) for _ in range(ndim)])
        for ndim in integers(value["ndim"])
    ]


def items_of(rank: dict[str, Any]) -> list[Item]:
    """Return the items of one rank after holding every byte of its files against its checksums."""
    found = []
    fqns, boxes = strings(rank["fqns"]), boxes_of(rank["boxes"])
    for file in rank["files"]:
        data = referenced(file).read_bytes()
        table = {key: integers(value) for key, value in file["items"].items()}
        blocks = unpacked(file["block_crcs"])
        frames = unpacked(file["frame_crcs"])
        assert file["block_bytes"] == 65_536
        end = 0
        for i, name in enumerate(table["fqn"]):
            start, length = table["payload_start"][i], table["payload_bytes"][i]
            payload = data[start : start + length]
            assert table["item_start"][i] % 64 == start % 64 == 0
            assert frames.pop(0) == crc32c(data[end:start])
            assert unpacked(file["chunk_crcs"])[i] == crc32c(payload)
            if payload:  # All are shorter than a block: one each, none for an empty one.
                assert blocks.pop(0) == crc32c(payload)
            end = start + length
            dtype, box = table["dtype"][i], table["box"][i]
            assert (dtype < 0) == (box < 0)
            found.append(
                Item(
                    fqn=fqns[name],
                    dtype=None if dtype < 0 else rank["dtypes"][dtype],
                    offsets=None if box < 0 else boxes[box][0],
                    sizes=None if box < 0 else boxes[box][1],
                    payload=payload,
                )
            )
        assert frames == [crc32c(data[end:])]
        assert blocks == []
    return found


def flat(tree: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by FQN."""
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        found.update(inner)
    return found


def test_a_reader_made_from_the_format_page_alone_finds_everything() -> None:
    """docs/format.md is enough: references, checksums, tables and payloads are as it says."""
    record = unsealed(GOLDEN / "commits" / "00000001.json")
    assert record["format"] == "ckpt_storage.commit/1"
    manifest = unsealed(referenced(record["manifest"]))
    assert manifest["format"] == "ckpt_storage.manifest/2"
    assert manifest["stock"] == record["stock"]
    assert manifest["stock_entries"] == record["stock_entries"]
    stock = referenced(manifest["stock"]).read_bytes()
    assert (GOLDEN / ".metadata").read_bytes() == stock
    assert stock.endswith(b"CKPTSTO1")
    save_id = manifest["save_id"]
    ranks = []
    for number, (size, crc) in enumerate(
        zip(
            integers(manifest["ranks"]["bytes"]), unpacked(manifest["ranks"]["crc32c"]), strict=True
        )
    ):
        path = f"saves/{save_id}/ranks/rank-{number:05d}.json"
        ranks.append(unsealed(referenced({"path": path, "bytes": size, "crc32c": f"{crc:08x}"})))
    assert manifest["inline_ranks"] == ranks
    assert {rank["format"] for rank in ranks} == {"ckpt_storage.rank/2"}
    files = [file for rank in ranks for file in rank["files"]]
    assert integers(manifest["files"]["bytes"]) == [file["bytes"] for file in files]
    assert "paths" not in manifest["files"]
    assert [file["path"] for file in files] == [f"saves/{save_id}/__{i}_0.distcp" for i in (0, 1)]
    items = [(number, item) for number, rank in enumerate(ranks) for item in items_of(rank)]
    assert manifest["stock_entries"] == len(items)

    tensors = flat(expected()["model"], "model.")
    counts = dict.fromkeys(tensors, 0)
    for _, item in items:
        if item.offsets is None or item.sizes is None:
            continue
        tensor = tensors[item.fqn]
        for dim, (start, size) in enumerate(zip(item.offsets, item.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        assert f"torch.{item.dtype}" == str(tensor.dtype)
        assert item.payload == raw_bytes(tensor)
        counts[item.fqn] += tensor.numel()
    assert counts == {name: tensor.numel() for name, tensor in tensors.items()}

    table = manifest["tensors"]
    shapes = [manifest["shapes"][at] for at in integers(table["shape"])]
    assert dict(zip(strings(table["fqns"]), shapes, strict=True)) == {
        name: list(tensor.shape) for name, tensor in tensors.items()
    }
    blobs = {item.fqn: number for number, item in items if item.offsets is None}
    names, owners = strings(manifest["blobs"]["fqns"]), integers(manifest["blobs"]["rank"])
    assert dict(zip(names, owners, strict=True)) == blobs
    entries = map(json.loads, strings(manifest["planner_data"]))
    assert {fqn: path for fqn, path in entries if fqn in blobs} == {
        "step": ["step"],
        **{f"data.{name}": ["data", name] for name in ("epoch", "order", "name")},
    }


def test_chunks_were_written_by_the_rank_that_owns_them() -> None:
    """Rows went to two ranks, what both had to one; layouts name the owners, and are shared."""
    record = unsealed(GOLDEN / "commits" / "00000001.json")
    manifest = unsealed(GOLDEN / record["manifest"]["path"])
    table = manifest["tensors"]
    cut = dict(zip(strings(table["fqns"]), integers(table["layout"]), strict=True))
    layouts = manifest["layouts"]
    assert layouts[cut["model.rows"]] == {"cuts": [[0, 3], [0]], "ranks": [0, 1]}
    assert layouts[cut["model.columns"]] == {"cuts": [[0], [0, 2]], "ranks": [0, 1]}
    assert cut["model.uneven"] == cut["model.rows"]
    assert len({cut[f"model.many.layer {i}"] for i in range(70)}) == 1
    assert len(layouts[cut["model.replicated"]]["ranks"]) == 1
    assert layouts[cut["model.empty"]]["sizes"] == [0, 3]
