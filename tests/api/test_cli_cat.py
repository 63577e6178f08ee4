"""`ckpt-storage cat`: what it prints, what it reads for that, and where it goes."""

from __future__ import annotations

import io
import json
import shutil
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import call
from dcp_cases import seeded

from ckpt_storage import save
from ckpt_storage.cli.options import parse_slice
from ckpt_storage.inspect.handle import Handle
from ckpt_storage.store.backend import Range
from ckpt_storage.store.backends.local import LocalBackend

STATE: dict[str, Any] = {
    "long": seeded(1, 5000, 3),
    "cube": seeded(2, 9, 11, 13),
    "deep": seeded(3, 2, 7, 8, 40),
    "whole": torch.arange(10_000),
    "half": seeded(4, 60, 60, dtype=torch.bfloat16),
    "complex": seeded(5, 40, 40, dtype=torch.complex64),
    "empty": torch.empty(0, 3),
    "one": torch.tensor(2.5),
    "note": "hello",
}

SLICES = [None, "...", "::-1", "-1", "1:,::2", "5:2", "::-2,...,::-1", "...,1"]


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


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all ranged reads from a disk."""
    found: list[int] = []
    read = LocalBackend.read

    def counted(self: LocalBackend, path: str, ranges: Iterable[Range]) -> int:
        found.append(0)

        def noted() -> Iterator[Range]:
            for start, view in ranges:
                found[-1] += len(view)
                yield start, view

        return read(self, path, noted())

    monkeypatch.setattr(LocalBackend, "read", counted)
    return found


def numpys(name: str, index: str | None) -> Any:
    """Return what numpy has for a tensor of `STATE` at an index; bfloat16 as float32 has it."""
    tensor = STATE[name]
    array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return array[parse_slice(index) if index is not None else ...]


def sliced(name: str, index: str | None, *options: str) -> list[str]:
    """Return the arguments that ask for a tensor at an index."""
    return [name, *(() if index is None else ("--slice", index)), *options]


@pytest.mark.parametrize("index", SLICES)
@pytest.mark.parametrize("name", ["long", "cube", "deep", "whole", "complex"])
def test_text_is_numpys_though_only_the_edges_are_read(
    url: Path, name: str, index: str | None
) -> None:
    """Abbreviated where numpy abbreviates, whole where it does not, whatever the index."""
    if index == "1:,::2" and name == "whole":
        index = "1::2"
    if index == "::-2,...,::-1" and name == "whole":
        index = "::-2"
    found = call("cat", url, *sliced(name, index))
    assert found.exit_code == 0, found.output
    with np.printoptions(edgeitems=3, threshold=1000):
        expected = str(np.asarray(numpys(name, index)))
    if np.asarray(numpys(name, index)).dtype.kind == "i":
        # Numpy's numbers are as wide as the widest of those shown.
        assert found.stdout.split() == expected.split()
    else:
        assert found.stdout == f"{expected}\n"


@pytest.mark.parametrize("index", SLICES)
@pytest.mark.parametrize("name", ["long", "cube", "deep", "complex", "empty"])
def test_files_have_the_elements_in_numpys_order(
    url: Path, name: str, index: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As raw bytes and as numpy's file, in pieces of 100 bytes or in one."""
    if name == "empty" and index == "-1":
        index = "...,-1"
    array = np.asarray(numpys(name, index))
    for _ in range(2):
        raw = call("cat", url, *sliced(name, index, "--form", "raw")).stdout_bytes
        assert raw == array.tobytes()
        file = io.BytesIO(call("cat", url, *sliced(name, index, "--form", "npy")).stdout_bytes)
        found = np.load(file)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        monkeypatch.setattr(Handle, "piece_bytes", 100)


def test_types_that_numpy_lacks_are_printed_and_written(url: Path) -> None:
    """bfloat16 is abbreviated like any other, and raw bytes are those of torch."""
    found = call("cat", url, "half")
    assert found.exit_code == 0, found.output
    assert "..." in found.stdout
    raw = call("cat", url, "half", "--form", "raw", "--slice", "::-1").stdout_bytes
    assert raw == STATE["half"].flip(0).contiguous().view(torch.uint8).numpy().tobytes()


