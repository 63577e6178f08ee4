"""Staging: a rank's state is planned in the caller and copied to an arena."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt_storage.errors import CheckpointError, InvalidInputError, PhaseTimeoutError
from ckpt_storage.loads.states import plain_state
from ckpt_storage.saves.devices import DeviceReader, as_integers, fork_stream
from ckpt_storage.saves.items import LiveItems, host_views, is_as_stored
from ckpt_storage.saves.planning import LocalPlan, flat_state
from ckpt_storage.saves.replicas import values_of
from ckpt_storage.saves.shardfile import Item

from .arenas import ROUNDING_BYTES, Arena, Arenas
from .events import ReentrantEvent
from .staged_plan import ItemPlace, StagedPlan

log = logging.getLogger("ckpt_storage")

_SYNCHRONIZE_S = 5.0
"""How long the streams of a failed copy may go on before their arena is retired."""

_LOOK_S = 0.01
_MAX_NAMED = 8
_ALIGN_BYTES = 64
_SMALL_BYTES = 64 * 1024
"""Up to this, asking torch for a copy costs more than the copy."""


class StagingJob:
    """A rank's state in a save: planned when it is made, copied to `arena` by `run` or `start`.

    `start_s` and `end_s` are on the monotonic clock.
    """

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
        """Plan this rank's shard of the state, and copy all but tensors.

        If `is_checked`, hash the tensors: a copy with another hash was made while something wrote
        to the tensor.
        """
        self.start_s = self.end_s = time.monotonic()
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
            self.staged = StagedPlan.of(live, values)
            self._sources: list[torch.Tensor] = []
            self._starts: list[int] = []
            try:
                blobs, end = self._place(live)
            except InvalidInputError as error:
                error.phase = "stage"
                raise
        self.arena = arenas.acquire(end)
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
        plan = self.staged.cached.plan
        items = LiveItems(live.planner).with_tensors(plan)
        for planned, (item, tensor) in zip(plan.items, items, strict=True):
            size_bytes, start = item.payload_bytes, end
            if tensor is None:
                blobs.append((start, item))
            elif size_bytes:
                # Views of the same elements of the same memory are copied once.
                first = known.setdefault(tensor.data_ptr(), len(self._sources))
                if first < len(self._sources) and _layout(self._sources[first]) == _layout(tensor):
                    start = self._starts[first]
                else:
                    self._sources.append(tensor)
                    self._starts.append(start)
            place = ItemPlace(start, size_bytes, item.dtype, item.unsafe)
            self.staged.places[planned.index] = place
            if start == end:
                end += -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return blobs, end

    def warm_up(self, arenas: Arenas, count: int) -> None:
        """Allocate, touch and page-lock the memory of `count` saves like this, which is not run.

        Raises `CheckpointError` if the memory cannot be allocated.
        """
        acquired = [self.arena]
        try:
            acquired.extend(arenas.acquire(self.arena.size_bytes) for _ in range(count - 1))
            for arena in acquired:
                arena.touch()
                self._pin(arena)
        finally:
            for arena in acquired:
                arenas.release(arena)

    def _pin(self, arena: Arena) -> None:
        """Page-lock an arena for copies from CUDA devices; a single device suffices."""
        for device in list(self._streams)[:1]:
            arena.pin(device)

    def start(self) -> None:
        """Copy in a thread; the tensors must not change before `done`."""
        threading.Thread(target=self._run, name="ckpt-storage stage", daemon=True).start()

    def run(self) -> None:
        """Copy the tensors' bytes. Raises `CheckpointError`, or an interrupt."""
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
            self._await_streams()
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
            # Before a waiting thread continues: the trainer may need the memory of the sources.
            self._sources.clear()
            self.end_s = time.monotonic()
            self._ended.set()
        return None

    def _await_streams(self) -> None:
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
        self._pin(self.arena)
        for tensor, start in zip(self._sources, self._starts, strict=True):
            size_bytes = tensor.nbytes
            if size_bytes <= _SMALL_BYTES and is_as_stored(tensor):
                ctypes.memmove(address + start, tensor.data_ptr(), size_bytes)
                continue
            targets, sources = pairs.setdefault(tensor.device, ([], []))
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # named in torch's "Extending PyTorch"
                source = as_integers(tensor.as_subclass(torch.Tensor))
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
        names = sorted(
            {
                index.fqn
                for index, place in self.staged.places.items()
                # The place of an empty tensor begins where the next tensor does.
                if place.size_bytes and place.start in torn
            }
        )
        if names:
            more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
            raise InvalidInputError(
                f"The state changed while it was copied: {', '.join(names[:_MAX_NAMED])}{more}.",
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


def _hash_of(tensor: torch.Tensor) -> bytes:
    """Return the hash of a tensor's elements as they are staged."""
    hasher = hashlib.blake2b()
    for view in host_views(tensor, ROUNDING_BYTES, DeviceReader()):
        hasher.update(view)
    return hasher.digest()


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return how elements are read from the memory that a tensor begins at."""
    return (
        *(tensor.device, tensor.dtype, tensor.shape, tensor.stride()),
        *(tensor.is_conj(), tensor.is_neg()),
    )


def _fork_streams(devices: set[torch.device]) -> dict[torch.device, Any]:
    """Return a side stream per CUDA device, behind what is enqueued; await other accelerators."""
    for device in devices:
        if device.type not in {"cpu", "cuda"}:
            torch.accelerator.synchronize(device)
    return {device: fork_stream(device) for device in devices if device.type == "cuda"}
