"""Google Cloud Storage through its JSON API: one request per call, generations as conditions.

Works on buckets of the usual kinds; zonal ones (Rapid Storage) take no such uploads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ckpt_storage.errors import StorageError
from ckpt_storage.options import KIB

from .backends.clients import Client
from .base import Capabilities, Entry, PathFilter, Stat, Version
from .dialect_gcs_requests import GcsRequests
from .dialect_gcs_upload import GcsUpload
from .problems import ForeignAnswer
from .timed import moved

CAPABILITIES = Capabilities(
    kind="gcs",
    exclusive_create=True,
    atomic_replace=True,
    if_match=True,
    parallel_parts=False,
    part_multiple_bytes=256 * KIB,
)

_PAGE_COUNT = 1000
_NOT_FOUND = 404


class GcsDialect:
    """Speaks the JSON API; see `dialect.Dialect`. A token is an object's generation."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._requests = GcsRequests(client)

    @property
    def capabilities(self) -> Capabilities:
        """What Google promises; parts of a resumable upload come in order."""
        return CAPABILITIES

    def prepare(self, folders: Sequence[str]) -> None:
        """Send nothing: asking for the bucket needs a right that saving does not."""
        del folders

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Objects: get with alt=media; the generation stands in the answer's headers."""
        reply = self._client.run(
            lambda fs: self._requests.send(
                fs,
                "GET",
                self._requests.media(path),
                query={"alt": "media"},
                most_bytes=most_bytes,
            )
        )
        if "X-Goog-Generation" not in reply.headers:
            raise ForeignAnswer("X-Goog-Generation")
        return Version(data=reply.body, version=reply.headers["X-Goog-Generation"])

    def read_range(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Objects: get with alt=media and Range, the body copied piece by piece."""
        return self._client.run(
            lambda fs: self._requests.fetch(fs, self._requests.media(path), start, view)
        )

    def stat(self, path: str) -> Stat:
        """Objects: get."""
        found = self._client.run(
            lambda fs: self._requests.send(fs, "GET", self._requests.object(path))
        ).document()
        return Stat(
            path=path, size_bytes=int(found["size"]), modified_s=_seconds(found.get("updated"))
        )

    def put(self, path: str, data: bytes) -> None:
        """Objects: insert, in one request."""
        self._insert(path, data)

    def create(self, path: str, data: bytes) -> None:
        """Objects: insert with ifGenerationMatch=0, in one request."""
        self._insert(path, data, condition="0")

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """Objects: insert with ifGenerationMatch, in one request."""
        self._insert(path, data, condition=token)

    def start_upload(self, path: str, *, part_bytes: int) -> GcsUpload:
        """Begin an upload; its first request comes with its first part."""
        del part_bytes
        return GcsUpload(self._client, self._requests, path)

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """Objects: list, with a delimiter for direct children only."""
        entries = []
        cut = len(self._requests.name(""))
        for page in self._pages(self._below(prefix), recursive=recursive):
            entries += [
                Entry(
                    path=item["name"][cut:],
                    size_bytes=int(item["size"]),
                    modified_s=_seconds(item.get("updated")),
                )
                for item in page.get("items", ())
                # Consoles make folders as empty objects with a slash at the end.
                if not item["name"].endswith("/")
            ]
            entries += [Entry(path=name[cut:], size_bytes=0) for name in page.get("prefixes", ())]
        return entries

    def delete(self, paths: Sequence[str]) -> None:
        """Objects: delete, several at a time."""
        self._delete_names([self._requests.name(path) for path in paths])

    def delete_folder(self, path: str) -> None:
        """Delete every name below the prefix, page by page."""
        for page in self._pages(self._below(path), recursive=True):
            self._delete_names([item["name"] for item in page.get("items", ())])

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """Find none: the API lists no sessions. Google drops them after a week, unbilled."""
        del prefix, only
        return 0

    def now_s(self, probe_path: str) -> float:
        """Objects: insert, whose answer tells the time that Google gave."""
        made = self._insert(probe_path, b"clock\n")
        with contextlib.suppress(Exception):
            self.delete([probe_path])
        now_s = _seconds(made.get("updated"))
        if now_s is None:
            raise StorageError("The server gives objects no time.")
        return now_s

    def _insert(self, path: str, data: bytes, *, condition: str | None = None) -> Mapping[str, Any]:
        return self._client.run(
            lambda fs: self._requests.insert(fs, path, data, condition=condition)
        )

    def _below(self, prefix: str) -> str:
        """Return the name prefix of everything below a folder; "" is the whole bucket."""
        return self._requests.name(f"{prefix}/" if prefix else "")

    def _pages(self, below: str, *, recursive: bool) -> Iterator[Mapping[str, Any]]:
        query = {
            "prefix": below,
            "maxResults": str(_PAGE_COUNT),
            "fields": "kind,items(name,size,updated),prefixes,nextPageToken",
        }
        if not recursive:
            query["delimiter"] = "/"
        while True:
            page = self._page(query)
            moved()
            yield page
            token = page.get("nextPageToken")
            if not token:
                return
            query = {**query, "pageToken": token}

    def _page(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        address = self._requests.objects()
        return self._client.run(
            lambda fs: self._requests.send(fs, "GET", address, query=query)
        ).document("objects")

    def _delete_names(self, names: Sequence[str]) -> None:
        self._client.run_all(
            lambda fs, name: self._requests.send(
                fs, "DELETE", self._requests.named(name), accepts={_NOT_FOUND}
            ),
            names,
        )


def _seconds(stamp: str | None) -> float | None:
    """Return Unix seconds for a timestamp of RFC 3339."""
    return None if stamp is None else datetime.fromisoformat(stamp).timestamp()
