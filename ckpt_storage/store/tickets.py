"""The texts by which other processes join an upload: what is in them, checked on the way in."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from ckpt_storage.errors import InvalidInputError

__all__ = ["decode_ticket", "encode_ticket"]


def encode_ticket(kind: str, path: str, fields: Mapping[str, str]) -> str:
    """Return the ticket for the upload of `path` on a storage of `kind`."""
    return json.dumps({"kind": kind, "path": path, **fields}, separators=(",", ":"))


def decode_ticket(ticket: str, kind: str, path: str, names: Collection[str]) -> Mapping[str, str]:
    """Return the fields `names` of a ticket; raises `InvalidInputError` if it is another's."""
    try:
        found = json.loads(ticket)
    except ValueError:
        found = None
    if (
        not isinstance(found, dict)
        or (found.get("kind"), found.get("path")) != (kind, path)
        or set(found) != {"kind", "path", *names}
        or not all(isinstance(value, str) for value in found.values())
    ):
        raise InvalidInputError(
            f"The ticket is not one for an upload of {path} on this storage.",
            path=path,
            next_step="Pass on what `ticket()` of that very upload returned.",
        )
    return found
