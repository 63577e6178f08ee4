"""The suite of all backends against the rules of single S3 services.

Two profiles are left out: "aws-no-list", as every fact is checked by a listing, and "flaky-bytes",
as a `Store` hands over what came; who reads checks it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar, TypeAlias

import pytest
from profiles import Service, running, small_parts
from servers import Running
from suites import SuiteAt

from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.probe import find_all_abilities
from ckpt_storage.store.store import Store
from ckpt_storage.testing.s3_rules import Profile
from ckpt_storage.testing.s3_server import S3Server

Started: TypeAlias = Callable[[Profile], S3Server]


@pytest.fixture(scope="module")
def started() -> Iterator[Started]:
    """What starts a server of a profile, once."""
    with ExitStack() as stack:
        yield functools.cache(lambda profile: stack.enter_context(running(profile)))


class ProfileSuite(SuiteAt):
    """The suite on a new bucket of a server with the rules of `profile`."""

    profile: ClassVar[Profile]
    at = "profile_root"
    many = 130

    @pytest.fixture
    def profile_root(self, started: Started, monkeypatch: pytest.MonkeyPatch) -> Running:
        small_parts(monkeypatch)
        service = Service(server=started(self.profile))
        return Running(url=service.root, storage_options=service.server.storage_options)

    def opened(self, location: Location, settings: Settings) -> Backend:
        """Return a backend that declares what the service was seen to do."""
        backend = super().opened(location, settings)
        record = find_all_abilities(Store(backend, url=location.url, scope=location.scope))
        backend.capabilities = replace(
            backend.capabilities,
            exclusive_create=not record.create_problem,
            if_match=not record.replace_problem,
        )
        self.deletes_by_version = not record.delete_problem
        return backend

    def test_a_version_is_deleted_only_while_it_is_there(self, store: Store) -> None:
        """What took its place meanwhile stays, where the service was seen to decide that."""
        if not self.deletes_by_version:
            pytest.skip("the service deletes whatever is there")
        super().test_a_version_is_deleted_only_while_it_is_there(store)


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
