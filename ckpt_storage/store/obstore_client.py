"""obstore's stores: built once per process and plan, and never touched again after a fork.

Knows obstore's classes and that its runtime of threads does not outlive a fork: a child whose
parent had used it would wait for ever, so the child is told and takes the fsspec plane. Retries of
obstore's own are off, except inside an upload, where they are the only ones that can be.
Credentials are looked up before a request that may need new ones, in a thread that is left behind
when its time is up: obstore's own threads, of which there are few, would wait without an end.
Called by `engine`, `dialect_obstore` and `obstore_upload`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from ckpt_storage.options import RetryPolicy

from .clients import frozen
from .mapping import HttpFailure, LookupFailure
from .obstore_errors import CrashedError, is_crash, translated
from .obstore_plan import ObstorePlan, Provider
from .timed import AbandonedError, TimedPool

__all__ = ["ForeignStore", "ObstoreClient", "Use", "is_cut_off"]

T = TypeVar("T")

ForeignStore: TypeAlias = Any
"""A store of obstore; its type hints are those of a type checker's world only."""

Use = Literal["read", "write", "upload"]
"""What a store is for: "read" bounds silence, "write" does not, "upload" repeats its requests."""

_CLASSES = {"azure": "AzureStore", "gcs": "GCSStore", "s3": "S3Store"}
_SCHEMES = {"azure": "az", "gcs": "gs", "s3": "s3"}
_CONTAINER = {"azure": "container_name", "gcs": "bucket", "s3": "bucket"}


_LOOKUP_SHARE = 0.8
"""The part of a request's time that its lookup may take: it must be heard of before that is up."""

_AHEAD = timedelta(minutes=6)
"""Credentials that end within this are looked up anew; obstore itself asks 5 minutes before."""

_LEAST_PAUSE_S = 1e-3

_MOST_KEPT = 8
"""Stores of one bucket and use: tokens that change with each save must not pile up."""

_UNTOLD = frozenset({401, 403})
"""What a server answers to a request that is not signed as it should be."""


@dataclass(slots=True)
class _Built:
    store: ForeignStore
    lookup: _Lookup | None = field(repr=False)
    used_s: float = field(default_factory=time.monotonic)


# As in `clients`: entries of other process ids came by fork and stay untouched.
_BUILT: dict[tuple[int, tuple[Use, Hashable, Hashable]], _Built] = {}
_LOCKS: dict[int, threading.Lock] = {}
_LOOKUPS = TimedPool("ckpt-storage credentials")
_USED_BY: set[int] = set()


def is_cut_off() -> bool:
    """Return whether this process came by fork from one that had used obstore."""
    return bool(_USED_BY) and os.getpid() not in _USED_BY


def _lock() -> threading.Lock:
    """Return this process's lock; one inherited by fork may be held by a thread that is gone."""
    return _LOCKS.setdefault(os.getpid(), threading.Lock())


class _Lookup:
    """A provider's credentials, looked up within `limit_s` seconds, by one thread at a time.

    obstore is told those that were found until they come to their end; it tells of a lookup only
    that it failed, so that is remembered here.
    """

    def __init__(self, make: Callable[[], Provider], limit_s: float) -> None:
        self._make = make
        self._limit_s = limit_s
        self._inner: Provider | None = None
        self._found: Mapping[str, Any] | None = None
        self._failed: tuple[float, Exception | None] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "credentials"

    def __call__(self) -> Mapping[str, Any]:
        """Return credentials that are good for a while; raises `LookupFailure`."""
        start_s = time.monotonic()
        found = self._kept()
        if found is not None:
            return found
        if not self._lock.acquire(timeout=self._limit_s):
            raise LookupFailure(hung_s=self._limit_s)
        try:
            found = self._kept()
            if found is None:
                # Who waited while it failed has waited long enough.
                self.raise_failure(since_s=start_s)
                found = self._found = self._looked_up()
            return found
        finally:
            self._lock.release()

    def raise_failure(self, *, since_s: float) -> None:
        """Raise `LookupFailure` if the last lookup ended after `since_s`, and badly."""
        failed = self._failed
        if failed is not None and failed[0] >= since_s:
            # Each gets its own: a traceback keeps the buffers of whoever it leads through.
            hung_s = self._limit_s if failed[1] is None else None
            raise LookupFailure(hung_s=hung_s) from failed[1]

    def _kept(self) -> Mapping[str, Any] | None:
        found = self._found
        end = found["expires_at"] if found is not None else None
        return found if end is None or end - datetime.now(UTC) > _AHEAD else None

    def _looked_up(self) -> Mapping[str, Any]:
        what, limit_s = "lookup of credentials", self._limit_s
        start_s = time.monotonic()
        try:
            found = _LOOKUPS.run(self._ask, timeout_s=limit_s, what=what, repeatable=True)
        except AbandonedError:
            # The thread that is left behind may still use it.
            self._inner = None
            self._failed = (time.monotonic(), None)
        except Exception as error:  # noqa: BLE001  # whatever a library raises
            error.__traceback__ = None
            self._failed = (time.monotonic(), error)
        else:
            self._failed = None
            return found
        self.raise_failure(since_s=start_s)
        raise AssertionError("a lookup neither ended nor failed")  # pragma: no cover

    def _ask(self) -> Mapping[str, Any]:
        # Making it may ask as well: Google's looks for a metadata server.
        inner = self._inner or self._make()
        found = inner()
        self._inner = inner
        return found


