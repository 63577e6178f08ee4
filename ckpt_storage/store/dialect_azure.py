"""Azure Blob Storage through the SDK's client: one request per call, ETags as conditions.

Accounts with a hierarchical namespace (abfs://) take the same calls. The SDK's own retries are off:
`retry` is the one layer that repeats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_storage.errors import StorageError

from .backends.clients import Client, ForeignFs
from .base import Capabilities, Entry, PathFilter, Stat, Version
from .dialect_azure_shared import AzureSharedUpload
from .dialect_azure_upload import AzureRequests, AzureUpload
from .parts import check_bound, decode_ticket
from .timed import moved

CAPABILITIES = Capabilities(
    kind="azure",
    exclusive_create=True,
    atomic_replace=True,
    if_match=True,
    parallel_parts=True,
    # 50,000 blocks, less a margin that costs nothing.
    max_part_count=45_000,
    max_part_bytes=4000 << 20,
    max_put_bytes=5000 << 20,
    tokens_travel=True,
    # Put Block From URL wants a signed URL of the source, and Azurite answers 501 to it.
)

_FOLDER_MARK = "hdi_isfolder"


class AzureDialect:
    """Speaks to blobs; see `dialect.Dialect`. A token is an ETag."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests = AzureRequests(client)

    @property
    def capabilities(self) -> Capabilities:
        """What Azure promises. Blocks that were not committed cannot be found or removed."""
        return CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Send nothing: asking for the container needs a right that saving does not."""
        del folders

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Get Blob; the SDK holds up to 32 MiB of it before its length is known."""

        async def fetch(fs: ForeignFs) -> Version:
            blob = self._requests.blob(fs, path)
            stream = await blob.download_blob(**self._requests.settings)
            check_bound(stream.size, most_bytes)
            return Version(data=await stream.readall(), version=stream.properties.etag)

        return self._client.run(fetch)

    def read_range(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Get Blob with a range; the SDK holds up to 32 MiB of it before it is copied."""

        async def fetch(fs: ForeignFs) -> tuple[int, int | None]:
            stream = await self._requests.blob(fs, path).download_blob(
                offset=start, length=len(view), **self._requests.settings
            )
            count = 0
            async for piece in stream.chunks():
                taken = piece[: len(view) - count]
                view[count : count + len(taken)] = taken
                count += len(taken)
            total = str(stream.properties.content_range or "").rpartition("/")[2]
            return count, int(total) if total.isdigit() else None

        return self._client.run(fetch)

    def stat(self, path: str) -> Stat:
        """Get Blob Properties."""

        async def ask(fs: ForeignFs) -> Stat:
            found = await self._requests.blob(fs, path).get_blob_properties(
                **self._requests.settings
            )
            if _is_folder(found):
                raise FileNotFoundError(path)
            return Stat(
                path=path, size_bytes=found.size, modified_s=found.last_modified.timestamp()
            )

        return self._client.run(ask)

    def put(self, path: str, data: bytes) -> None:
        """Put Blob."""
        self._client.run(lambda fs: self._requests.upload(fs, path, data, overwrite=True))

    def create(self, path: str, data: bytes) -> None:
        """Put Blob with If-None-Match: *."""
        self._client.run(lambda fs: self._requests.upload(fs, path, data, overwrite=False))

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """Put Blob with If-Match."""
        from azure.core import MatchConditions  # noqa: PLC0415  # only with this backend

        self._client.run(
            lambda fs: self._requests.upload(
                fs,
                path,
                data,
                overwrite=True,
                etag=token,
                match_condition=MatchConditions.IfNotModified,
            )
        )

    def start_upload(self, path: str, *, part_bytes: int) -> AzureUpload:
        """Begin a list of blocks; nothing is sent before the first part."""
        del part_bytes
        return AzureUpload(self._client, self._requests, path)

    def start_shared_upload(self, path: str) -> AzureSharedUpload:
        """Begin a list of blocks whose ids begin with a random one."""
        return AzureSharedUpload(self._client, self._requests, path)

    def join_upload(self, path: str, ticket: str) -> AzureSharedUpload:
        """Take over the random id."""
        write_id = decode_ticket(ticket, "azure", path, {"id"})["id"]
        return AzureSharedUpload(self._client, self._requests, path, joined_id=write_id)

    def copy_place(self, path: str) -> tuple[str, str] | None:
        """Return that nothing can be copied."""
        del path
        return None

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """List Blobs, with a delimiter for direct children only."""
        cut = len(self._requests.name(""))
        entries = []
        pages = self._pages(prefix, recursive=recursive)
        for item in (item for page in pages for item in page):
            name = item.name[cut:]
            if item.get("prefix") is not None:
                entries.append(Entry(path=f"{name.rstrip('/')}/", size_bytes=0))
            elif not _is_folder(item) and not name.endswith("/"):
                entries.append(
                    Entry(
                        path=name,
                        size_bytes=item.size,
                        modified_s=item.last_modified.timestamp(),
                    )
                )
        return entries

    def delete(self, paths: Sequence[str]) -> None:
        """Delete Blob for each, several at a time."""
        self._delete_names([self._requests.name(path) for path in paths])

    def delete_folder(self, path: str) -> None:
        """Delete all blobs below, page by page, then the folders of a hierarchical namespace."""
        folders: list[str] = []
        for page in self._pages(path, recursive=True):
            folders += [item.name for item in page if _is_folder(item)]
            self._delete_names([item.name for item in page if not _is_folder(item)])
        for name in sorted(folders, key=len, reverse=True):
            self._delete_names([name])
        if folders:
            self._delete_names([self._requests.name(path)])

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """Find none: blocks that were not committed are invisible and vanish after a week."""
        del prefix, only
        return 0

    def now_s(self, probe_path: str) -> float:
        """Put Blob, whose answer tells the time that Azure gave."""
        made = self._client.run(
            lambda fs: self._requests.upload(fs, probe_path, b"clock\n", overwrite=True)
        )
        with contextlib.suppress(Exception):
            self.delete([probe_path])
        modified = made.get("last_modified")
        if modified is None:
            raise StorageError("The server gives objects no time.")
        return float(modified.timestamp())

    def _pages(self, prefix: str, *, recursive: bool) -> Iterator[Sequence[Any]]:
        below = self._requests.name(f"{prefix}/" if prefix else "")

        async def begin(fs: ForeignFs) -> Any:  # noqa: ANN401  # the SDK's pages
            container = fs.service_client.get_container_client(self._requests.container)
            arguments = {"name_starts_with": below, "include": ["metadata"]}
            if recursive:
                items = container.list_blobs(**arguments, **self._requests.settings)
            else:
                items = container.walk_blobs(**arguments, delimiter="/", **self._requests.settings)
            return items.by_page()

        async def more(pages: Any) -> Sequence[Any] | None:  # noqa: ANN401  # the SDK's pages
            async for page in pages:
                return [item async for item in page]
            return None

        pages = self._client.run(begin)
        while (page := self._client.run(lambda _: more(pages))) is not None:
            moved()
            yield page

    def _delete_names(self, names: Sequence[str]) -> None:
        async def delete_one(fs: ForeignFs, name: str) -> None:
            from azure.core.exceptions import (  # noqa: PLC0415  # only with this backend
                ResourceNotFoundError,
            )

            container = fs.service_client.get_container_client(self._requests.container)
            try:
                await container.delete_blob(name, **self._requests.settings)
            except ResourceNotFoundError as error:
                if getattr(error, "error_code", "") == "ContainerNotFound":
                    raise

        self._client.run_all(delete_one, names)


def _is_folder(item: Any) -> bool:  # noqa: ANN401  # the SDK's properties
    """Return whether a blob stands for a folder of a hierarchical namespace."""
    return bool((item.get("metadata") or {}).get(_FOLDER_MARK))
