"""Mount passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import SuiteAt


class TestMountSuite(SuiteAt):
    """The suite."""

    at = "mount_root"


class TestMountJourneys(Journeys):
    """The journeys."""

    at = "mount_root"
