"""Staging: a rank's state, planned in the caller and copied to an arena of host memory."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import mmap
import os
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError
from ckpt_storage.loads.resolving import plain_state
from ckpt_storage.saves.devices import DeviceReader, clear_last_error, fork_stream, warn_unlocked
from ckpt_storage.saves.items import LiveItems, host_views, is_as_stored
from ckpt_storage.saves.planning import (
    PLAN_CACHE,
    CachedPlan,
    LocalPlan,
    checked,
    find_cached_plan,
    flat_state,
)
from ckpt_storage.saves.replicas import LocalSample, staged_sample, values_of
from ckpt_storage.saves.saveplanner import BoxSavePlanner
from ckpt_storage.saves.shardfile import Item

from .events import ReentrantEvent

log = logging.getLogger("ckpt_storage")

Kind = Literal["private", "shared"]

ROUNDING_BYTES = 2 * 1024 * 1024
"""Arenas are multiples of this, the size of a huge page on the common machines."""

# mman.h: MADV_WIPEONFORK, which Python's mmap does not name.
_WIPE_ON_FORK = 18

# cuda.h: memory that every CUDA context sees as page-locked.
_REGISTER_PORTABLE = 1

_SYNCHRONIZE_S = 5.0
"""How long the streams of a failed copy may go on before their arena is retired."""

_LOOK_S = 0.01
_MOST_NAMED = 8
_ALIGN_BYTES = 64
_SMALL_BYTES = 64 * 1024
"""Up to this, asking torch for a copy costs more than the copy."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Torch copies elements of some kinds only as integers."""

_planned: deque[CachedPlan] = deque(maxlen=PLAN_CACHE.maxlen)
"""Cached local plans of the last few structures: planning takes torch some 50 us an item."""


_written_by_devices: list[NDArray[np.uint8]] = []
"""Memory of retired arenas."""


class Arena:
    """One mapping of host memory; the kernel frees it when the last view of `memory` is deleted."""

    def __init__(self, kind: Kind, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.file: int | None = None
        self.is_retired = False
        self._was_pinned = False
        try:
            if kind == "shared":
                self.file = _anonymous_file()
            self._close_file = weakref.finalize(self, _close, self.file)
            if self.file is None:
                mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                os.ftruncate(self.file, size_bytes)
                mapping = mmap.mmap(self.file, size_bytes)
        except (OSError, MemoryError, OverflowError) as error:
            raise CheckpointError(
                f"{size_bytes} bytes of host memory for staging cannot be allocated: {error}.",
                phase="stage",
                next_step="Free host memory, lower max_pending, or save without staging.",
            ) from error
        if self.file is None and sys.platform == "linux":
            # Not MADV_DONTFORK: a child would unmap whatever it has mapped at that address since.
            with contextlib.suppress(OSError):
                mapping.madvise(_WIPE_ON_FORK)
        self.memory: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)

    def pin(self, device: torch.device) -> None:
        """Lock the pages for copies from a CUDA device, if that is possible; idempotent."""
        if self._was_pinned:
            return
        self._was_pinned = True
        address = self.memory.ctypes.data
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, self.size_bytes, _REGISTER_PORTABLE))
        if code:
            clear_last_error(runtime, device)
            warn_unlocked(self.size_bytes, f"CUDA error {code}")
            return
        # On the array, not on the mapping: CPython unmaps before it runs a mapping's finalizers.
        unlock = weakref.finalize(self.memory, _unlock, runtime, address, device)
        # At exit CUDA may be gone already, and the kernel unlocks.
        unlock.atexit = False

    def touch(self) -> None:
        """Have the kernel allocate every page; the bytes are of no use afterwards."""
        self.memory[:: mmap.PAGESIZE] = 0

    def retire(self) -> None:
        """Keep the memory mapped for good, and from every later save: a device may write there."""
        self.is_retired = True
        _written_by_devices.append(self.memory)
        log.error(
            "%d bytes of staging memory stay mapped and unused: a copy from a GPU that failed may "
            "still write there.",
            self.size_bytes,
        )

    def close(self) -> None:
        """Close the descriptor, so that no further process can map the memory; idempotent."""
        self.file = None
        self._close_file()


