"""A name below a root has any number of users, or one deletion."""

from __future__ import annotations

import pytest

from ckpt_storage.errors import PhaseTimeoutError
from ckpt_storage.manager.names_in_use import NamesInUse


def test_a_name_in_use_is_not_reserved_for_its_deletion() -> None:
    """It is once its last use has ended; a user then waits for the deletion, and in vain here."""
    names = NamesInUse()
    releases = [names.acquire("a", "it is being loaded", timeout_s=0.0) for _ in range(2)]
    for release in releases:
        with names.reserved_for_deletion("a") as is_free:
            assert not is_free
        assert names.reasons() == {"a": "it is being loaded"}
        release()
    with names.reserved_for_deletion("a") as is_free:
        assert is_free
        with pytest.raises(PhaseTimeoutError, match="is being deleted"):
            names.acquire("a", "it is being saved", timeout_s=0.0)
    assert names.reasons() == {}
    names.acquire("a", "it is being saved", timeout_s=0.0)
