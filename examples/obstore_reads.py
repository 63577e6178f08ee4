"""A backend that changes one thing of another: S3, with large reads and puts through obstore.

obstore's client takes less of a processor than s3fs's. It cannot send one part of an upload, or
list them, so all else stays with `S3Backend`. docs/extending.md goes through it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError

from ckpt_storage import store
from ckpt_storage.store.backends.s3 import S3Backend

_LEAST_BYTES = 1 << 20
_NAMES = {"key": "access_key_id", "secret": "secret_access_key", "token": "session_token"}


class ObstoreBackend(S3Backend):
    """S3 for options that obstore understands, too: keys, endpoint and region.

    What is not among the options obstore looks up in the environment. Whatever it fails at is
    asked again by `S3Backend`, whose errors say what is wrong.
    """

    def __init__(self, location: store.Location, settings: store.Settings) -> None:
        super().__init__(location, settings)
        self._location = location
        self._timeout = timedelta(seconds=settings.request_timeout_s)
        # obstore's threads do not survive a fork.
        self._process_id = os.getpid()

    @functools.cached_property
    def _obstore(self) -> obstore.store.S3Store:
        options = self._location.storage_options
        inner = options.get("client_kwargs") or {}
        endpoint = options.get("endpoint_url") or inner.get("endpoint_url")
        more: dict[str, Any] = {_NAMES[name]: options[name] for name in _NAMES.keys() & options}
        if endpoint:
            more["endpoint"] = endpoint
        if "region_name" in inner:
            more["region"] = inner["region_name"]
        bucket, _, prefix = self._location.path.partition("/")
        return obstore.store.S3Store(
            bucket,
            prefix=prefix or None,
            client_options={"allow_http": True, "timeout": self._timeout},
            # `Store` repeats what may be repeated.
            retry_config={"max_retries": 0, "retry_timeout": self._timeout},
            **more,
        )

    def read(self, path: str, ranges: Iterable[store.Range]) -> int | None:
        """Get each large range by obstore, each small range as `S3Backend` does."""
        total_bytes = None
        for start, view in ranges:
            if not self._is_worth_it(view.nbytes) or not self._got(path, start, view):
                total_bytes = super().read(path, [(start, view)])
        return total_bytes

    def _got(self, path: str, start: int, view: memoryview) -> bool:
        """Copy a range into `view`; return False where obstore could not get all of it."""
        try:
            data = obstore.get_range(self._obstore, path, start=start, length=view.nbytes)
        except (BaseError, OSError, ValueError):
            return False
        if len(data) == view.nbytes:
            view[:] = memoryview(data)
        return len(data) == view.nbytes

    def put(
        self,
        path: str,
        data: store.Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put a large object by one request; what has conditions is small."""
        size_bytes = sum(view.nbytes for view in data)
        if self._is_worth_it(size_bytes) and not (if_absent or if_match):
            # What `stat` of S3Backend looks for.
            metadata = {"ckpt-write-id": write_id} if write_id else None
            try:
                obstore.put(
                    self._obstore, path, list(data), attributes=metadata, use_multipart=False
                )
            except (BaseError, OSError, ValueError):
                pass  # a put may be repeated: it replaces what is there
            else:
                return
        super().put(path, data, write_id=write_id, if_absent=if_absent, if_match=if_match)

    def _is_worth_it(self, size_bytes: int) -> bool:
        return size_bytes >= _LEAST_BYTES and os.getpid() == self._process_id
