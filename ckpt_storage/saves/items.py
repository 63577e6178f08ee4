"""The items of a planner's state, as host bytes in the order of the plan; and its ties."""

from __future__ import annotations

import ctypes
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.torchload import name_in, refusal_of
from ckpt_storage.loads.layouts import check_layout
from ckpt_storage.loads.states import plain_names
from ckpt_storage.loads.tensors import PLAIN, dtype_name, is_freed

from .blobs import pickled, pickles_plainly
from .devices import DeviceReader, byte_view
from .saveplanner import BoxSavePlanner
from .shardfile import Item

MAKE_PLAIN = "Convert it to a dense tensor with data before saving, or leave it out."
"""What to do about a tensor that cannot be saved."""

_MAX_WINDOW_BYTES = 4 << 20
"""The bytes that are copied from a device at a time.

So many that starting a copy costs little, and so few that the copy ends while as many bytes are
written.
"""

_SMALL_BYTES = 64 << 10
"""Up to this size one copy costs less than views."""


Items = Callable[[SavePlan], Iterable[Item]]
"""Yields the items of a final plan. Raises `InvalidInputError` naming an item it cannot save."""


class LiveItems:
    """Items that a planner, which has been set up, resolves one by one."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner
        self._plain = plain_names(planner)
        self._pickles_plainly = pickles_plainly(planner)

    def items(self, plan: SavePlan) -> Iterator[Item]:
        """Yield each item of `plan`; its bytes are copied when `Item.views` is iterated."""
        return (item for item, _ in self.with_tensors(plan))

    def with_tensors(self, plan: SavePlan) -> Iterator[tuple[Item, torch.Tensor | None]]:
        """Yield each item of `plan` and its tensor, None for a blob."""
        # A thread of its own may iterate each plan.
        devices = DeviceReader()
        for item in plan.items:
            data = self._resolved(item)
            if item.type is WriteItemType.BYTE_IO:
                yield self._blob(item.index.fqn, data), None
            else:
                yield self._tensor(item, data, devices)

    def _resolved(self, item: WriteItem) -> object:
        try:
            # With gradients torch makes a differentiable view of each sharded tensor.
            with torch.no_grad():
                if not isinstance(self._planner, BoxSavePlanner):
                    check_layout(
                        item.index.fqn,
                        getattr(self._planner, "state_dict", None),
                        act="saved",
                        way_out="Save with ckpt_storage.save or an AsyncSaver, without a planner.",
                    )
                if item.type is WriteItemType.BYTE_IO and self._pickles_plainly:
                    planner: Any = self._planner
                    return pickled(planner.lookup_object(item.index))
                return self._planner.resolve_data(item)
        except CheckpointError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"{item.index.fqn} cannot be saved: {type(error).__name__}: "
                f"{str(error).rstrip('.')}.",
                phase="write",
                next_step="Save plain data in its place, or give the object a state_dict.",
            ) from error

    def _blob(self, fqn: str, data: object) -> Item:
        if not isinstance(data, io.BytesIO):
            raise InvalidInputError(
                f"The planner gave {type(data).__name__} for the blob {fqn}.",
                next_step="SavePlanner.resolve_data must return io.BytesIO for BYTE_IO items.",
            )
        refusal = None if fqn in self._plain else refusal_of(data)
        # Not getbuffer(): the collector cannot close a file that has a view.
        view = memoryview(data.getvalue())
        return Item(
            fqn=fqn,
            dtype=None,
            offsets=(),
            sizes=(),
            payload_bytes=view.nbytes,
            views=lambda _: (view,),
            unsafe=None if refusal is None else name_in(refusal),
        )

    def _tensor(
        self, item: WriteItem, data: object, devices: DeviceReader
    ) -> tuple[Item, torch.Tensor]:
        fqn = item.index.fqn
        if not isinstance(data, torch.Tensor) or item.tensor_data is None:
            raise InvalidInputError(
                f"The planner gave {type(data).__name__} for the tensor {fqn}.",
                next_step="SavePlanner.resolve_data must return a tensor for tensor items.",
            )
        chunk = item.tensor_data.chunk
        # A planner may put lists there.
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if data.shape != sizes and (data.numel() or 0 not in sizes):
            raise InvalidInputError(
                f"{fqn} has shape {list(data.shape)}; the plan says {list(sizes)}.",
                phase="write",
                next_step="The state changed after it was planned; with plan caching, pass the "
                "same shapes or a new planner key.",
            )
        check_plain(data, fqn)
        dtype = dtype_name(data.dtype)
        if dtype not in DTYPES:
            raise InvalidInputError(
                f"{fqn} has dtype {dtype}, which cannot be stored.",
                phase="write",
                next_step="Convert it before saving, or leave it out.",
            )
        length = data.nbytes
        views: Callable[[int], Any] = partial(host_views, data, devices=devices)
        if length <= _SMALL_BYTES:
            views = lambda _: (host_bytes(data),)  # noqa: E731  # as above
        made = Item(
            fqn=fqn, dtype=dtype, offsets=offsets, sizes=sizes, payload_bytes=length, views=views
        )
        return made, data


def tensor_bytes(item: WriteItem) -> int:
    """Return how many bytes the elements of an item have, 0 for a blob."""
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def planned_bytes(plan: SavePlan) -> int:
    """Return how many bytes the elements of a plan's tensors have."""
    return sum(map(tensor_bytes, plan.items))


