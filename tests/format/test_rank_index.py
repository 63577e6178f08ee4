"""Which item of a rank a reader takes for a chunk, where two begin at one place."""

from __future__ import annotations

import pytest
from report_tools import SAVE_ID, Written, manifest_of

from ckpt_storage.format.boxes import Grid
from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.manifest import Manifest, TensorRecord
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import CommittedSource
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline

EMPTY = Written("w", (0, 0), (0, 4))
SOLID = Written("w", (0, 0), (4, 4))


@pytest.mark.parametrize(
    ("items", "start"),
    [
        ([SOLID, EMPTY], 64),
        ([EMPTY, SOLID], 64 + 64),
        ([EMPTY, EMPTY, SOLID, EMPTY], 3 * 64),
        ([EMPTY, SOLID, SOLID], 64 + 64),
    ],
)
def test_the_first_with_elements_counts(items: list[Written], start: int) -> None:
    """Whatever of it that is empty was written before."""
    ref = FileRef(path=f"saves/{SAVE_ID}/ranks/rank-00000.json", size_bytes=1, crc32c=0)
    document = manifest_of(0, 1, items)
    tensor = TensorRecord(dtype="float32", shape=(4, 4), grid=Grid(((0,), (0,)), (0,)))
    manifest = Manifest(
        save_id=SAVE_ID,
        world_size=1,
        tensors={"w": tensor},
        blobs={},
        planner_data=None,
        files=[],
        ranks=[ref],
        hosts=["here"],
        stock=None,
    )
    source = CommittedSource(
        store=open_store(Location.of("memory://rank-index")),
        record=SlotRecord(
            type="commit", slot=1, write_id="", head=HeadRef(slot=1, save_id=SAVE_ID)
        ),
        manifest=manifest,
        deadline=Deadline("load", 60.0),
        options=TransferOptions.for_storage(
            is_remote=False,
            local_threads=1,
            local_part_bytes=1 << 20,
            thread_count=None,
            part_bytes=None,
            memory_limit_bytes=None,
        ),
    )
    source._ranks[0] = document  # noqa: SLF001  # as if it had been fetched
    place = source.place("w", (0, 0))
    assert (place.start, place.size_bytes) == (start, 64)
