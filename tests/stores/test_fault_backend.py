"""Backends that fail to order: what tests of crashes and lost answers rely on."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Iterable

import pytest

from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location
from ckpt_storage.store.backend import Backend
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule, SimulatedCrash

OBEY_NO_RULE = {"capabilities", "close", "copy_source", "endpoint", "explain"}


@pytest.fixture
def memory() -> MemoryBackend:
    """A backend with one object."""
    made = MemoryBackend(Location.of(f"memory://{uuid.uuid4().hex}"))
    made.put("x", [memoryview(b"data")])
    return made


def opened(backend: FaultBackend) -> Store:
    """Return a store that repeats nothing."""
    return Store(backend, url="memory://x", policy=RetryPolicy(attempt_count=1))


def test_every_method_of_the_seam_plays_the_script(memory: MemoryBackend) -> None:
    """None is passed through unseen, but those that ask nothing of a storage."""
    methods = inspect.getmembers(Backend, inspect.isfunction)
    names = {name for name, _ in methods if not name.startswith("_")} - OBEY_NO_RULE
    for name in names:
        broken = FaultBackend(memory, [Rule(action="error", hit_count=None)])
        _, *wanted = inspect.signature(getattr(Backend, name)).parameters.values()
        named = {one.name: False for one in wanted if one.kind is one.KEYWORD_ONLY}
        method: Callable[..., Iterable[object]] = getattr(broken, name)
        with pytest.raises(StorageError):
            # A listing begins when its first entry is asked for.
            list(method(*["x"] * (len(wanted) - len(named)), **named))
        assert [call.operation for call in broken.script.calls] in ([name], [f"{name}_match"])


def test_a_crash_passes_the_facade_and_ends_everything(memory: MemoryBackend) -> None:
    """The caller sees the death itself; later calls of any thread die too, and change nothing."""
    backend = FaultBackend(memory, [Rule(action="crash_after", operation="put_absent")])
    store = opened(backend)
    store.put("y", b"before")
    for put, path in ((store.create, "z"), (store.put, "late")):
        with pytest.raises(SimulatedCrash):
            put(path, b"dying")
    store.close()
    assert sorted(info.path for info in memory.list("", recursive=True)) == ["x", "y", "z"]
    assert [call.operation for call in backend.script.calls] == ["put", "put_absent"]


def test_half_of_an_operation_is_done_or_refused(memory: MemoryBackend) -> None:
    """Bytes, paths and listings are halved; a test that asks for half a completion is told so."""
    store = opened(FaultBackend(memory, [Rule(action="short", hit_count=None)]))
    assert store.get("x").data == b"da"
    assert store.stat("x").size_bytes == 2
    target = bytearray(4)
    store.read("x", [(0, memoryview(target))])
    assert bytes(target) == b"da\0\0"
    store.put("y", b"data")
    assert [info.path for info in store.list("")] == ["x"]
    store.delete(["x", "y"])
    assert [info.path for info in memory.list("", recursive=True)] == ["y"]
    with pytest.raises(InvalidInputError, match="complete_upload cannot be short"):
        FaultBackend(memory, [Rule(action="short")]).complete_upload(
            "x", "", [], write_id="", if_absent=False
        )
    store.close()
