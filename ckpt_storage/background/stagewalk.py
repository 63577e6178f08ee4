"""The shape of a state dict: its containers, its tensors inside out, and copies of the rest.

A walk lists all plain tensors in order; their copies come back in the same order and are put
into new wrappers and new containers.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.loads.resolving import Parts, parts_of
from ckpt_storage.saves.hostcopy import MAKE_PLAIN, fault_of
from ckpt_storage.saves.refusals import endless

from .hostbuffers import Kind

State = dict[str, Any]
"""A state dict as DCP takes it."""

_UNCHANGING = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_BUILT_IN = frozenset({dict, list, tuple})


class Pickled:
    """An object kept as its pickle; unpickling this gives the object back."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Callable[[bytes], object], tuple[bytes]]:
        return (pickle.loads, (self.data,))


class _RefusedError(Exception):
    """Something that cannot be staged; `keys` lead to it, the innermost first."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(reason)
        self.next_step = next_step
        self.keys: list[object] = []

    def told(self) -> InvalidInputError:
        fqn = ".".join(str(key) for key in reversed(self.keys)) or "The state"
        return InvalidInputError(
            f"{fqn} cannot be staged: {self}.", phase="stage", next_step=self.next_step
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What a copy keeps of a tensor beside its elements."""

    requires_grad: bool
    is_parameter: bool
    parts: Parts | None = None


_KEEPS = {
    (requires_grad, is_parameter): Keep(requires_grad=requires_grad, is_parameter=is_parameter)
    for requires_grad in (False, True)
    for is_parameter in (False, True)
}


class Walk:
    """All tensors of a state, in order.

    `tensors` are plain and strided; `keeps` has one entry for each. `kinds` is equal for two
    states if everything but the structure of containers, addresses and elements is.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.tensors: list[torch.Tensor] = []
        self.keeps: list[Keep] = []
        self.kinds: list[object] = []
        self._leaves: list[torch.Tensor] = []
        self._visit(state)

    def built(self, copies: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield one copy for each tensor that the state's containers hold, wrapped as that is."""
        for leaf in self._leaves:
            yield _built(leaf, copies)

    def _visit(self, value: object) -> None:
        kind = type(value)
        if kind in _UNCHANGING:
            return
        if isinstance(value, torch.Tensor):
            self._leaves.append(value)
            self._tensor(value, is_inner=False)
        elif isinstance(value, dict | list | tuple):
            key: object = None
            try:
                for key, item in _items(value):  # noqa: B007  # read below
                    self._visit(item)
            except _RefusedError as refused:
                refused.keys.append(key)
                raise

    def _tensor(self, tensor: torch.Tensor, *, is_inner: bool) -> None:
        parts = None if is_inner else parts_of(tensor)
        if type(tensor) not in _PLAIN:
            tensor = _awaited(tensor)
            wrapper = _wrapper(tensor)
            if wrapper is not None:
                self.kinds.append(wrapper.kind)
                for inner in wrapper.inners:
                    self._tensor(inner, is_inner=True)
                return
            tensor = _bare(tensor)
        device = tensor.device
        _check_plain(tensor)
        # A wrapper is what requires gradients, not what it wraps.
        keep = _KEEPS[
            not is_inner and tensor.requires_grad,
            not is_inner and type(tensor) is torch.nn.Parameter,
        ]
        if parts is not None:
            keep = replace(keep, parts=parts)
        self.kinds.append(
            (
                keep,
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                device,
                tensor.is_conj(),
                tensor.is_neg(),
            )
        )
        self.keeps.append(keep)
        self.tensors.append(tensor)


def walked(state: Mapping[str, Any]) -> Walk:
    """Return the walk over a state dict, whose Stateful objects are asked for their state.

    Raises:
        InvalidInputError: The state is no mapping, or a tensor has no data of its own to copy; the
            message names it.

    """
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"The state is a {type(state).__qualname__}, not a dict.",
            phase="stage",
            next_step="Give a dict of names to tensors, objects or further dicts.",
        )
    top = {
        key: value.state_dict() if _is_stateful(value) else value for key, value in state.items()
    }
    try:
        return Walk(top)
    except _RefusedError as refused:
        raise refused.told() from None
    except RecursionError:
        raise endless(top, phase="stage", verb="staged") from None


def rebuilt(walk: Walk, tensors: Iterator[torch.Tensor], kind: Kind) -> State:
    """Return the walk's state with new containers, the given tensors, and copies of the rest.

    `tensors` has one for each that the containers hold. In shared memory the rest is `Pickled`,
    so that what cannot travel is found here.

    Raises:
        InvalidInputError: An object can be neither copied nor pickled; the message names it.

    """
    try:
        copied: State = _rebuilt(walk.state, tensors, kind)
    except _RefusedError as refused:
        raise refused.told() from None
    except RecursionError:
        raise endless(walk.state, phase="stage", verb="staged") from None
    return copied


def _rebuilt(value: Any, tensors: Iterator[torch.Tensor], kind: Kind) -> Any:  # noqa: ANN401  # any object of a user's
    if type(value) in _UNCHANGING:
        return value
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if not isinstance(value, dict | list | tuple):
        return _object_copy(value, kind)
    key: object = None
    items: list[tuple[object, object]] = []
    try:
        for key, item in _items(value):
            items.append((key, _rebuilt(item, tensors, kind)))
    except _RefusedError as refused:
        refused.keys.append(key)
        raise
    return _container_like(value, items)


