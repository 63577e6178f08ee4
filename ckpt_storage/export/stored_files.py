"""The files that a checkpoint holds as values `files.<name>`, as a storage that can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Never

import numpy as np

from ckpt_storage.errors import UnsupportedByStoreError
from ckpt_storage.format.names import FILES_PREFIX
from ckpt_storage.inspect.reading import Handle, read_into
from ckpt_storage.options import RetryPolicy
from ckpt_storage.source.model import Source, gone
from ckpt_storage.store.backend import Backend, Capabilities, Content, ObjectInfo, Range
from ckpt_storage.store.store import Store

from .output import ExportSpec

_ONE_ATTEMPT = RetryPolicy(attempt_count=1)
"""The store of the checkpoint retries."""


def open_stored_files(spec: ExportSpec, source: Source) -> Store:
    """Return the files of the checkpoint of a committed `source`; every read is verified."""
    handle = Handle(
        spec.source,
        unsafe_pickle=False,
        arguments={
            "thread_count": spec.thread_count,
            "memory_limit_bytes": spec.memory_limit_bytes,
            "timeout": spec.timeouts,
            "retry": spec.retry,
        },
    )
    if handle.source.save_id != source.save_id:
        handle.close()
        assert source.save_id is not None  # noqa: S101  # only a save of ours holds such files
        raise gone(source.store, source.save_id, spec.source.url) or AssertionError
    timeout_s = spec.timeouts.request
    return Store(
        partial(_StoredFiles, handle),
        url=spec.source.url,
        policy=_ONE_ATTEMPT,
        request_timeout_s=timeout_s,
    )


class _StoredFiles(Backend):
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        is_remote = not handle.location.is_local
        self.capabilities = Capabilities(kind="generic", is_remote=is_remote)

    def stat(self, path: str) -> ObjectInfo:
        info = self._handle.tensors.get(f"{FILES_PREFIX}{path}")
        if info is None:
            raise FileNotFoundError(path)
        return ObjectInfo(path=path, size_bytes=info.shape[0])

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        size_bytes = self.stat(path).size_bytes
        data = bytearray(size_bytes if max_bytes is None else min(size_bytes, max_bytes + 1))
        self.read(path, [(0, memoryview(data))])
        return Content(data=bytes(data))

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        for start, view in ranges:
            if view:
                array = np.frombuffer(view, dtype="u1")
                positions = (range(start, start + len(view)),)
                read_into(self._handle, f"{FILES_PREFIX}{path}", positions, array)
        return self.stat(path).size_bytes

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        assert recursive and not prefix  # noqa: S101, PT018  # files are looked for at the root
        return (self.stat(fqn.removeprefix(FILES_PREFIX)) for fqn in self._handle.tensors)

    def close(self) -> None:
        self._handle.close()

    def _refuse(self, *_: object, **__: object) -> Never:
        what = f"Files of {self._handle.url} can only be read."
        raise UnsupportedByStoreError(what)

    put = delete = begin_upload = put_part = complete_upload = abort_upload = _refuse
