"""A state dict copied out of the trainer's way, into leased host memory.

The result holds nothing that the trainer can change: tensors are copied, everything else is
copied or pickled. Structure and objects are taken when the call is made; `begin_stage` leaves
only the copying of tensors' bytes to a thread.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ckpt_storage.errors import CheckpointError, PhaseTimeoutError
from ckpt_storage.loads.resolving import mark_parts

from .hostbuffers import Arena, Lease
from .stagelayout import Copy, Layout, plan_layout
from .stagewalk import Keep, State, Walk, rebuilt, walked

BATCH_BYTES = 64 * 1024 * 1024
"""Bytes between two looks at signals and at other threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """A state that belongs to its holder until the lease ends.

    `tensors` are its plain tensors, also those inside wrappers (DTensor), and `layout` says where
    in `arena` they lie. Where the memory is shared, objects that are neither containers nor
    tensors are kept pickled, as `stagewalk.Pickled`.
    """

    state: State
    tensor_bytes: int
    arena: Arena
    layout: Layout = field(repr=False)
    tensors: tuple[torch.Tensor, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What one stage leaves to the next about its arena: valid while the kinds are the same."""

    kinds: list[object]
    layout: Layout
    arena: Arena
    targets: tuple[torch.Tensor, ...]
    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Copies still to be made, and the state as it will be after them."""

    staged: StagedState
    sources: list[torch.Tensor]
    targets: tuple[torch.Tensor, ...]


def stage(state: State, lease: Lease) -> StagedState:
    """Copy `state` into the memory of `lease` and return the copy when it is complete.

    Stateful objects at the top level are asked for their state first. A storage that several
    tensors share is copied once and shared by their copies. Attributes set on a tensor are not
    kept, but those by which it names parts of a global tensor (`localparts`). The second and later
    states of the same structure cost little more than the copy of their bytes.

    Raises:
        InvalidInputError: Something cannot be staged; the message names it. Nothing was kept.
        CheckpointError: The memory cannot be had, or the device failed.

    """
    prepared = _prepare(state, lease)
    _copy(prepared, _fork_streams(prepared.sources))
    return prepared.staged


def begin_stage(state: State, lease: Lease) -> StagingJob:
    """Take structure and objects of `state` now, and its tensors' bytes in a thread.

    The tensors must not change before the job is done. On CUDA the copies wait for what the
    calling thread has enqueued so far on its current streams.

    Raises:
        InvalidInputError: As `stage`.

    """
    prepared = _prepare(state, lease)
    return StagingJob(prepared, _fork_streams(prepared.sources))


class StagingJob:
    """Copies under way in a daemon thread, which nobody has to join."""

    def __init__(self, prepared: _Prepared, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self._staged = prepared.staged
        self._error: Exception | None = None
        self._ended = threading.Event()
        thread = threading.Thread(
            target=self._run, args=(prepared, streams), name="ckpt_storage-stage", daemon=True
        )
        thread.start()

    def _run(self, prepared: _Prepared, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        try:
            _copy(prepared, streams)
        except Exception as error:  # noqa: BLE001  # raised by `wait`, whatever it is
            # Frames hold tensors of the trainer, and the error lives as long as the job.
            for told in (error, error.__cause__):
                traceback.clear_frames(told.__traceback__ if told else None)
            self._error = error
        finally:
            # Before anyone goes on: the trainer may want the memory of the sources.
            prepared.sources.clear()
            self._ended.set()

    def done(self) -> bool:
        """Return whether the copies have ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> StagedState:
        """Return the complete copy, waiting at most `timeout_s`; may be called again.

        Raises:
            PhaseTimeoutError: The copies go on; the lease must not be released yet.
            CheckpointError: They failed.

        """
        if not self._ended.wait(timeout_s):
            raise PhaseTimeoutError(
                f"The state was not copied to host memory within {timeout_s} s.",
                timeout_s=timeout_s,
                phase="stage",
                next_step="Look for work on the device that never ends, or allow more time.",
            )
        if self._error is not None:
            raise self._error
        return self._staged


def _prepare(state: State, lease: Lease) -> _Prepared:
    # Unlike inference mode, tensors made here may be used outside.
    with torch.no_grad():
        walk = walked(state)
        addresses = [tensor.data_ptr() for tensor in walk.tensors]
        recipe = lease.memo if isinstance(lease.memo, _Recipe) else None
        sources = None
        if (
            recipe is not None
            and _same(recipe.kinds, walk.kinds)
            and recipe.layout.holds_for(addresses)
        ):
            sources = _sources(recipe.layout.copies, recipe.targets, walk.tensors)
        if recipe is None or sources is None:
            # Its tensors would keep the old arena in memory beside a new one.
            lease.memo = recipe = None
            recipe = lease.memo = _recipe(walk, lease)
            sources = _sources(recipe.layout.copies, recipe.targets, walk.tensors)
            assert sources is not None, "a layout holds for the tensors it was made for"  # noqa: S101
        staged = StagedState(
            state=rebuilt(walk, iter(recipe.leaves), lease.kind),
            tensor_bytes=recipe.layout.payload_bytes,
            arena=recipe.arena,
            layout=recipe.layout,
            tensors=recipe.tensors,
        )
    return _Prepared(staged=staged, sources=sources, targets=recipe.targets)


def _same(left: list[object], right: list[object]) -> bool:
    try:
        return left == right
    except Exception:  # noqa: BLE001  # a wrapper's own context may not be comparable
        return False


def _recipe(walk: Walk, lease: Lease) -> _Recipe:
    layout = plan_layout(walk.tensors)
    arena = lease.arena(layout.size_bytes)
    memory = arena.memory
    storages = [
        torch.from_numpy(memory[window.start : window.start + window.size_bytes]).untyped_storage()
        for window in layout.windows
    ]
    plain = [
        torch.empty(0, dtype=source.dtype).set_(
            storages[place.window], place.offset, place.size, place.stride
        )
        for source, place in zip(walk.tensors, layout.places, strict=True)
    ]
    targets = []
    for copy in layout.copies:
        if copy.form == "elements":
            targets.append(plain[copy.source])
        else:
            whole = torch.empty(0, dtype=torch.uint8)
            targets.append(whole.set_(storages[layout.places[copy.source].window]))
    tensors = tuple(map(kept, plain, walk.keeps))
    return _Recipe(
        kinds=walk.kinds,
        layout=layout,
        arena=arena,
        targets=tuple(targets),
        tensors=tensors,
        leaves=tuple(walk.built(iter(tensors))),
    )


def kept(tensor: torch.Tensor, keep: Keep) -> torch.Tensor:
    """Return a tensor of the same memory with what a copy keeps."""
    if keep.is_parameter:
        made: torch.Tensor = torch.nn.Parameter(tensor, requires_grad=keep.requires_grad)
    else:
        made = tensor.detach().requires_grad_(keep.requires_grad)
    return made if keep.parts is None else mark_parts(made, keep.parts)


def _sources(
    copies: Sequence[Copy], targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return the tensor to copy from for each copy; None if a window reaches past its storage."""
    found = []
    for copy, target in zip(copies, targets, strict=True):
        tensor = tensors[copy.source]
        if copy.form == "bytes":
            storage = tensor.untyped_storage()
            start = tensor.data_ptr() - storage.data_ptr()
            size_bytes = target.numel()
            if start + size_bytes > storage.nbytes():
                return None
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            tensor = raw.set_(storage, start, (size_bytes,), (1,))
        found.append(tensor)
    return found


def _fork_streams(sources: Sequence[torch.Tensor]) -> dict[torch.device, torch.cuda.Stream]:
    """Return a side stream per CUDA device, behind all that is enqueued on the current one.

    Other accelerators are waited for here: their copies are made without a stream of their own.
    """
    streams = {}
    for device in {source.device for source in sources}:
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device] = stream
            stream.wait_stream(torch.cuda.current_stream(device))
        elif device.type != "cpu":
            torch.accelerator.synchronize(device)
    return streams


def _copy(prepared: _Prepared, streams: dict[torch.device, torch.cuda.Stream]) -> None:
    """Make all copies; on return they are complete."""
    pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, target in zip(prepared.sources, prepared.targets, strict=True):
        targets, sources = pairs.setdefault(source.device, ([], []))
        targets.append(target)
        sources.append(source)
    try:
        if streams:
            prepared.staged.arena.pin(next(iter(streams)))
        with torch.no_grad():
            for device, (targets, sources) in pairs.items():
                if device in streams:
                    with torch.cuda.stream(streams[device]):
                        _copy_batches(targets, sources, non_blocking=True)
                else:
                    _copy_batches(targets, sources, non_blocking=False)
        for stream in streams.values():
            stream.synchronize()
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"The state could not be copied to host memory: {error}.",
            phase="stage",
            next_step="Free host and device memory, then save again.",
        ) from error


def _copy_batches(
    targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool
) -> None:
    # One call for many tensors: it costs half of their own calls, and lets other threads run.
    first = size_bytes = 0
    for last, target in enumerate(targets, start=1):
        size_bytes += target.numel() * target.element_size()
        if size_bytes >= BATCH_BYTES or last == len(targets):
            torch._foreach_copy_(
                targets[first:last], sources[first:last], non_blocking
            )  # torch documents its foreach functions under these names
            first, size_bytes = last, 0
