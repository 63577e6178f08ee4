"""Samba passes the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import SuiteAt


class TestSambaSuite(SuiteAt):
    """The suite, by smbprotocol's client."""

    many, at = 30, "samba_root"

    # SMB has no names with these characters ([MS-FSCC], section 2.1.5.2).
    odd_names = tuple(name for name in SuiteAt.odd_names if not set('"*') & set(name))


class TestSambaJourneys(Journeys):
    """The journeys."""

    at = "samba_root"