def _items(
    value: dict[Any, Any] | list[Any] | tuple[Any, ...],
) -> Iterable[tuple[object, object]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _container_like(
    old: dict[Any, Any] | list[Any] | tuple[Any, ...], items: list[tuple[object, Any]]
) -> object:
    """Return a container of the type of `old`, without what else may be attached to that."""
    kind = type(old)
    if isinstance(old, dict):
        if kind is dict or kind is OrderedDict:
            return kind(items)
        if isinstance(old, defaultdict):
            return defaultdict(old.default_factory, items)
        new = copy.copy(old)
        new.update(items)
        return new
    values = [item for _, item in items]
    if kind is list:
        return values
    if isinstance(old, list):
        changed = copy.copy(old)
        changed[:] = values
        return changed
    return kind._make(values) if hasattr(kind, "_make") else kind(values)


def _object_copy(value: object, kind: Kind) -> object:
    try:
        if kind == "shared":
            return Pickled(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        return copy.deepcopy(value)
    except Exception as error:  # noqa: BLE001  # what a user's own methods raise
        raise _RefusedError(
            f"its {type(value).__qualname__} cannot be "
            f"{'pickled' if kind == 'shared' else 'copied'} ({error})",
            "Save plain data in its place, or give the object a state_dict.",
        ) from None


def _is_stateful(value: object) -> bool:
    kind = type(value)
    if kind in _UNCHANGING or kind in _BUILT_IN or isinstance(value, torch.Tensor):
        return False
    return isinstance(value, Stateful)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapper:
    """A tensor that consists of others; `build` makes one of their copies."""

    kind: object
    inners: list[torch.Tensor]
    build: Callable[[list[torch.Tensor]], torch.Tensor]


def _built(leaf: torch.Tensor, copies: Iterator[torch.Tensor]) -> torch.Tensor:
    if type(leaf) not in _PLAIN:
        leaf = _awaited(leaf)
        wrapper = _wrapper(leaf)
        if wrapper is not None:
            return wrapper.build([_built(inner, copies) for inner in wrapper.inners])
    return next(copies)


def _wrapper(tensor: torch.Tensor) -> _Wrapper | None:
    if isinstance(tensor, ShardedTensor):
        return _sharded(tensor)
    if isinstance(tensor, LocalShardsWrapper):
        offsets = [tuple(offset) for offset in tensor.local_offsets()]
        return _Wrapper(
            kind=(type(tensor), offsets),
            inners=tensor.local_shards(),
            build=lambda copies: type(tensor)(copies, offsets),
        )
    if is_traceable_wrapper_subclass(tensor):
        return _traceable(tensor)
    return None


def _traceable(tensor: Any) -> _Wrapper:  # noqa: ANN401  # torch's protocol is no class
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    # torch 2.13's DTensor names its mesh as a part.
    inners = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    others = {name: part for name, part in parts.items() if name not in inners}
    kind, size, stride = type(tensor), tensor.shape, tensor.stride()
    requires_grad: bool = tensor.requires_grad

    def build(copies: list[torch.Tensor]) -> torch.Tensor:
        values = others | dict(zip(inners, copies, strict=True))
        made: torch.Tensor = kind.__tensor_unflatten__(values, context, size, stride)
        return made.requires_grad_(requires_grad)

    return _Wrapper(
        kind=(kind, size, stride, requires_grad, names, others, context),
        inners=list(inners.values()),
        build=build,
    )


def _sharded(tensor: ShardedTensor) -> _Wrapper:
    metadata = tensor.metadata()
    shards = tensor.local_shards()

    def build(copies: list[torch.Tensor]) -> torch.Tensor:
        properties = metadata.tensor_properties
        made: ShardedTensor = ShardedTensorBase.__new__(
            type(tensor),
            tensor.sharding_spec(),
            metadata.size,
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=False,
            requires_grad=properties.requires_grad,
        )
        # No constructor takes CPU shards of a tensor whose metadata says CUDA.
        made.__dict__.update(tensor.__dict__)
        made._local_shards = [  # noqa: SLF001  # the same
            _shard_like(shard, copied) for shard, copied in zip(shards, copies, strict=True)
        ]
        return made

    return _Wrapper(
        kind=(type(tensor), metadata), inners=[shard.tensor for shard in shards], build=build
    )


def _shard_like(shard: Shard, tensor: torch.Tensor) -> Shard:
    made = copy.copy(shard)
    made.tensor = tensor
    return made


def _awaited(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        arrived: torch.Tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        return arrived
    return tensor


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a plain tensor or Parameter, without the subclass."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        _refuse_tensor("it is uninitialised")
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or hasattr(
        kind, "__create_write_items__"
    ):
        _refuse_tensor(f"its type {kind.__qualname__} has no __tensor_flatten__")
    # Else the subclass' own hook would wrap the result again.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # named in torch's "Extending PyTorch"
        plain: torch.Tensor = tensor.as_subclass(torch.Tensor)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(plain.detach(), requires_grad=tensor.requires_grad)
        return plain


def _check_plain(tensor: torch.Tensor) -> None:
    reason = fault_of(tensor)
    if reason is not None:
        _refuse_tensor(reason)


def _refuse_tensor(reason: str) -> NoReturn:
    raise _RefusedError(reason, MAKE_PLAIN)
