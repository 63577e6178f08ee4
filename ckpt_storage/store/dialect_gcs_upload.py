"""One object on its way into Google Cloud Storage: held back if small, else a resumable session."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_storage.errors import StorageError
from ckpt_storage.options import KIB

from .backends.clients import Client, ForeignFs
from .dialect_gcs_requests import WRITE_ID, GcsRequests, Reply
from .parts import PartList, SentPart, ended, joined, wrong_length
from .problems import HttpFailure

_MULTIPLE_BYTES = 256 * KIB
_GOES_ON = 308
_CANCELLED = 499
_GONE = frozenset({404, 410})
_CHANGED = 412
_DONE = frozenset({200, 201})


class GcsUpload:
    """An `Upload`; the session shows the object with its last bytes, so those are held back.

    An object of one part is kept until `complete`, which inserts it in one request.
    """

    def __init__(self, client: Client, requests: GcsRequests, path: str) -> None:
        self._client = client
        self._requests = requests
        self._path = path
        self._shown = f"gs://{requests.bucket}/{requests.name(path)}"
        self._write_id = os.urandom(16).hex()
        self._session: str | None = None
        self._parts = PartList()
        self._kept_bytes = 0
        self._tail = b""
        self._has_last = False
        self._is_sure = True
        self._may_be_visible = False
        self._state = "open"

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Send a part to the session, which the first one begins; the end of the last is kept."""
        if self._state != "open":
            raise ended(self._shown)
        data = joined(buffers)
        if last:
            # What is sent must be a multiple; at least a byte stays to end the object with.
            keeps = len(data) - (max(0, len(data) - 1) // _MULTIPLE_BYTES) * _MULTIPLE_BYTES
            keeps = len(data) if number == 0 else keeps
            self._tail = data[len(data) - keeps :]
            self._has_last = True
            self._send(data[: len(data) - keeps], offset)
        else:
            self._send(data, offset)
        self._parts.add(number, SentPart(offset=offset, size_bytes=len(data), receipt=""))

    def complete(self, total_bytes: int) -> None:
        """Insert the only part, or send the session its last bytes with the length of all."""
        if self._state == "complete":
            return
        if self._state != "open":
            raise ended(self._shown)
        self._parts.whole(total_bytes, shown=self._shown)
        self._may_be_visible = True
        if self._session is None:
            self._client.run(
                lambda fs: self._requests.insert(
                    fs, self._path, self._tail, metadata={WRITE_ID: self._write_id}
                )
            )
        else:
            self._finish(self._session, total_bytes)
        self._state = "complete"
        self._tail = b""

    def abort(self) -> None:
        """Cancel the session; delete the object if completing it may have worked after all."""
        if self._state == "complete":
            return
        self._state = "aborted"
        self._tail = b""
        session = self._session
        if session is not None:
            self._client.run(
                lambda fs: self._requests.send(
                    fs, "DELETE", session, data=b"", accepts={*_GONE, _CANCELLED}
                )
            )
        found = self._found() if self._may_be_visible else None
        if found is not None:
            same = {"ifGenerationMatch": str(found["generation"])}
            self._client.run(
                lambda fs: self._requests.send(
                    fs,
                    "DELETE",
                    self._requests.object(self._path),
                    query=same,
                    accepts={*_GONE, _CHANGED},
                )
            )

    def _send(self, data: bytes, offset: int) -> None:
        """Send bytes that are not the last, from where the session has come to."""
        if not data:
            return
        session = self._begun()
        if not self._is_sure:
            self._kept_bytes = self._asked(session)
        end = offset + len(data)
        while self._kept_bytes < end:
            start = self._kept_bytes
            if start < offset:
                raise StorageError(
                    f"The upload of {self._shown} holds {start} bytes, and the part at "
                    f"{offset} cannot follow.",
                    path=self._shown,
                    next_step="Save again.",
                )
            self._is_sure = False
            reply = self._put(session, data[start - offset :], f"bytes {start}-{end - 1}/*")
            self._kept_bytes = _kept(reply)
            self._is_sure = True
            if self._kept_bytes <= start:
                raise StorageError(
                    f"The upload of {self._shown} makes no progress at byte {start}.",
                    retryable=True,
                    path=self._shown,
                    next_step="Try again later; the fault is the storage's.",
                )

    def _finish(self, session: str, total_bytes: int) -> None:
        start = total_bytes - len(self._tail)
        if not self._is_sure:
            reply = self._status(session, total_bytes)
            if reply.status != _GOES_ON:
                self._check(reply, total_bytes)
                return
            self._kept_bytes = _kept(reply)
        if self._kept_bytes < start:
            raise wrong_length(self._shown, self._kept_bytes, total_bytes)
        rest = self._tail[self._kept_bytes - start :]
        span = f"{self._kept_bytes}-{total_bytes - 1}" if rest else "*"
        self._is_sure = False
        reply = self._put(session, rest, f"bytes {span}/{total_bytes}", accepts=_GONE)
        if reply.status == _GOES_ON:
            raise StorageError(
                f"The server kept {_kept(reply)} of {total_bytes} bytes of {self._shown}.",
                retryable=True,
                path=self._shown,
                next_step="Try again later; the fault is the storage's.",
            )
        self._check(reply, total_bytes)

    def _check(self, reply: Reply, total_bytes: int) -> None:
        """Accept the object that a session ended with, or that it left behind when it went."""
        found_bytes: int | None
        if reply.status in _DONE:
            found_bytes = int(reply.document()["size"])
        else:
            found = self._found()
            found_bytes = None if found is None else int(found["size"])
        if found_bytes != total_bytes:
            raise StorageError(
                f"The upload of {self._shown} ended with {found_bytes} bytes instead of "
                f"{total_bytes}.",
                path=self._shown,
                next_step="Save again.",
            )

    def _found(self) -> Mapping[str, Any] | None:
        """Return what is known of the object if it is the one that this upload wrote."""
        reply = self._client.run(
            lambda fs: self._requests.send(
                fs, "GET", self._requests.object(self._path), accepts=_GONE
            )
        )
        if reply.status in _GONE:
            return None
        found = reply.document()
        ours = found.get("metadata", {}).get(WRITE_ID) == self._write_id
        return found if ours else None

    def _begun(self) -> str:
        if self._session is None:
            self._session = self._client.run(self._begin)
        return self._session

    async def _begin(self, fs: ForeignFs) -> str:
        reply = await self._requests.send(
            fs,
            "POST",
            f"/upload{self._requests.objects()}",
            query={"uploadType": "resumable", "name": self._requests.name(self._path)},
            headers={"Content-Type": "application/json; charset=UTF-8"},
            data=json.dumps({"metadata": {WRITE_ID: self._write_id}}).encode(),
        )
        location = reply.headers.get("Location")
        if not location:
            raise HttpFailure(status=reply.status, message="no address for the upload was given")
        return location

    def _asked(self, session: str) -> int:
        """Return how many bytes the session holds."""
        reply = self._status(session, None)
        if reply.status != _GOES_ON:
            raise StorageError(
                f"The upload of {self._shown} was ended by the server (status {reply.status}).",
                path=self._shown,
                next_step="Save again.",
            )
        return _kept(reply)

    def _status(self, session: str, total_bytes: int | None) -> Reply:
        whole = "*" if total_bytes is None else str(total_bytes)
        return self._put(session, b"", f"bytes */{whole}", accepts=_GONE)

    def _put(
        self, session: str, data: bytes, span: str, *, accepts: frozenset[int] = frozenset()
    ) -> Reply:
        headers = {"Content-Range": span}
        return self._client.run(
            lambda fs: self._requests.send(
                fs, "PUT", session, headers=headers, data=data, accepts=accepts
            )
        )


def _kept(reply: Reply) -> int:
    """Return how many bytes a session says it holds: "bytes=0-524287" is 524288."""
    end = reply.headers.get("Range", "").rpartition("-")[2]
    return int(end) + 1 if end.isdigit() else 0
