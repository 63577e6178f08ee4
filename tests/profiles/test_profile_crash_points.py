"""A save that dies before, after or within each of its requests, by the rules of S3 services."""

from __future__ import annotations

import contextlib

import pytest
from commit_tools import IN_TURN, take_in_turn
from profiles import Service, profile_server, service
from s3_server import crash_rules

from ckpt_storage.errors import CheckpointError
from ckpt_storage.store.backends.s3 import S3Backend

__all__ = ["profile_server", "service"]


@pytest.mark.parametrize("is_overwrite", [False, True], ids=["first", "overwrite"])
def test_a_save_that_dies_leaves_the_old_or_the_new(
    monkeypatch: pytest.MonkeyPatch, service: Service, *, is_overwrite: bool
) -> None:
    """After a death at any request one of the two is loaded, and the next save works."""
    take_in_turn(monkeypatch, IN_TURN[0])
    if service.server.profile == "flaky-bytes":
        # `test_flipped_reads` shows that the second read takes a new connection. A new client for
        # each wrong byte takes fifty times as long as the read.
        monkeypatch.setattr(S3Backend, "drop_caches", lambda *_: None)
    old = 1 if is_overwrite else None
    before: dict[str, bytes] = {}
    if is_overwrite:
        service.save(1, service.url(1))
        before = service.files

    def fresh() -> Service:
        made = Service(server=service.server)
        for path, data in before.items():
            made.server.put(made.bucket, path, data)
        made.server.reset_counters()
        return made

    dry = fresh()
    dry.save(2, dry.url(1), overwrite=is_overwrite)
    count = len(service.server.requests)
    assert count > 10
    seen: set[tuple[object, ...]] = set()
    # A death before a request, or within it, leaves what a death after the one before it left.
    for number in range(1, count + 1):
        made = fresh()
        service.server.faults(crash_rules(number, "after"))
        with contextlib.suppress(CheckpointError):
            made.save(2, made.url(1), overwrite=is_overwrite)
        service.server.faults([])
        files = tuple(sorted((path.split("/")[-1], len(data)) for path, data in made.files.items()))
        if files in seen:
            continue
        seen.add(files)
        at = f"after {number} of {count}"
        assert made.loaded(made.url(1)) in {old, 2}, at
        made.save(3, made.url(1), overwrite=True)
        assert made.loaded(made.url(1)) == 3, at
    assert made.verify(made.url(1)) == []
    assert len(seen) > 5
