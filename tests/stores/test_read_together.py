"""Readers of a remote checkpoint ask for its first two slots side by side."""

from __future__ import annotations

import pytest
from commit_tools import CAS, DictStore, Disk, saved

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import StorageError

SLOT_1, SLOT_2 = "commits/00000001.json", "commits/00000002.json"


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_slots_that_are_read_together_tell_what_they_tell_in_turn(count: int) -> None:
    """Whatever the number of slots, the log is that of `read_log`, and no slot is read twice."""
    disk, paths = Disk(), list[str]()
    store = DictStore(disk, CAS)
    save_ids = [saved(store) for _ in range(count)]
    watched = DictStore(disk, CAS, lambda _, path: paths.append(path))
    found = slotlog.read_log(watched, for_reader=True)
    assert found == slotlog.read_log(store)
    assert (found.head.save_id if found.head else None) == (save_ids[-1] if save_ids else None)
    assert found.last_slot == count
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("broken", [SLOT_1, SLOT_2])
def test_a_slot_that_cannot_be_read_is_no_absent_slot(broken: str) -> None:
    """A failed read of either slot is raised: a newer commit may lie behind it."""
    disk = Disk()
    store = DictStore(disk, CAS)
    saved(store)

    def gate(_: str, path: str) -> None:
        if path == broken:
            raise StorageError("No answer.", kind="server", retryable=False)

    with pytest.raises(StorageError, match="No answer"):
        slotlog.read_log(DictStore(disk, CAS, gate), for_reader=True)
