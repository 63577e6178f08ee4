"""Outputs of other formats: a folder told by its own last file, and a single file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ckpt_storage.commit.slotlog import is_there, read_if_there, read_log
from ckpt_storage.errors import CheckpointExistsError, InvalidInputError
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    Holder,
    is_weight_file,
    records_folder,
)
from ckpt_storage.format.names import BLOCKER, STOCK_METADATA, is_blocker
from ckpt_storage.store.store import Store

from .folder import FolderOutput, holder_of, listed
from .output import Made, Output, Site, Taken
from .plan import Plan

Shown = Literal["metadata", "index", "nothing"]
"""What makes files a checkpoint of others: `.metadata`, an index, or that they lie there."""


class PlainFolder(FolderOutput):
    """A folder in which files of another format are being put, so that a part looks like no whole.

    What makes the files a checkpoint goes last: `.metadata`, or the index of the weight files. A
    folder of safetensors without an index has nothing of the kind; so while such a folder is being
    filled, a blocker index lies in it (`BLOCKER`). At the end nothing of ours stays.
    """

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        shown: Shown,
        last: str = "",
        document: Callable[[], bytes] = bytes,
        overwrite: bool,
    ) -> None:
        """`last` is the file that shows all others, "" for none, and `document` gives its bytes."""
        super().__init__(site, plan)
        self._shown = shown
        self._last = last
        self._document = document
        self._overwrite = overwrite
        self._names = frozenset({*(file.name for file in plan.files), last} - {""})
        self.is_together = shown != "metadata"

    def take(self) -> Taken:
        """Make the folder look like no checkpoint; keep what an earlier run of this work sealed.

        Raises `CheckpointExistsError` if a checkpoint, or a file of one of the names, is there and
        is not to be overwritten, and `InvalidInputError` for the folder of a checkpoint of ours.
        What another run left that died may always be replaced; a complete checkpoint may not.
        """
        store = self.store
        if read_log(store).last is not None:
            raise InvalidInputError(
                f"{store.url} is, or was, a checkpoint of ckpt_storage; files of another format "
                "would lie between its own.",
                path=store.url,
                next_step="Give another folder.",
            )
        earlier = holder_of(store, "")
        is_resumed = earlier is not None and earlier.fingerprint == self.plan.identity
        entries = listed(store, "", recursive=True)
        here = {entry.path for entry in entries if not entry.path.endswith("/")}
        found = read_if_there(store, INDEX_NAME) if INDEX_NAME in here else None
        is_hidden = found is not None and is_blocker(found.data)
        in_the_way = {path for path in here if path in self._names or self._mixes(path)}
        # Readers take what would be replaced here for a checkpoint.
        is_whole = STOCK_METADATA in here or (
            self._shown != "metadata"
            and not is_hidden
            and (found is not None or any(map(_is_weight, here)))
        )
        is_remains = not is_whole and is_there(store, HOLDER_PATH)
        blocking = sorted(in_the_way | here & {STOCK_METADATA})
        # A blocker alone: cut between hiding the folder and writing the note.
        is_free = not blocking or (is_hidden and blocking == [INDEX_NAME])
        if not (is_resumed or is_remains or self._overwrite or is_free):
            raise CheckpointExistsError(
                f"{store.url} holds {blocking[0]}.",
                path=store.url,
                phase="plan",
                next_step="Give another folder, or pass overwrite=True to replace what is there.",
            )
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        if STOCK_METADATA in here:
            store.delete([STOCK_METADATA])
        if self._shown != "metadata" and any(map(_is_weight, here | self._names)):
            store.replace(INDEX_NAME, BLOCKER)
        if not is_resumed:
            old = in_the_way - {INDEX_NAME}
            if is_remains and self._shown == "metadata":
                # Shards of work that died: without its `.metadata` nobody can tell what is in them.
                old |= set(filter(_is_shard, here))
            if old:
                store.delete(sorted(old))
            # Only their records lead to sealed files that lack their names.
            self.end_uploads(sealed for _, sealed in self.read_records(here))
            if any(path.startswith(f"{DOCUMENTS}/") for path in here):
                store.delete_folder(DOCUMENTS)
        return self.hold(earlier)

    def may_end(self, path: str, earlier: Holder) -> bool:
        """Return whether an open upload is one that the earlier holder left, sealed or not."""
        is_kind = _is_shard(path) or _is_weight(path)
        return is_kind or super().may_end(path, earlier) or path in self._names

    def publish(self, made: Made) -> None:
        """Put the file that shows all others, or take the index away that hid them."""
        del made
        self.check_held()
        if self._last:
            self.store.replace(self._last, self._document())
        elif self._shown != "metadata":
            self.store.delete([INDEX_NAME])
        # Whatever lies here now is a checkpoint like any other.
        self.store.delete_folder(records_folder(self.plan.identity))
        self.store.delete([HOLDER_PATH])
        if not listed(self.store, DOCUMENTS):
            self.store.delete_folder(DOCUMENTS)

    def _mixes(self, path: str) -> bool:
        """Return whether a file would mix with those to come.

        Where an index says what counts, those are weight files of an earlier export alone.
        """
        if self._shown == "metadata":
            return False
        is_old = is_weight_file if self._shown == "index" else _is_weight
        return path == INDEX_NAME or is_old(path)


class OneFile(Output):
    """One file that is written as a stream, visible only complete."""

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        url: str,
        name: str,
        overwrite: bool,
        write: Callable[[Store, str, Callable[[], None]], None],
    ) -> None:
        """`write` takes the store, the name, and what it calls before the first byte."""
        super().__init__(site, plan)
        self._url = url
        self._name = name
        self._overwrite = overwrite
        self._write = write
        self._is_taken = False

    def take(self) -> Taken:
        """Refuse a name that is taken."""
        if not self._name:
            raise InvalidInputError(
                f"{self._url} names no file.", next_step="Give a file, such as model.pt."
            )
        self._is_taken = is_there(self.store, self._name)
        if self._is_taken and not self._overwrite:
            raise CheckpointExistsError(
                f"{self._url} is there.",
                path=self._url,
                phase="plan",
                next_step="Give another name, or pass overwrite=True to replace it.",
            )
        return Taken()

    def publish(self, made: Made) -> None:
        """Write the file; only where nothing can be replaced in one step, delete the old before."""
        del made

        def begin() -> None:
            if self._is_taken and not self.store.capabilities.atomic_replace:
                self.store.delete([self._name])

        self.store.make_folders([])
        self._write(self.store, self._name, begin)


def _is_weight(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors")


def _is_shard(path: str) -> bool:
    return "/" not in path and path.startswith("__") and path.endswith(".distcp")
