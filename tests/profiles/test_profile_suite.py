"""The suite of all backends against the rules of single S3 services.

Two profiles are left out: "aws-no-list", as every fact is checked by a listing, and "flaky-bytes",
as a `Store` hands over what came; who reads checks it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import ClassVar, TypeAlias

import pytest
from profiles import Service, running, small_parts
from s3_rules import Profile
from s3_server import S3Server
from servers import Running
from suites import ProbedSuite

Started: TypeAlias = Callable[[Profile], S3Server]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """What starts a server of a profile, once."""
    with ExitStack() as stack:
        yield functools.cache(lambda profile: stack.enter_context(running(profile)))


class ProfileSuite(ProbedSuite):
    """The suite on a new bucket of a server with the rules of `profile`."""

    profile: ClassVar[Profile]
    at = "profile_root"
    many = 130

    @pytest.fixture
    def profile_root(self, started: Started, monkeypatch: pytest.MonkeyPatch) -> Running:
        small_parts(monkeypatch)
        service = Service(server=started(self.profile))
        return Running(url=service.root, storage_options=service.server.storage_options)


class TestAws(ProfileSuite):
    """General purpose buckets of Amazon S3."""

    profile = "aws"


class TestExpress(ProfileSuite):
    """Directory buckets of S3 Express One Zone."""

    profile = "express"


class TestObjectLock(ProfileSuite):
    """Buckets with Object Lock."""

    profile = "object-lock"


class TestR2(ProfileSuite):
    """Cloudflare R2."""

    profile = "r2"


class TestIfMatchIgnored(ProfileSuite):
    """Servers from before If-Match of PUT."""

    profile = "if-match-ignored"


class TestCustomerKey(ProfileSuite):
    """Objects that are encrypted with the customer's key."""

    profile = "sse-c"


class TestCeph(ProfileSuite):
    """Ceph's RGW, which compares If-Match with the bare ETag."""

    profile = "ceph"


class TestCephVersioned(ProfileSuite):
    """Ceph's RGW on a bucket with versions."""

    profile = "ceph-versioned"


class TestSwift(ProfileSuite):
    """OpenStack Swift's S3 API, which has no conditions."""

    profile = "swift"


class TestRclone(ProfileSuite):
    """`rclone serve s3`, which answers ranges with status 200."""

    profile = "rclone"
    copies_parts = False
