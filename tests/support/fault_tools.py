"""Stores that fail as told: what users get, over backends that play rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckpt_storage.export.output
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend, Settings
from ckpt_storage.store.registry import backend_of
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Call, FaultBackend, Rule, Script

ONCE = RetryPolicy(attempt_count=1)

Wrap = Callable[[Location, Backend], Backend]


class Opener:
    """Stands in for `open_store`; `wrap` may put another backend around each."""

    def __init__(self, wrap: Wrap, *, retry: RetryPolicy = ONCE) -> None:
        self._wrap = wrap
        self._retry = retry
        self._opened: list[Store] = []

    def __call__(self, location: Location, **options: Any) -> Store:
        del options
        settings = Settings(request_timeout_s=20.0, sync_files=False)
        backend = self._wrap(location, backend_of(location, settings))
        store = Store(backend, url=location.url, policy=self._retry, request_timeout_s=20.0)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()
        self._opened.clear()


class Scripted(Opener):
    """Stands in for `open_store`; all its stores play one script, as one process does."""

    def __init__(self, *rules: Rule) -> None:
        super().__init__(self._scripted)
        self.script = Script(rules)

    def _scripted(self, _: Location, backend: Backend) -> Backend:
        found = FaultBackend(backend)
        found.script = self.script
        return found


class Faulty(Opener):
    """Stands in for `open_store`; stores whose URL begins with `target` play `rules`."""

    def __init__(self, target: str, *rules: Rule, retry: RetryPolicy = ONCE) -> None:
        super().__init__(self._faulty, retry=retry)
        self.target = target
        self.rules: Sequence[Rule] = rules
        self.made: list[FaultBackend] = []

    def _faulty(self, location: Location, backend: Backend) -> Backend:
        if not location.url.startswith(self.target):
            return backend
        self.made.append(FaultBackend(backend, self.rules))
        return self.made[-1]

    def calls(self) -> Sequence[Call]:
        """Return what the latest of these stores was asked for."""
        return self.made[-1].script.calls


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Stores of exports to `dst` and below."""
    found = Faulty((tmp_path / "dst").as_uri())
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", found)
    yield found
    found.close()
