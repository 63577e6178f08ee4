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
from .location import Location, anchored, endpoint_of, redacted_url
from .registry import open_store, register_backend
from .threads import report_progress

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
    "redacted_url",
    "register_backend",
    "report_progress",
]
