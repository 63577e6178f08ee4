"""Samba passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from typing import Any

import pytest
from journeys import Journeys
from limits import HANG_S
from servers import Running
from suites import SuiteAt

import ckpt_storage
from ckpt_storage import RetryPolicy


class TestSambaSuite(SuiteAt):
    """The suite, by smbprotocol's client."""

    many, at = 30, "samba_root"

    # SMB has no names with these characters ([MS-FSCC], section 2.1.5.2).
    odd_names = tuple(name for name in SuiteAt.odd_names if not set('"*') & set(name))


class TestSambaJourneys(Journeys):
    """The journeys."""

    at = "samba_root"


def test_a_share_that_is_not_there_is_named(samba_root: Running) -> None:
    """It is no place without checkpoints, and nobody tries to make it."""
    url = samba_root.url.replace("/data/", "/misspelt/")
    options: dict[str, Any] = {"storage_options": samba_root.storage_options}
    options["retry"] = RetryPolicy(attempt_count=1)
    for call in (
        lambda: ckpt_storage.save({"step": 1}, url, timeout=HANG_S, **options),
        lambda: ckpt_storage.load({"step": 1}, url, timeout=HANG_S, **options),
        lambda: ckpt_storage.list_checkpoints(url, timeout=HANG_S, **options),
    ):
        with pytest.raises(ckpt_storage.StorageError, match="no share 'misspelt'") as caught:
            call()
        assert caught.value.kind == "other"
