"""The backend that the tests of the protocol stand on keeps every promise of a backend."""

from __future__ import annotations

import time

import pytest
from commit_tools import BLIND, CAS, DictBackend, Disk

from ckpt_storage.store.backend import Backend
from ckpt_storage.testing.store_suite import StoreSuite


class TestDictBackend(StoreSuite):
    """The backend that stands in for storages in these tests."""

    capabilities = CAS

    @pytest.fixture
    def backend(self) -> DictBackend:
        """A backend on a disk of its own."""
        disk = Disk()
        disk.clock_s = time.time()
        return DictBackend(disk, self.capabilities)

    @pytest.fixture
    def other(self, backend: DictBackend) -> Backend:
        """Another one on that disk."""
        return DictBackend(backend.disk, self.capabilities)


class TestBlindDictBackend(TestDictBackend):
    """The same without conditional replacement."""

    capabilities = BLIND
