"""Which tensors of one rank are the same memory.

Tensors are the same memory if they begin at the same byte and have the same dtype, shape and
strides. A rank that holds no element of a tensor says nothing about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from ckpt_storage.commit.tiednames import Groups

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

_Part = tuple[tuple[int, ...], torch.Tensor]
"""Where a local tensor lies in the whole one, and the local tensor."""


class WrittenMemory:
    """Collects the tensors that a planner gives for writing, and tells which are tied.

    A planner may give a copy that is gone before the next one comes, in the same place, or one
    buffer with ever new content. Neither makes a tie: what is compared is the storage object,
    which no other one can be mistaken for while there is a weak reference to it, and the count of
    changes made to the tensor.
    """

    def __init__(self) -> None:
        # Columns of plain values: an object for each of many tensors would keep the garbage
        # collector busy.
        self._fqns: list[str] = []
        self._storages: list[int] = []
        self._forms: list[int] = []
        self._form_numbers: dict[object, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}

    def add(
        self, fqn: str, offsets: tuple[int, ...], tensor: torch.Tensor, *, lasts: bool = False
    ) -> None:
        """Note a chunk that is about to be written; `lasts`: its memory outlives this object."""
        if not tensor.numel():
            return
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:
            # A kind of tensor without one place in memory: a number that nothing else has.
            number = -1 - len(self._storages)
        else:
            number = storage._cdata  # noqa: SLF001  # what `StorageWeakRef` goes by
            if not lasts and number not in self._alive:
                self._alive[number] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._storages.append(number)
        changes = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  # its only name
        form = (offsets, tensor.storage_offset(), changes, *_form(tensor))
        self._fqns.append(fqn)
        self._forms.append(self._form_numbers.setdefault(form, len(self._form_numbers)))

    def ties(self) -> dict[str, str]:
        """Return alias -> target for what was noted; the target was noted first."""
        shared = _repeated(self._storages)
        names = {fqn for fqn, at in zip(self._fqns, self._storages, strict=True) if at in shared}
        parts: dict[str, list[tuple[int, int]]] = {}
        for fqn, storage, form in zip(self._fqns, self._storages, self._forms, strict=True):
            if fqn in names:
                parts.setdefault(fqn, []).append((storage, form))
        firsts: dict[frozenset[tuple[int, int]], str] = {}
        roots = {fqn: firsts.setdefault(frozenset(held), fqn) for fqn, held in parts.items()}
        return {fqn: root for fqn, root in roots.items() if fqn != root}


class StateMemory:
    """The tensors of a state dict by FQN, as DCP names them; holds them while it lives."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        try:
            self._tensors = dict(named_tensors(state, ""))
        except RecursionError:
            # A state that holds itself: a planner may still save it, as a blob.
            self._tensors = {}

    def ties(self) -> Groups:
        """Return the groups of FQNs that are the same memory, in the order of the state."""
        # Few share the byte that they begin at; only those are looked at closely.
        addresses = list(map(_address, self._tensors.values()))
        shared = _repeated(addresses) - {0}
        groups: dict[object, list[str]] = {}
        for fqn, address in zip(self._tensors, addresses, strict=True):
            if address in shared:
                groups.setdefault(self._memory(fqn), []).append(fqn)
        groups.pop(None, None)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def objections(self, candidates: Groups) -> tuple[Groups, ...]:
        """Return, of each candidate group that is not the same memory here, what is.

        Names of which this rank holds no element are left out.
        """
        found = []
        for group in candidates:
            classes: dict[object, list[str]] = {}
            for fqn in group:
                if fqn in self._tensors:
                    classes.setdefault(self._memory(fqn), []).append(fqn)
            classes.pop(None, None)
            if len(classes) > 1:
                found.append(tuple(map(tuple, classes.values())))
        return tuple(found)

    def _memory(self, fqn: str) -> object:
        """Return what is equal for tensors that are the same memory; None without elements."""
        try:
            parts = [
                (offsets, tensor.device, _known_address(tensor), *_form(tensor))
                for offsets, tensor in _parts(self._tensors[fqn])
                if tensor.numel()
            ]
        except RuntimeError:
            # Its memory cannot be told, so it is the same as no other's.
            return object()
        return frozenset(parts) or None


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
    """Return where the first local elements begin, 0 if there are none or it cannot be told."""
    try:
        if type(tensor) in _PLAIN:
            return tensor.data_ptr()
        if isinstance(tensor, DTensor):
            return tensor._local_tensor.data_ptr()  # noqa: SLF001  # to_local() costs ten times that
        for _, part in _parts(tensor):
            if part.numel():
                return part.data_ptr()
    except RuntimeError:
        pass
    return 0


def _known_address(tensor: torch.Tensor) -> int:
    address = tensor.data_ptr()
    if not address:
        raise RuntimeError  # as torch does for most kinds without memory of their own
    return address


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return how elements are read from the memory that a tensor begins at."""
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _repeated(numbers: list[int]) -> set[int]:
    return {number for number, count in Counter(numbers).items() if count > 1}


def _parts(tensor: torch.Tensor) -> list[_Part]:
    """Return the local tensors; raises `RuntimeError` where torch does not say where they lie."""
    if isinstance(tensor, ShardedTensor):
        return [
            (tuple(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()
        ]
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor  # noqa: SLF001  # as above
        if not local.numel():
            return []
        chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        # A local tensor of several chunks has no memory of its own, which is noticed later.
        return [(tuple(chunk.offsets), local) for chunk in chunks]
    return [((0,) * tensor.ndim, tensor)]
