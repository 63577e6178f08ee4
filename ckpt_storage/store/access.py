"""Calls to one backend: opened late, in time, with errors that say what they mean."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import NoReturn, TypeVar

from ckpt_storage.errors import (
    CheckpointError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.options import RetryPolicy

from .backend import (
    Backend,
    Capabilities,
)
from .calls import Caller, Repeat, system_random
from .deadline import Deadline
from .problems import Call, explain

T = TypeVar("T")


class Access:
    """One backend, and how it is called; `Store` says what for."""

    def __init__(
        self,
        backend: Backend | Callable[[], Backend],
        *,
        url: str,
        scrub: Callable[[str], str] = str,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = 300.0,
        scope: Callable[[], Hashable] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = system_random,
    ) -> None:
        self.url = url
        self.policy = policy or RetryPolicy()
        self.scope = scope
        self.deadline = Deadline("commit", math.inf)
        self._scrub = scrub
        self._request_timeout_s = request_timeout_s
        self._open = backend
        self._opened: dict[str, Backend] = {}
        if isinstance(backend, Backend):
            self._opened[""] = backend
        self._is_view = False
        self._caller = Caller(
            url=url,
            refresh=self._refresh,
            policy=self.policy,
            request_timeout_s=request_timeout_s,
            clock=clock,
            sleep=sleep,
            random=random,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Store is not pickled; open it again from its Location.")

    @property
    def capabilities(self) -> Capabilities:
        """What the storage can do; nothing is asked of it."""
        known = self._opened.get("")
        if known is None:
            known = self.run("opening", "", lambda backend: backend)
        return known.capabilities

    def shown(self, path: str) -> str:
        """Return the URL of a path, for messages."""
        return f"{self.url.rstrip('/')}/{path}".rstrip("/")

    def run(
        self,
        operation: str,
        path: str,
        call: Callable[[Backend], T],
        *,
        repeat: Repeat = "always",
        extra_s: float = 0.0,
    ) -> T:
        """Return what `call` makes of the backend; see `Caller.run`. For uploads of this store."""
        return self._caller.run(
            f"{operation} of {self.shown(path)}",
            lambda: self.bordered(operation, path, call),
            repeat=repeat,
            extra_s=extra_s,
        )

    def _backend(self) -> Backend:
        known = self._opened.get("")
        if known is None and not isinstance(self._open, Backend):
            # Of two threads that open it at once, both go on with one.
            known = self._opened.setdefault("", self._open())
        assert known is not None  # noqa: S101  # what is open from the start is known
        return known

    def _refresh(self) -> None:
        self.bordered("refresh of the credentials", "", lambda backend: backend.refresh())

    def bordered(self, operation: str, path: str, call: Callable[[Backend], T]) -> T:
        """Return what `call` returns; every foreign exception leaves as a `StorageError`."""
        try:
            return call(self._backend())
        except Exception as error:  # noqa: BLE001  # backends raise any type
            failure = self.explain(error, operation, path)
        # Raised here, not where it was caught: the foreign one may carry credentials, and
        # its traceback the caller's buffers.
        try:
            raise failure
        finally:
            # The traceback leads to this frame, and the frame must not lead back.
            del failure

    def explain(self, error: Exception, operation: str, path: str) -> CheckpointError:
        """Return what an exception of the backend means, without credentials."""
        known = self._opened.get("")
        told: Exception = error
        if known is not None and not isinstance(error, CheckpointError):
            told = known.explain(error) or error
        if isinstance(told, CheckpointError) and not isinstance(told, StorageError):
            return told
        about = Call(
            name=operation,
            path=self.shown(path),
            endpoint="" if known is None else known.endpoint,
            timeout_s=self._request_timeout_s,
            scrub=self._scrub,
        )
        return explain(told, about)

    def _unable(self, path: str, what: str, next_step: str) -> UnsupportedByStoreError:
        return UnsupportedByStoreError(
            f"{self.url} {what}.", kind="unsupported", path=self.shown(path), next_step=next_step
        )
