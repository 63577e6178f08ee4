"""Paths and file names of a checkpoint, and checks of foreign paths.

The section "Layout" of `docs/format.md` specifies the paths. No other module spells them.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime

from ckpt_storage.errors import UnsafeContentError

STOCK_METADATA = ".metadata"
INDEX_NAME = "model.safetensors.index.json"
"""Hugging Face's name of the map from tensors to weight files."""
WEIGHT_NAMES = ("model.safetensors", "adapter_model.safetensors")
"""Weight files that come without an index."""
COMMITS = "commits"
SAVES = "saves"
FILES_PREFIX = "files."
"""What the names of values begin with that hold the bytes of a file: `files.config.json`."""
PROBE_PREFIX = ".ckpt-storage-probe-"
_SAVE_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}")
_UNSAFE_PARTS = frozenset({"", ".", ".."})
_UNSAFE_CHARACTER = re.compile("[\\\\\\x00-\\x1f\\x7f\ud800-\udfff]")
_DRIVE_OR_URL = re.compile("[A-Za-z]:|[A-Za-z][A-Za-z0-9+.-]*:/")
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
_PER_RANK_KEY = re.compile(r"per-rank-([0-9]{1,9})-of-([0-9]{1,9})")


def per_rank_key(rank: int, world_size: int) -> str:
    """Return the key of the value of one rank in a nested state."""
    return f"per-rank-{rank}-of-{world_size}"


def parse_per_rank_key(key: str) -> tuple[int, int] | None:
    """Return rank and world size of a key of `per_rank_key`, None for any other key."""
    match = _PER_RANK_KEY.fullmatch(key)
    return None if match is None else (int(match[1]), int(match[2]))


def new_save_id() -> str:
    """Return a new id of an attempt: UTC time for people, 64 random bits for uniqueness."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{stamp}-{os.urandom(8).hex()}"


def new_write_id() -> str:
    """Return a random token of one attempt to create a slot."""
    return os.urandom(16).hex()


def is_save_id(text: str) -> bool:
    """Return whether `text` has the form of a save id."""
    return _SAVE_ID.fullmatch(text) is not None


def slot_path(slot: int) -> str:
    """Return the path of commit slot `slot` (from 1)."""
    return f"{COMMITS}/{slot:08d}.json"


def slot_number(name: str) -> int:
    """Return the number of the slot with this file name, 0 for any other name."""
    digits = name.removesuffix(".json")
    return int(digits) if digits.isascii() and digits.isdigit() and digits != name else 0


def save_folder(save_id: str) -> str:
    """Return the folder of one attempt."""
    return f"{SAVES}/{save_id}"


def manifest_path(save_id: str) -> str:
    """Return the path of the manifest of one attempt."""
    return f"{save_folder(save_id)}/manifest.json"


def stock_copy_path(save_id: str) -> str:
    """Return the path of the immutable copy from which `.metadata` is published."""
    return f"{save_folder(save_id)}/stock.metadata"


def begun_path(save_id: str) -> str:
    """Return the path of the marker, which shows that an attempt began, and when."""
    return f"{save_folder(save_id)}/begun.json"


def ranks_folder(save_id: str) -> str:
    """Return the folder of the rank manifests of one attempt."""
    return f"{save_folder(save_id)}/ranks"


def rank_manifest_path(save_id: str, rank: int) -> str:
    """Return the path of the manifest of one rank."""
    return f"{ranks_folder(save_id)}/rank-{rank:05d}.json"


def shard_name(rank: int, index: int) -> str:
    """Return the file name of shard file `index` (from 0) of one rank, as in stock torch."""
    return f"__{rank}_{index}.distcp"


def shard_path(save_id: str, rank: int, index: int) -> str:
    """Return the path of one shard file."""
    return f"{save_folder(save_id)}/{shard_name(rank, index)}"


def probe_path() -> str:
    """Return a new name at the root for a capability probe."""
    return f"{PROBE_PREFIX}{os.urandom(8).hex()}"


def path_flaw(path: str) -> str | None:
    """Return why a path is not safe to join to a root, None if it is.

    The rule is the same for all storages: some resolve names that others take literally.
    """
    if not _UNSAFE_PARTS.isdisjoint(path.split("/")):
        return "it has an empty part, '.' or '..'"
    if _DRIVE_OR_URL.match(path):
        return "it begins with a drive or a scheme"
    if _UNSAFE_CHARACTER.search(path):
        return "it holds a backslash, a control character or half of a surrogate pair"
    return None


def unsafe_path_error(path: str, *, where: str, flaw: str, next_step: str) -> UnsafeContentError:
    """Return the error for a `path` with a `flaw`, from the document or URL `where`."""
    what = f"{where} names the file {path!r:.200}, which is unsafe: {flaw}."
    return UnsafeContentError(what, path=where, next_step=next_step)


def checked_path(path: str, *, where: str) -> str:
    """Return `path` from the document `where`. Raises `UnsafeContentError` if it is unsafe.

    A path in a document must not begin with a scheme either; in a listing, "epoch:5" is a folder.
    """
    flaw = path_flaw(path) or ("it begins with a scheme" if _SCHEME.match(path) else None)
    if flaw is None:
        return path
    step = "Do not load this checkpoint; find out who wrote it."
    raise unsafe_path_error(path, where=where, flaw=flaw, next_step=step)
