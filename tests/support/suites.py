"""The suite of all backends on a root that a fixture gives, by whichever backend serves its URL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from remote_tools import ONCE, POLICY, send
from servers import Running

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.registry import backend_of
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Action, FaultBackend, Rule
from ckpt_storage.testing.store_suite import StoreSuite
from ckpt_storage.testing.upload_facts import kind_of, pattern


class SuiteAt(StoreSuite):
    """The suite on the root of the fixture that `at` names. Another timeout, another client."""

    at: ClassVar[str]

    def opened(self, location: Location, settings: Settings) -> Backend:
        return backend_of(location, settings)

    @pytest.fixture
    def location(self, request: pytest.FixtureRequest) -> Location:
        root: Running = request.getfixturevalue(self.at)
        return Location.of(root.url, root.storage_options)

    @pytest.fixture
    def backend(self, location: Location) -> Backend:
        return self.opened(location, Settings(request_timeout_s=30.0))

    @pytest.fixture
    def other(self, location: Location) -> Backend:
        return self.opened(location, Settings(request_timeout_s=31.0))

    @pytest.fixture
    def faulty(self, backend: Backend) -> Iterator[Callable[..., Store]]:
        """What opens stores whose backend plays rules; they are closed."""
        with contextlib.ExitStack() as opened:

            def make(policy: RetryPolicy, *rules: Rule) -> Store:
                store = Store(FaultBackend(backend, rules), url="faulty://root", policy=policy)
                return opened.enter_context(contextlib.closing(store))

            yield make

    @pytest.mark.parametrize("action", ["error", "lost_answer"])
    @pytest.mark.parametrize(
        "operation",
        ["begin_upload", "put_part", "flush_parts", "complete_upload", "put", "abort_upload"],
    )
    def test_what_fails_in_passing_is_made_good(
        self, store: Store, faulty: Any, size: int, operation: str, action: Action
    ) -> None:
        """A step that fails twice, done or not, is repeated or settled; no upload stays open."""
        known = store.capabilities
        if (operation, action, known.parallel_parts) == ("put_part", "lost_answer", False):
            pytest.skip("a part of a stream that was lost cannot be sent again")
        failing = faulty(POLICY, Rule(action=action, operation=operation, hit_count=2))
        for parts in ([pattern(size), b"tail"], [b"small"]):
            upload = failing.upload("saves/a/x")
            upload.complete(send(upload, parts))
            assert store.get("saves/a/x").data == b"".join(parts)
        if known.tokens_travel:
            upload = failing.upload("saves/a/y")
            member = failing.join("saves/a/y", upload.token())
            member.write_part(0, 0, [memoryview(pattern(size))], last=False)
            upload.write_part(1, size, [memoryview(b"tail")], last=True)
            upload.complete(size + 4, receipts=member.receipts())
            assert store.get("saves/a/y").data == pattern(size) + b"tail"
        given_up = failing.upload("saves/a/z")
        given_up.write_part(0, 0, [memoryview(pattern(size))], last=False)
        given_up.abort()
        assert len(store.list("")) == 1 + known.tokens_travel
        # Nobody knows the name of an upload whose start got no answer.
        is_unknown = (operation, action) == ("begin_upload", "lost_answer")
        assert is_unknown or store.abort_uploads("") == 0

    @pytest.mark.parametrize("operation", ["complete_upload", "put"])
    def test_what_nobody_saw_complete_is_taken_back(
        self, store: Store, faulty: Any, size: int, operation: str
    ) -> None:
        """It may have worked, nobody can tell: nothing of it stays, even if it cannot be aborted.

        What another put meanwhile stays.
        """
        upload = store.upload("saves/a/x")
        upload.complete(send(upload, [b"small"]))
        if store.stat("saves/a/x").write_id is None or not store.capabilities.is_remote:
            pytest.skip("nobody could tell whose it is")
        parts = [b"small"] if operation == "put" else [pattern(size), b"tail"]
        lost = Rule(action="lost_answer", operation=operation, hit_count=None)
        blind = Rule(action="error", operation="stat")
        kept = Rule(action="error", operation="abort_upload", kind="permission", retryable=False)
        for is_ours in (True, False):
            upload = faulty(ONCE, lost, blind, kept).upload("saves/a/x")
            with pytest.raises(StorageError):
                upload.complete(send(upload, parts))
            if not is_ours:
                store.put("saves/a/x", b"another's")
            with contextlib.suppress(StorageError):
                upload.abort()
            left = [store.get(entry.path).data for entry in store.list("saves")]
            assert left == ([] if is_ours else [b"another's"])

    def test_a_version_is_deleted_only_while_it_is_there(self, store: Store) -> None:
        """What took its place meanwhile stays."""
        store.put("x", b"ours")
        version = store.get("x").version or ""
        store.put("x", b"another's")
        if kind_of(store.delete_version, "x", version) == "unsupported":
            pytest.skip("it deletes no version")
        assert store.get("x").data == b"another's"
        store.delete_version("x", store.get("x").version or "")
        assert kind_of(store.stat, "x") == "not-found"
