"""Finding out what lies at a URL, and opening it: ours first, by its head; then what others write.

Knows the order in which to look and what to say when there is nothing to load. Called by
`catalog` and `reader`.
"""

from __future__ import annotations

from collections.abc import Callable

from . import layout, slotlog, stockfooter
from .ceilings import MOST_STOCK_BYTES
from .deadline import Deadline
from .errors import (
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    FormatError,
    StorageError,
)
from .foreign import is_rank_local, open_safetensors, open_stock
from .options import TransferOptions
from .slotlog import CommitLog
from .source import CommittedSource, Source, read_manifest
from .store.base import Store


def open_source(
    store: Store,
    *,
    deadline: Deadline,
    options: TransferOptions,
    before_foreign: Callable[[], None] | None = None,
) -> Source:
    """Return the checkpoint at the root of `store`, whatever wrote it.

    Costs two small reads, side by side, and the manifest for one of ours; lists the folder only
    if it is not.
    `before_foreign` is called before anything is read that tells of another writer's tensors.
    Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
    `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`.
    """
    is_remote = store.capabilities.is_remote
    found = slotlog.read_log_together(store) if is_remote else slotlog.read_log(store)
    if found.head is not None:
        if not is_remote:
            # Elsewhere it would cost a round trip: who publishes, verifies or exports looks there.
            stockfooter.check_newest(store, found.head)
        manifest = read_manifest(store, found.head)
        return CommittedSource(store, found.head, manifest, deadline, options)
    current = slotlog.read_stock(store)
    if current is not None:
        named = stockfooter.split_footer(current.data)[1]
        if named is None:
            # Perhaps under the name of one of ours that was deleted: its slots stay.
            data = current.data
            if before_foreign is not None:
                before_foreign()
                data = store.read(layout.STOCK_METADATA, most_bytes=MOST_STOCK_BYTES)
            return open_stock(store, data, options=options, deadline=deadline)
        if found.last is None:
            raise FormatError(
                f"{store.url} has .metadata of save {named.save_id} but no commits/ folder.",
                path=layout.COMMITS,
                next_step="Copy the whole checkpoint, commits/ included; torch's own readers "
                "can load it as it is, without checksums.",
            )
    if before_foreign is not None:
        before_foreign()
    names = _names(store)
    if any(name.endswith(".safetensors") for name in names) and found.last is None:
        return open_safetensors(store, names)
    raise _nothing(store, found, names)


def _names(store: Store) -> list[str]:
    try:
        return [entry.path for entry in store.list("", recursive=False)]
    except StorageError as error:
        if error.kind == "not-found":
            return []
        raise


def _nothing(store: Store, found: CommitLog, names: list[str]) -> Exception:
    """Return the error that says why nothing can be loaded, and what to do."""
    last = found.last
    if last is not None and last.type == "deleted":
        return CheckpointGoneError(
            f"{store.url} was deleted at {last.created_at} by process {last.pid} on {last.host}.",
            path=store.url,
            phase="load",
            next_step="Load another checkpoint.",
        )
    if f"{layout.SAVES}/" in names:
        return CheckpointInProgressError(
            f"{store.url} holds a save that has not committed: it is still running, or it died.",
            path=store.url,
            phase="load",
            next_step="Wait for the save to end, or load an earlier checkpoint.",
        )
    local = next((name for name in names if is_rank_local(name)), None)
    if local is not None:
        return FormatError(
            f"{store.url} was saved with use_collectives=False: every rank has metadata of its "
            f"own ({local}).",
            path=local,
            next_step="Load it with torch's FileSystemReader on as many ranks as saved it.",
        )
    if any(name.endswith(".distcp") for name in names):
        return CheckpointInProgressError(
            f"{store.url} holds .distcp files but no .metadata: a save by another writer is "
            "still running, or it died.",
            path=store.url,
            phase="load",
            next_step="Wait for the save to end, or load an earlier checkpoint.",
        )
    folders = [name for name in names if name.endswith("/")]
    what = "is empty or does not exist"
    step = "Check the path; ckpt_storage.list_checkpoints(root) shows what is there."
    if names:
        what = f"holds no checkpoint, but {', '.join(sorted(names)[:3])}"
        if folders:
            step = f"Give the folder of one checkpoint, such as {store.url}/{max(folders)}"
    return CheckpointNotFoundError(
        f"{store.url} {what}.", path=store.url, phase="load", next_step=step
    )
