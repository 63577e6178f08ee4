"""Storages: one facade, `Store`, over the backend of each, and the one function that opens them."""

from __future__ import annotations

from .backend import (
    Backend,
    Buffers,
    Capabilities,
    Content,
    CopySource,
    ObjectInfo,
    OpenUpload,
    Part,
    PartCopy,
    Range,
    Settings,
    ShortReadError,
)
from .location import Location, anchored
from .registry import open_store, register_backend

__all__ = [
    "Backend",
    "Buffers",
    "Capabilities",
    "Content",
    "CopySource",
    "Location",
    "ObjectInfo",
    "OpenUpload",
    "Part",
    "PartCopy",
    "Range",
    "Settings",
    "ShortReadError",
    "anchored",
    "endpoint_of",
    "open_store",
    "register_backend",
]


def endpoint_of(location: Location) -> str:
    """Return the host, or account, that requests go to; "" for a local path or a default.

    By it and its URL, ranks agree on a storage. Holds no credentials.
    """
    if location.is_local:
        return ""
    from .backends import clients  # noqa: PLC0415  # local users need no fsspec

    return clients.endpoint_of(location, location.storage_options)
