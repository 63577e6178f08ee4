"""The values of an open checkpoint by name: which there are, whole ones in memory, and in pieces.

Imports torch only for what is asked for as torch, or is no tensor.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.options import Progress
from ckpt_storage.progress import reporting

from .arrays import Region, elements_of, numpy_name, read_blobs, read_regions
from .lazytensor import LazyTensor
from .session import Session

if TYPE_CHECKING:
    from .torchload import Device


Names = str | Iterable[str] | Callable[[str], bool] | None
"""Names, or a function that says of each whether it is wanted; None: all of them."""

_MOST_SUGGESTED_FROM = 20_000

_PIECES_HELD = 8
"""A piece, what reading it holds meanwhile, and that of a second tensor it is compared with."""


class Holdings:
    """What a checkpoint holds; iterating gives the FQNs of tensors, then of objects."""

    def __init__(self, session: Session, *, unsafe_pickle: bool) -> None:
        self.session = session
        self.tensors: Sequence[str] = tuple(session.names())
        self.objects: Sequence[str] = tuple(sorted(session.blobs()))
        self._tensor_set = frozenset(self.tensors)
        self._object_set = frozenset(self.objects)
        self._unsafe_pickle = unsafe_pickle

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects

    def __len__(self) -> int:
        return len(self.tensors) + len(self.objects)

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._tensor_set or fqn in self._object_set

    def is_tensor(self, fqn: str) -> bool:
        """Return whether a tensor has this name."""
        return fqn in self._tensor_set

    def tensor(self, fqn: str) -> LazyTensor:
        """Return a tensor. Raises `KeyError` if none has this name."""
        if fqn in self._object_set:
            raise KeyError(f"{fqn!r:.200} in {self.session.url} is an object, no tensor")
        if fqn not in self._tensor_set:
            raise self.unknown(fqn)
        return LazyTensor(self.session, fqn)

    def value(self, fqn: str) -> Any:  # noqa: ANN401  # a LazyTensor, or what was saved
        """Return a tensor, unread, or an object. Raises `KeyError` if nothing has this name."""
        return self.load_objects([fqn])[fqn] if fqn in self._object_set else self.tensor(fqn)

    def unknown(self, fqn: object) -> KeyError:
        """Return the error that says that there is no such name, and which are like it."""
        near: list[str] = []
        if isinstance(fqn, str) and len(self) <= _MOST_SUGGESTED_FROM:
            near = difflib.get_close_matches(fqn, list(self), n=3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return KeyError(f"{fqn!r:.200} is not in {self.session.url}{hint}")

    def chosen(self, names: Names, prefix: str | None) -> list[str]:
        """Return the names that are wanted. Raises `KeyError` for one that is not there."""
        if names is None:
            found = list(self)
        elif callable(names):
            found = [fqn for fqn in self if names(fqn)]
        else:
            found = list(dict.fromkeys([names] if isinstance(names, str) else names))
            for fqn in found:
                if fqn not in self:
                    raise self.unknown(fqn)
        return [fqn for fqn in found if prefix is None or fqn.startswith(prefix)]

    def load(
        self,
        fqns: Sequence[str],
        *,
        kind: Literal["numpy", "torch"],
        device: Device | None,
        progress: Progress,
    ) -> dict[str, Any]:
        """Return whole values by name, all tensors read in one batch, then all objects."""
        if kind not in {"numpy", "torch"}:
            raise InvalidInputError(f"kind is {kind!r}.", next_step="Give 'numpy' or 'torch'.")
        if device is not None and kind != "torch":
            raise InvalidInputError(
                "A device was given for numpy arrays.", next_step="Pass kind='torch' too."
            )
        outlines = [self.session.outline(fqn) for fqn in fqns if self.is_tensor(fqn)]
        unknown = {each.fqn: each.dtype for each in outlines if numpy_name(each.dtype) is None}
        if kind == "numpy" and unknown:
            listing = ", ".join(f"{fqn} ({dtype})" for fqn, dtype in unknown.items())
            raise CheckpointError(
                f"numpy has no types for {len(unknown)} tensors: {listing}.",
                next_step="Pass kind='torch', or load the others by name.",
            )
        values: dict[str, Any] = {}
        with reporting(
            progress,
            phase="load",
            rank=0,
            total_bytes=sum(outline.size_bytes for outline in outlines),
            save_id=self.session.save_id,
            with_bar=True,
        ) as on_bytes:
            arrays = read_regions(
                self.session,
                [Region.whole(outline.fqn, outline.shape) for outline in outlines],
                gaps="cheap",
                on_bytes=on_bytes,
            )
            for outline, words in zip(outlines, arrays, strict=True):
                if kind == "numpy":
                    values[outline.fqn] = elements_of(words, outline.dtype)
                else:
                    from .torchload import tensor_of  # noqa: PLC0415  # only now torch is needed

                    values[outline.fqn] = tensor_of(words, outline.dtype, device)
            objects = [fqn for fqn in fqns if fqn in self._object_set]
            values.update(self.load_objects(objects, on_bytes=on_bytes))
        return {fqn: values[fqn] for fqn in fqns}

    def load_objects(
        self, fqns: Sequence[str], on_bytes: Callable[[int], None] = lambda _: None
    ) -> dict[str, object]:
        """Return values that are no tensors, unpickled as far as that runs no code.

        Raises `UnsafeContentError` for others, unless they were allowed.
        """
        if not fqns:
            return {}
        stored = read_blobs(self.session, fqns, on_bytes=on_bytes)
        from .torchload import blob_value  # noqa: PLC0415  # torch.load reads what it wrote

        return {
            fqn: blob_value(buffer, place, unsafe_pickle=self._unsafe_pickle)
            for fqn, (buffer, place) in zip(fqns, stored, strict=True)
        }

    def stored_bytes(self, fqn: str) -> bytearray:
        """Return a value that is no tensor as it is stored."""
        ((buffer, _),) = read_blobs(self.session, [fqn])
        return buffer

    @property
    def piece_bytes(self) -> int:
        """How much to hold at a time of what may be too large to hold."""
        return max(1, self.session.options.memory_limit_bytes // _PIECES_HELD)
