"""Azure Blob Storage through the SDK's client: one request per call, ETags as versions.

Accounts with a hierarchical namespace (abfs://) take the same calls. The SDK's own retries are off:
`Store` is the one layer that repeats.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from ckpt_storage.store.backend import (
    Buffers,
    Capabilities,
    Content,
    ObjectInfo,
    Part,
    Settings,
)
from ckpt_storage.store.location import Location

from .clients import ForeignFs
from .remote import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, RemoteBackend, total_of

_WRITE_ID = "ckptwriteid"
_FOLDER_MARK = "hdi_isfolder"
_NOT_FOUND = 404
_GONE = 404
_CHANGED = 412
_NO_RANGE = 416


class AzureBackend(RemoteBackend):
    """A prefix in a container, with the connections and the credentials of adlfs.

    The token of an upload is a random text that the names of its blocks begin with. A block that
    nobody lists stays invisible and vanishes after a week.
    """

    capabilities = Capabilities(
        kind="azure",
        exclusive_create=True,
        if_match=True,
        atomic_replace=True,
        parallel_parts=True,
        # 50,000 blocks, less a margin that costs nothing.
        max_part_count=45_000,
        max_part_bytes=4000 << 20,
        max_put_bytes=5000 << 20,
        tokens_travel=True,
        # Put Block From URL wants a signed URL of the source, and Azurite answers 501 to it.
    )

    def __init__(self, location: Location, settings: Settings) -> None:
        limit_s = settings.request_timeout_s
        super().__init__(location, location.storage_options, request_timeout_s=limit_s)
        self._container, _, self._prefix = self._client.root.partition("/")
        self._settings: dict[str, Any] = {
            "retry_total": 0,
            "connection_timeout": min(CONNECT_TIMEOUT_S, limit_s),
            "read_timeout": min(READ_TIMEOUT_S, limit_s),
        }

    def stat(self, path: str) -> ObjectInfo:
        """Get Blob Properties."""
        found = self._send("get_blob_properties", path)
        if _is_folder(found):
            raise FileNotFoundError(path)
        return ObjectInfo(
            path=path,
            size_bytes=found.size,
            modified_s=found.last_modified.timestamp(),
            version=found.etag,
            write_id=(found.metadata or {}).get(_WRITE_ID, ""),
        )

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Get Blob; the SDK holds up to 32 MiB of it before its length is known."""

        async def fetch(fs: ForeignFs) -> Content:
            stream = await self._blob(fs, path).download_blob(**self._settings)
            data = await stream.read(-1 if max_bytes is None else max_bytes + 1)
            return Content(data=data, version=stream.properties.etag)

        return self._client.run(fetch)

    def _filled(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Get Blob with a range; the SDK holds up to 32 MiB of it before it is copied."""
        try:
            return self._client.run(partial(self._fill, path, start, view))
        except Exception as error:
            if getattr(error, "status_code", None) != _NO_RANGE:
                raise
            return 0, None

    async def _fill(
        self, path: str, start: int, view: memoryview, fs: ForeignFs
    ) -> tuple[int, int | None]:
        """Fill `view` from `start` (bytes) on; return bytes read and the blob's length."""
        stream = await self._blob(fs, path).download_blob(
            offset=start, length=len(view), **self._settings
        )
        count = 0
        async for piece in stream.chunks():
            taken = piece[: len(view) - count]
            view[count : count + len(taken)] = taken
            count += len(taken)
        return count, total_of(stream.properties.content_range)

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put Blob, in one request up to the SDK's limit of 64 MiB."""
        body = b"".join(data)
        with _exists_if_taken(path, if_absent=if_absent):
            self._send(
                "upload_blob",
                path,
                io.BytesIO(body),
                length=len(body),
                overwrite=True,
                metadata=_metadata(write_id),
                **_condition(if_absent=if_absent, if_match=if_match),
            )

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """List Blobs, with a delimiter for direct children only."""
        cut = len(self._name(""))
        for item in chain.from_iterable(self._pages(prefix, recursive=recursive)):
            name = item.name[cut:]
            if item.get("prefix") is not None:
                yield ObjectInfo(path=f"{name.rstrip('/')}/", size_bytes=0)
            elif not _is_folder(item) and not name.endswith("/"):
                modified_s = item.last_modified.timestamp()
                yield ObjectInfo(path=name, size_bytes=item.size, modified_s=modified_s)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete Blob for each, several at a time."""

        async def delete_one(fs: ForeignFs, path: str) -> None:
            try:
                await self._blob(fs, path).delete_blob(**self._settings)
            except Exception as error:
                is_gone = getattr(error, "status_code", None) == _NOT_FOUND
                if not is_gone or _code_of(error) == "ContainerNotFound":
                    raise

        self._client.run_all(delete_one, paths)

    def delete_version(self, path: str, version: str) -> None:
        """Delete Blob with If-Match."""
        try:
            self._send("delete_blob", path, **_condition(if_match=version))
        except Exception as error:
            status = getattr(error, "status_code", None)
            # Azurite says of a blob that is gone that the condition is not met.
            if status != _GONE and (status != _CHANGED or self._is_there(path)):
                raise

    def _is_there(self, path: str) -> bool:
        try:
            self._send("get_blob_properties", path)
        except Exception as error:
            if getattr(error, "status_code", None) != _GONE:
                raise
            return False
        return True

    def delete_folder(self, path: str) -> bool:
        """Delete all blobs below, page by page, then the folders of a hierarchical namespace."""
        folders, cut = [], len(self._name(""))
        for page in self._pages(path, recursive=True):
            folders += [item.name[cut:] for item in page if _is_folder(item)]
            self.delete([item.name[cut:] for item in page if not _is_folder(item)])
        for name in sorted(folders, key=len, reverse=True):
            self.delete([name])
        if folders:
            self.delete([path])
        return True

    def begin_upload(
        self, path: str, *, write_id: str, if_absent: bool, size_hint: int | None, copies: bool
    ) -> str:
        """Draw a random text; nothing is sent."""
        del path, write_id, if_absent, size_hint, copies
        return os.urandom(8).hex()

    def put_part(
        self, path: str, token: str, number: int, offset: int, data: Buffers, *, last: bool
    ) -> str:
        """Put Block, under a name that no other upload of this path uses."""
        del offset, last
        body = b"".join(data)
        # All names of one blob's blocks must be of one length.
        block_id = base64.b64encode(f"{token}-{number:06d}".encode()).decode()
        self._send("stage_block", path, block_id, io.BytesIO(body), length=len(body))
        return block_id

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str, if_absent: bool
    ) -> None:
        """Put Block List; the same list again changes nothing."""
        from azure.storage.blob import BlobBlock  # noqa: PLC0415  # comes with adlfs

        del token
        with _exists_if_taken(path, if_absent=if_absent):
            self._send(
                "commit_block_list",
                path,
                [BlobBlock(block_id=part.receipt) for part in parts],
                metadata=_metadata(write_id),
                **_condition(if_absent=if_absent),
            )

    def abort_upload(self, path: str, token: str) -> None:
        """Send nothing: blocks that are not listed cannot be removed."""
        del path, token

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Sequence[Any]]:
        below = self._name(f"{prefix}/" if prefix else "")

        async def begin(fs: ForeignFs) -> Any:  # noqa: ANN401  # the SDK's pages
            container = fs.service_client.get_container_client(self._container)
            wanted = {"name_starts_with": below, "include": ["metadata"], **self._settings}
            if recursive:
                return container.list_blobs(**wanted).by_page()
            return container.walk_blobs(delimiter="/", **wanted).by_page()

        async def more(pages: Any) -> Sequence[Any] | None:  # noqa: ANN401  # the SDK's pages
            async for page in pages:
                return [item async for item in page]
            return None

        pages = self._client.run(begin)
        while (page := self._client.run(lambda _: more(pages))) is not None:
            yield page

    def _name(self, path: str) -> str:
        """Return the blob name of a path below the root."""
        return f"{self._prefix}/{path}" if self._prefix else path

    def _blob(self, fs: ForeignFs, path: str) -> Any:  # noqa: ANN401  # the SDK's client
        """Return the SDK's client of one blob; it shares the connections of the service's."""
        return fs.service_client.get_blob_client(self._container, self._name(path))

    def _send(self, method: str, path: str, *arguments: object, **named: object) -> Any:  # noqa: ANN401  # the SDK's answers
        """Call a method of the SDK's client of one blob."""

        async def send(fs: ForeignFs) -> Any:  # noqa: ANN401  # the SDK's answers
            call = getattr(self._blob(fs, path), method)
            return await call(*arguments, **named, **self._settings)

        return self._client.run(send)


@contextlib.contextmanager
def _exists_if_taken(path: str, *, if_absent: bool) -> Iterator[None]:
    """Raise `FileExistsError` for a refusal that says so."""
    try:
        yield
    except Exception as error:
        if not if_absent or _code_of(error) not in {"BlobAlreadyExists", "ConditionNotMet"}:
            raise
        raise FileExistsError(path) from None


def _condition(*, if_absent: bool = False, if_match: str | None = None) -> dict[str, object]:
    from azure.core import MatchConditions  # noqa: PLC0415  # comes with adlfs

    if if_absent:
        return {"match_condition": MatchConditions.IfMissing}
    if if_match is not None:
        return {"etag": if_match, "match_condition": MatchConditions.IfNotModified}
    return {}


def _metadata(write_id: str | None) -> dict[str, str]:
    return {} if write_id is None else {_WRITE_ID: write_id}


def _code_of(error: Exception) -> str:
    """Return the code that Azure gives with an error, or ""."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _is_folder(item: Any) -> bool:  # noqa: ANN401  # the SDK's properties
    """Return whether a blob stands for a folder of a hierarchical namespace."""
    return bool((item.get("metadata") or {}).get(_FOLDER_MARK))
