"""The suite of all backends against the rules of single S3 services.

Two profiles are left out: "aws-no-list", as every fact is checked by a listing, and "flaky-bytes",
as a `Store` hands over what came; who reads checks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from profiles import Service, running, small_parts
from servers import Running
from suites import SuiteAt

from ckpt_storage.testing.s3_rules import Profile
from ckpt_storage.testing.s3_server import S3Server


class ProfileSuite(SuiteAt):
    """The suite on a new bucket of a server with the rules of `profile`."""

    profile: ClassVar[Profile]
    at = "profile_root"
    many = 130

    @pytest.fixture(scope="class")
    def profile_server(self) -> Iterator[S3Server]:
        yield from running(self.profile)

    @pytest.fixture
    def profile_root(self, profile_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Running:
        small_parts(monkeypatch)
        service = Service(server=profile_server)
        return Running(url=service.root, storage_options=profile_server.storage_options)


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
