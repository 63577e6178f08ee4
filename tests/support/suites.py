"""The suite of all backends on a root that a fixture gives, by whichever backend serves its URL."""

from __future__ import annotations

from typing import ClassVar

import pytest
from raw_clients import RawClient
from servers import Running

from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.registry import backend_of
from ckpt_storage.testing.store_suite import RawWrite, StoreSuite


class SuiteAt(StoreSuite):
    """The suite on the root of the fixture that `at` names. Another timeout, another client."""

    at: ClassVar[str]

    def opened(self, location: Location, settings: Settings) -> Backend:
        return backend_of(location, settings)

    @pytest.fixture
    def root_of_suite(self, request: pytest.FixtureRequest) -> Running:
        root: Running = request.getfixturevalue(self.at)
        return root

    @pytest.fixture
    def location(self, root_of_suite: Running) -> Location:
        return Location.of(root_of_suite.url, root_of_suite.storage_options)

    @pytest.fixture
    def backend(self, location: Location) -> Backend:
        return self.opened(location, Settings(request_timeout_s=30.0))

    @pytest.fixture
    def other(self, location: Location) -> Backend:
        return self.opened(location, Settings(request_timeout_s=31.0))

    @pytest.fixture
    def raw(self, root_of_suite: Running) -> RawWrite | None:
        client = RawClient.of(root_of_suite)
        return None if client is None else client.write
