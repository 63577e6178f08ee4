"""The store that the tests of the protocol stand on keeps every promise of a store."""

from __future__ import annotations

import time

import pytest
from commit_tools import BLIND, CAS, DictStore, Disk

from ckpt_storage.store.base import Store
from ckpt_storage.testing._old_suite import StoreSuite


class TestDictStore(StoreSuite):
    """The store that stands in for storages in these tests keeps every promise of a store."""

    capabilities = CAS

    @pytest.fixture
    def store(self) -> Store:
        """A store on a disk of its own."""
        disk = Disk()
        disk.clock_s = time.time()
        return DictStore(disk, self.capabilities)

    @pytest.fixture
    def other(self, store: DictStore) -> Store:
        """Another store on that disk."""
        return DictStore(store.disk, self.capabilities)


class TestBlindDictStore(TestDictStore):
    """The same without conditional replacement."""

    capabilities = BLIND
