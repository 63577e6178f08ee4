"""S3, Google Cloud Storage and Azure through obstore, the Rust client; the rest through fsspec.

Knows which requests obstore makes as the protocol needs them: get, ranges, put, conditional put and
(but on Google Cloud Storage) streamed uploads. Listings, deletions, open uploads of others and
shared uploads are left to the fsspec dialect of the family, which is built when the first of them
is asked for. Called by `remote`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .base import Arrived, Capabilities, Entry, PathFilter, SharedUpload, Stat, Upload, Version
from .bounds import check_bound
from .mapping import HttpFailure
from .obstore_client import ObstoreClient
from .obstore_errors import is_whole_answer
from .obstore_feed import MOST_VIEWS
from .obstore_upload import ObstoreUpload

__all__ = ["ObstoreDialect", "capabilities_of"]


_FOLDER_MARK = "hdi_isfolder"
"""Metadata of what stands for a folder of Azure's hierarchical namespace."""

_UNTOLD = frozenset({400, 403})

_PIECE_BYTES = 256 << 10
"""Copied and checked while it, and what it is a copy of, are in a processor's own cache.

Python's lock is kept meanwhile: giving it away and waiting for it takes longer than 30 us."""


class ObstoreDialect:
    """Speaks through obstore; see `dialect.Dialect`. A token is an ETag, on GCS a generation.

    `complement` returns the fsspec dialect, which it builds when first called.
    """

    def __init__(self, client: ObstoreClient, complement: Callable[[], Any]) -> None:
        self._client = client
        self._complement = complement
        self._capabilities = capabilities_of(client.family)

    @property
    def capabilities(self) -> Capabilities:
        """What the family can do: the same as through fsspec."""
        return self._capabilities

    def refresh(self) -> None:
        """Build obstore's stores anew, so that credentials are looked up again."""
        self._client.refresh()

    def prepare(self, folders: Sequence[str]) -> None:
        """Send nothing, as no family of object stores has folders that must be made."""
        del folders

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """GET of the whole object, with the token of the same answer."""
        import obstore  # noqa: PLC0415  # an extra

        name = self._client.name(path)

        def fetch(store: Any) -> Version:  # noqa: ANN401  # obstore's store
            answer = obstore.get(store, name)
            check_bound(answer.meta["size"], most_bytes)
            token = answer.meta["version" if self._client.family == "gcs" else "e_tag"]
            return Version(data=bytes(answer.bytes()), token=token)

        return self._client.run("read", fetch)

    def read_range(
        self,
        path: str,
        start: int,
        view: memoryview,
        *,
        size_bytes: int | None = None,
        arrived: Arrived | None = None,
    ) -> tuple[int, int | None]:
        """GET with Range, copied once out of obstore's memory, piece by piece for `arrived`.

        Of an object that is not `size_bytes` long nothing is copied. A server that answers with
        the whole object is read by the complement, which skips what was not asked for, or refuses.
        """
        found = self._get_range(path, start, view.nbytes)
        if found is None:
            answer: tuple[int, int | None] = self._complement().read_range(path, start, view)
            return answer
        data, total_bytes = found
        if size_bytes is not None and total_bytes != size_bytes:
            return 0, total_bytes
        count = min(len(data), view.nbytes)
        if arrived is not None:
            arrived(0)
        for at in range(0, count, _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, count)
            view[at:stop] = data[at:stop]
            # A short answer is no reason to judge what came of it.
            if arrived is not None and count == view.nbytes:
                arrived(stop)
        return count, total_bytes

    def read_lent(self, path: str, start: int, length: int) -> tuple[memoryview, int | None]:
        """GET with Range: what came, in obstore's memory, and how many bytes the object has."""
        found = self._get_range(path, start, length)
        if found is not None:
            return found
        view = memoryview(bytearray(length))
        count, total_bytes = self._complement().read_range(path, start, view)
        return view[:count], total_bytes

    def _get_range(self, path: str, start: int, length: int) -> tuple[memoryview, int] | None:
        """Return what came and the object's size; None if the whole object was the answer."""
        import obstore  # noqa: PLC0415  # an extra

        name = self._client.name(path)

        def fetch(store: Any) -> tuple[memoryview, int] | None:  # noqa: ANN401  # obstore's store
            try:
                answer = obstore.get(store, name, options={"range": (start, start + length)})
            except obstore.exceptions.GenericError as error:
                if is_whole_answer(error):
                    return None
                raise
            return memoryview(answer.bytes()), answer.meta["size"]

        return self._client.run("read", fetch)

    def stat(self, path: str) -> Stat:
        """HEAD; if it is refused, GET of a byte, as only that answer says why."""
        import obstore  # noqa: PLC0415  # an extra

        name = self._client.name(path)
        try:
            found = self._client.run(
                "read", lambda store: obstore.get(store, name, options={"head": True})
            )
        except HttpFailure as error:
            if error.status not in _UNTOLD:
                raise
            self.read_range(path, 0, memoryview(bytearray(1)))
            raise
        if found.attributes.get(_FOLDER_MARK):
            raise FileNotFoundError(path)
        meta = found.meta
        return Stat(size_bytes=meta["size"], modified_s=meta["last_modified"].timestamp())

    def put(self, path: str, data: bytes) -> None:
        """PUT, in one request."""
        self._put(path, data, "overwrite")

    def create(self, path: str, data: bytes) -> None:
        """PUT on the condition that nothing is there, in one request that is sent once."""
        self._put(path, data, "create")

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """PUT on the condition that the version is still there, in one request."""
        is_gcs = self._client.family == "gcs"
        self._put(path, data, {"version": token} if is_gcs else {"e_tag": token})

    def start_upload(self, path: str, *, part_bytes: int) -> Upload:
        """Begin an upload whose parts, but the last, are best of `part_bytes`.

        On GCS it is the complement's: obstore's would be one of the XML API, and what a killed
        process left of it would be neither found nor dropped by Google after a week.
        """
        if self._client.family == "gcs":
            upload: Upload = self._complement().start_upload(path, part_bytes=part_bytes)
            return upload
        return ObstoreUpload(
            self._client,
            path,
            chunk_bytes=max(part_bytes, self._capabilities.min_part_bytes),
            remains=_Remains(self._complement),
        )

    def start_shared_upload(self, path: str) -> SharedUpload:
        """Leave it to the complement: obstore names no upload that others could join."""
        upload: SharedUpload = self._complement().start_shared_upload(path)
        return upload

    def join_upload(self, path: str, ticket: str) -> SharedUpload:
        """Leave it to the complement."""
        upload: SharedUpload = self._complement().join_upload(path, ticket)
        return upload

    def copy_place(self, path: str) -> tuple[str, str] | None:
        """Leave it to the complement, which copies."""
        if not self._capabilities.shared_uploads:
            return None
        place: tuple[str, str] | None = self._complement().copy_place(path)
        return place

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """Leave it to the complement: obstore shows the empty objects that consoles make."""
        found: list[Entry] = self._complement().list(prefix, recursive=recursive)
        return found

    def delete(self, paths: Sequence[str]) -> None:
        """Leave it to the complement, which knows servers without bulk deletion."""
        self._complement().delete(paths)

    def delete_folder(self, path: str) -> None:
        """Leave it to the complement."""
        self._complement().delete_folder(path)

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """Leave it to the complement: obstore finds no uploads."""
        count: int = self._complement().abort_uploads(prefix, only)
        return count

    def now_s(self, probe_path: str) -> float:
        """Leave it to the complement, as it deletes what it wrote."""
        now_s: float = self._complement().now_s(probe_path)
        return now_s

    def _put(self, path: str, data: bytes, mode: Any) -> None:  # noqa: ANN401  # obstore's
        import obstore  # noqa: PLC0415  # an extra

        name = self._client.name(path)
        self._client.run(
            "write", lambda store: obstore.put(store, name, data, mode=mode, use_multipart=False)
        )


