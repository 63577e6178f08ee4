"""Facts of the store suite about calls that fail temporarily, by faults around the backend.

The backend itself does not fail: it must cope with retries, and with successful calls whose
response is lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store.backend import Backend
from ckpt_storage.store.store import Store

from .faults import Action, FaultBackend, Rule
from .upload_facts import pattern, send

__all__ = ["FaultFacts"]

OpenFaulty: TypeAlias = Callable[..., Store]

_OFTEN = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)
_ONCE = RetryPolicy(attempt_count=1)


class FaultFacts:
    """Facts about calls that are retried; the fixtures are `StoreSuite`'s."""

    @pytest.fixture
    def faulty(self, backend: Backend) -> Iterator[OpenFaulty]:
        """A function that opens stores with faults; they are closed at the end."""
        with contextlib.ExitStack() as opened:

            def open_faulty(policy: RetryPolicy, *rules: Rule) -> Store:
                store = Store(FaultBackend(backend, rules), url="faulty://root", policy=policy)
                return opened.enter_context(contextlib.closing(store))

            yield open_faulty

    @pytest.mark.parametrize("action", ["error", "lost_answer"])
    @pytest.mark.parametrize(
        "operation",
        ["begin_upload", "put_part", "flush_parts", "complete_upload", "put", "abort_upload"],
    )
    def test_what_fails_in_passing_is_made_good(
        self, store: Store, faulty: OpenFaulty, size: int, operation: str, action: Action
    ) -> None:
        """A step that fails twice, done or not, is retried or resolved; no upload stays open."""
        known = store.capabilities
        if (operation, action, known.parallel_parts) == ("put_part", "lost_answer", False):
            pytest.skip("a part of a stream cannot be sent again after a lost response")
        failing = faulty(_OFTEN, Rule(action=action, operation=operation, hit_count=2))
        for parts in ([pattern(size), b"tail"], [b"small"]):
            upload = failing.upload("saves/a/x")
            send(upload, parts)
            upload.complete(sum(map(len, parts)))
            assert store.get("saves/a/x").data == b"".join(parts)
        if known.tokens_travel:
            upload = failing.upload("saves/a/y")
            member = failing.join("saves/a/y", upload.token())
            member.write_part(0, 0, [memoryview(pattern(size))], last=False)
            upload.write_part(1, size, [memoryview(b"tail")], last=True)
            upload.complete(size + 4, receipts=member.receipts())
            assert store.get("saves/a/y").data == pattern(size) + b"tail"
        aborted = failing.upload("saves/a/z")
        aborted.write_part(0, 0, [memoryview(pattern(size))], last=False)
        aborted.abort()
        assert len(store.list("")) == 1 + known.tokens_travel
        # The id of an upload is unknown if the response to its creation is lost.
        is_unknown = (operation, action) == ("begin_upload", "lost_answer")
        assert is_unknown or store.abort_uploads("") == 0

    @pytest.mark.parametrize("operation", ["complete_upload", "put"])
    def test_what_nobody_saw_complete_is_taken_back(
        self, store: Store, faulty: OpenFaulty, size: int, operation: str
    ) -> None:
        """An object with an unknown outcome is deleted, even if the upload cannot be aborted.

        An object that another client put meanwhile stays.
        """
        upload = store.upload("saves/a/x")
        send(upload, [b"small"])
        upload.complete(5)
        if store.stat("saves/a/x").write_id is None or not store.capabilities.is_remote:
            pytest.skip("the backend does not identify the writer of an object")
        parts = [b"small"] if operation == "put" else [pattern(size), b"tail"]
        lost = Rule(action="lost_answer", operation=operation, hit_count=None)
        blind = Rule(action="error", operation="stat")
        kept = Rule(action="error", operation="abort_upload", kind="permission", retryable=False)
        for is_ours in (True, False):
            upload = faulty(_ONCE, lost, blind, kept).upload("saves/a/x")
            send(upload, parts)
            with pytest.raises(StorageError):
                upload.complete(sum(map(len, parts)))
            if not is_ours:
                store.put("saves/a/x", b"another's")
            with contextlib.suppress(StorageError):
                upload.abort()
            remaining = [store.get(entry.path).data for entry in store.list("saves")]
            assert remaining == ([] if is_ours else [b"another's"])
