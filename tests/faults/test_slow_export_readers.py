"""Readers that are slower than an export read one save or fail: all interleavings, enumerated.

The steps are those of a real export. A reader lists, or reads the index, at one of them, and opens
each file at that or any later one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from fault_tools import Opener

import ckpt_storage
from ckpt_storage.export.removal import remove_exports
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend
from ckpt_storage.testing.faults import FaultBackend

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SIZES: dict[str, int | str] = {"one": "5GB", "many": 1000}
NAMES = [f"w{number}" for number in range(3)]

Files = Mapping[str, bytes]


def files_in(folder: Path) -> Files:
    paths = [*folder.glob("*.safetensors"), *folder.glob(INDEX)]
    return {path.name: path.read_bytes() for path in sorted(paths)}


class Watched(FaultBackend):
    """A backend after each of whose operations the folder is looked at."""

    def __init__(self, backend: Backend, folder: Path, steps: list[Files]) -> None:
        super().__init__(backend)
        play = self.script.play

        def watched(*args: object, **more: object) -> object:
            try:
                return play(*args, **more)  # type: ignore[arg-type]  # as they come
            finally:
                if (now := files_in(folder)) != steps[-1]:
                    steps.append(now)

        self.script.play = watched  # type: ignore[method-assign,assignment]


def later(steps: Sequence[Files], start: int, names: Sequence[str]) -> Iterator[list[bytes | None]]:
    """Yield what each file holds, opened in this order at ever later steps."""
    moments = itertools.combinations_with_replacement(range(start, len(steps)), len(names))
    for some in moments:
        yield [steps[at].get(name) for at, name in zip(some, names, strict=True)]


def by_glob(steps: Sequence[Files]) -> Iterator[list[bytes | None]]:
    for start, files in enumerate(steps):
        names = [name for name in files if name != INDEX]
        nothing: list[bytes | None] = [None]
        yield from later(steps, start, names) if names else [nothing]


def by_index(steps: Sequence[Files], first: int = 0) -> Iterator[list[bytes | None]]:
    for start in range(first, len(steps)):
        if INDEX not in steps[start]:
            yield [None]
            continue
        names = json.loads(steps[start][INDEX])["weight_map"].values()
        yield from later(steps, start, sorted({*names}))


def by_single_file_first(steps: Sequence[Files]) -> Iterator[list[bytes | None]]:
    for start, files in enumerate(steps):
        yield from later(steps, start, [SINGLE]) if SINGLE in files else by_index(steps, start)


READERS: dict[str, Callable[[Sequence[Files]], Iterator[list[bytes | None]]]] = {
    "glob": by_glob,
    "index": by_index,
    "model.safetensors first": by_single_file_first,
}


def outcome(contents: Sequence[bytes | None]) -> str:
    """Return the saves of which a reader got weights, "error" if it failed."""
    found: dict[str, list[float]] = {}
    for data in contents:
        try:
            weights = safetensors.torch.load(data or b"")
        except Exception:  # noqa: BLE001  # whatever the library raises is loud
            return "error"
        for name, one in weights.items():
            found.setdefault(name, []).extend({*one.tolist()})
    lacking = "" if sorted(found) == NAMES else "a part of "
    return lacking + "+".join(sorted({f"{value:g}" for some in found.values() for value in some}))


CALLS: dict[str, Callable[..., object]] = {
    "consolidate": ckpt_storage.consolidate,
    "convert": partial(ckpt_storage.convert, to="safetensors", overwrite=True),
}


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    """A folder with two saves of one model, whose values are the number of the save."""
    for version in (1, 2):
        state = {name: torch.full((200,), float(version)) for name in NAMES}
        ckpt_storage.save(state, tmp_path / f"v{version}", sync_files=False)
    return tmp_path


def watching(output: Path, steps: list[Files]) -> Opener:
    """Return what opens stores that note each step at and above the output."""
    steps.append(files_in(output))

    def wrap(location: Location, backend: Backend) -> Backend:
        is_watched = output.is_relative_to(location.path)
        return Watched(backend, output, steps) if is_watched else backend

    return Opener(wrap)


def outcomes(steps: Sequence[Files]) -> Iterator[tuple[str, str]]:
    """Yield what each reader may get, however its steps lie between those of a writer."""
    known: dict[tuple[bytes | None, ...], str] = {}
    for reader, read in READERS.items():
        for contents in read(steps):
            key = tuple(contents)
            if key not in known:
                known[key] = outcome(contents)
            yield reader, known[key]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", SIZES)
@pytest.mark.parametrize("before", [None, *SIZES])
def test_a_slow_reader_gets_one_save_or_an_error(
    saves: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str, call: str
) -> None:
    """However its steps lie between those of the export, no reader mixes old and new weights."""
    if (before, after, call) == ("many", "many", "convert"):
        pytest.skip("convert gives new files the names of those that it was told to overwrite")
    output, steps = saves / "out", list[Files]()
    if before is not None:
        CALLS[call](saves / "v1", output, max_file_bytes=SIZES[before])
    monkeypatch.setattr("ckpt_storage.export.output.open_store", watching(output, steps))
    CALLS[call](saves / "v2", output, max_file_bytes=SIZES[after])
    assert len(steps) > 1
    assert {found for _, found in outcomes(steps)} <= {"1", "2", "error"}
    assert {found for _, found in outcomes(steps[-1:])} == {"2"}


def test_a_slow_reader_of_an_export_that_is_removed_gets_all_or_an_error(saves: Path) -> None:
    """While an export of several files is deleted, none that is still there passes for all."""
    run, steps = saves / "v1", list[Files]()
    ckpt_storage.consolidate(run, max_file_bytes=SIZES["many"])
    remove_exports(watching(run / "hf", steps)(Location.of(run)))
    assert len(steps) > 1
    assert {found for _, found in outcomes(steps)} <= {"1", "error"}
    assert not steps[-1]
