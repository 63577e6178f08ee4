"""Samba passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import SuiteAt


class TestSambaSuite(SuiteAt):
    """The suite."""

    at = "samba_root"


class TestSambaJourneys(Journeys):
    """The journeys."""

    at = "samba_root"
