"""Codecs of the records under `commits/` and of the footer of `.metadata`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt_storage.errors import FormatError, InvalidInputError, UnsafeContentError

from .documents import MAX_SLOT_BYTES, FileRef, seal, unseal
from .fields import Fields, format_of
from .names import is_save_id, manifest_path, slot_path, stock_copy_path


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRef:
    """A reference to a commit: its slot number and save id."""

    slot: int
    save_id: str

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"slot": self.slot, "save_id": self.save_id}


_COMMIT_KEYS = (
    *("save_id", "manifest", "stock", "stock_entries", "previous"),
    *("part", "stats", "user"),
)

_OPTIONAL = {"part", "stats", "stock_entries", "user"}
"""Keys that are omitted when they are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot under `commits/` (`docs/format.md`, "Slots").

    `stock_entries` is as in the manifest: 0 if `stock` is a note. `stats` are measurements of the
    save; `user` is the user record, which lists of checkpoints show; both are plain JSON. `part` of
    a partial checkpoint names the save (`of`) that its values come from, and the patterns that
    chose them.
    """

    type: Literal["commit", "fence", "deleted"]
    slot: int
    write_id: str
    head: HeadRef | None
    save_id: str | None = None
    manifest: FileRef | None = None
    stock: FileRef | None = None
    stock_entries: int | None = None
    previous: HeadRef | None = None
    fenced: Sequence[str] = ()
    stats: Mapping[str, Any] = field(default_factory=dict, hash=False)
    user: Mapping[str, Any] = field(default_factory=dict, hash=False)
    part: Mapping[str, Any] = field(default_factory=dict, hash=False)
    created_at: str = ""
    host: str = ""
    pid: int = 0

    @property
    def is_thinned(self) -> bool:
        """Whether this partial checkpoint replaced the save that its values come from."""
        previous = self.previous
        return previous is not None and self.part.get("of") == previous.save_id

    def encode(self) -> bytes:
        """Return the sealed document.

        Raises `InvalidInputError` for a record that is longer than readers accept.
        """
        keys = _COMMIT_KEYS if self.type == "commit" else ("fenced",)
        body: dict[str, object] = {"format": format_of("commit")}
        for key in ("type", "slot", "write_id", "head", *keys, "created_at", "host", "pid"):
            value = getattr(self, key)
            value = dict(value) if key in {"part", "stats", "user"} else value
            if key not in _OPTIONAL or value not in (None, {}):
                body[key] = value.as_json() if isinstance(value, FileRef | HeadRef) else value
        sealed = seal(body)
        if len(sealed) > MAX_SLOT_BYTES:
            raise InvalidInputError(
                f"The record in {slot_path(self.slot)} would have {len(sealed)} bytes; "
                f"readers accept {MAX_SLOT_BYTES}.",
                path=slot_path(self.slot),
                next_step="Keep fewer annotations with a save."
                if self.user
                else "Delete leftovers below saves/ by hand, once no job saves here.",
            )
        return sealed

    @classmethod
    def decode(cls, data: bytes, *, slot: int) -> SlotRecord:
        """Return the record in `data`, which was read from slot `slot`.

        Raises `IntegrityError` for damage, `FormatError` for a record that this release cannot use.
        """
        where = slot_path(slot)
        body = unseal(data, path=where)
        get = Fields.of(body, "commit", where)
        kind = get.value("type", str)
        if kind not in {"commit", "fence", "deleted"}:
            what = f"{where} is a record of type {kind!r}, which this release does not know."
            raise FormatError(what, path=where, next_step="Install a newer ckpt_storage.")
        if get.count("slot") != slot:
            get.fail(f"is the record of slot {body['slot']}; the file was copied or renamed")
        user, part, stats = body.get("user"), body.get("part"), body.get("stats")
        is_commit = kind == "commit"
        save_id = get.value("save_id", str) if is_commit else None
        record = cls(
            type=kind,  # type: ignore[arg-type]  # checked above
            slot=slot,
            write_id=get.value("write_id", str),
            head=_head_of(get.required("head"), "head"),
            save_id=save_id,
            manifest=get.document("manifest", manifest_path(save_id)) if save_id else None,
            stock=get.required("stock").document("stock", stock_copy_path(save_id))
            if save_id
            else None,
            stock_entries=get.count("stock_entries") if "stock_entries" in get else None,
            previous=_head_of(get, "previous"),
            fenced=() if is_commit else tuple(get.strings("fenced")),
            # Other values are ignored, so that the checkpoint stays readable.
            stats=stats if is_commit and isinstance(stats, dict) else {},
            user=user if is_commit and isinstance(user, dict) else {},
            part=part if is_commit and isinstance(part, dict) else {},
            created_at=get.note("created_at", str, ""),
            host=get.note("host", str, ""),
            pid=get.note("pid", int, 0),
        )
        if is_commit and (
            record.manifest is None
            or not is_save_id(save_id or "")
            or record.head != HeadRef(slot=slot, save_id=save_id or "")
        ):
            get.fail("is a commit record without a save id, a manifest or itself as head")
        if not all(map(is_save_id, record.fenced)):
            # Folders of these names get deleted.
            raise UnsafeContentError(
                f"{where} fences {list(record.fenced)!r:.200}, which are not save ids.",
                path=where,
                next_step="Do not load or delete this checkpoint; find out who wrote it.",
            )
        if kind == "deleted" and record.head is not None:
            get.fail("is a deleted record with a head")
        if (record.head and record.head.slot > slot) or (
            # A walk back through the commits must end.
            record.previous and record.previous.slot >= slot
        ):
            get.fail("references a later slot")
        return record


def _head_of(get: Fields, key: str) -> HeadRef | None:
    if key not in get:
        return None
    head = get.object(key)
    return HeadRef(slot=head.count("slot"), save_id=head.value("save_id", str, ok=is_save_id))


_FOOTER_MAGIC = b"CKPTSTO1"
_FOOTER_TAIL_BYTES = 16


def with_footer(pickled: bytes, *, slot: int, save_id: str) -> bytes:
    """Return the content of `.metadata`: the pickle and our footer."""
    footer = json.dumps(
        {"format": "ckpt_storage.stock/1", "slot": slot, "save_id": save_id}, separators=(",", ":")
    ).encode()
    return pickled + footer + b"%08d" % len(footer) + _FOOTER_MAGIC


def split_footer(data: bytes) -> tuple[bytes, HeadRef | None]:
    """Return the pickle in a `.metadata` file, and the commit in its footer; None: no footer."""
    if data[-8:] != _FOOTER_MAGIC or not data[-16:-8].isdigit():
        return data, None
    start = len(data) - _FOOTER_TAIL_BYTES - int(data[-16:-8])
    if start < 0:
        return data, None
    try:
        footer = json.loads(data[start:-_FOOTER_TAIL_BYTES])
        reference = HeadRef(slot=int(footer["slot"]), save_id=str(footer["save_id"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return data, None
    return data[:start], reference