class Arenas:
    """The free arenas of a saver, reused from save to save.

    Thread-safe without a lock: a finalizer or a signal handler may call a method in the middle of
    another call of the same thread.
    """

    def __init__(self, kind: Kind = "private") -> None:
        self._kind: Kind = kind
        self._free: deque[Arena] = deque()
        self._is_closed = False

    def take(self, need_bytes: int) -> Arena:
        """Return an arena of at least `need_bytes`, if possible the one that was used last."""
        arena = self._pop()
        if arena is not None:
            if arena.size_bytes >= need_bytes:
                return arena
            # Before the larger one is allocated, so that the process never holds both.
            arena.close()
            del arena
        rounded = math.ceil(max(1, need_bytes) / ROUNDING_BYTES) * ROUNDING_BYTES
        return Arena(self._kind, rounded)

    def give_back(self, arena: Arena) -> None:
        """Keep an arena for the next `take`. No copy or reader uses it, unless it is retired."""
        if arena.is_retired:
            arena.close()
            return
        self._free.append(arena)
        # Also if `close` was called between the two lines.
        if self._is_closed:
            self.release()

    def release(self) -> None:
        """Free the arenas that no save uses."""
        while (arena := self._pop()) is not None:
            arena.close()

    def close(self) -> None:
        """Free all arenas, those in use when they are given back; idempotent."""
        self._is_closed = True
        self.release()

    def _pop(self) -> Arena | None:
        try:
            return self._free.pop()
        except IndexError:
            return None


