"""`PerRank`: a value that each rank saves and loads for itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt_storage.format.names import parse_per_rank_key, per_rank_key


class RankValues(list[Any]):
    """The values of all ranks, in order; callable, as torch calls the method `values` of a dict."""

    def __init__(self, owner: PerRank, values: Iterable[Any] = ()) -> None:
        super().__init__(values)
        self._owner = owner

    def __call__(self) -> list[Any]:
        """Return the values of `items()`."""
        return [value for _, value in self._owner.items()]


class PerRank(dict[str, Any]):
    """A value of this rank in a state, such as the state of a random generator or data position.

    Saved under the name that it has in the state, for every rank of the default process group. A
    load into a `PerRank` by as many ranks sets `value`; by more or fewer ranks it sets `value` to
    None and `values` to those of all ranks that saved, in order. A target without a value,
    `PerRank()`, takes what was saved, of any structure.

    To torch it is a dict with one key, such as `per-rank-3-of-8`: its tensors are saved and loaded
    like others, and are left out of exported weights.
    """

    values: RankValues  # type: ignore[assignment]  # it may be called, as torch does

    def __init__(self, value: object = None) -> None:
        super().__init__()
        self.value: Any = value
        self.values = RankValues(self)
        self._entries: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.value,)

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]  # a dict has none

    # The methods of a dict that torch's planners and stagers use. The key depends on the process
    # group, which may be made after this object.

    def items(self) -> Any:  # noqa: ANN401  # torch iterates over it
        """Return the key of this rank with its value; during some loads, those of all ranks."""
        return self._mapping().items()

    def keys(self) -> Any:  # noqa: ANN401  # as above
        """Return the keys of `items`."""
        return self._mapping().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping())

    def __len__(self) -> int:
        return len(self._mapping())

    def __contains__(self, key: object) -> bool:
        return key in self._mapping()

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  # of any kind
        return self._mapping()[key]

    def setdefault(self, key: str, default: Any = None) -> Any:  # noqa: ANN401  # as above
        """Return the value of a key, first set to `default` if there is none."""
        if self._mapping().get(key) is None:
            self[key] = default
        return self[key]

    def __setitem__(self, key: str, value: Any) -> None:  # noqa: ANN401  # as above
        if self._entries is not None:
            self._entries[key] = value
        elif key == own_key():
            self.value = value
        else:
            raise KeyError(key)

    def _mapping(self) -> dict[str, Any]:
        return {own_key(): self.value} if self._entries is None else self._entries

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Show `saved`, a target for each key, until `finish` or `abandon` is called."""
        self._entries = dict(saved)

    def finish(self) -> None:
        """Set `value` and `values` from what was loaded since `prepare`."""
        entries, self._entries = self._entries, None
        self.values.clear()
        if entries is None:
            return
        if entries.keys() == {own_key()}:
            self.value = entries[own_key()]
            return
        self.value = None
        self.values.extend(entries[key] for key in sorted(entries, key=_rank_of))

    def abandon(self) -> None:
        """Undo `prepare`."""
        self._entries = None


def _rank_of(key: str) -> tuple[int, int]:
    return parse_per_rank_key(key) or (0, 0)


def own_key() -> str:
    """Return the key of this process's rank in the default process group."""
    if dist.is_available() and dist.is_initialized():
        return per_rank_key(dist.get_rank(), dist.get_world_size())
    return per_rank_key(0, 1)


@contextmanager
def prepared_targets(state: Mapping[str, Any], metadata: Metadata) -> Iterator[None]:
    """Let each `PerRank` of a target state show the checkpoint's targets for it, in the block."""
    targets = list(_find(state, ()))
    prepared = list[PerRank]()
    try:
        for path, target in targets:
            saved = _saved_under(path, metadata)
            is_own = own_key() in saved
            if saved and not (is_own and target.value is not None):
                target.prepare({own_key(): saved[own_key()]} if is_own else saved)
                prepared.append(target)
        yield
        for _, target in targets:
            target.finish()
    finally:
        for target in prepared:
            target.abandon()


def _find(value: object, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], PerRank]]:
    if isinstance(value, PerRank):
        yield path, value
    elif isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            if isinstance(item, Mapping | list):
                yield from _find(item, (*path, key if isinstance(value, list) else str(key)))


def _saved_under(path: tuple[Any, ...], metadata: Metadata) -> dict[str, Any]:
    """Return a target for each key that was saved below `path`: tensors to fill, and None."""
    saved: dict[str, Any] = {}
    paths: Mapping[str, Any] = metadata.planner_data or {}
    name = ".".join(map(str, path))
    for fqn in metadata.state_dict_metadata:
        inner = _inner_path(name, paths.get(fqn, ())) if fqn.startswith(f"{name}.") else ()
        if inner:
            entry = metadata.state_dict_metadata[fqn]
            target = None
            if isinstance(entry, TensorStorageMetadata):
                target = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            set_element(saved, inner, target)
    return saved


def _inner_path(name: str, path: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the rest of a path from the key of a rank on, if the keys before it make `name`.

    Names are compared, as a renamed value has only the last key of its path.
    """
    for at, key in enumerate(path):
        is_key = parse_per_rank_key(str(key)) is not None
        if is_key and ".".join(map(str, path[:at])) == name:
            return tuple(path[at:])
    return ()
