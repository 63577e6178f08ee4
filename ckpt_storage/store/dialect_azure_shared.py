"""One object on its way into Azure from several processes: blocks under one id, one block list."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_storage.errors import UnsupportedByStoreError

from .backends.clients import Client, ForeignFs
from .base import CopySource, Existing, PartReceipt
from .dialect_azure_upload import (
    WRITE_ID,
    AzureRequests,
    block_id_of,
    delete_ours,
    is_ours,
    stage_block,
)
from .parts import SharedParts, encode_ticket, ended, joined, not_the_owner, whole_object


class AzureSharedUpload:
    """A `SharedUpload`; with `joined_id`, from a ticket, a member's.

    A block that a member sends late lies beside the blob, uncommitted, and vanishes.
    """

    def __init__(
        self, client: Client, requests: AzureRequests, path: str, *, joined_id: str | None = None
    ) -> None:
        self._client = client
        self._requests = requests
        self._path = path
        self._shown = f"az://{requests.container}/{requests.name(path)}"
        self._is_owner = joined_id is None
        self._write_id = joined_id or os.urandom(8).hex()
        self._parts = SharedParts(self._shown)
        self._may_be_visible = False
        self._state = "open"

    def ticket(self) -> str:
        """Return the random id that block ids begin with."""
        return encode_ticket("azure", self._path, {"id": self._write_id})

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Put Block."""
        del last
        self._parts.check_open()
        data = joined(buffers)
        block_id = block_id_of(self._write_id, number)
        self._client.run(lambda fs: stage_block(self._requests, fs, self._path, block_id, data))
        self._parts.add(
            PartReceipt(number=number, offset=offset, size_bytes=len(data), receipt=block_id)
        )

    def copy_part(
        self,
        number: int,
        offset: int,
        source: CopySource,
        source_start: int,
        length: int,
        *,
        source_bytes: int | None = None,
        last: bool,
    ) -> int | None:
        """Refuse; see `dialect_azure.CAPABILITIES`."""
        del number, offset, source_start, length, source_bytes, last
        raise UnsupportedByStoreError(
            f"Ranges of {source.path} cannot be copied into {self._shown} by this storage.",
            kind="unsupported",
            path=self._shown,
            next_step="Read them and write them.",
        )

    def receipts(self) -> list[PartReceipt]:
        """Take no more parts; Azure keeps the blocks for a week."""
        return self._parts.end()

    def complete(
        self,
        total_bytes: int,
        *,
        receipts: Sequence[PartReceipt] = (),
        existing: Existing = "refuse",
    ) -> None:
        """Put Block List; to refuse what exists, with If-None-Match: *."""
        if not self._is_owner:
            raise not_the_owner(self._shown)
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._shown)
        parts = {*self._parts.end(), *receipts}
        self._list_blocks(whole_object(list(parts), total_bytes, shown=self._shown), existing)
        self._state = "complete"

    def abort(self) -> None:
        """Forget the blocks; delete the blob if listing them may have worked after all."""
        self._parts.end()
        if self._state == "complete":
            return
        self._state = "aborted"
        if self._may_be_visible:
            self._client.run(lambda fs: delete_ours(self._requests, fs, self._path, self._write_id))

    def _list_blocks(self, parts: Sequence[PartReceipt], existing: Existing) -> None:
        from azure.core import MatchConditions  # noqa: PLC0415  # only with this backend
        from azure.core.exceptions import (  # noqa: PLC0415  # only with this backend
            ResourceExistsError,
            ResourceModifiedError,
        )
        from azure.storage.blob import BlobBlock  # noqa: PLC0415  # only with this backend

        conditions = {"match_condition": MatchConditions.IfMissing} if existing == "refuse" else {}

        async def commit(fs: ForeignFs) -> None:
            blocks = [BlobBlock(block_id=part.receipt) for part in parts]
            try:
                await self._requests.blob(fs, self._path).commit_block_list(
                    blocks,
                    metadata={WRITE_ID: self._write_id},
                    **conditions,
                    **self._requests.settings,
                )
            except (ResourceExistsError, ResourceModifiedError):
                # Our own, where the answer to an earlier attempt got lost.
                if await is_ours(self._requests, fs, self._path, self._write_id) is None:
                    raise

        self._may_be_visible = True
        self._client.run(commit)
