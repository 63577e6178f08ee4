"""obstore's stores: built once per process and plan, and never touched again after a fork.

Knows obstore's classes and that its runtime of threads does not outlive a fork: a child whose
parent had used it would wait for ever, so the child is told and takes the fsspec plane. Retries of
obstore's own are off, except inside an upload, where they are the only ones that can be. Called
by `engine`, `dialect_obstore` and `obstore_upload`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from ckpt_storage.options import RetryPolicy

from .clients import frozen
from .obstore_errors import CrashedError, is_crash, translated
from .obstore_plan import ObstorePlan, Provider

__all__ = ["ForeignStore", "ObstoreClient", "Use", "is_cut_off"]

T = TypeVar("T")

ForeignStore: TypeAlias = Any
"""A store of obstore; its type hints are those of a type checker's world only."""

Use = Literal["read", "write", "upload"]
"""What a store is for: "read" bounds silence, "write" does not, "upload" repeats its requests."""

_CLASSES = {"azure": "AzureStore", "gcs": "GCSStore", "s3": "S3Store"}
_SCHEMES = {"azure": "az", "gcs": "gs", "s3": "s3"}
_CONTAINER = {"azure": "container_name", "gcs": "bucket", "s3": "bucket"}


@dataclass(frozen=True, slots=True)
class _Built:
    store: ForeignStore
    provider: _Watched | None = field(repr=False)


# As in `clients`: entries of other process ids came by fork and stay untouched.
_BUILT: dict[tuple[int, Hashable], _Built] = {}
_LOCKS: dict[int, threading.Lock] = {}
_USED_BY: set[int] = set()


def is_cut_off() -> bool:
    """Return whether this process came by fork from one that had used obstore."""
    return bool(_USED_BY) and os.getpid() not in _USED_BY


def _lock() -> threading.Lock:
    """Return this process's lock; one inherited by fork may be held by a thread that is gone."""
    return _LOCKS.setdefault(os.getpid(), threading.Lock())


class _Watched:
    """A provider that remembers why it failed: obstore tells only that it did."""

    def __init__(self, inner: Provider) -> None:
        self._inner = inner
        self.failure: Exception | None = None

    def __repr__(self) -> str:
        return "credentials"

    def __call__(self) -> Mapping[str, Any]:
        try:
            found = self._inner()
        except Exception as error:
            self.failure = error
            raise
        self.failure = None
        return found


class ObstoreClient:
    """Access to obstore's stores of one plan, whichever process asks.

    `request_timeout_s` (seconds) is the deadline of one request; `policy` says how often a
    request inside an upload is repeated.
    """

    def __init__(
        self, plan: ObstorePlan, *, request_timeout_s: float, policy: RetryPolicy | None = None
    ) -> None:
        self._plan = plan
        self._policy = policy or RetryPolicy()
        self.request_timeout_s = request_timeout_s
        self.bucket = plan.bucket
        self.family = plan.family
        told = (frozen(plan.config), frozen(plan.client_options))
        times = (request_timeout_s, plan.connect_timeout_s, plan.read_timeout_s)
        place = (plan.family, plan.bucket)
        self._key: Hashable = (place, told, times, self._policy, plan.make_provider)

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

        Raises what `mapping` understands, in place of what obstore raised.
        """
        built = self._built(use)
        try:
            return operation(built.store)
        except Exception as error:  # noqa: BLE001  # obstore raises builtins, too
            lookup = built.provider.failure if built.provider is not None else None
            failure = lookup or translated(error)
        except BaseException as error:
            if not is_crash(error):
                raise
            lookup, failure = None, CrashedError(f"obstore panicked: {error}")
        try:
            raise failure
        finally:
            # The traceback leads to this frame, and the frame must not lead back.
            del failure, lookup

    def refresh(self) -> None:
        """Build this process's stores anew, so that credentials are looked up again."""
        with _lock():
            for use in ("read", "write", "upload"):
                _BUILT.pop((os.getpid(), (use, self._key)), None)

    def _built(self, use: Use) -> _Built:
        key = (os.getpid(), (use, self._key))
        built = _BUILT.get(key)
        if built is None:
            with _lock():
                built = _BUILT.get(key)
                if built is None:
                    built = _BUILT[key] = self._build(use)
        return built

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
                "init_backoff": timedelta(seconds=max(policy.first_delay_s, 1e-3)),
                "max_backoff": timedelta(seconds=max(policy.max_delay_s, 1e-3)),
                "base": 2,
            },
        }
        extra: dict[str, Any] = {}
        provider = None
        if plan.make_provider is not None:
            provider = extra["credential_provider"] = _Watched(plan.make_provider())
        store = getattr(obstore.store, _CLASSES[plan.family])(
            **{_CONTAINER[plan.family]: plan.bucket},
            **plan.config,
            client_options=settings,
            retry_config=retries,
            **extra,
        )
        return _Built(store, provider)
