"""`open_checkpoint`: a checkpoint as a mapping from FQN to what it holds, read when asked for."""

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
from ckpt_storage.options import Casts, Progress, RetryPolicy, Timeouts, check_choice
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


_MOST_LINES = 12
_STEP = re.compile(r"(?:.*(?:step|iter|iteration|checkpoint|ckpt)[-_=. ]?)?([0-9]+)", re.IGNORECASE)


def open_checkpoint(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    unsafe_pickle: bool = False,
    casts: Casts = "checked",
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
) -> Checkpoint:
    """Return what lies at a URL or path, as a mapping from FQN to `LazyTensor` or object.

    Opens checkpoints of ours, stock DCP's, torch's sharded safetensors and Hugging Face folders, by
    their documents alone: three small reads for one of ours. Small documents that this process has
    opened there before are not read again; `verify` reads them. Runs no code from the checkpoint,
    unless `unsafe_pickle` lets objects be unpickled that torch does not load with
    `weights_only=True`. `casts` is as for `load`: what `numpy.asarray(tensor, dtype)` may do to
    values. `timeout` is how long no bytes may arrive. Any process; not
    collective; changes nothing.

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
    check_choice("casts", casts, Casts)
    location = Location.to_read(url, storage_options)
    return Checkpoint(
        Handle(location, unsafe_pickle=unsafe_pickle, casts=casts, arguments=arguments)
    )


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint, made by `open_checkpoint`: FQN -> `LazyTensor`, or object if it is none.

    It stays at the save that was found when it was opened. Once that save has been deleted or
    superseded and freed, reads raise `CheckpointGoneError`; they never return bytes of another
    save. As a context manager it is closed at the end of the block.
    """

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __getitem__(self, fqn: str) -> Any:  # noqa: ANN401  # a LazyTensor, or what was saved
        if fqn in self._handle.source.blobs:
            return read_objects(self._handle, [fqn])[fqn]
        return self._tensor(fqn)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handle.values)

    def __len__(self) -> int:
        return len(self._handle.values)

    def __contains__(self, fqn: object) -> bool:
        # Mapping's own would read the object to find out.
        return fqn in self._handle.values

    # Mapping compares all values, which would read the whole checkpoint; `diff` does that.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def url(self) -> str:
        """Where it lies, without credentials."""
        return self._handle.url

    @property
    def format(self) -> SourceFormat:
        """What was found: "ckpt_storage", "dcp", "dcp_safetensors" or "safetensors"."""
        return self._handle.source.format

    @property
    def save_id(self) -> str | None:
        """The save that is read; None where the format has no such thing."""
        return self._handle.source.save_id

    @property
    def info(self) -> CheckpointInfo:
        """What its commit record tells: name, step, metrics, time."""
        source = self._handle.source
        if isinstance(source, CommittedSource):
            return CheckpointInfo.of(self.url, source.record)
        name = self.url.rstrip("/").rpartition("/")[2]
        return CheckpointInfo(url=self.url, name=name, format=source.format)

    @property
    def step(self) -> int | None:
        """The step recorded with the save, else the one that its name tells, else None.

        A name tells it by a number at its end, alone or behind `step`, `iter`, `iteration`,
        `checkpoint` or `ckpt`: `step-1000`, `checkpoint-500`, `epoch=3-step=7`, but not `gpt-2`.
        """
        if self.info.step is not None:
            return self.info.step
        match = _STEP.fullmatch(self.info.name)
        return int(match[1]) if match else None

    @property
    def world_size(self) -> int | None:
        """The number of ranks that saved it; None where the format does not tell."""
        manifest = self._handle.manifest
        return None if manifest is None else manifest.world_size

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(entry.size_bytes for entry in self.entries())

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files that hold the values, in order of their names."""
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
            seen = {path: size_bytes for path, (size_bytes, _) in source.versions.of.items()}
            return tuple(
                StoredFile(path=path, size_bytes=seen.get(path) or store.stat(path).size_bytes)
                for path in sorted(source.paths)
            )

    @property
    def history(self) -> tuple[SlotRecord, ...]:
        """What was done to this checkpoint, oldest first, as its commit slots say now.

        A record has `slot`, `type` ("commit", "fence" or "deleted"), `save_id`, `created_at`
        (RFC 3339, the writer's clock), `host` and `pid`. Costs a small read per slot. Empty where
        the format keeps no history.
        """
        handle, source = self._handle, self._handle.source
        if not isinstance(source, CommittedSource):
            return ()
        with handle.session("Reading the history of") as store:
            last = slotlog.read_log(store, known=source.record).last_slot
            looks = [partial(slotlog.read_slot, store, slot) for slot in range(1, last + 1)]
            return tuple(one for one in some_at_once(looks, handle.options.thread_count) if one)

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

        `names` are names, or a function that says of each whether it is wanted; `prefix` chooses
        those that begin with it; both narrow, neither means everything. Tensors come as arrays of
        their own, or with `kind="torch"` as tensors on `device`. `progress=True` shows a bar.

        Raises `KeyError` for a name that is not there and a prefix that no name has, otherwise as
        indexing a `LazyTensor`.
        """
        handle = self._handle
        chosen = handle.chosen(names, prefix)
        if prefix is not None and names is None and not chosen and len(self):
            raise KeyError(f"No name in {self.url} begins with {prefix!r:.200}")
        tensors = [self._tensor(fqn) for fqn in chosen if fqn in handle.tensors]
        made: Callable[[Any, str], Any] = elements_of
        if kind == "torch":
            from .torchload import tensor_of  # noqa: PLC0415  # only now torch is needed

            made = partial(tensor_of, device=device)
        elif kind != "numpy":
            raise InvalidInputError(f"kind is {kind!r}.", next_step="Give 'numpy' or 'torch'.")
        elif unknown := [one for one in tensors if numpy_name(one.dtype) is None]:
            listing = ", ".join(f"{one.fqn} ({one.dtype})" for one in unknown)
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
        """Return mean, spread, extremes, NaN and Inf counts and a histogram of one tensor.

        Reads it in pieces, twice if it does not fit into the memory limit. `progress=True` shows a
        bar. Raises `KeyError`, `InvalidInputError` for complex numbers, otherwise as indexing.
        """
        tensor = self._tensor(fqn)
        if tensor.dtype.startswith("complex"):
            raise InvalidInputError(
                f"{fqn} is complex: its elements have no order.",
                next_step="Read it, and look at its real and imaginary parts.",
            )
        is_held = tensor.nbytes <= self._handle.piece_bytes
        total_bytes = tensor.nbytes * (1 if is_held else 2)
        with self._handle.reporting(progress, total_bytes=total_bytes) as on_bytes:

            def read() -> Iterator[NDArray[Any]]:
                for _, (words,) in walk([self._handle], [fqn], on_bytes=on_bytes):
                    yield elements_of(words, tensor.dtype)

            held = list(read()) if is_held else None
            facts = {"dtype": tensor.dtype, "shape": tensor.shape, "count": tensor.size}
            return summarise(lambda: held or read(), bin_count=bin_count, fqn=fqn, **facts)

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
        """Compare with another checkpoint, streamed: names, shapes, types, values.

        Whatever their shardings and formats. `other` may be a URL, opened without storage options.
        `values=False` reads no tensor. Elements are alike within `rtol` and `atol`, NaN and NaN
        always. `names` and `prefix` narrow as in `load`; names may be in either one only.

        Raises what reading raises, and `KeyError` for a name that is in neither.
        """
        chosen: dict[str, Any] = {"names": names, "prefix": prefix, "values": values}
        return diff(self, other, **chosen, rtol=rtol, atol=atol, progress=progress)

    def verify(self, *, deep: bool = True) -> VerifyReport:
        """Check every byte of the save that is open, and report all damage; see `verify`.

        Raises `CheckpointGoneError` if another save has taken its place.
        """
        handle = self._handle
        report = verify(handle.location.target, deep=deep, **handle.arguments)
        if report.save_id != self.save_id:
            with handle.session("Verifying") as store:
                if error := gone(store, self.save_id or "", self.url):
                    raise error
        return report

    def close(self) -> None:
        """Refuse reads from now on; idempotent. Clients stay for the next to open."""
        self._handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tensor(self, fqn: str) -> LazyTensor:
        """Return a tensor, unread. Raises `KeyError` if none has this name."""
        if fqn in self._handle.source.blobs:
            raise KeyError(f"{fqn!r:.200} in {self.url} is an object, no tensor")
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
        # Whoever saved chose the names of metrics: none may take the place of a fact.
        facts.update((f"metric {name}", f"{value:.6g}") for name, value in info.metrics.items())
        return {name: value for name, value in facts.items() if value is not None}

    def __repr__(self) -> str:
        told = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        lines = self.tree(1).lines(_MOST_LINES, "… tree(depth=2) shows more")
        return "\n  ".join([shown(f"<Checkpoint {self.url}>"), shown(told), *lines])

    def _repr_html_(self) -> str:
        return self.tree().page(heading(self.info.name, self.url, self._facts()))


def diff(
    left: Checkpoint | str | os.PathLike[str],
    right: Checkpoint | str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    **options: Any,  # noqa: ANN401  # those of Checkpoint.diff
) -> CheckpointDiff:
    """Compare two checkpoints, open ones or URLs, which are opened with `storage_options`.

    Takes the options of `Checkpoint.diff` and raises as it does, and as `open_checkpoint`.
    """
    with ExitStack() as stack:
        handles = []
        for side in (left, right):
            if not isinstance(side, Checkpoint):
                opened = open_checkpoint(side, storage_options=storage_options)
                side = stack.enter_context(opened)  # noqa: PLW2901  # the same, open
            handles.append(side._handle)  # noqa: SLF001  # of this module
        return compare(*handles, **options)
