"""What a dialect of a family of storages has to do, and which one speaks to which client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from .backends.clients import Client
from .base import Capabilities, Entry, PathFilter, SharedUpload, Stat, Upload, Version
from .location import Location


class Dialect(Protocol):
    """How one family of storages is spoken to; paths are relative to the root.

    Methods make one attempt, end at the client's deadline if `capabilities.self_timed`, and
    raise whatever the storage's client raises. `put` replaces what is there, complete or not
    at all; `read_range` returns how many bytes it read and how long the object is, if it was
    told. The rest is as in `base.Store`.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What the family can do."""

    def prepare(self, folders: Sequence[str]) -> None:
        """Make folders where the storage has such things."""

    def get(self, path: str, *, most_bytes: int | None = None) -> Version:
        """Return content and token from one answer; raises `TooLongError` before it takes more."""

    def read_range(self, path: str, start: int, view: memoryview) -> tuple[int, int | None]:
        """Fill `view` from `start` (bytes) on; return bytes read and bytes the object has."""

    def stat(self, path: str) -> Stat:
        """Return size and time."""

    def put(self, path: str, data: bytes) -> None:
        """Put an object in place of what is there."""

    def create(self, path: str, data: bytes) -> None:
        """Put an object if nothing is there; called only if `exclusive_create`."""

    def put_if_match(self, path: str, data: bytes, token: str) -> None:
        """Put an object in place of the version that `token` names."""

    def start_upload(self, path: str, *, part_bytes: int) -> Upload:
        """Begin an upload."""

    def list(self, prefix: str, *, recursive: bool) -> list[Entry]:
        """Return the objects below a folder, in any order."""

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects that may be absent."""

    def delete_folder(self, path: str) -> None:
        """Delete everything below a folder."""

    def abort_uploads(self, prefix: str, only: PathFilter | None) -> int:
        """Abort open uploads below a folder, those of the paths that are meant."""

    def now_s(self, probe_path: str) -> float:
        """Return the storage's clock in Unix seconds."""


@runtime_checkable
class SharedDialect(Dialect, Protocol):
    """A dialect whose uploads several processes can share; `capabilities` say so, too."""

    def start_shared_upload(self, path: str) -> SharedUpload:
        """Begin an upload as its owner; sends nothing."""

    def join_upload(self, path: str, ticket: str) -> SharedUpload:
        """Join an upload as a member; sends nothing."""

    def copy_place(self, path: str) -> tuple[str, str] | None:
        """Return scope and address of `base.CopySource`; None where nothing can be copied."""


def client_options(location: Location, request_timeout_s: float) -> Mapping[str, Any]:
    """Return the storage options as the backend of a location should get them."""
    if location.protocol == "s3":
        from . import dialect_s3  # noqa: PLC0415  # one dialect is loaded

        return dialect_s3.client_options(location.storage_options, request_timeout_s)
    return location.storage_options


def dialect_for(client: Client) -> Dialect:
    """Return the dialect of a client's file system, told by what its class descends from."""
    from .dialect_s3 import S3Dialect  # noqa: PLC0415  # one dialect is loaded

    return S3Dialect(client)
