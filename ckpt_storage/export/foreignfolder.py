"""A folder in which files of another format are being put, so that a part looks like no whole.

What makes the files a checkpoint goes last: `.metadata`, or the index of the weight files. A
folder of safetensors without an index has nothing of the kind, and half of it looks like a smaller
whole; so while such a folder is being filled, a blocker index lies in it (`layout.BLOCKER`).
Readers that follow an index refuse it until it is replaced, or deleted, at the end.

A file of the right length may be of another checkpoint. So files that were there are believed only
while a note says that they are of this very work, and work begins by writing that note after
everything of the same names is gone. What vouches for single files lies in a folder beside the
note, one record for each, and goes before the note does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import (
    CheckpointExistsError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.format.documents import seal, unseal
from ckpt_storage.format.exports import is_weight_file
from ckpt_storage.format.names import BLOCKER, INDEX_NAME, STOCK_METADATA, is_blocker
from ckpt_storage.store.store import Store

NOTE = ".ckpt-storage-copy.json"
"""Lies in the folder while somebody fills it."""

RECORDS = ".ckpt-storage-copy"
"""The folder of what is known of single files while somebody fills the folder above."""

Content = Literal["metadata", "indexed", "unindexed"]
"""What makes the files a checkpoint: `.metadata`, an index of weight files, or nothing."""


class ForeignFolder:
    """The root of `store` while files of these names are put there; used by one thread."""

    def __init__(self, store: Store, names: Collection[str], *, content: Content) -> None:
        self._store = store
        self._names = frozenset(names)
        self._content = content

    def begin(self, identity: str, *, source: str, overwrite: bool) -> bool:
        """Make the folder look like no checkpoint; return whether earlier files may be believed.

        `identity` stands for the content to come. Raises `CheckpointExistsError` if a checkpoint,
        or a file of one of the names, is there and `overwrite` is False, and `InvalidInputError`
        for the folder of a checkpoint of ours. The remains of other work, which a note tells of,
        need no `overwrite`; a checkpoint with such a note in it does.
        """
        store, note = self._store, self._note()
        if slotlog.read_log(store).last is not None:
            raise InvalidInputError(
                f"{store.url} is, or was, a checkpoint of ckpt_storage; files of another format "
                "would lie between its own.",
                path=store.url,
                next_step="Give another folder.",
            )
        here = self._here()
        is_resumed = note == identity
        is_remains = note is not None and not self._is_whole(here)
        if not is_resumed:
            self._check_free(here, may_replace=overwrite or is_remains)
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        self._hide(here)
        if not is_resumed:
            old = [path for path in self._in_the_way(here) if path != INDEX_NAME]
            if is_remains and self._content == "metadata":
                # Shards of work that died: without its `.metadata` nobody can tell what is in them.
                old = sorted({*old, *filter(_is_shard, here)})
            if old:
                store.delete(old)
            if any(path.startswith(f"{RECORDS}/") for path in here):
                store.delete_folder(RECORDS)
            head = {"format": "ckpt_storage.copy_note/1", "identity": identity, "source": source}
            store.replace(NOTE, seal({**head, **slotlog.stamp()}))
        return is_resumed

    def show(self, index: bytes | None) -> None:
        """Put the index, or take the one away that hid the files; all files are complete."""
        if index is not None:
            self._store.replace(INDEX_NAME, index)
        elif self._content != "metadata":
            self._store.delete([INDEX_NAME])

    def end(self) -> None:
        """Take the note back: whatever lies here now is a checkpoint like any other."""
        self._store.delete([NOTE])

    def _note(self) -> str | None:
        """Return whose work is under way here, "" for a note that cannot be read."""
        found = slotlog.read_if_there(self._store, NOTE)
        if found is None:
            return None
        try:
            return str(unseal(found.data, path=NOTE).get("identity", ""))
        except (FormatError, IntegrityError):
            return ""

    def _here(self) -> set[str]:
        """Return the paths of what lies here now."""
        try:
            return {entry.path for entry in self._store.list("") if not entry.path.endswith("/")}
        except StorageError as error:
            if error.kind != "not-found":
                raise
            return set()

    def _in_the_way(self, here: set[str]) -> list[str]:
        """Return what has a name of the files to come, and weights that would mix with them.

        Where an index says what counts, those are weight files of an earlier export alone.
        """
        return sorted(path for path in here if path in self._names or self._mixes(path))

    def _mixes(self, path: str) -> bool:
        if self._content == "metadata":
            return False
        is_old = is_weight_file if self._content == "indexed" else _is_weight
        return path == INDEX_NAME or is_old(path)

    def _check_free(self, here: set[str], *, may_replace: bool) -> None:
        taken = [*(here & {STOCK_METADATA}), *self._in_the_way(here)]
        if taken == [INDEX_NAME] and self._is_hidden():
            return  # cut between hiding the folder and writing the note
        if taken and not may_replace:
            raise CheckpointExistsError(
                f"{self._store.url} holds {taken[0]}.",
                path=self._store.url,
                phase="plan",
                next_step="Give another folder, or pass overwrite=True to replace what is there.",
            )

    def _is_whole(self, here: set[str]) -> bool:
        """Return whether readers take what would be replaced here for a checkpoint."""
        if STOCK_METADATA in here:
            return True
        if self._content == "metadata":
            return False
        return not self._is_hidden() if INDEX_NAME in here else any(map(_is_weight, here))

    def _is_hidden(self) -> bool:
        """Return whether the index is one that hides what is not complete."""
        found = slotlog.read_if_there(self._store, INDEX_NAME)
        return found is not None and is_blocker(found.data)

    def _hide(self, here: set[str]) -> None:
        """Keep readers from taking what lies here, or some of what comes, for a whole."""
        if STOCK_METADATA in here:
            self._store.delete([STOCK_METADATA])
        if self._content != "metadata" and any(map(_is_weight, here | self._names)):
            self._store.replace(INDEX_NAME, BLOCKER)


def is_of_the_work(path: str) -> bool:
    """Return whether a path is that of the note or of a record, and so no part of a checkpoint."""
    return path == NOTE or path.startswith(f"{RECORDS}/")


def _is_weight(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors")


def _is_shard(path: str) -> bool:
    return "/" not in path and path.startswith("__") and path.endswith(".distcp")
