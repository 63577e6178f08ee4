"""Which memory a saver stages the next state in, and which it never uses again."""

from __future__ import annotations

import contextlib
import types
from typing import Any

from ckpt_storage.background.arenas import ROUNDING_BYTES, Arenas
from ckpt_storage.background.handle import SaveStatus
from ckpt_storage.background.save_queue import PendingSave, SaveQueue
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.saves.options import SaveOptions


def test_an_arena_of_just_the_size_is_used_again() -> None:
    """A larger one takes its place, and the smaller one is closed first."""
    with contextlib.closing(Arenas("shared")) as arenas:
        first = arenas.acquire(ROUNDING_BYTES)
        arenas.release(first)
        assert arenas.acquire(ROUNDING_BYTES) is first
        arenas.release(first)
        second = arenas.acquire(ROUNDING_BYTES + 1)
        assert second.size_bytes == 2 * ROUNDING_BYTES
        assert (first.file, second.file is None) == (None, False)
        arenas.release(second)


def test_an_arena_that_comes_back_after_the_end_is_closed() -> None:
    """A save that ends after its saver was closed leaves no descriptor."""
    arenas = Arenas("shared")
    arena = arenas.acquire(1)
    arenas.close()
    assert arena.file is not None
    arenas.release(arena)
    assert arena.file is None


def test_an_arena_that_an_abandoned_thread_may_read_is_not_used_again() -> None:
    """The next save gets other memory, so that a late request sends no bytes of it."""
    queue = SaveQueue(RankGroup.alone(), None)
    for is_read in (False, True):
        arena = queue.arenas.acquire(1)
        staging: Any = types.SimpleNamespace(arena=arena, done=lambda: True)
        status = SaveStatus("file:///c", 0, limit_s=1.0)
        save = PendingSave(status=status, options=SaveOptions(), url="/c", staging=staging)
        queue._free(save, is_read=is_read)  # noqa: SLF001  # as at the end of a save
        assert (queue.arenas.acquire(1) is arena) != is_read
    queue.close()