def fault_of(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor are not stored as such; None if they are."""
    reason = None
    if torch.nn.parameter.is_lazy(tensor):
        reason = "it is uninitialised"
    elif tensor.is_nested:
        reason = "it is a nested tensor"
    elif tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}"
    elif tensor.is_quantized:
        reason = "it is quantised"
    elif tensor.is_meta:
        reason = "it is on the meta device and has no data"
    elif is_freed(tensor):
        reason = "its memory was released (its storage was resized to nothing)"
    return reason


def check_plain(tensor: torch.Tensor, fqn: str) -> None:
    """Raise `InvalidInputError` unless the tensor is dense, with its elements stored as such."""
    kind = type(tensor)
    reason = fault_of(tensor)
    if kind not in PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        reason = reason or f"its type {kind.__qualname__} wraps others, and has no bytes of its own"
    if reason:
        raise InvalidInputError(
            f"{fqn} cannot be saved: {reason}.", phase="write", next_step=MAKE_PLAIN
        )


def host_bytes(tensor: torch.Tensor) -> bytes:
    """Return a copy of the elements of a small tensor in C order."""
    if type(tensor) in PLAIN and is_as_stored(tensor):
        # Ten times faster than a view, an array and a buffer; states have many small tensors.
        return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return bytes(byte_view(plain))


def host_views(
    tensor: torch.Tensor, window_bytes: int, devices: DeviceReader
) -> Iterator[memoryview]:
    """Yield the elements of `tensor` in C order as consecutive byte views.

    A contiguous CPU tensor is one view of its own memory, not copied, and must not change
    while the view is in use. Anything else is copied window by window, each of at most
    `window_bytes` (or one element), so memory stays bounded whatever the tensor's size; from a
    CUDA device the next window is copied while the previous window is in use.
    """
    tensor = tensor.detach()
    if is_as_stored(tensor):
        yield byte_view(tensor)
        return
    is_cuda = tensor.device.type == "cuda"
    most_bytes = min(window_bytes, _MAX_WINDOW_BYTES) if is_cuda else window_bytes
    windows = _windows(tensor, max(1, most_bytes // max(1, tensor.element_size())))
    if is_cuda:
        yield from devices.views(tensor.device, windows)
        return
    for window in windows:
        yield byte_view(window.resolve_conj().resolve_neg().to("cpu").contiguous())


def is_as_stored(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a plain tensor lie in C order at its address.

    False for some tensors of which they do; costs a fraction of `fault_of`.
    """
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > 0
    )


def _windows(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    if tensor.numel() <= most:
        yield tensor
        return
    length = tensor.size(0)
    rows = max(1, most * length // tensor.numel())
    if rows == 1:
        for row in tensor.unbind(0):
            yield from _windows(row, most)
        return
    for start in range(0, length, rows):
        yield tensor.narrow(0, start, min(rows, length - start))


def ties_of(planner: SavePlanner) -> dict[str, str]:
    """Return alias -> target of a planner's state; {} if it keeps none as DCP's do."""
    state = getattr(planner, "state_dict", None)
    return ties_in(state) if isinstance(state, Mapping) else {}


def ties_in(state: Mapping[str, Any]) -> dict[str, str]:
    """Return alias -> target of a state; nested names are flattened as DCP does."""
    try:
        tensors = dict(named_tensors(state, ""))
    except RecursionError:
        # A state that contains itself: a planner may still save it, as a blob.
        return {}
    # Few tensors share their first byte; only those are compared in full.
    addresses = list(map(_address, tensors.values()))
    shared = {address for address, count in Counter(addresses).items() if address and count > 1}
    firsts: dict[object, str] = {}
    ties: dict[str, str] = {}
    for (fqn, tensor), address in zip(tensors.items(), addresses, strict=True):
        if address in shared and (memory := _memory(tensor)) is not None:
            first = firsts.setdefault(memory, fqn)
            if first != fqn:
                ties[fqn] = first
    return ties


def named_tensors(value: object, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested mappings and lists by the names that DCP flattens them to."""
    items: Iterator[tuple[object, object]]
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    else:
        return
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"{prefix}{key}", item
        elif isinstance(item, Mapping | list):
            yield from named_tensors(item, f"{prefix}{key}.")


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the first local element, 0 if there is none or it is unknown."""
    try:
        if type(tensor) in PLAIN:
            return tensor.data_ptr()
        if isinstance(tensor, DTensor):
            return tensor._local_tensor.data_ptr()  # noqa: SLF001  # to_local() costs ten times that
        return next((chunk.data_ptr() for _, chunk in _local_chunks(tensor) if chunk.numel()), 0)
    except RuntimeError:
        return 0


def _memory(tensor: torch.Tensor) -> object:
    """Return a key equal for tensors of the same memory; None without elements, or if unknown."""
    try:
        chunks = [
            (
                *(offsets, chunk.device, chunk.data_ptr(), chunk.dtype, chunk.shape),
                *(chunk.stride(), chunk.is_conj(), chunk.is_neg()),
            )
            for offsets, chunk in _local_chunks(tensor)
            if chunk.numel()
        ]
    except RuntimeError:
        return None
    # Most kinds without memory of their own raise; others have address 0.
    return frozenset(chunks) if chunks and all(chunk[2] for chunk in chunks) else None


def _local_chunks(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return local tensors and their offsets in the whole; raises `RuntimeError` if unknown."""
    if isinstance(tensor, ShardedTensor):
        return [
            (tuple(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()
        ]
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor  # noqa: SLF001  # as above
        if not local.numel():
            return []
        # A local tensor of several chunks has no memory of its own; `_memory` sees that.
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return [(tuple(chunk.offsets), local) for chunk in chunks]
    return [((0,) * tensor.ndim, tensor)]
