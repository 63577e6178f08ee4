"""Rclone passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import SuiteAt


class TestRcloneSuite(SuiteAt):
    """The suite."""

    at = "rclone_root"


class TestRcloneJourneys(Journeys):
    """The journeys."""

    at = "rclone_root"
