"""A storage of your own, over the network: checkpoints in Redis, at redis://HOST:PORT/PREFIX.

The server keeps what it acknowledges only with `appendonly yes` and `appendfsync always`.
tests/realservers/test_redis.py has it pass `StoreSuite`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import redis

from ckpt_storage import store
from ckpt_storage.errors import StorageError
from ckpt_storage.store import Buffers, Part

_NAMES, _UPLOADS = "ckpt names", "ckpt uploads"


def _key(*words: object) -> str:
    return " ".join(map(str, ("ckpt", *words)))


class RedisBackend(store.Backend):
    """One prefix in one database.

    A name refers to a version, whose pieces are values of their own and never change. The token of
    an upload is the version that it makes. A sorted set has all names, whole: roots overlap.
    """

    capabilities = store.Capabilities(
        kind="generic",
        exclusive_create=True,
        if_match=True,
        atomic_replace=True,
        parallel_parts=True,
        max_part_bytes=512 << 20,  # of one value
        max_put_bytes=512 << 20,
        tokens_travel=True,
        lists_uploads=True,
    )

    def __init__(self, location: store.Location, settings: store.Settings) -> None:
        self.endpoint, _, prefix = location.path.partition("/")
        self._root = f"{prefix}/" if prefix else ""
        options = {"socket_timeout": settings.request_timeout_s, **location.storage_options}
        self._client: Any = redis.Redis.from_url(f"redis://{self.endpoint}", **options)

    def stat(self, path: str) -> store.ObjectInfo:
        """Look the name up."""
        if (text := self._client.get(_key("object", self._root + path))) is None:
            raise FileNotFoundError(path)
        return store.ObjectInfo(path=path, **json.loads(text))

    def get(self, path: str, *, max_bytes: int | None) -> store.Content:
        """Read all pieces of one version, or one byte more than `max_bytes`."""
        for _ in range(10):
            info = self.stat(path)
            most_bytes = info.size_bytes if max_bytes is None else max_bytes + 1
            data = bytearray(min(info.size_bytes, most_bytes))
            with contextlib.suppress(store.ShortReadError):
                self._fill(info, 0, memoryview(data))
                return store.Content(data=bytes(data), version=info.version)
        raise StorageError(f"{path} was replaced at each read.", retryable=True)

    def read(self, path: str, ranges: Iterable[store.Range]) -> int | None:
        """Ask for what each range has of each piece."""
        info = self.stat(path)
        for start, view in ranges:
            self._fill(info, start, view)
        return info.size_bytes

    def _fill(self, info: store.ObjectInfo, start: int, view: memoryview) -> None:
        """Fill the view; `Store` retries a short read of a version that was replaced meanwhile."""
        filled_bytes = 0
        for key, value in self._client.hgetall(_key("pieces", info.version)).items():
            offset, length = int(key), int(value)
            first, last = max(start, offset), min(start + view.nbytes, offset + length)
            if first < last:
                piece = _key("piece", info.version, offset)
                data = self._client.getrange(piece, first - offset, last - offset - 1)
                view[first - start : first - start + len(data)] = data
                filled_bytes += len(data)
        if filled_bytes < view.nbytes:
            raise store.ShortReadError(start + filled_bytes)

    def put(self, path: str, data: Buffers, **terms: Any) -> None:
        """Send one piece, and have the name refer to it if the condition holds."""
        part = Part(number=0, offset=0, size_bytes=sum(view.nbytes for view in data))
        token = self.begin_upload(path, write_id="")
        try:
            self.put_part(path, token, part, data, last=True)
            self._publish(path, token, part.size_bytes, **terms)
        except BaseException:
            self.abort_upload(path, token)
            raise

    def _publish(
        self,
        path: str,
        version: str,
        size_bytes: int,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Have a name refer to a version, in a transaction that compares the version before."""
        name, (seconds, micros) = self._root + path, self._client.time()
        fields = {"size_bytes": size_bytes, "modified_s": seconds + micros / 1e6}
        text = json.dumps({**fields, "version": version, "write_id": write_id})
        key = _key("object", name)

        def change(pipe: Any) -> str | None:
            before: str | None = json.loads(pipe.get(key) or "{}").get("version")
            if pipe.hget(_UPLOADS, version) != name.encode():
                raise FileNotFoundError(f"the upload of {path} is over")
            if if_absent and before:
                raise FileExistsError(path)
            if if_match is not None and before != if_match:
                raise StorageError(f"{path} was replaced meanwhile.", kind="precondition")
            pipe.multi()
            pipe.set(key, text).zadd(_NAMES, {name: 0}).hdel(_UPLOADS, version)
            return before

        if before := self._client.transaction(change, key, _UPLOADS, value_from_callable=True):
            self._drop(before)

    def _drop(self, version: str) -> None:
        pieces = _key("pieces", version)
        keys = [_key("piece", version, int(at)) for at in self._client.hkeys(pieces)]
        self._client.delete(pieces, *keys)

    def list(self, prefix: str, *, recursive: bool) -> Iterator[store.ObjectInfo]:
        """Take the names that begin so; folders are what stands before a slash."""
        below, cut = f"{self._root}{prefix}/" if prefix else self._root, len(self._root)
        first, folders = f"[{below}".encode(), set()
        for name in self._client.zrangebylex(_NAMES, first, first + b"\xff"):
            child, slash, _ = name.decode()[len(below) :].partition("/")
            if slash and not recursive:
                folders.add(f"{below}{child}/"[cut:])
            else:
                with contextlib.suppress(FileNotFoundError):  # deleted a moment ago
                    yield self.stat(name.decode()[cut:])
        yield from (store.ObjectInfo(path=folder, size_bytes=0) for folder in folders)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete each with its pieces; there may be a thousand."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                info = self.stat(path)
                pipe, name = self._client.pipeline(), self._root + path
                pipe.delete(_key("object", name)).zrem(_NAMES, name).execute()
                self._drop(str(info.version))
            store.report_progress()

    def begin_upload(self, path: str, *, write_id: str) -> str:
        """Note the version that is to be."""
        token = os.urandom(16).hex()
        self._client.hset(_UPLOADS, token, self._root + path)
        return token

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        """Set one piece, in place of what an earlier attempt left, if the upload is open."""
        if not self._client.hexists(_UPLOADS, token):
            raise FileNotFoundError(f"the upload of {path} is over")
        pipe = self._client.pipeline().hset(_key("pieces", token), part.offset, part.size_bytes)
        pipe.set(_key("piece", token, part.offset), b"".join(data)).execute()
        return ""

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        """Have the name refer to the pieces."""
        self._publish(path, token, sum(part.size_bytes for part in parts), write_id=write_id)

    def abort_upload(self, path: str, token: str) -> None:
        """Delete the pieces, unless the upload was completed."""
        if self._client.hdel(_UPLOADS, token):
            self._drop(token)

    def list_uploads(self, prefix: str) -> Iterator[store.OpenUpload]:
        """Look through all that are open."""
        below = f"{self._root}{prefix}/" if prefix else self._root
        for token, name in self._client.hgetall(_UPLOADS).items():
            if f"{name.decode()}/".startswith(below):
                path = name.decode()[len(self._root) :]
                yield store.OpenUpload(path=path, token=token.decode())

    def explain(self, error: BaseException) -> StorageError | None:
        """Tell an outage from all else, which is understood without."""
        if not isinstance(error, redis.ConnectionError | redis.TimeoutError):
            return None
        text = f"Redis at {self.endpoint} does not answer: {error}."
        return StorageError(text, kind="connection", retryable=True)
