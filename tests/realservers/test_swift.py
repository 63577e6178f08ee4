"""Swift passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import ProbedSuite


class TestSwiftSuite(ProbedSuite):
    """The suite."""

    many, at = 30, "swift_root"


class TestSwiftJourneys(Journeys):
    """The journeys."""

    at = "swift_root"