def map_shared(file: int, size_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes of another process' shared arena, and close the descriptor."""
    try:
        return np.frombuffer(mmap.mmap(file, size_bytes), dtype=np.uint8)
    finally:
        os.close(file)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckpt_storage")
    with tempfile.TemporaryFile() as temporary:
        return os.dup(temporary.fileno())


def _close(file: int | None) -> None:
    if file is not None:
        os.close(file)


def _unlock(runtime: Any, address: int, device: torch.device) -> None:  # noqa: ANN401  # torch types it as a module
    with torch.cuda.device(device):
        code = int(runtime.cudaHostUnregister(address))
    if code:
        clear_last_error(runtime, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPlan:
    """A rank's local plan and the place of each item in an arena; pickles.

    `rows` has start, size in bytes, dtype (None: a blob), and the name of a type that only pickle
    can hold, for which `load` refuses the item. `values` are checksums of what is no tensor.
    """

    kept: CachedPlan
    ties: Mapping[str, str]
    values: Mapping[str, int]
    rows: dict[MetadataIndex, tuple[int, int, str | None, str | None]] = field(default_factory=dict)

    def part(self, memory: NDArray[np.uint8], planner: SavePlanner | None) -> LocalPlan:
        """Return the local plan of a save whose bytes are in `memory`; default planner: torch's."""
        return LocalPlan(
            plan=lambda: self.kept.plan,
            planner=planner or BoxSavePlanner(),
            items=partial(self._items, memoryview(memory)),  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11
            ties=self.ties,
            structure=self.kept.structure,
            sample=partial(self._sample, memoryview(memory)),  # type: ignore[arg-type]  # as above
        )

    def _sample(self, memory: memoryview) -> LocalSample:
        """Return the sample of the replicated values in `memory`."""
        rows = (
            (item.index.fqn, self.rows[item.index])
            for item in self.kept.plan.items
            if item.type is WriteItemType.TENSOR
        )
        tensors = ((fqn, memory[start : start + size]) for fqn, (start, size, *_) in rows)
        return staged_sample(tensors, self.values)

    def _items(self, memory: memoryview, plan: SavePlan) -> Iterator[Item]:
        for item in plan.items:
            row = self.rows.get(item.index)
            if row is None:
                raise InvalidInputError(
                    f"{item.index.fqn} is not in the local plan, so it was not copied.",
                    phase="write",
                    next_step="Save with a planner whose finish_plan adds no items.",
                )
            start, size_bytes, dtype, unsafe = row
            chunk = None if item.tensor_data is None else item.tensor_data.chunk
            yield Item(
                fqn=item.index.fqn,
                dtype=dtype,
                offsets=() if chunk is None else tuple(chunk.offsets),
                sizes=() if chunk is None else tuple(chunk.sizes),
                payload_bytes=size_bytes,
                views=partial(_windows, memory[start : start + size_bytes]),
                unsafe=unsafe,
            )


def _windows(view: memoryview, window_bytes: int) -> Iterator[memoryview]:
    for at in range(0, len(view), window_bytes):
        yield view[at : at + window_bytes]


class StagingJob:
    """A rank's state in a save: planned when it is made, copied to `arena` by `run` or `start`."""

    def __init__(
        self,
        state: Mapping[str, Any],
        arenas: Arenas,
        planner: SavePlanner | None = None,
        *,
        url: str | os.PathLike[str] = "",
        rank: int = 0,
        world_size: int = 1,
        is_checked: bool = False,
    ) -> None:
        """Plan this rank's part and copy all that is no tensor; if `is_checked`, hash the tensors.

        The copy of a tensor that has another hash was made while something wrote to the tensor.
        """
        if not isinstance(state, Mapping):
            raise InvalidInputError(
                f"The state is a {type(state).__qualname__}, not a dict.",
                phase="stage",
                next_step="Give a dict of names to tensors, objects or further dicts.",
            )
        plain = plain_state(state)
        with torch.no_grad():
            live = LocalPlan.of(
                plain, planner, url=os.fspath(url), rank=rank, world_size=world_size
            )
            values = values_of(flat_state(live.planner)) if world_size > 1 else {}
            self.staged = StagedPlan(kept=_planned_by(live), ties=live.ties, values=values)
            self._sources: list[torch.Tensor] = []
            self._starts: list[int] = []
            try:
                blobs, end = self._place(live)
            except InvalidInputError as error:
                error.phase = "stage"
                raise
        self.arena = arenas.take(end)
        for start, item in blobs:
            (view,) = item.views(item.payload_bytes)
            end = start + item.payload_bytes
            self.arena.memory[start:end] = np.frombuffer(view, dtype=np.uint8)
        self._streams = _fork_streams({tensor.device for tensor in self._sources})
        self._hashes = [_hash_of(tensor) for tensor in self._sources] if is_checked else []
        self._error: CheckpointError | None = None
        self._ended = ReentrantEvent()

    def _place(self, live: LocalPlan) -> tuple[list[tuple[int, Item]], int]:
        """Place each item and list the tensors to copy; return the blobs, and the bytes of all."""
        blobs, end = list[tuple[int, Item]](), 0
        known: dict[int, int] = {}
        plan = self.staged.kept.plan
        items = LiveItems(live.planner).with_tensors(plan)
        for planned, (item, tensor) in zip(plan.items, items, strict=True):
            size_bytes, start = item.payload_bytes, end
            if tensor is None:
                blobs.append((start, item))
            elif size_bytes:
                # Views of the same elements of the same memory are copied once.
                first = known.setdefault(tensor.data_ptr(), len(self._sources))
                if first < len(self._sources) and _form(self._sources[first]) == _form(tensor):
                    start = self._starts[first]
                else:
                    self._sources.append(tensor)
                    self._starts.append(start)
            self.staged.rows[planned.index] = start, size_bytes, item.dtype, item.unsafe
            if start == end:
                end += -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return blobs, end

    @property
    def cuda_devices(self) -> list[torch.device]:
        """The CUDA devices that tensors are copied from."""
        return list(self._streams)

    def start(self) -> None:
        """Copy in a thread; the tensors must not change before `done`."""
        threading.Thread(target=self._run, name="ckpt_storage-stage", daemon=True).start()

    def run(self) -> None:
        """Copy the tensors' bytes. Raises `CheckpointError`, or the interrupt that came."""
        interrupt = self._run()
        if interrupt is not None:
            raise interrupt
        self.wait(0)

    def _run(self) -> BaseException | None:
        """Copy; keep an error for `wait`. Return an interrupt, which belongs to the caller."""
        try:
            self._copy()
            self._check()
        except BaseException as error:  # noqa: BLE001  # no save may take this copy for the state
            self._settle()
            # Frames hold tensors of the trainer, and the error lives as long as the job.
            for failed in (error, error.__cause__):
                traceback.clear_frames(failed.__traceback__ if failed else None)
            if isinstance(error, CheckpointError):
                self._error = error
                return None
            self._error = CheckpointError(
                f"The state could not be copied to host memory: {type(error).__name__}: {error}.",
                phase="stage",
                next_step="Free host and device memory, then save again.",
            )
            self._error.__cause__ = error
            return None if isinstance(error, Exception) else error
        finally:
            # Before anyone goes on: the trainer may want the memory of the sources.
            self._sources.clear()
            self._ended.set()
        return None

    def _settle(self) -> None:
        """Wait until no stream copies to the arena any more; retire it if that is not known."""
        end_s = time.monotonic() + _SYNCHRONIZE_S
        for device, stream in self._streams.items():
            try:
                with torch.cuda.device(device):
                    while not (is_idle := stream.query()) and time.monotonic() < end_s:
                        time.sleep(_LOOK_S)
            except Exception as error:  # noqa: BLE001  # a device that is lost
                # The text only: a record's arguments may live long, and an error holds frames.
                log.warning("A failed copy from %s cannot be awaited: %s", device, str(error))
                is_idle = False
            if not is_idle:
                self.arena.retire()
                return

    def done(self) -> bool:
        """Return whether the copy has ended, with success or an error."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait until the copy is complete. Raises its error, or `PhaseTimeoutError`."""
        if not self._ended.wait(timeout_s):
            raise PhaseTimeoutError(
                f"The state was not copied to host memory within {timeout_s} s.",
                timeout_s=timeout_s,
                phase="stage",
                next_step="Look for work on the device that never ends, or allow more time.",
            )
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        memory = self.arena.memory
        address = memory.ctypes.data
        pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for device in self.cuda_devices[:1]:
            self.arena.pin(device)
        for tensor, start in zip(self._sources, self._starts, strict=True):
            size_bytes = tensor.nbytes
            if size_bytes <= _SMALL_BYTES and is_as_stored(tensor):
                ctypes.memmove(address + start, tensor.data_ptr(), size_bytes)
                continue
            targets, sources = pairs.setdefault(tensor.device, ([], []))
            source = _copyable(tensor)
            target = torch.from_numpy(memory[start : start + size_bytes])
            targets.append(target.view(source.dtype).view(source.shape))
            sources.append(source)
        for device, (targets, sources) in pairs.items():
            with torch.no_grad(), self._on_stream(device):
                # One call for all: it takes half the time of many, and releases the GIL.
                torch._foreach_copy_(targets, sources, device in self._streams)
        for device, stream in self._streams.items():
            with torch.cuda.device(device):
                stream.synchronize()

    def _check(self) -> None:
        """Raise `InvalidInputError` naming the tensors whose copies have other hashes."""
        torn = set()
        for tensor, start, expected in zip(self._sources, self._starts, self._hashes, strict=False):
            copied = hashlib.blake2b(self.arena.memory[start : start + tensor.nbytes].data)
            if copied.digest() != expected:
                torn.add(start)
        rows = self.staged.rows.items()
        # The row of an empty tensor begins where the next one does.
        names = sorted({index.fqn for index, (start, size, *_) in rows if size and start in torn})
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            raise InvalidInputError(
                f"The state changed while it was copied: {', '.join(names[:_MOST_NAMED])}{more}.",
                phase="stage",
                next_step="Let nothing write to these tensors before the copy has ended: use "
                "step_guard or handle.wait_staged, or save with block_until_staged=True.",
            )

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """Make the side stream of a CUDA device current in the block."""
        if device not in self._streams:
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(self._streams[device]):
            yield


def warm_up(job: StagingJob, arenas: Arenas, count: int) -> None:
    """Allocate, touch and page-lock the memory of `count` saves like `job`, which is not run.

    Raises `CheckpointError` if the memory cannot be allocated.
    """
    taken = [job.arena]
    try:
        taken.extend(arenas.take(job.arena.size_bytes) for _ in range(count - 1))
        for arena in taken:
            arena.touch()
            for device in job.cuda_devices[:1]:
                arena.pin(device)
    finally:
        for arena in taken:
            arenas.give_back(arena)


def _planned_by(live: LocalPlan) -> CachedPlan:
    """Return the local plan of a planner that is set up, from the cache if nothing changed."""
    kept = find_cached_plan(_planned, live.structure)
    if kept is None:
        plan = live.plan()
        if not plan.usable:
            # With torch's plan caching this says "as before"; the items are staged all the same.
            plan = checked(live.planner.plan)  # type: ignore[attr-defined]  # torch's default one
        kept = CachedPlan(plan_id="", plan=plan, structure=live.structure)
        if live.structure is not None:
            _planned.append(kept)
    return kept


def _hash_of(tensor: torch.Tensor) -> bytes:
    """Return the hash of a tensor's elements as they are staged."""
    hasher = hashlib.blake2b()
    for view in host_views(tensor, ROUNDING_BYTES, DeviceReader()):
        hasher.update(view)
    return hasher.digest()


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return how elements are read from the memory that a tensor begins at."""
    return (
        *(tensor.device, tensor.dtype, tensor.shape, tensor.stride()),
        *(tensor.is_conj(), tensor.is_neg()),
    )


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as elements that torch can copy."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # named in torch's "Extending PyTorch"
        plain = tensor.as_subclass(torch.Tensor)
        is_lazy = plain.is_conj() or plain.is_neg() or plain.element_size() not in _SAME_SIZE
        return plain if is_lazy else plain.view(_SAME_SIZE[plain.element_size()])


def _fork_streams(devices: set[torch.device]) -> dict[torch.device, Any]:
    """Return a side stream per CUDA device, behind what is enqueued; await other accelerators."""
    for device in devices:
        if device.type not in {"cpu", "cuda"}:
            torch.accelerator.synchronize(device)
    return {device: fork_stream(device) for device in devices if device.type == "cuda"}
