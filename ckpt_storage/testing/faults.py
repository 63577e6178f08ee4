"""A backend that injects scripted faults.

    store = Store(FaultBackend(MemoryBackend(), [Rule(action="lost_answer")]), url="memory://x")

A crash is a `SimulatedCrash`: once raised, every later operation of the wrapper raises it too, in
any thread, as if the process had died. Inspect the storage then with another store.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar

from ckpt_storage.errors import InvalidInputError, StorageError, UnsupportedByStoreError
from ckpt_storage.store.backend import Backend, Content, CopySource, ObjectInfo

__all__ = ["Action", "Call", "FaultBackend", "Rule", "Script", "SimulatedCrash", "first_half"]

P = ParamSpec("P")
T = TypeVar("T")

Action = Literal[
    "crash_before", "crash_after", "torn", "error", "lost_answer", "short", "delay", "hang"
]
"""What happens at an operation.

crash_before, crash_after: the process dies just before or just after it.
torn: the process dies with the operation half done, where it can be half done.
error: it fails and does nothing. lost_answer: it is done, and then reported as failed.
short: it does or returns half and reports success. delay: it is done after `delay_s`.
hang: it is done only once `Script.release` is called.
"""


class SimulatedCrash(BaseException):
    """Stands for the death of the process; code under test never catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an operation."""

    operation: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Calls that get a fault, and the fault.

    operation, path: regular expressions; the first must match the whole name of the operation, the
        second any part of the path. An empty pattern matches all.
    skip_count: matching calls before the first fault.
    hit_count: calls with the fault; None: all that follow.
    kind, retryable: of the `StorageError` that a backend raises.
    errno: of the `OSError` that a system call raises.
    """

    action: Action
    operation: str = ""
    path: str = ""
    skip_count: int = 0
    hit_count: int | None = 1
    kind: str = "connection"
    retryable: bool = True
    errno: int = errno.EIO
    delay_s: float = 0.0


def storage_error(rule: Rule, path: str) -> StorageError:
    """Return the error that a backend raises by a rule."""
    kind = UnsupportedByStoreError if rule.kind == "unsupported" else StorageError
    message = f"Fault injected by a rule of the test ({rule.action} of {path})."
    return kind(message, kind=rule.kind, retryable=rule.retryable)


class Script:
    """Counts the calls, chooses the rule and plays its action; thread-safe.

    The first rule that applies is played. `calls` logs all calls, so that a run without rules
    counts the possible places of a fault.
    error: makes the exception from a rule and a path. on_crash: called when the process dies.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        *,
        error: Callable[[Rule, str], Exception] = storage_error,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self._rules = tuple(rules)
        self._seen_counts = [0] * len(self._rules)
        self._error = error
        self._on_crash = on_crash
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._hung = threading.Semaphore(0)
        self.calls: list[Call] = []
        self.crashed = False

    def release(self) -> None:
        """Resume all operations that hang, now or later."""
        self._released.set()

    def wait_hung(self, timeout_s: float) -> bool:
        """Wait until another operation hangs; return False if none does in time."""
        return self._hung.acquire(timeout=timeout_s)

    def play(
        self, operation: str, path: str, call: Callable[[], T], half: Callable[[], T] | None = None
    ) -> T:
        """Perform an operation by the rules.

        `half` performs half of it, for "torn" and "short"; without it these raise
        `InvalidInputError`, so that no test relies on a fault that did not happen.
        """
        rule = self._next(operation, path)
        if rule is None:
            return call()
        action = rule.action
        if action == "error":
            raise self._error(rule, path)
        if action == "crash_before":
            self._crash()
        if action == "delay":
            time.sleep(rule.delay_s)
        if action == "hang":
            self._hung.release()
            self._released.wait()
        if action in {"torn", "short"}:
            if half is None:
                raise InvalidInputError(f"{operation} cannot be {action}.")
            call = half
        result = call()
        if action in {"torn", "crash_after"}:
            self._crash()
        if action == "lost_answer":
            raise self._error(rule, path)
        return result

    def _crash(self) -> NoReturn:
        self.crashed = True
        self._on_crash()
        raise SimulatedCrash

    def _next(self, operation: str, path: str) -> Rule | None:
        with self._lock:
            if self.crashed:
                raise SimulatedCrash
            self.calls.append(Call(operation=operation, path=path))
            chosen = None
            for i, rule in enumerate(self._rules):
                if re.fullmatch(rule.operation or ".*", operation) and re.search(rule.path, path):
                    self._seen_counts[i] += 1
                    hit = self._seen_counts[i] - rule.skip_count
                    if hit > 0 and (rule.hit_count is None or hit <= rule.hit_count):
                        chosen = chosen or rule
            return chosen


def first_half(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return the views of the first half of the bytes; of a single byte, none."""
    left = sum(view.nbytes for view in buffers) // 2
    halves = []
    for view in buffers:
        halves.append(view[:left])
        left -= min(left, view.nbytes)
    return halves


