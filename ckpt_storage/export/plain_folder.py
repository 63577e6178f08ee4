"""Outputs of other formats: a folder told by its own last file, and a single file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from ckpt_storage.commit.slotlog import is_there, read_if_there, read_log
from ckpt_storage.errors import CheckpointExistsError, InvalidInputError
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    is_weight_file,
    records_folder,
)
from ckpt_storage.format.names import BLOCKER, STOCK_METADATA, is_blocker
from ckpt_storage.store import Location
from ckpt_storage.store.store import Store

from .folder import FolderOutput, files_there, holder_of, listed
from .output import Made, Output, Site, Taken
from .places import split_file
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
        trusts_lengths: bool = False,
    ) -> None:
        """`last` is the file that shows all others, "" for none, and `document` gives its bytes.

        With `trusts_lengths` a file of a resumed run needs no record, only its length.
        """
        super().__init__(site, plan)
        self._shown = shown
        self._last = last
        self._document = document
        self._overwrite = overwrite
        self._trusts_lengths = trusts_lengths
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
        is_noted = is_there(store, HOLDER_PATH)
        earlier = holder_of(store, "")
        entries = listed(store, "", recursive=True)
        here = {entry.path for entry in entries if not entry.path.endswith("/")}
        is_resumed = earlier is not None and earlier.fingerprint == self.plan.identity
        is_remains = is_noted and not self._is_whole(here)
        if not is_resumed:
            self._check_free(here, may_replace=self._overwrite or is_remains)
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        self._hide(here)
        if not is_resumed:
            old = [path for path in self._in_the_way(here) if path != INDEX_NAME]
            if is_remains and self._shown == "metadata":
                # Shards of work that died: without its `.metadata` nobody can tell what is in them.
                old = sorted({*old, *filter(_is_shard, here)})
            if old:
                store.delete(old)
            # Only their records lead to sealed files that lack their names.
            self._end_uploads(sealed for _, sealed in self._read_records(here))
            if any(path.startswith(f"{DOCUMENTS}/") for path in here):
                store.delete_folder(DOCUMENTS)
        taken = self._hold(earlier)
        if is_resumed and self._trusts_lengths:
            taken = replace(taken, done=files_there(self.site, self.plan, taken))
        return taken

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

    def _in_the_way(self, here: set[str]) -> list[str]:
        """Return what has a name of the files to come, and weights that would mix with them.

        Where an index says what counts, those are weight files of an earlier export alone.
        """
        return sorted(path for path in here if path in self._names or self._mixes(path))

    def _mixes(self, path: str) -> bool:
        if self._shown == "metadata":
            return False
        is_old = is_weight_file if self._shown == "index" else _is_weight
        return path == INDEX_NAME or is_old(path)

    def _check_free(self, here: set[str], *, may_replace: bool) -> None:
        taken = [*(here & {STOCK_METADATA}), *self._in_the_way(here)]
        if taken == [INDEX_NAME] and self._is_hidden():
            return  # cut between hiding the folder and writing the note
        if taken and not may_replace:
            raise CheckpointExistsError(
                f"{self.store.url} holds {taken[0]}.",
                path=self.store.url,
                phase="plan",
                next_step="Give another folder, or pass overwrite=True to replace what is there.",
            )

    def _is_whole(self, here: set[str]) -> bool:
        """Return whether readers take what would be replaced here for a checkpoint."""
        if STOCK_METADATA in here:
            return True
        if self._shown == "metadata":
            return False
        return not self._is_hidden() if INDEX_NAME in here else any(map(_is_weight, here))

    def _is_hidden(self) -> bool:
        """Return whether the index is one that hides what is not complete."""
        found = read_if_there(self.store, INDEX_NAME)
        return found is not None and is_blocker(found.data)

    def _hide(self, here: set[str]) -> None:
        """Keep readers from taking what lies here, or some of what comes, for a whole."""
        if STOCK_METADATA in here:
            self.store.delete([STOCK_METADATA])
        if self._shown != "metadata" and any(map(_is_weight, here | self._names)):
            self.store.replace(INDEX_NAME, BLOCKER)


class OneFile(Output):
    """One file that is written as a stream, such as that of `torch.save`, visible only complete."""

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        location: Location,
        overwrite: bool,
        write: Callable[[Store, str, Callable[[], None]], None],
    ) -> None:
        """`write` takes the store, the name, and what it calls before the first byte."""
        super().__init__(site, plan)
        self._url = location.url
        self._name = split_file(location)[1]
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
