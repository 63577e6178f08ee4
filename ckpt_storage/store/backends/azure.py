"""Azure Blob Storage through the SDK's client, with the connections and credentials of adlfs.

Accounts with a hierarchical namespace (abfs://) take the same calls.
"""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.store.backend import Backend, Buffers, CopySource, Part, Settings
from ckpt_storage.store.location import Location
from ckpt_storage.store.problems import check_copied, upload_error
from ckpt_storage.store.threads import report_progress

from . import clouds
from .client_registry import ForeignFs

log = logging.getLogger("ckpt_storage")

_WRITE_ID = "ckptwriteid"
_FOLDER_MARK = "hdi_isfolder"
_COPY_POLL_S = 0.2
_NO_COPY = frozenset({"CannotVerifyCopySource", "CopyAcrossAccountsNotSupported"})


class AzureBackend(clouds.CloudBackend):
    """A prefix in a container; versions are ETags.

    A token is the prefix of the names of an upload's blocks; blocks not committed end after a week.
    """

    capabilities = replace(
        clouds.CLOUD,
        kind="azure",
        parallel_parts=True,
        # 50,000 blocks, less a margin that costs nothing.
        max_part_count=45_000,
        max_part_bytes=4000 << 20,
        max_put_bytes=5000 << 20,
        tokens_travel=True,
        copies_objects=True,
        # Put Block From URL wants a signed URL of the source, and Azurite answers 501 to it.
    )

    def __init__(self, location: Location, settings: Settings) -> None:
        super().__init__(location, settings)
        connect_s, read_s = clouds.client_timeouts(self._timeout_s)
        timeouts = {"connection_timeout": connect_s, "read_timeout": read_s}
        self._settings: dict[str, Any] = {"retry_total": 0, **timeouts}

    tail = Backend.tail
    """Blob Storage has no ranges that count from the end."""

    async def _head(self, fs: ForeignFs, path: str) -> clouds.ObjectStat:
        blob = await self._request(fs, "get_blob_properties", path)
        if _is_folder(blob):
            raise FileNotFoundError(path)
        write_id = (blob.metadata or {}).get(_WRITE_ID, "")
        return blob.size, blob.last_modified.timestamp(), blob.etag, write_id

    @contextlib.asynccontextmanager
    async def _body(
        self, fs: ForeignFs, path: str, start: int | None, length: int
    ) -> AsyncIterator[clouds.Body]:
        """Get Blob; the SDK holds up to 32 MiB of it before the first piece."""
        span = {} if start is None else {"offset": start, "length": length}
        stream = await self._request(fs, "download_blob", path, **span)
        first, total_bytes = clouds.span_of(stream.properties.content_range, stream.size)
        version = stream.properties.etag
        yield clouds.Body(
            pieces=stream.chunks(), first=first, total_bytes=total_bytes, version=version
        )

    async def _put(
        self,
        fs: ForeignFs,
        path: str,
        data: Buffers,
        write_id: str | None,
        terms: clouds.Preconditions,
    ) -> None:
        """Put Blob, in one request up to the SDK's limit of 64 MiB."""
        body = b"".join(data)
        options = {"length": len(body), "overwrite": True, "metadata": _metadata(write_id)}
        options["validate_content"] = True  # an MD5 that the service checks
        await self._request(fs, "upload_blob", path, io.BytesIO(body), **options, **terms)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete blobs, but none with "." or ".." in its path.

        aiohttp, the SDK's HTTP client, resolves these, so that another blob would be deleted.
        """
        safe = [path for path in paths if {".", ".."}.isdisjoint(path.split("/"))]
        if len(safe) < len(paths):
            unsafe = next(path for path in paths if path not in safe)
            log.warning("Names such as %r are not deleted", unsafe)
        super().delete(safe)

    async def _delete(self, fs: ForeignFs, path: str, terms: clouds.Preconditions) -> None:
        # `_page` appended a slash to blobs that stand for folders.
        await self._request(fs, "delete_blob", path.removesuffix("/"), **terms)

    async def _page(self, fs: ForeignFs, below: str, more: Any, *, recursive: bool) -> clouds.Page:
        container = fs.service_client.get_container_client(self._place[0])
        options = {"name_starts_with": below, "include": ["metadata"], **self._settings}
        list_blobs = container.list_blobs if recursive else container.walk_blobs
        pages = list_blobs(**options).by_page(more)
        entries = []
        async for page in pages:
            async for item in page:
                if item.get("prefix") is not None:
                    entries.append(self._listed(f"{item.name.rstrip('/')}/"))
                elif _is_folder(item) or item.name.endswith("/"):
                    entries += [self._listed(f"{item.name}/")] if recursive else []
                else:
                    changed_s = item.last_modified.timestamp()
                    entries.append(self._listed(item.name, item.size, changed_s))
            break
        return entries, pages.continuation_token

    def _terms(
        self, *, if_absent: bool = False, if_match: str | None = None
    ) -> clouds.Preconditions:
        from azure.core import MatchConditions  # noqa: PLC0415  # comes with adlfs

        if if_absent:
            return {"match_condition": MatchConditions.IfMissing}
        if if_match is not None:
            return {"etag": if_match, "match_condition": MatchConditions.IfNotModified}
        return {}

    def begin_upload(self, path: str, *, write_id: str) -> str:
        """Return a random text; no request is sent."""
        return os.urandom(8).hex()

    def put_part(self, path: str, token: str, part: Part, data: Buffers, *, last: bool) -> str:
        """Put Block, with a name that no other upload of this path uses."""
        body = b"".join(data)
        if part.crc32c not in {None, crc32c_of(body)}:
            # Put Block takes no CRC-32C, and the SDK's MD5 is that of `body`.
            raise upload_error(path, f"got other bytes at {part.offset} than were hashed")
        # All names of a blob's blocks must have the same length.
        block_id = base64.b64encode(f"{token}-{part.number:06d}".encode()).decode()
        checked = {"length": len(body), "validate_content": True}
        self._run(self._request, "stage_block", path, block_id, io.BytesIO(body), **checked)
        return block_id

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str
    ) -> None:
        """Put Block List; idempotent."""
        from azure.storage.blob import BlobBlock  # noqa: PLC0415  # comes with adlfs

        blocks = [BlobBlock(block_id=part.receipt) for part in parts]
        self._run(self._request, "commit_block_list", path, blocks, metadata=_metadata(write_id))

    def abort_upload(self, path: str, token: str) -> None:
        """Do nothing: blocks that are not committed cannot be removed."""

    def copy_object(self, path: str, source: CopySource, *, size_bytes: int) -> None:
        """Copy Blob within the account, which continues after its response; reports no checksum."""

        async def begin(fs: ForeignFs) -> None:
            blob = fs.service_client.get_blob_client(self._place[0], source.address)
            await self._request(fs, "start_copy_from_url", path, blob.url)

        try:
            self._run(begin)
        except Exception as error:
            if getattr(error, "error_code", "") in _NO_COPY:
                what = f"{source.path} cannot be copied with these credentials."
                raise UnsupportedByStoreError(what) from error
            raise
        while True:
            blob = self._run(self._request, "get_blob_properties", path)
            if blob.copy.status != "pending":
                break
            report_progress()
            time.sleep(_COPY_POLL_S)
        if blob.copy.status != "success":
            what = f"The copy to {path} ended: {blob.copy.status} {blob.copy.status_description}."
            raise StorageError(what, retryable=True, next_step="Copy again.")
        check_copied(source.path, blob.size, size_bytes)

    async def _request(
        self, fs: ForeignFs, method: str, path: str, *arguments: Any, **named: Any
    ) -> Any:
        """Call a method of the SDK's client of one blob, which shares the service's connections."""
        blob = fs.service_client.get_blob_client(self._place[0], self._name(path))
        return await getattr(blob, method)(*arguments, **named, **self._settings)


def _metadata(write_id: str | None) -> dict[str, str]:
    return {} if write_id is None else {_WRITE_ID: write_id}


def _is_folder(item: Any) -> bool:
    """Return whether a blob stands for a folder of a hierarchical namespace."""
    return bool((item.get("metadata") or {}).get(_FOLDER_MARK))
