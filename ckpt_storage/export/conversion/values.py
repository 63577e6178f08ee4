"""What a conversion moves: the tensors and other values of one source, and how to stream them.

Made by `converting`, used by the targets.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ckpt_storage.export.options import Selection
from ckpt_storage.export.options import matching as selected
from ckpt_storage.format.boxes import Box
from ckpt_storage.source.model import TensorInfo

from .stream import Item, TensorStream, payload_bytes


class HasValues(Protocol):
    """What has named values: a source."""

    @property
    def tensors(self) -> Collection[str]:
        """FQNs of tensors."""

    @property
    def blobs(self) -> frozenset[str]:
        """FQNs of the values that are no tensors."""


def chosen(
    source: HasValues, *, include: Selection | None, exclude: Selection | None
) -> tuple[set[str], set[str]]:
    """Return the FQNs that go over, and those that a selection leaves out.

    Raises `InvalidInputError` for an entry that matches nothing: it is likely misspelt.
    """
    names = {*source.tensors, *source.blobs}
    kept = names if include is None else selected(include, names, "include")
    if exclude is not None:
        kept = kept - selected(exclude, names, "exclude")
    return set(kept), names - kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The values that are to be converted; what was dropped is not among them.

    blobs: FQNs of what is no tensor. held: those of them that are in memory as objects; the
    others are pickled in the source. paths: where each value sits in the nested state dict; a
    value that it does not name sits at the top. ties: alias to target, equal in all bytes.
    check_unchanged: raises `CheckpointGoneError` if another save touched the source since it was
    opened; a target is shown only after it held for all that was read.
    """

    tensors: Mapping[str, TensorInfo]
    blobs: frozenset[str]
    held: Mapping[str, object]
    paths: Mapping[str, tuple[str | int, ...]]
    ties: Mapping[str, str]
    stream: TensorStream
    check_unchanged: Callable[[], None]

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(payload_bytes(info) for info in self.tensors.values())

    def path_of(self, fqn: str) -> tuple[str | int, ...]:
        """Return where a value sits in the nested state dict."""
        return self.paths.get(fqn, (fqn,))

    def boxes_of(self, fqn: str) -> list[Box]:
        """Return the chunks of a tensor, each once; one for a tensor without elements."""
        info = self.tensors[fqn]
        boxes = list(dict.fromkeys(box for box in info.boxes if not box.is_empty))
        return boxes or [Box((0,) * len(info.shape), info.shape)]

    def pickled(self, fqn: str) -> memoryview:
        """Return a value that is no tensor as DCP stores it: by `torch.save`."""
        if fqn not in self.held:
            return self.stream.blob(fqn)
        import torch  # noqa: PLC0415  # only what torch read is held

        buffer = io.BytesIO()
        torch.save(self.held[fqn], buffer)
        return buffer.getbuffer()

    def expect(self, items: Iterable[Item]) -> None:
        """Say which values will be asked for next, and in which order; see `TensorStream.expect`.

        With the box of a tensor, or without one for what is none.
        """
        self.stream.expect(
            (fqn, box) for fqn, box in items if box is not None or fqn not in self.held
        )

    def whole_box(self, fqn: str) -> Box:
        """Return the box of all elements of a tensor."""
        shape = self.tensors[fqn].shape
        return Box((0,) * len(shape), shape)

    def whole(self, fqn: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in C order."""
        return self.stream.whole(fqn)

    def box(self, fqn: str, box: Box) -> Iterator[memoryview]:
        """Yield the bytes of a box of a tensor in C order."""
        return self.stream.box(fqn, box)
