"""Whether two roots are one place under two names, or one of them lies inside the other.

Names prove that two roots are one place, never that they are not: a link, a mount, two profiles or
two spellings of an endpoint lead to the same files. So a note of a random name is put at the target
and looked for through the source's own store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import StorageError
from ckpt_storage.format.names import probe_path
from ckpt_storage.store.location import Location
from ckpt_storage.store.store import Store

_WHERE = (
    "endpoint_url",
    "endpoint",
    "account_host",
    "account_name",
    "base_url",
    "connection_string",
    "host",
    "port",
    "profile",
)
"""Options that may lead to another storage; all others change who asks, not whom."""


def is_within(outer: Location, inner: Location) -> bool:
    """Return whether names alone tell that `inner` is `outer`, or lies below it."""
    if outer.protocol != inner.protocol:
        return False
    if not outer.is_local and _endpoint(outer) != _endpoint(inner):
        return False
    above, below = _resolved(outer), _resolved(inner)
    return below == above or below.startswith(f"{above.rstrip('/')}/")


def _resolved(location: Location) -> str:
    return os.path.realpath(location.target) if location.is_local else location.url


def _endpoint(location: Location) -> list[str]:
    inner = location.storage_options.get("client_kwargs")
    sides: list[Mapping[str, Any]] = [location.storage_options]
    if isinstance(inner, Mapping):
        sides.append(inner)
    return [str(side[name]).rstrip("/") for name in _WHERE for side in sides if side.get(name)]


def place_within(source: Store, target: Store, *, is_deep: bool = True) -> str | None:
    """Return where below the source's root that of the target lies, "" for the very same.

    None: elsewhere. Puts a file of a random name at the target and removes it, unless nothing lies
    there, or nothing may be written there: then nothing there can be harmed. Without `is_deep`
    only the source's root itself is looked at. Raises `StorageError`.
    """
    if not _holds_anything(target):
        return None
    name = probe_path()
    try:
        target.put(name, b"Is this folder the one that is read from?")
    except StorageError as error:
        if error.kind == "permission":
            return None
        raise
    try:
        if _is_there(source, name):
            return ""
        return _below(source, name) if is_deep else None
    finally:
        with contextlib.suppress(StorageError):
            target.delete([name])


def _holds_anything(store: Store) -> bool:
    try:
        return bool(store.list("", recursive=False))
    except StorageError as error:
        if error.kind == "not-found":
            return False
        if error.kind == "permission":
            return True
        raise


def _is_there(store: Store, name: str) -> bool:
    try:
        return slotlog.is_there(store, name)
    except StorageError as error:
        # Some storages answer so for what is not there to those who may not list.
        if error.kind == "permission":
            return False
        raise


def _below(store: Store, name: str) -> str | None:
    try:
        paths = [entry.path for entry in store.list("")]
    except StorageError as error:
        if error.kind in {"not-found", "permission"}:
            return None
        raise
    return next((path[: -len(name) - 1] for path in paths if path.endswith(f"/{name}")), None)
