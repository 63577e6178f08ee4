"""`ckpt-storage cat`: what it prints, what it reads for that, and where it goes."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import call
from copy_cases import flip
from dcp_cases import seeded

from ckpt_storage import save
from ckpt_storage.cli.options import parse_slice

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

SLICES = [None, "-1", "1:,::2", "5:2", "::-2,...,::-1"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours with `STATE`."""
    folder: Path = tmp_path_factory.mktemp("run") / "c"
    save(dict(STATE), folder)
    return folder


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tensor of 24 MB."""
    folder: Path = tmp_path_factory.mktemp("run") / "big"
    save({"w": seeded(1, 3000, 2000)}, folder)
    return folder


def numpys(name: str, index: str | None) -> Any:
    """Return what numpy has for a tensor of `STATE` at an index."""
    return np.asarray(STATE[name].numpy()[parse_slice(index) if index is not None else ...])


def sliced(name: str, index: str | None, *options: str) -> list[str]:
    """Return the arguments that ask for a tensor at an index."""
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


def test_types_that_numpy_lacks_are_printed_and_written(url: Path) -> None:
    """bfloat16 is abbreviated like any other, and raw bytes are those of torch."""
    found = call("cat", url, "half")
    assert found.exit_code == 0, found.output
    assert "..." in found.stdout
    raw = call("cat", url, "half", "--form", "raw", "--slice", "::-1").stdout_bytes
    assert raw == STATE["half"].flip(0).contiguous().view(torch.uint8).numpy().tobytes()


def test_an_element_alone_is_printed(url: Path) -> None:
    """A tensor without dimensions, and one element of a larger one."""
    assert call("cat", url, "one").stdout == "2.5\n"
    element = str(STATE["long"].numpy()[1, 2])
    assert call("cat", url, "long", "--slice", "1,2").stdout == f"{element}\n"


def test_what_is_not_shown_is_not_read(big: Path, tmp_path: Path) -> None:
    """The text of 24 MB takes no block between its corners; too much JSON takes none at all."""
    copied = shutil.copytree(big, tmp_path / "big")
    (shard,) = copied.glob("saves/*/*.distcp")
    flip(shard, shard.stat().st_size // 2)
    assert call("cat", copied, "w", "--form", "raw").exit_code == 1
    assert call("cat", copied, "w").exit_code == 0
    shard.unlink()
    found = call("cat", copied, "w", "--json")
    assert found.exit_code == 2
    assert "too many for JSON" in found.stderr


def test_what_was_asked_for_goes_to_the_file_that_was_named(url: Path, tmp_path: Path) -> None:
    """`-o` counts for every form; a folder that is not there is told in one line."""
    for name, values in (("one", 2.5), ("note", "hello")):
        told = call("cat", url, name, "--json", "-o", tmp_path / name)
        assert (told.exit_code, told.stdout) == (0, "")
        assert json.loads((tmp_path / name).read_text())["values"] == values
    found = call("cat", url, "one", "-o", tmp_path / "none" / "file")
    assert found.exit_code == 2
    assert "cannot be written" in found.stderr
    assert "unexpected" not in found.stderr


def test_damage_late_in_a_tensor_leaves_a_file_as_it_was(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced once all is there; nothing else is left in its folder."""
    monkeypatch.setattr(PIECES_HELD, 256)
    copied = shutil.copytree(big, tmp_path / "big")
    (shard,) = copied.glob("saves/*/*.distcp")
    flip(shard, -2000)
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("mine")
    found = call("cat", copied, "w", "--form", "raw", "-o", out / "kept")
    assert found.exit_code == 1
    assert (out / "kept").read_text() == "mine"
    assert [path.name for path in out.iterdir()] == ["kept"]