class _Remains:
    """Clears up through the complement; see `obstore_upload.Remains`."""

    def __init__(self, complement: Callable[[], Any]) -> None:
        self._complement = complement

    def abort_all(self, path: str) -> None:
        abort = getattr(self._complement(), "abort_all", None)
        if abort is not None:
            abort(path)

    def delete(self, path: str) -> None:
        self._complement().delete([path])


def capabilities_of(family: str) -> Capabilities:
    """Return what a family can do through obstore: the same as through fsspec, less copying.

    Its operations are not `self_timed`: one may be two requests, or wait for an upload's end.
    """
    if family == "s3":
        from .dialect_s3 import CAPABILITIES as S3  # noqa: PLC0415  # one family is loaded

        return dataclasses.replace(
            S3, in_place_views=MOST_VIEWS, self_timed=False, lends_reads=True
        )
    if family == "azure":
        from .dialect_azure import CAPABILITIES as AZURE  # noqa: PLC0415  # one family is loaded

        return dataclasses.replace(
            AZURE, in_place_views=MOST_VIEWS, self_timed=False, lends_reads=True
        )
    from .dialect_gcs import CAPABILITIES as GCS  # noqa: PLC0415  # one family is loaded

    return dataclasses.replace(GCS, self_timed=False, lends_reads=True)
