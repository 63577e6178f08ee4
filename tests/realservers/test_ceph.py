"""Ceph passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import ProbedSuite


class TestCephSuite(ProbedSuite):
    """The suite."""

    at = "ceph_root"


class TestCephJourneys(Journeys):
    """The journeys."""

    at = "ceph_root"
