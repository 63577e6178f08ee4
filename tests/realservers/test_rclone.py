"""The servers of rclone pass the suite of all backends and the journeys of users."""

from __future__ import annotations

from journeys import Journeys
from suites import ProbedSuite, ReplacesInSteps, SuiteAt


class TestRcloneSuite(ProbedSuite, ReplacesInSteps):
    """The suite; its S3 server writes objects in place."""

    many, at = 30, "rclone_root"
    copies_parts = False


class TestRcloneJourneys(Journeys):
    """The journeys."""

    at = "rclone_root"


class TestWebdavSuite(SuiteAt):
    """The suite on its WebDAV server."""

    many, at = 30, "rclone_webdav_root"

    # webdav4 does not quote "#" and "%" in a path.
    odd_names = tuple(name for name in SuiteAt.odd_names if not {"#", "%"} & set(name))


class TestWebdavJourneys(Journeys):
    """The journeys there."""

    at = "rclone_webdav_root"