def test_torch_prints_what_numpy_cannot_have(tmp_path: Path) -> None:
    """Packed fours are torch's to print; how it prints elsewhere does not change."""
    packed = seeded(6, 60, 60, dtype=torch.float4_e2m1fn_x2)
    save({"packed": packed}, tmp_path / "c")
    found = call("cat", tmp_path / "c", "packed")
    assert found.exit_code == 0, found.output
    assert found.stdout == f"{packed}\n"
    assert "..." in found.stdout
    assert "..." not in str(torch.zeros(900))


def test_an_element_alone_is_printed(url: Path) -> None:
    """A tensor without dimensions, and one element of a larger one."""
    assert call("cat", url, "one").stdout == "2.5\n"
    element = str(STATE["cube"].numpy()[1, 2, 3])
    assert call("cat", url, "cube", "--slice", "1,2,3").stdout == f"{element}\n"


def test_what_is_not_shown_is_not_read(big: Path, read_bytes: list[int]) -> None:
    """The text of 24 MB takes the blocks at its corners; too much JSON takes none."""
    assert call("cat", big, "w").exit_code == 0
    assert 0 < sum(read_bytes) < 8_000_000
    read_bytes.clear()
    found = call("cat", big, "w", "--json")
    assert found.exit_code == 2
    assert "too many for JSON" in found.stderr
    assert sum(read_bytes) < 100_000


@pytest.mark.parametrize("form", ["raw", "npy"])
def test_a_file_takes_the_memory_of_a_piece(
    big: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 MB are written by a process that holds a few."""
    monkeypatch.setattr(Handle, "piece_bytes", 1 << 20)
    call("cat", big, "w", "--slice", "0")
    tracemalloc.start()
    try:
        found = call("cat", big, "w", "--form", form, "-o", tmp_path / "w")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.exit_code == 0, found.output
    assert peak_bytes < 12_000_000
    data = (tmp_path / "w").read_bytes()
    assert data.endswith(seeded(1, 3000, 2000).numpy().tobytes())


def test_json_goes_to_the_file_that_was_named(url: Path, tmp_path: Path) -> None:
    """`-o` counts with `--json` too, for tensors and for objects; nothing is printed then."""
    for name, values in (("one", 2.5), ("note", "hello")):
        answer = call("cat", url, name, "--json", "-o", tmp_path / name)
        assert (answer.exit_code, answer.stdout) == (0, "")
        body = json.loads((tmp_path / name).read_text())
        assert (body["fqn"], body["values"]) == (name, values)


@pytest.mark.parametrize("form", ["raw", "npy"])
def test_two_forms_at_once_are_refused(url: Path, form: str) -> None:
    """`--json` with another form is an error of usage, not one of the two."""
    found = call("cat", url, "one", "--json", "--form", form)
    assert found.exit_code == 2
    assert "--json and --form" in found.stderr
    assert found.stdout == ""


def test_a_file_that_cannot_be_written_is_told_in_one_line(url: Path, tmp_path: Path) -> None:
    """A folder that is not there is no mistake of the program."""
    found = call("cat", url, "one", "-o", tmp_path / "none" / "file")
    assert found.exit_code == 2
    assert "cannot be written" in found.stderr
    assert "unexpected" not in found.stderr


def test_damage_late_in_a_tensor_leaves_a_file_as_it_was(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced once all is there; nothing else is left in its folder."""
    monkeypatch.setattr(Handle, "piece_bytes", 1 << 20)
    copied = shutil.copytree(big, tmp_path / "big")
    (shard,) = copied.glob("saves/*/*.distcp")
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 1
    shard.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("mine")
    found = call("cat", copied, "w", "--form", "raw", "-o", out / "kept")
    assert found.exit_code == 1
    assert (out / "kept").read_text() == "mine"
    assert [path.name for path in out.iterdir()] == ["kept"]


def test_what_cannot_be_read_leaves_a_file_as_it_was(url: Path, tmp_path: Path) -> None:
    """An index that does not fit is found before the file is opened."""
    (tmp_path / "kept").write_text("mine")
    found = call("cat", url, "one", "--slice", "7", "--form", "raw", "-o", tmp_path / "kept")
    assert found.exit_code == 2
    assert (tmp_path / "kept").read_text() == "mine"
