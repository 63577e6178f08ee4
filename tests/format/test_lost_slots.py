"""A commit slot that was lost is told, and nobody gets an older save in silence (A3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_storage
from ckpt_storage import CheckpointError
from ckpt_storage.format.names import slot_path
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3_server import S3Server

SAVES = 3


class Place:
    """A checkpoint that was saved three times over, each save with its own values."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options
        for value in range(1, SAVES + 1):
            state = {"w": torch.full((4,), float(value))}
            ckpt_storage.save(state, url, storage_options=options, overwrite=True)

    def lose(self, slot: int) -> None:
        """Remove a slot, as somebody who copies a folder by hand may."""
        with closing(open_store(self.url, storage_options=self.options)) as store:
            store.delete([slot_path(slot)])


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Make the checkpoint on a local disk and on an object storage."""
    if request.param == "local":
        yield Place(str(tmp_path), {})
        return
    with S3Server() as server:
        server.create_bucket("bucket")
        yield Place("s3://bucket/run", server.storage_options)


def load(place: Place) -> None:
    """Load, and hold what came against the newest save."""
    state = {"w": torch.zeros(4)}
    ckpt_storage.load(state, place.url, storage_options=place.options)
    assert state["w"][0] == SAVES, "an older save, in silence"


def open_checkpoint(place: Place) -> None:
    """Open it, and hold a value against the newest save."""
    found = ckpt_storage.open_checkpoint(place.url, storage_options=place.options)
    assert found["w"][0] == SAVES, "an older save, in silence"


def verify(place: Place) -> None:
    """Verify, and raise what is wrong."""
    report = ckpt_storage.verify(place.url, storage_options=place.options)
    if not report.ok:
        raise CheckpointError(" ".join(f"{one.message} {one.next_step}" for one in report.problems))


DOORS = (load, open_checkpoint, verify)


@pytest.mark.parametrize("lost", range(2, SAVES + 1))
def test_a_lost_slot_is_told(place: Place, lost: int) -> None:
    """A middle one and the last one: the error says that `commits/` lost files."""
    for door in DOORS:
        door(place)
    place.lose(lost)
    for door in DOORS:
        with pytest.raises(CheckpointError, match=r"commits/.*lost files|lost files.*commits/"):
            door(place)


def test_without_the_first_slot_the_newest_save_is_read(place: Place) -> None:
    """A listing finds the others; without any, all of them are told to be lost."""
    place.lose(1)
    for door in DOORS:
        door(place)
    for slot in range(2, SAVES + 1):
        place.lose(slot)
    for door in DOORS:
        with pytest.raises(CheckpointError, match="slot 1 cannot be found"):
            door(place)
