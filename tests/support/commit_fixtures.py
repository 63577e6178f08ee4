"""A checkpoint's storage in a dict, for the tests of the commit protocol."""

from __future__ import annotations

import pytest
from commit_tools import DictStore, Disk

from ckpt_storage.store.backend import Capabilities


@pytest.fixture
def disk() -> Disk:
    """Nothing yet."""
    return Disk()


@pytest.fixture
def store(disk: Disk, capabilities: Capabilities) -> DictStore:
    """A store on `disk`."""
    return DictStore(disk, capabilities)
