"""Random sequences of calls by two clients, compared with a dict: the suite's state machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckpt_storage.store.store import Store

from .upload_facts import fill, kind_of, pattern, send

__all__ = ["check_sequences"]

_STEP_COUNT = 20
_NAMES = (".metadata", "commits/1", "saves/a/x", "saves/a/y", "saves/a/ranks/0", "saves/ab/x")
_FOLDERS = ("", "commits", "saves", "saves/a", "saves/a/ranks", "saves/ab", "saves/a/x", "none")

_names = st.sampled_from(_NAMES)
_contents = st.builds(pattern, st.integers(0, 300), st.integers(0, 9))
_which = st.integers(0, 1)


def check_sequences(store: Store, second: Store, count: int) -> None:
    """Run `count` random sequences on two clients of the same root, each in a folder of its own.

    The sequences are the same in each run. Raises the first error, with the calls before it.
    """
    numbers = itertools.count()
    run_state_machine_as_test(
        # Any factory is allowed by Hypothesis' documentation.
        lambda: StoreMachine(store, second, f"sequence-{next(numbers)}/"),  # type: ignore[arg-type]
        settings=settings(
            max_examples=count,
            stateful_step_count=_STEP_COUNT,
            deadline=None,
            database=None,
            # No shrinking: on a slow storage it takes longer than to read twenty calls.
            phases=(Phase.generate,),
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


class StoreMachine(RuleBasedStateMachine):
    """The expected content of a folder, and calls of two clients that change or read it."""

    def __init__(self, store: Store, second: Store, root: str) -> None:
        super().__init__()
        self.clients, self.root = (store, second), root
        self.part_bytes = fill(store.capabilities)
        self.model: dict[str, bytes] = {}
        store.make_folders([f"{self.root}{folder}" for folder in _FOLDERS[1:6]])

    @rule(at=_which, name=_names, data=_contents)
    def put(self, at: int, name: str, data: bytes) -> None:
        self.clients[at].put(self.root + name, data)
        self.model[self.root + name] = data

    @rule(at=_which, name=_names, data=_contents)
    def replace(self, at: int, name: str, data: bytes) -> None:
        self.clients[at].replace(self.root + name, data)
        self.model[self.root + name] = data

    @precondition(lambda self: self.clients[0].capabilities.exclusive_create)
    @rule(at=_which, name=_names, data=_contents)
    def create(self, at: int, name: str, data: bytes) -> None:
        path = self.root + name
        if path in self.model and self.model[path] != data:
            assert kind_of(self.clients[at].create, path, data) == "exists"
        else:
            self.clients[at].create(path, data)
            self.model[path] = data

    @rule(at=_which, name=_names, tail=_contents, in_parts=st.booleans(), ends=st.booleans())
    def upload(self, at: int, name: str, tail: bytes, *, in_parts: bool, ends: bool) -> None:
        upload = self.clients[at].upload(self.root + name)
        parts = [pattern(self.part_bytes, len(tail)), tail] if in_parts and tail else [tail]
        send(upload, parts)
        if ends:
            upload.complete(sum(map(len, parts)))
            self.model[self.root + name] = b"".join(parts)
        else:
            upload.abort()

    @rule(at=_which, names=st.lists(_names, unique=True))
    def delete(self, at: int, names: Sequence[str]) -> None:
        self.clients[at].delete([self.root + name for name in names])
        for name in names:
            self.model.pop(self.root + name, None)

    @rule(at=_which, name=_names, data=st.data())
    def read(self, at: int, name: str, data: st.DataObject) -> None:
        path = self.root + name
        if path not in self.model:
            assert kind_of(self.clients[at].get, path) == "not-found"
            assert kind_of(self.clients[at].stat, path) == "not-found"
            return
        held = self.model[path]
        assert self.clients[at].get(path).data == held
        assert self.clients[at].stat(path).size_bytes == len(held)
        start = data.draw(st.integers(0, len(held)))
        target = bytearray(data.draw(st.integers(0, len(held) - start)))
        self.clients[at].read(path, [(start, memoryview(target))], size_bytes=len(held))
        assert target == held[start : start + len(target)]

    @rule(at=_which, folder=st.sampled_from(_FOLDERS))
    def list(self, at: int, folder: str) -> None:
        below = f"{self.root}{folder}/" if folder else self.root
        held = {path: len(data) for path, data in self.model.items() if path.startswith(below)}
        entries = self.clients[at].list(below)
        assert {entry.path: entry.size_bytes for entry in entries} == held
        flat = self.clients[at].list(below, recursive=False)
        files = {path: size for path, size in held.items() if "/" not in path[len(below) :]}
        shown = {entry.path: entry.size_bytes for entry in flat if entry.path[-1] != "/"}
        assert shown == files

    @invariant()
    def nothing_else_is_there(self) -> None:
        listed = {entry.path: entry.size_bytes for entry in self.clients[1].list(self.root)}
        assert listed == {path: len(data) for path, data in self.model.items()}

    def teardown(self) -> None:
        for path, data in self.model.items():
            assert self.clients[1].get(path).data == data, path
        self.clients[1].delete_folder(self.root)
        assert self.clients[0].abort_uploads(self.root) == 0
