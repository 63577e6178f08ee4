"""Where the items of a plan come from: a planner, as they are written."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.inspect.torchload import name_in, refusal_of
from ckpt_storage.loads.resolving import data_resolver, dtype_name, plain_names

from .hostcopy import HostCopies, check_plain, host_bytes
from .shardfile import Item

_SMALL_BYTES = 64 << 10
"""Up to here one copy costs less than views."""


class ItemSource(Protocol):
    """Where the items of a final plan come from."""

    def items(self, plan: SavePlan) -> Iterable[Item]:
        """Yield the items of `plan`. Raises `InvalidInputError` naming one that cannot be."""


class LiveItems:
    """Items straight from the planner, which has been set up, as they are asked for."""

    def __init__(self, planner: SavePlanner) -> None:
        self._resolve = data_resolver(planner)
        self._plain = plain_names(planner)
        self._copies = HostCopies()

    def items(self, plan: SavePlan) -> Iterator[Item]:
        """Yield each item of `plan`; its bytes are copied no sooner than they are asked for."""
        return (item for item, _ in self.with_tensors(plan))

    def with_tensors(self, plan: SavePlan) -> Iterator[tuple[Item, torch.Tensor | None]]:
        """Yield each item of `plan`, and the tensor that it is, if it is one."""
        for item in plan.items:
            data = self._resolved(item)
            if item.type is WriteItemType.BYTE_IO:
                yield self._blob(item.index.fqn, data), None
            else:
                yield self._tensor(item, data)

    def _resolved(self, item: WriteItem) -> object:
        try:
            return self._resolve(item)
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
        # Not getbuffer(): a file among garbage cannot be closed while there is a view of it.
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

    def _tensor(self, item: WriteItem, data: object) -> tuple[Item, torch.Tensor]:
        fqn = item.index.fqn
        if not isinstance(data, torch.Tensor) or item.tensor_data is None:
            raise InvalidInputError(
                f"The planner gave {type(data).__name__} for the tensor {fqn}.",
                next_step="SavePlanner.resolve_data must return a tensor for tensor items.",
            )
        chunk = item.tensor_data.chunk
        # A planner may put lists there.
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if data.shape != sizes:
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
        views: Callable[[int], Any] = (
            partial(_small, data) if length <= _SMALL_BYTES else partial(self._copies.views, data)
        )
        made = Item(
            fqn=fqn, dtype=dtype, offsets=offsets, sizes=sizes, payload_bytes=length, views=views
        )
        return made, data


def _small(tensor: torch.Tensor, _window_bytes: int) -> tuple[bytes]:
    return (host_bytes(tensor),)


def planned_bytes(plan: SavePlan) -> int:
    """Return how many bytes the elements of a plan's tensors have."""
    found = 0
    for item in plan.items:
        if (data := item.tensor_data) is not None:
            found += data.chunk.sizes.numel() * data.properties.dtype.itemsize
    return found
