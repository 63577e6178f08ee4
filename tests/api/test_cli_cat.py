"""`ckpt-storage cat`: what it prints, what it reads for that, and where it goes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import call
from copy_cases import flip
from dcp_cases import raw_bytes, seeded

from ckpt_storage import open_checkpoint, save
from ckpt_storage.cli.options import parse_slice
from ckpt_storage.cli.values import _pieces
from ckpt_storage.inspect.lazy_tensor import select

STATE: dict[str, Any] = {
    "long": seeded(1, 5000, 3),
    "deep": seeded(3, 2, 7, 8, 40),
    "half": seeded(4, 60, 60, dtype=torch.bfloat16),
    "complex": seeded(5, 40, 40, dtype=torch.complex64),
    "empty": torch.empty(0, 3),
    "one": torch.tensor(2.5),
    "note": "hello",
}

PIECES_HELD = "ckpt_storage.inspect.reading._PIECES_HELD"
"""How many pieces take all of the memory that an open checkpoint may: 256 MiB."""

SLICES = [None, "-1", "1:,::2", "5:2", "::2,...,1::3"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("run") / "c"
    save(dict(STATE), folder)
    return folder


def numpys(name: str, index: str | None) -> Any:
    return np.asarray(STATE[name].numpy()[parse_slice(index) if index is not None else ...])


def sliced(name: str, index: str | None, *options: str) -> list[str]:
    return [name, *(() if index is None else ("--slice", index)), *options]


@pytest.mark.parametrize("index", SLICES)
@pytest.mark.parametrize("name", ["long", "deep", "complex"])
def test_text_is_numpys_though_only_the_edges_are_read(
    url: Path, name: str, index: str | None
) -> None:
    """Abbreviated where numpy abbreviates, whole where it does not, whatever the index."""
    found = call("cat", url, *sliced(name, index))
    assert found.exit_code == 0, found.output
    with np.printoptions(edgeitems=3, threshold=1000):
        assert found.stdout == f"{numpys(name, index)}\n"


@pytest.mark.parametrize("index", SLICES)
@pytest.mark.parametrize("name", ["deep", "complex", "empty"])
def test_files_have_the_elements_in_numpys_order(
    url: Path, name: str, index: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As raw bytes and as numpy's file, in pieces of 100 bytes or in one."""
    if name == "empty" and index == "-1":
        index = "...,-1"
    array = numpys(name, index)
    for _ in range(2):
        raw = call("cat", url, *sliced(name, index, "--form", "raw")).stdout_bytes
        assert raw == array.tobytes()
        file = io.BytesIO(call("cat", url, *sliced(name, index, "--form", "npy")).stdout_bytes)
        found = np.load(file)
        assert found.dtype == array.dtype
        with np.errstate(invalid="ignore"):  # numpy 1 compares complex NaN so
            np.testing.assert_array_equal(found, array)
        monkeypatch.setattr(PIECES_HELD, (256 << 20) // 100)


@pytest.mark.parametrize("index", ["...", "::2,...,1:", "1,::3,..."])
def test_no_more_than_a_piece_is_read_at_a_time(url: Path, index: str) -> None:
    """Each read is of at most the bytes that are asked for; together they are the elements."""
    array = STATE["deep"].numpy()
    with open_checkpoint(url) as checkpoint:
        wanted = parse_slice(index)
        pieces = list(_pieces(checkpoint["deep"], select(wanted, array.shape), 256))
    assert max(map(len, pieces)) <= 256
    assert b"".join(pieces) == np.ascontiguousarray(array[wanted]).tobytes()


def test_types_that_numpy_lacks_and_single_elements_are_printed(url: Path) -> None:
    """bfloat16 is abbreviated like any other, and raw bytes are those of torch."""
    found = call("cat", url, "half")
    assert found.exit_code == 0, found.output
    assert "..." in found.stdout
    raw = call("cat", url, "half", "--form", "raw").stdout_bytes
    assert raw == raw_bytes(STATE["half"])
    assert call("cat", url, "one").stdout == "2.5\n"
    for name, values in (("one", 2.5), ("note", "hello")):
        assert json.loads(call("cat", url, name, "--json").stdout)["values"] == values
    element = str(STATE["long"].numpy()[1, 2])
    assert call("cat", url, "long", "--slice", "1,2").stdout == f"{element}\n"


def test_what_is_not_shown_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text takes no block between its corners; raw elements are all checked."""
    big = tmp_path / "big"
    save({"w": seeded(1, 3000, 2000)}, big)
    (shard,) = big.glob("saves/*/*.distcp")
    flip(shard, shard.stat().st_size // 2)
    monkeypatch.setattr(PIECES_HELD, 256)
    assert call("cat", big, "w", "--form", "raw").exit_code == 1
    assert call("cat", big, "w").exit_code == 0
    shard.unlink()
    found = call("cat", big, "w", "--json")
    assert found.exit_code == 2
    assert "too many for JSON" in found.stderr
