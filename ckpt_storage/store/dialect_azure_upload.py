"""One object on its way into Azure: blocks staged in any order, then listed in one request."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from typing import Any

from ckpt_storage.options import MIB

from .backends.clients import Client, ForeignFs
from .parts import PartList, SentPart, ended, joined, wrong_length

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0


class AzureRequests:
    """The client of one container, and what every request is sent with."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.container, _, self._prefix = client.root.partition("/")
        self.settings = {
            "retry_total": 0,
            "connection_timeout": min(_CONNECT_TIMEOUT_S, client.request_timeout_s),
            "read_timeout": min(_READ_TIMEOUT_S, client.request_timeout_s),
        }

    def name(self, path: str) -> str:
        """Return the blob name of a path below the root."""
        return f"{self._prefix}/{path}" if self._prefix else path

    def blob(self, fs: ForeignFs, path: str) -> Any:  # noqa: ANN401  # the SDK's client
        """Return the SDK's client of one blob; it shares the connections of the service's."""
        return fs.service_client.get_blob_client(self.container, self.name(path))

    async def upload(self, fs: ForeignFs, path: str, data: bytes, **conditions: object) -> Any:  # noqa: ANN401  # the SDK's dict
        """Put Blob, in one request up to the SDK's limit of 64 MiB."""
        return await self.blob(fs, path).upload_blob(
            io.BytesIO(data), length=len(data), **{**self.settings, **conditions}
        )


WRITE_ID = "ckptwriteid"
"""Metadata that tells one attempt to write a name from another."""

_ONE_PUT_BYTES = 32 * MIB
"""Up to here one Put Blob does; the SDK would cut it at 64 MiB."""


class AzureUpload:
    """An `Upload`; listing the same blocks again changes nothing, so a lost answer does no harm.

    An object of one part that is not large is kept until `complete`: it needs one request.
    """

    def __init__(self, client: Client, requests: AzureRequests, path: str) -> None:
        self._client = client
        self._requests = requests
        self._path = path
        self._shown = f"az://{requests.container}/{requests.name(path)}"
        self._write_id = os.urandom(8).hex()
        self._only_part: bytes | None = None
        self._parts = PartList()
        self._may_be_visible = False
        self._state = "open"

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Put Block, under an id that no other upload of this name uses."""
        if self._state != "open":
            raise ended(self._shown)
        data = joined(buffers)
        if last and number == 0 and len(data) <= _ONE_PUT_BYTES:
            self._only_part = data
            return
        block_id = block_id_of(self._write_id, number)
        self._client.run(lambda fs: stage_block(self._requests, fs, self._path, block_id, data))
        self._parts.add(number, SentPart(offset=offset, size_bytes=len(data), receipt=block_id))

    def complete(self, total_bytes: int) -> None:
        """Put Blob or Put Block List; the name is write-once and needs no condition."""
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._shown)
        if self._only_part is not None:
            self._put(self._only_part, total_bytes)
        else:
            self._list_blocks(total_bytes)
        self._state = "complete"
        self._only_part = None

    def abort(self) -> None:
        """Forget the blocks; delete the blob if listing them may have worked after all."""
        if self._state == "complete":
            return
        self._state = "aborted"
        self._only_part = None
        if self._may_be_visible:
            self._client.run(lambda fs: delete_ours(self._requests, fs, self._path, self._write_id))

    def _put(self, data: bytes, total_bytes: int) -> None:
        if len(data) != total_bytes:
            raise wrong_length(self._shown, len(data), total_bytes)
        self._may_be_visible = True
        self._client.run(
            lambda fs: self._requests.upload(
                fs, self._path, data, overwrite=True, metadata={WRITE_ID: self._write_id}
            )
        )

    def _list_blocks(self, total_bytes: int) -> None:
        parts = self._parts.whole(total_bytes, shown=self._shown)

        async def commit(fs: ForeignFs) -> None:
            from azure.storage.blob import BlobBlock  # noqa: PLC0415  # only with this backend

            blocks = [BlobBlock(block_id=part.receipt) for _, part in parts]
            await self._requests.blob(fs, self._path).commit_block_list(
                blocks, metadata={WRITE_ID: self._write_id}, **self._requests.settings
            )

        self._may_be_visible = True
        self._client.run(commit)


def block_id_of(write_id: str, number: int) -> str:
    """Return the id of a block; ids of one blob must be of one length."""
    return base64.b64encode(f"{write_id}-{number:06d}".encode()).decode()


async def stage_block(
    requests: AzureRequests, fs: ForeignFs, path: str, block_id: str, data: bytes
) -> None:
    """Put Block."""
    await requests.blob(fs, path).stage_block(
        block_id, io.BytesIO(data), length=len(data), **requests.settings
    )


async def is_ours(requests: AzureRequests, fs: ForeignFs, path: str, write_id: str) -> int | None:
    """Return the length of the blob if it is the one that `write_id` stands for, else None."""
    from azure.core.exceptions import ResourceNotFoundError  # noqa: PLC0415  # only with this

    try:
        found = await requests.blob(fs, path).get_blob_properties(**requests.settings)
    except ResourceNotFoundError:
        return None
    ours = (found.metadata or {}).get(WRITE_ID) == write_id
    return int(found.size) if ours else None


async def delete_ours(requests: AzureRequests, fs: ForeignFs, path: str, write_id: str) -> None:
    """Delete the blob if it is the one that `write_id` stands for."""
    from azure.core import MatchConditions  # noqa: PLC0415  # only with this backend
    from azure.core.exceptions import (  # noqa: PLC0415  # only with this backend
        ResourceModifiedError,
        ResourceNotFoundError,
    )

    blob = requests.blob(fs, path)
    try:
        found = await blob.get_blob_properties(**requests.settings)
        if (found.metadata or {}).get(WRITE_ID) == write_id:
            await blob.delete_blob(
                etag=found.etag,
                match_condition=MatchConditions.IfNotModified,
                **requests.settings,
            )
    except (ResourceModifiedError, ResourceNotFoundError):
        return
