"""Copies of a part and thinnings on every kind of bucket: the storage moves the bytes."""

from __future__ import annotations

from typing import Any

import pytest
from dcp_cases import same, seeded
from part_cases import save
from servers import Running

from ckpt_storage import copy, open_checkpoint, thin, verify
from ckpt_storage.store import Location, open_store

KEPT: dict[str, Any] = {"model": seeded(1, 300, 500)}
WHOLE: dict[str, Any] = {**KEPT, "optim": seeded(2, 300, 500)}


@pytest.fixture(params=["s3_root", "moto_root", "gcs_root", "azure_root"])
def root(request: pytest.FixtureRequest) -> Running:
    running: Running = request.getfixturevalue(request.param)
    return running


def found_at(url: str, options: dict[str, Any]) -> dict[str, Any]:
    with open_checkpoint(url, storage_options=options) as found:
        return {name: found[name].torch() for name in found}


def test_no_byte_of_a_file_that_stays_whole_is_sent(root: Running) -> None:
    """Neither by a copy of a part nor by a thinning; both are sound, and the rest is freed."""
    options = dict(root.storage_options)
    whole, part = f"{root.url}/whole", f"{root.url}/part"
    save(whole, WHOLE, storage_options=options)
    copied = copy(whole, part, exclude="optim*", storage_options=options)
    assert (copied.sent_bytes, copied.copied_bytes) == (0, copied.total_bytes)
    thinned = thin(whole, drop="optim*", storage_options=options)
    assert (thinned.sent_bytes, thinned.copied_bytes) == (0, thinned.kept_bytes)
    for url in (whole, part):
        assert same(found_at(url, options), KEPT)
        assert verify(url, storage_options=options).ok
    store = open_store(Location.of(whole, options))
    assert {one.path.split("/")[1] for one in store.list("saves")} == {thinned.save_id}
