"""The suite of all backends on a root that a fixture gives, by whichever backend serves its URL."""

from __future__ import annotations

from typing import ClassVar

import pytest
from servers import Running

from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.registry import backend_of
from ckpt_storage.testing.store_suite import StoreSuite


class SuiteAt(StoreSuite):
    """The suite on the root of the fixture that `at` names. Another timeout, another client."""

    at: ClassVar[str]

    def opened(self, location: Location, settings: Settings) -> Backend:
        """Return a client."""
        return backend_of(location, settings)

    @pytest.fixture
    def location(self, request: pytest.FixtureRequest) -> Location:
        """A bucket, container or folder of its own."""
        root: Running = request.getfixturevalue(self.at)
        return Location.of(root.url, root.storage_options)

    @pytest.fixture
    def backend(self, location: Location) -> Backend:
        """A client."""
        return self.opened(location, Settings(request_timeout_s=30.0))

    @pytest.fixture
    def other(self, location: Location) -> Backend:
        """A second one."""
        return self.opened(location, Settings(request_timeout_s=31.0))
