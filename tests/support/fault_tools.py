"""Stores with injected faults: what users get, over backends that play rules."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fork_server import ForkServer, shared_server

import ckpt_storage.export.output
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, abilities, registry
from ckpt_storage.store.backend import Backend, Settings
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Action, Call, FaultBackend, Rule, Script, SimulatedCrash

ONCE = RetryPolicy(attempt_count=1)

T = TypeVar("T")
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
        backend = self._wrap(location, registry.backend_of(location, settings))
        store = Store(backend, url=location.url, policy=self._retry, request_timeout_s=20.0)
        self._opened.append(store)
        return store

    def close(self) -> None:
        for store in self._opened:
            store.close()
        self._opened.clear()


class Faulty(Opener):
    """Stands in for `open_store`; stores at `target` and below play one script, as processes do."""

    def __init__(self, target: str = "", *rules: Rule, retry: RetryPolicy = ONCE) -> None:
        super().__init__(self._faulty, retry=retry)
        self.target = target
        self.play(*rules)

    def play(self, *rules: Rule) -> None:
        """Begin anew with these rules; none is for a run without faults."""
        self.script = Script(rules)

    def _faulty(self, location: Location, backend: Backend) -> Backend:
        if not location.url.startswith(self.target):
            return backend
        faulty = FaultBackend(backend)
        faulty.script = self.script
        return faulty


class ScriptedBackends:
    """Backends of all rooms of the package that play one script, as those of one process do."""

    def __init__(self) -> None:
        self._backend_of = registry.backend_of
        self._script: Script | None = None

    def __call__(self, location: Location, settings: Settings) -> Backend:
        """Stand in for `registry.backend_of`."""
        backend = self._backend_of(location, settings)
        if self._script is None:
            return backend
        scripted = FaultBackend(backend)
        scripted.script = self._script
        return scripted

    @contextmanager
    def playing(self, script: Script) -> Iterator[None]:
        """Have the stores that are opened in the block play a script, as a new process."""
        abilities.RECORDS.clear()
        self._script = script
        try:
            yield
        finally:
            self._script = None
            abilities.RECORDS.clear()


class Racing(Script):
    """Runs a rival before operation `at`; with `is_killed` the process ends there."""

    def __init__(self, at: int, rival: Callable[[], object], *, is_killed: bool = False) -> None:
        super().__init__()
        self.at, self.rival, self.is_killed = at, rival, is_killed
        self.count = 0

    def play(
        self, operation: str, path: str, call: Callable[[], T], half: Callable[[], T] | None = None
    ) -> T:
        self.count += 1
        if self.count == self.at:
            self.rival()
        if self.crashed or (self.is_killed and self.count >= self.at):
            self.crashed = True
            raise SimulatedCrash
        return super().play(operation, path, call, half)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> ScriptedBackends:
    """Backends in place of those of the package."""
    backends = ScriptedBackends()
    monkeypatch.setattr(registry, "backend_of", backends)
    return backends


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    """Stores of exports to `dst` and below."""
    opener = Faulty((tmp_path / "dst").as_uri())
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", opener)
    yield opener
    opener.close()


def each_fault(
    calls: Sequence[Call], actions: Mapping[Action, str] | Sequence[Action], **rule: Any
) -> Iterator[tuple[str, Rule]]:
    """Yield each fault at each call that it may befall, first where that is.

    `actions` says which operations each is for; "" is all.
    """
    for action, (number, call) in itertools.product(actions, enumerate(calls)):
        operations = actions[action] if isinstance(actions, Mapping) else ""
        if re.fullmatch(operations or ".*", call.operation):
            at = f"{action} at {number} ({call.operation} {call.path})"
            yield at, Rule(action=action, skip_count=number, **rule)


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """A process that has imported torch, whose forks end as scripts do."""
    return shared_server()
