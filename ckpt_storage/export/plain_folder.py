"""An output folder of another format than Hugging Face's: told by its own last file."""

from __future__ import annotations

from ckpt_storage.commit.slotlog import is_there, read_if_there, read_log
from ckpt_storage.errors import (
    CheckpointExistsError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    is_weight_file,
    records_folder,
)
from ckpt_storage.format.names import BLOCKER, STOCK_METADATA, is_blocker
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .output import OutputFolder, Shown, is_shard, is_weight, listed
from .plan import Plan


class PlainFolder(OutputFolder):
    """A folder in which files of another format are being put, so that a part looks like no whole.

    What makes the files a checkpoint goes last: `.metadata`, or the index of the weight files. A
    folder of safetensors without an index has nothing of the kind; so while such a folder is being
    filled, a blocker index lies in it (`BLOCKER`). At the end nothing of ours stays.
    """

    def __init__(
        self, store: Store, plan: Plan, deadline: Deadline, *, shown: Shown, others: str = ""
    ) -> None:
        """Begin nothing; `others` is the name of a file that is put at the end, besides."""
        super().__init__(store, plan, deadline)
        self._shown = shown
        self._names = frozenset({*(file.name for file in plan.files), others} - {""})

    def take(self, *, overwrite: bool) -> bool:
        """Make the folder look like no checkpoint; return whether an earlier run began this work.

        Raises `CheckpointExistsError` if a checkpoint, or a file of one of the names, is there and
        `overwrite` is False, and `InvalidInputError` for the folder of a checkpoint of ours. What
        another run left that died needs no `overwrite`; a complete checkpoint does.
        """
        store, identity = self._store, self._plan.identity
        if read_log(store).last is not None:
            raise InvalidInputError(
                f"{store.url} is, or was, a checkpoint of ckpt_storage; files of another format "
                "would lie between its own.",
                path=store.url,
                next_step="Give another folder.",
            )
        is_noted = is_there(store, HOLDER_PATH)
        earlier = self._holder()
        here = self._here()
        is_resumed = earlier is not None and earlier.fingerprint == identity
        is_remains = is_noted and not self._is_whole(here)
        if not is_resumed:
            self._check_free(here, may_replace=overwrite or is_remains)
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        self._hide(here)
        if not is_resumed:
            old = [path for path in self._in_the_way(here) if path != INDEX_NAME]
            if is_remains and self._shown == "metadata":
                # Shards of work that died: without its `.metadata` nobody can tell what is in them.
                old = sorted({*old, *filter(is_shard, here)})
            if old:
                store.delete(old)
            if any(path.startswith(f"{DOCUMENTS}/") for path in here):
                store.delete_folder(DOCUMENTS)
        self._hold(earlier, [])
        return is_resumed

    def publish(self, shown: tuple[str, bytes] | None) -> None:
        """Put the file that shows all others, or take the index away that hid them."""
        self._check_held()
        if shown is not None:
            self._store.replace(*shown)
        elif self._shown != "metadata":
            self._store.delete([INDEX_NAME])
        # Whatever lies here now is a checkpoint like any other.
        self._store.delete_folder(records_folder(self._plan.identity))
        self._store.delete([HOLDER_PATH])
        if not listed(self._store, DOCUMENTS):
            self._store.delete_folder(DOCUMENTS)

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
        if self._shown == "metadata":
            return False
        is_old = is_weight_file if self._shown == "index" else is_weight
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
        if self._shown == "metadata":
            return False
        return not self._is_hidden() if INDEX_NAME in here else any(map(is_weight, here))

    def _is_hidden(self) -> bool:
        """Return whether the index is one that hides what is not complete."""
        found = read_if_there(self._store, INDEX_NAME)
        return found is not None and is_blocker(found.data)

    def _hide(self, here: set[str]) -> None:
        """Keep readers from taking what lies here, or some of what comes, for a whole."""
        if STOCK_METADATA in here:
            self._store.delete([STOCK_METADATA])
        if self._shown != "metadata" and any(map(is_weight, here | self._names)):
            self._store.replace(INDEX_NAME, BLOCKER)