def played(
    method: Callable[Concatenate[Any, P], T],
    half: Callable[..., T] | None = None,
    *,
    target: int = 0,
) -> Callable[Concatenate[Any, P], T]:
    """Return a method that plays the script of its object; `half` performs half of it.

    `path_of` of the object returns the path of the argument at position `target`.
    """
    operation = method.__name__

    def play(self: Any, /, *args: P.args, **more: P.kwargs) -> T:  # noqa: ANN401  # two classes
        call: Callable[P, T] = getattr(self.inner, operation)
        arguments = [*args, *more.values(), ""]
        result: T = self.script.play(
            operation + (_condition(**more) if operation == "put" else ""),
            self.path_of(arguments[target]),
            lambda: call(*args, **more),
            half and (lambda: half(self.inner, *args, **more)),
        )
        return result

    return play


def _condition(*, if_absent: object = False, if_match: object = None, **_: object) -> str:
    return "_absent" if if_absent else "" if if_match is None else "_match"


def _half(whole: Sequence[T]) -> Sequence[T]:
    return whole[: len(whole) // 2]


def _stat_half(inner: Backend, path: str) -> ObjectInfo:
    info = inner.stat(path)
    return replace(info, size_bytes=info.size_bytes // 2)


def _get_half(inner: Backend, path: str, *, max_bytes: int | None) -> Content:
    content = inner.get(path, max_bytes=max_bytes)
    return replace(content, data=content.data[: len(content.data) // 2])


def _list_half(inner: Backend, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
    return iter(_half(list(inner.list(prefix, recursive=recursive))))


def _delete_half(inner: Backend, path: str) -> None:
    inner.delete([info.path for info in _list_half(inner, path, recursive=True)])


class FaultBackend(Backend):
    """A `Backend` around another that plays a `Script`; without rules it only keeps a log.

    Operations have the names of the methods; `put` is "put_absent" or "put_match" if it has a
    condition, and a listing is a single operation. The path of `delete` and `make_folders` is all
    their paths, separated by spaces. Methods without requests, and `close`, have no faults.
    """

    def __init__(self, inner: Backend, rules: Sequence[Rule] = ()) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.endpoint = inner.endpoint
        self.script = Script(rules)

    def path_of(self, target: str | Sequence[str]) -> str:
        """Return the path of an operation, or its paths separated by spaces."""
        return target if isinstance(target, str) else " ".join(target)

    stat = played(Backend.stat, _stat_half)
    get = played(Backend.get, _get_half)
    tail = played(Backend.tail)
    read = played(
        Backend.read,
        lambda inner, path, ranges: inner.read(path, ((at, _half(view)) for at, view in ranges)),
    )
    list = played(Backend.list, _list_half)
    put = played(
        Backend.put, lambda inner, path, data, **more: inner.put(path, first_half(data), **more)
    )
    delete = played(Backend.delete, lambda inner, paths: inner.delete(_half(paths)))
    begin_upload = played(Backend.begin_upload)
    put_part = played(
        Backend.put_part,
        lambda inner, path, token, part, data, last: inner.put_part(
            path, token, part, first_half(data), last=last
        ),
    )
    complete_upload = played(Backend.complete_upload)
    abort_upload = played(Backend.abort_upload)
    refresh = played(Backend.refresh)
    drop_caches = played(Backend.drop_caches)
    make_folders = played(Backend.make_folders, lambda inner, all_: inner.make_folders(_half(all_)))
    delete_folder = played(Backend.delete_folder, _delete_half)
    delete_version = played(Backend.delete_version)
    flush_parts = played(Backend.flush_parts)
    leave_upload = played(Backend.leave_upload)
    copy_object = played(Backend.copy_object)
    copy_part = played(
        Backend.copy_part,
        lambda inner, path, token, copy: inner.copy_part(
            path, token, replace(copy, length=copy.length // 2)
        ),
    )
    list_uploads = played(
        Backend.list_uploads, lambda inner, prefix: iter(_half(list(inner.list_uploads(prefix))))
    )
    server_time = played(Backend.server_time)

    def close(self) -> None:
        """Close the inner backend, also after a crash: a dead process closes its connections."""
        self.inner.close()

    def durability_problem(self) -> str:
        """Return the result of the inner backend."""
        return self.inner.durability_problem()

    def copy_source(self, path: str) -> CopySource | None:
        """Return the result of the inner backend."""
        return self.inner.copy_source(path)

    def explain(self, error: BaseException) -> StorageError | None:
        """Return the result of the inner backend."""
        return self.inner.explain(error)
