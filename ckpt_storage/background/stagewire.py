"""Staged states on their way to a worker process: references through a pipe, memory by mapping.

The trainer packs a state: a pickle in which tensors are references into an arena. An arena's
descriptor crosses once; the worker maps it and keeps the mapping for the saves to come.
"""

from __future__ import annotations

import io
import logging
import pickle
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loads.resolving import Parts, parts_of

from .hostbuffers import Arena, map_shared
from .stagewalk import Keep, State
from .staging import StagedState, kept

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Reference = tuple[
    int, int, torch.dtype, int, tuple[int, ...], tuple[int, ...], bool, bool, Parts | None
]
"""Window start, window bytes, dtype, offset, size, stride, requires_grad, is_parameter, parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedState:
    """A state that can travel: `skeleton` is its pickle without tensors' bytes."""

    skeleton: bytes
    arena: Arena


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What goes before a skeleton; `with_file`: a descriptor of the arena follows."""

    arena_id: int
    arena_bytes: int
    with_file: bool
    dropped_ids: tuple[int, ...]


def pack(staged: StagedState) -> PackedState:
    """Pickle a state staged in shared memory, with references in place of tensors.

    Takes microseconds a tensor; any thread, while the lease lasts.

    Raises:
        InvalidInputError: Something in the state cannot be pickled; the message names it.

    """
    references = _references(staged)
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, references).dump(staged.state)
    except Exception as error:  # noqa: BLE001  # what a user's own classes raise
        fqn, reason = _culprit(staged.state, references, error)
        raise InvalidInputError(
            f"{fqn} cannot be sent to the worker process: {reason}.",
            phase="stage",
            next_step="Save plain data in its place, or save with mode='thread'.",
        ) from None
    return PackedState(skeleton=buffer.getvalue(), arena=staged.arena)


class StateSender:
    """The trainer's end: remembers which arenas one worker has. One per worker process.

    `connection` is one end of `multiprocessing.Pipe(duplex=True)`, a Unix socket. The caller sees
    to it that nothing else is written to it during `send`.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._sent: dict[int, weakref.ref[Arena]] = {}

    def send(self, packed: PackedState) -> None:
        """Send a state, and its arena's descriptor if the worker does not have that yet.

        Waits while the socket is full: call it from a thread that may wait, and only once the
        worker is about to call `StateReceiver.receive`.

        Raises:
            OSError: The worker is gone.
            InvalidInputError: The arena was closed, or is not shared.

        """
        arena = packed.arena
        if arena.file is None:
            raise InvalidInputError(
                "The staged state's memory is private or was released.",
                phase="stage",
                next_step="Send it while its lease lasts, from HostBuffers('shared').",
            )
        with_file = arena.arena_id not in self._sent
        gone = [
            key for key, held in self._sent.items() if (it := held()) is None or it.file is None
        ]
        header = _Header(
            arena_id=arena.arena_id,
            arena_bytes=arena.size_bytes,
            with_file=with_file,
            dropped_ids=tuple(gone),
        )
        self._connection.send(header)
        if with_file:
            reduction.send_handle(self._connection, arena.file, None)
            self._sent[arena.arena_id] = weakref.ref(arena)
        self._connection.send_bytes(packed.skeleton)
        for key in gone:
            del self._sent[key]


class StateReceiver:
    """The worker's end: keeps arenas mapped from state to state."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._arenas: dict[int, NDArray[np.uint8]] = {}

    def receive(self) -> State:
        """Return the next state, whose tensors lie in the trainer's memory.

        They must not be used after the trainer was told that the save has ended.

        Raises:
            EOFError: The trainer is gone.
            Exception: What the user's own classes raise when they are unpickled.

        """
        try:
            header: _Header = self._connection.recv()
        except ConnectionResetError as error:
            # So ends a socket whose other end died with something unread.
            raise EOFError(str(error)) from error
        for key in header.dropped_ids:
            self._arenas.pop(key, None)
        if header.with_file:
            file = reduction.recv_handle(self._connection)
            self._arenas[header.arena_id] = map_shared(file, header.arena_bytes)
        # Read before anything can fail, so that the next message starts where it should.
        skeleton = self._connection.recv_bytes()
        return unpack(skeleton, self._arenas[header.arena_id])


def unpack(skeleton: bytes, memory: NDArray[np.uint8]) -> State:
    """Return the state of a skeleton over the bytes of its arena."""
    # torch warns for each mesh whose groups this process does not have; a save needs none.
    log = logging.getLogger("torch.distributed.device_mesh")
    log.addFilter(_without_mesh_warning)
    try:
        state: State = _Unpickler(io.BytesIO(skeleton), memory).load()
    finally:
        log.removeFilter(_without_mesh_warning)
    return state


def _without_mesh_warning(record: logging.LogRecord) -> bool:
    return "DeviceMesh" not in record.getMessage()


def _references(staged: StagedState) -> Mapping[int, _Reference]:
    """Map the `id` of each staged tensor to its place; `staged` keeps the tensors alive."""
    found = {}
    for tensor, place in zip(staged.tensors, staged.layout.places, strict=True):
        window = staged.layout.windows[place.window]
        found[id(tensor)] = (
            window.start,
            window.size_bytes,
            tensor.dtype,
            place.offset,
            place.size,
            place.stride,
            tensor.requires_grad,
            type(tensor) is torch.nn.Parameter,
            parts_of(tensor),
        )
    return found


class _Pickler(pickle.Pickler):
    """Writes references for tensors of the arena."""

    def __init__(self, file: io.BytesIO, references: Mapping[int, _Reference]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._references = references

    def persistent_id(self, obj: object) -> _Reference | None:
        return self._references.get(id(obj))


class _Unpickler(pickle.Unpickler):
    """Makes tensors of references; those of one window share a storage."""

    def __init__(self, file: io.BytesIO, memory: NDArray[np.uint8]) -> None:
        super().__init__(file)
        self._memory = memory
        self._storages: dict[tuple[int, int], torch.UntypedStorage] = {}

    def persistent_load(self, pid: _Reference) -> torch.Tensor:
        start, size_bytes, dtype, offset, size, stride, requires_grad, is_parameter, parts = pid
        storage = self._storages.get((start, size_bytes))
        if storage is None:
            window = torch.from_numpy(self._memory[start : start + size_bytes])
            storage = self._storages[start, size_bytes] = window.untyped_storage()
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
        if not (requires_grad or is_parameter or parts):
            return tensor
        keep = Keep(requires_grad=requires_grad, is_parameter=is_parameter, parts=parts)
        return kept(tensor, keep)


def _culprit(
    value: object, references: Mapping[int, _Reference], error: Exception
) -> tuple[str, Exception]:
    """Return the FQN of the innermost item that does not pickle, and why."""
    keys: list[str] = []
    while isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            try:
                _Pickler(io.BytesIO(), references).dump(item)
            except Exception as reason:  # noqa: BLE001  # the reason is what is looked for
                keys.append(str(key))
                value, error = item, reason
                break
        else:
            break
    return ".".join(keys) or "The state", error
