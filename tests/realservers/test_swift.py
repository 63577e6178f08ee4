"""Swift passes the suite of all backends and the journeys of users."""

from __future__ import annotations

import pytest
from journeys import Journeys
from suites import ProbedSuite

from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.upload_facts import pattern, send


class TestSwiftSuite(ProbedSuite):
    """The suite."""

    many, at = 30, "swift_root"

    @pytest.mark.parametrize("is_complete", [True, False])
    def test_who_joins_late_changes_nothing(
        self, owner: Upload, store: Store, second: Store, size: int, *, is_complete: bool
    ) -> None:
        """A part that arrives again after the completion changes nothing; Swift keeps others."""
        if not is_complete:
            super().test_who_joins_late_changes_nothing(
                owner, store, second, size, is_complete=False
            )
            return
        token = owner.token()
        send(owner, [pattern(size), b"end"])
        owner.complete(size + 3)
        send(second.join("saves/a/x", token), [pattern(size)])
        assert store.get("saves/a/x").data == pattern(size) + b"end"


class TestSwiftJourneys(Journeys):
    """The journeys."""

    at = "swift_root"
