"""Commit records: what is for people never stands in the way of a reader."""

from __future__ import annotations

from typing import Any

import pytest
from report_tools import SAVE_ID

from ckpt_storage.format.commit_record import HeadRef, SlotRecord
from ckpt_storage.format.documents import FileRef, seal, unseal

RECORD = SlotRecord(
    type="commit",
    slot=1,
    write_id="0" * 32,
    head=HeadRef(slot=1, save_id=SAVE_ID),
    save_id=SAVE_ID,
    manifest=FileRef(path=f"saves/{SAVE_ID}/manifest.json", size_bytes=1, crc32c=0),
    user={"step": 3},
)


@pytest.mark.parametrize("user", [None, [], "step", 3, True, [["step", 3]], 1.5])
def test_a_user_record_that_is_no_object_is_left_out(user: Any) -> None:
    """The checkpoint can be read whatever is there."""
    body = unseal(RECORD.encode(), path="here") | {"user": user}
    assert SlotRecord.decode(seal(body), slot=1).user == {}
    assert SlotRecord.decode(RECORD.encode(), slot=1) == RECORD
