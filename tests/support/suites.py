"""The suite of all backends on a root that a fixture gives, by whichever backend serves its URL."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from limits import HANG_S
from raw_clients import RawClient
from servers import Running

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.store import Backend, Location, PartCopy, Settings
from ckpt_storage.store.probe import copies_parts, find_all_abilities
from ckpt_storage.store.registry import backend_of
from ckpt_storage.store.store import Store
from ckpt_storage.testing.store_suite import RawWrite, StoreSuite


class SuiteAt(StoreSuite):
    """The suite on the root of the fixture that `at` names. Another timeout, another client."""

    at: ClassVar[str]

    def opened(self, location: Location, settings: Settings) -> Backend:
        return backend_of(location, settings)

    @pytest.fixture
    def root_of_suite(self, request: pytest.FixtureRequest) -> Running:
        root: Running = request.getfixturevalue(self.at)
        return root

    @pytest.fixture
    def location(self, root_of_suite: Running) -> Location:
        return Location.of(root_of_suite.url, root_of_suite.storage_options)

    @pytest.fixture
    def backend(self, location: Location) -> Backend:
        return self.opened(location, Settings(request_timeout_s=HANG_S))

    @pytest.fixture
    def other(self, location: Location) -> Backend:
        return self.opened(location, Settings(request_timeout_s=HANG_S + 1))

    @pytest.fixture
    def raw(self, root_of_suite: Running) -> RawWrite | None:
        client = RawClient.of(root_of_suite)
        return None if client is None else client.write


class ProbedSuite(SuiteAt):
    """The suite where the server, and no class, says which conditions it honours.

    copies_parts: the server copies a range of an object as a part of an upload.
    """

    copies_parts: ClassVar[bool] = True

    def opened(self, location: Location, settings: Settings) -> Backend:
        """Return a backend that declares what the server was seen to do."""
        backend = super().opened(location, settings)
        probed = Store(backend, url=location.url, scope=location.scope)
        probed.make_folders([])
        abilities = find_all_abilities(probed)
        backend.capabilities = replace(
            backend.capabilities,
            exclusive_create=not abilities.create_problem,
            if_match=not abilities.replace_problem,
        )
        self.deletes_by_version = not abilities.delete_problem
        return backend

    def test_a_version_is_deleted_only_while_it_is_there(self, store: Store) -> None:
        """A later version stays, where the server was seen to decide that."""
        if not self.deletes_by_version:
            pytest.skip("the server deletes whatever is there")
        super().test_a_version_is_deleted_only_while_it_is_there(store)

    def test_a_copied_part_holds_the_range(self, store: Store, second: Store, size: int) -> None:
        """Where the server passes over the source of a copy, it is refused and no part is made."""
        if self.copies_parts:
            super().test_a_copied_part_holds_the_range(store, second, size)
            return
        data = bytes(max(store.capabilities.copy_min_bytes or 0, size))
        second.put("saves/ab/source", data)
        source = second.copy_source("saves/ab/source")
        assert source is not None
        copy = PartCopy(number=0, offset=0, source=source, start=0, length=len(data))
        upload = store.upload("saves/a/x")
        with pytest.raises(UnsupportedByStoreError):
            upload.copy_part(copy)
        upload.abort()
        assert not copies_parts(store, "saves/a/y", copy)
        assert [entry.path for entry in second.list("")] == ["saves/ab/source"]


class ReplacesInSteps(SuiteAt):
    """The suite where a reader during a replace may get an error, as rclone's storages do it."""

    def test_a_reader_during_replaces_sees_old_or_new(self, store: Store, second: Store) -> None:
        """Once a replace has returned, the new content is there."""
        store.replace(".metadata", b"old")
        store.replace(".metadata", b"new")
        assert second.get(".metadata").data == b"new"
