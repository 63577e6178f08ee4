"""`open_checkpoint`: a checkpoint as a mapping from FQN to values, which are read on access."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Self

from numpy.typing import NDArray

from ckpt_storage.commit import slotlog
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.options import Progress, RetryPolicy, Timeouts
from ckpt_storage.source.model import CommittedSource, SourceFormat, gone
from ckpt_storage.store import Location
from ckpt_storage.transfer.workers import some_at_once

from .lazy_tensor import LazyTensor
from .numbers import CheckpointDiff, TensorStats, compare, summarise
from .reading import Handle, Names, elements_of, numpy_name, read_objects, read_tensors, walk
from .verify import VerifyReport, verify
from .views import Entry, Row, StoredFile, TreeView, heading, human_bytes, rows_of, shown

if TYPE_CHECKING:
    from .torchload import Device


_MAX_LINES = 12
_STEP = re.compile(r"(?:.*(?:step|iter|iteration|checkpoint|ckpt)[-_=. ]?)?([0-9]+)", re.IGNORECASE)


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    unsafe_pickle: bool = False,
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
) -> Checkpoint:
    """Return the checkpoint at a URL or path, a mapping from FQN to `LazyTensor` or object.

    Opens checkpoints of this package, stock DCP checkpoints, torch's sharded safetensors and
    Hugging Face folders by their documents; a checkpoint of this package takes three small reads.
    Runs no code of the checkpoint, unless `unsafe_pickle` permits to unpickle objects that torch
    does not load with `weights_only=True`. A read fails when no bytes arrive for `timeout`. Any
    process; not collective; changes nothing.

    Raises `CheckpointNotFoundError`, `CheckpointInProgressError`, `CheckpointGoneError`,
    `FormatError`, `UnsafeContentError`, `IntegrityError`, `StorageError`, `InvalidInputError`.
    """
    arguments = {
        "storage_options": storage_options,
        "thread_count": thread_count,
        "memory_limit_bytes": memory_limit_bytes,
        "timeout": Timeouts.of(timeout),
        "retry": retry or RetryPolicy(),
    }
    location = Location.to_read(url, storage_options)
    return Checkpoint(Handle(location, unsafe_pickle=unsafe_pickle, arguments=arguments))


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: FQN -> `LazyTensor`, or the object. Made by `open_checkpoint`.

    It stays at the save that was the head when it was opened. Once that save has been deleted, or
    superseded and freed, reads raise `CheckpointGoneError`; they never return bytes of another
    save. As a context manager, it is closed at the end of the block.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __getitem__(self, fqn: str) -> Any:  # noqa: ANN401  # a LazyTensor or an object
        if fqn in self._handle.source.blobs:
            return read_objects(self._handle, [fqn])[fqn]
        return self._tensor(fqn)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handle.values)

    def __len__(self) -> int:
        return len(self._handle.values)

    def __contains__(self, fqn: object) -> bool:
        # The method of Mapping would read the object.
        return fqn in self._handle.values

    # The method of Mapping would read the whole checkpoint; `diff` compares values.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def url(self) -> str:
        """The URL of the checkpoint, without credentials."""
        return self._handle.url

    @property
    def format(self) -> SourceFormat:
        """The format: "ckpt_storage", "dcp", "dcp_safetensors" or "safetensors"."""
        return self._handle.source.format

    @property
    def save_id(self) -> str | None:
        """The id of the open save; None if the format has no save ids."""
        return self._handle.source.save_id

    @property
    def info(self) -> CheckpointInfo:
        """Name, step, metrics and time, from the commit record."""
        source = self._handle.source
        if isinstance(source, CommittedSource):
            return CheckpointInfo.of(self.url, source.record)
        name = self.url.rstrip("/").rpartition("/")[2]
        return CheckpointInfo(url=self.url, name=name, format=source.format)

    @property
    def step(self) -> int | None:
        """The step that was recorded with the save, else the step in the name, else None.

        The step in a name is a number at its end, alone or after `step`, `iter`, `iteration`,
        `checkpoint` or `ckpt`: `step-1000`, `checkpoint-500`, `epoch=3-step=7`, but not `gpt-2`.
        """
        if self.info.step is not None:
            return self.info.step
        match = _STEP.fullmatch(self.info.name)
        return int(match[1]) if match else None

    @property
    def world_size(self) -> int | None:
        """The number of ranks that saved it; None if the format does not record it."""
        manifest = self._handle.manifest
        return None if manifest is None else manifest.world_size

    @cached_property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(entry.size_bytes for entry in self.entries())

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files that hold the values, sorted by name."""
        handle, source = self._handle, self._handle.source
        if isinstance(source, CommittedSource):
            files, groups = source.manifest.files, source.manifest.groups
            return tuple(
                StoredFile(
                    path=ref.path,
                    size_bytes=ref.size_bytes,
                    rank=rank,
                    crc32c=ref.crc32c,
                    group=group or None,
                )
                for (ref, rank), group in zip(files, groups or [""] * len(files), strict=True)
            )
        with handle.session("Listing") as store:
            sizes = {path: size_bytes for path, (size_bytes, _) in source.versions.of.items()}
            return tuple(
                StoredFile(path=path, size_bytes=sizes.get(path) or store.stat(path).size_bytes)
                for path in sorted(source.paths)
            )

    @property
    def history(self) -> tuple[SlotRecord, ...]:
        """The current records of all commit slots, oldest first.

        A record has `slot`, `type` ("commit", "fence" or "deleted"), `save_id`, `created_at`
        (RFC 3339, the writer's clock), `host` and `pid`. Costs a small read for each slot. Empty if
        the format has no history.
        """
        handle, source = self._handle, self._handle.source
        if not isinstance(source, CommittedSource):
            return ()
        with handle.session("Reading the history of") as store:
            last = slotlog.read_log(store, known=source.record).last_slot
            reads = [partial(slotlog.read_slot, store, slot) for slot in range(1, last + 1)]
            return tuple(filter(None, some_at_once(reads, handle.options.thread_count)))

    def entries(self) -> tuple[Entry, ...]:
        """Return name, dtype, shape and size of every value; `dtype` is None for an object."""
        return tuple(map(self._handle.entry, self._handle.values))

    def tree(self, depth: int | None = None) -> TreeView:
        """Return the names as a tree with shapes and sizes, down to `depth` levels."""
        return TreeView(top=self._top, sharding_of=self._handle.sharding, depth=depth)

    def load(
        self,
        names: Names = None,
        *,
        prefix: str | None = None,
        kind: Literal["numpy", "torch"] = "numpy",
        device: Device | None = None,
        progress: Progress = None,
    ) -> dict[str, Any]:
        """Read whole values, all tensors in one batch, and return them by FQN.

        `names` are names, or a predicate of names; `prefix` selects the names that begin with it.
        With both, a value must match both; with neither, all values are read. Tensors are returned
        as new numpy arrays, or with `kind="torch"` as tensors on `device`. `progress=True` shows a
        bar.

        Raises `KeyError` for a missing name and for a prefix that no name has, otherwise as
        indexing a `LazyTensor`.
        """
        handle = self._handle
        chosen = handle.chosen(names, prefix)
        if prefix is not None and names is None and not chosen and len(self):
            raise KeyError(f"No name in {self.url} begins with {prefix!r:.200}")
        tensors = [self._tensor(fqn) for fqn in chosen if fqn in handle.tensors]
        made: Callable[[Any, str], Any] = elements_of
        if kind == "torch":
            from .torchload import tensor_of  # noqa: PLC0415  # imports torch

            made = partial(tensor_of, device=device)
        elif kind != "numpy":
            raise InvalidInputError(f"kind is {kind!r}.", next_step="Give 'numpy' or 'torch'.")
        elif unknown := [tensor for tensor in tensors if numpy_name(tensor.dtype) is None]:
            listing = ", ".join(f"{tensor.fqn} ({tensor.dtype})" for tensor in unknown)
            what = f"numpy has no types for {len(unknown)} tensors: {listing}."
            raise CheckpointError(what, next_step="Pass kind='torch', or load the others by name.")
        total_bytes = sum(tensor.nbytes for tensor in tensors)
        with handle.reporting(progress, total_bytes=total_bytes) as on_bytes:
            wanted = [(tensor.fqn, tuple(map(range, tensor.shape))) for tensor in tensors]
            arrays = read_tensors(handle, wanted, gaps="cheap", on_bytes=on_bytes)
            pairs = zip(tensors, arrays, strict=True)
            values = {tensor.fqn: made(words, tensor.dtype) for tensor, words in pairs}
            objects = [fqn for fqn in chosen if fqn not in values]
            values.update(read_objects(handle, objects, on_bytes=on_bytes))
        return {fqn: values[fqn] for fqn in chosen}

    def stats(self, fqn: str, *, bin_count: int = 64, progress: Progress = None) -> TensorStats:
        """Return mean, deviation, extremes, NaN and Inf counts and a histogram of one tensor.

        Reads it in pieces, twice if it exceeds the memory limit. `progress=True` shows a bar.
        Raises `KeyError`, `InvalidInputError` for complex numbers, otherwise as indexing.
        """
        tensor = self._tensor(fqn)
        if tensor.dtype.startswith("complex"):
            raise InvalidInputError(
                f"{fqn} is complex: its elements have no order.",
                next_step="Read it, and compute statistics of its real and imaginary parts.",
            )
        is_held = tensor.nbytes <= self._handle.piece_bytes
        total_bytes = tensor.nbytes * (1 if is_held else 2)
        with self._handle.reporting(progress, total_bytes=total_bytes) as on_bytes:

            def read() -> Iterator[NDArray[Any]]:
                for _, (words,) in walk([self._handle], [fqn], on_bytes=on_bytes):
                    yield elements_of(words, tensor.dtype)

            pieces = list(read()) if is_held else None
            facts = {"dtype": tensor.dtype, "shape": tensor.shape, "count": tensor.size}
            return summarise(lambda: pieces or read(), bin_count=bin_count, fqn=fqn, **facts)

    def diff(
        self,
        other: Checkpoint | str | os.PathLike[str],
        *,
        names: Names = None,
        prefix: str | None = None,
        values: bool = True,
        rtol: float = 0.0,
        atol: float = 0.0,
        progress: Progress = None,
    ) -> CheckpointDiff:
        """Compare names, shapes, dtypes and values with another checkpoint, in bounded memory.

        Shardings and formats may differ. `other` may be a URL, which is opened without storage
        options. `values=False` reads no tensor. Elements are equal within `rtol` and `atol`; NaN
        equals NaN. `names` and `prefix` select as in `load`; a name may be in one checkpoint only.

        Raises as reads do, and `KeyError` for a name that is in neither checkpoint.
        """
        chosen: dict[str, Any] = {"names": names, "prefix": prefix, "values": values}
        return diff(self, other, **chosen, rtol=rtol, atol=atol, progress=progress)

    def verify(self, *, deep: bool = True) -> VerifyReport:
        """Check every byte of the open save, and report all damage; see `verify`.

        Raises `CheckpointGoneError` if another save has replaced it.
        """
        handle = self._handle
        report = verify(handle.location.target, deep=deep, **handle.arguments)
        if report.save_id != self.save_id:
            with handle.session("Verifying") as store:
                if error := gone(store, self.save_id or "", self.url):
                    raise error
        return report

    def close(self) -> None:
        """Refuse further reads; idempotent. Clients stay open for other checkpoints."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tensor(self, fqn: str) -> LazyTensor:
        """Return a tensor without reading it. Raises `KeyError`."""
        if fqn in self._handle.source.blobs:
            raise KeyError(f"{fqn!r:.200} in {self.url} is an object, not a tensor")
        if fqn not in self._handle.tensors:
            raise self._handle.unknown(fqn)
        info = self._handle.tensors[fqn]
        return LazyTensor(fqn, info.dtype, tuple(info.shape), self._handle)

    @cached_property
    def _top(self) -> list[Row]:
        return rows_of(self.entries())

    def _facts(self) -> dict[str, object]:
        info, object_count = self.info, len(self._handle.source.blobs)
        facts = {
            "format": self.format,
            "step": self.step,
            "ranks": self.world_size,
            "tensors": f"{len(self._handle.tensors):,}",
            "size": human_bytes(self.nbytes),
            "objects": f"{object_count:,}" if object_count else None,
            "saved": info.created_at,
            "save": info.save_id,
        }
        # With a prefix, because a saver may name a metric like a fact.
        facts.update((f"metric {name}", f"{value:.6g}") for name, value in info.metrics.items())
        return {name: value for name, value in facts.items() if value is not None}

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        lines = self.tree(1).lines(_MAX_LINES, "… tree(depth=2) shows more")
        return "\n  ".join([shown(f"<Checkpoint {self.url}>"), shown(facts), *lines])

    def _repr_html_(self) -> str:
        return self.tree().page(heading(self.info.name, self.url, self._facts()))


def diff(
    left: Checkpoint | str | os.PathLike[str],
    right: Checkpoint | str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,  # noqa: ANN401  # those of Checkpoint.diff
) -> CheckpointDiff:
    """Compare two checkpoints; URLs are opened with `storage_options`.

    Has the options of `Checkpoint.diff`. Raises as `Checkpoint.diff` and `open_checkpoint`.
    """
    with ExitStack() as stack:
        handles = []
        for side in (left, right):
            if not isinstance(side, Checkpoint):
                opened = open_checkpoint(side, storage_options=storage_options)
                side = stack.enter_context(opened)  # noqa: PLW2901  # the same, open
            handles.append(side._handle)  # noqa: SLF001  # of this module
        return compare(*handles, **options)