class ObstoreClient:
    """Access to obstore's stores of one plan, whichever process asks.

    `request_timeout_s` (seconds) is the deadline of one request; `policy` says how often a
    request inside an upload is repeated, after `pause_s` seconds at first.
    """

    def __init__(
        self, plan: ObstorePlan, *, request_timeout_s: float, policy: RetryPolicy | None = None
    ) -> None:
        self._plan = plan
        self._policy = policy or RetryPolicy()
        self.request_timeout_s = request_timeout_s
        self.pause_s = max(self._policy.first_delay_s, _LEAST_PAUSE_S)
        self.bucket = plan.bucket
        self.family = plan.family
        told = (frozen(plan.config), frozen(plan.client_options))
        times = (request_timeout_s, plan.connect_timeout_s, plan.read_timeout_s)
        self._place: Hashable = (plan.family, plan.bucket)
        self._key: Hashable = (told, times, self._policy, plan.make_provider)

    def __repr__(self) -> str:
        return f"ObstoreClient({self._plan.family!r}, {self.bucket!r})"

    def name(self, path: str) -> str:
        """Return the key of a path below the root."""
        return f"{self._plan.prefix}/{path}" if self._plan.prefix else path

    def shown(self, path: str) -> str:
        """Return the URL of a path below the root, for messages."""
        return f"{_SCHEMES[self.family]}://{self.bucket}/{self.name(path)}"

    def run(self, use: Use, operation: Callable[[ForeignStore], T]) -> T:
        """Return what `operation` returns of this process's store.

        A lookup of credentials that has to come first takes up to `_LOOKUP_SHARE` of the request's
        time. Raises what `mapping` understands, in place of what obstore raised.
        """
        built = self._built(use)
        start_s = time.monotonic()
        if built.lookup is not None:
            built.lookup()
        try:
            return operation(built.store)
        except Exception as error:  # noqa: BLE001  # obstore raises builtins, too
            failure = translated(error)
        except BaseException as error:
            if not is_crash(error):
                raise
            failure = CrashedError(f"obstore panicked: {error}")
        try:
            is_answer = isinstance(failure, HttpFailure) and failure.status not in _UNTOLD
            if built.lookup is not None and not is_answer:
                # Of an upload that takes long, obstore asked for new ones meanwhile.
                built.lookup.raise_failure(since_s=start_s)
            raise failure
        finally:
            # The traceback leads to this frame, and the frame must not lead back.
            del failure

    def refresh(self) -> None:
        """Build this process's stores anew, so that credentials are looked up again."""
        with _lock():
            for use in ("read", "write", "upload"):
                _BUILT.pop((os.getpid(), (use, self._place, self._key)), None)

    def _built(self, use: Use) -> _Built:
        key: tuple[int, tuple[Use, Hashable, Hashable]]
        key = (os.getpid(), (use, self._place, self._key))
        built = _BUILT.get(key)
        if built is None:
            with _lock():
                built = _BUILT.get(key)
                if built is None:
                    built = _BUILT[key] = self._build(use)
                    self._drop_oldest(use)
        built.used_s = time.monotonic()
        return built

    def _drop_oldest(self, use: Use) -> None:
        """Forget stores of this bucket that nobody has used for long, and their credentials.

        Who is in the midst of a request holds its store itself.
        """
        here = [key for key in _BUILT if key[0] == os.getpid() and key[1][:2] == (use, self._place)]
        here.sort(key=lambda key: _BUILT[key].used_s)
        for key in here[:-_MOST_KEPT]:
            del _BUILT[key]

    def _build(self, use: Use) -> _Built:
        import obstore.store  # noqa: PLC0415  # an extra

        plan = self._plan
        _USED_BY.add(os.getpid())
        settings: dict[str, Any] = {
            **plan.client_options,
            "connect_timeout": timedelta(seconds=plan.connect_timeout_s),
            "timeout": timedelta(seconds=self.request_timeout_s),
        }
        if use == "read":
            # Of a request that sends, it would bound the sending as well.
            settings["read_timeout"] = timedelta(seconds=plan.read_timeout_s)
        policy = self._policy
        retries = {
            "max_retries": policy.attempt_count - 1 if use == "upload" else 0,
            "retry_timeout": timedelta(seconds=self.request_timeout_s),
            "backoff": {
                "init_backoff": timedelta(seconds=self.pause_s),
                "max_backoff": timedelta(seconds=max(policy.max_delay_s, _LEAST_PAUSE_S)),
                "base": 2,
            },
        }
        extra: dict[str, Any] = {}
        lookup = None
        if plan.make_provider is not None:
            limit_s = _LOOKUP_SHARE * self.request_timeout_s
            lookup = extra["credential_provider"] = _Lookup(plan.make_provider, limit_s)
        store = getattr(obstore.store, _CLASSES[plan.family])(
            **{_CONTAINER[plan.family]: plan.bucket},
            **plan.config,
            client_options=settings,
            retry_config=retries,
            **extra,
        )
        return _Built(store, lookup)
