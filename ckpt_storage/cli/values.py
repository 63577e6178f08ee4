"""Values of an open checkpoint by name, with errors as the command line prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_storage.errors import InvalidInputError

if TYPE_CHECKING:
    from ckpt_storage.inspect.checkpoint import Checkpoint
    from ckpt_storage.inspect.lazytensor import LazyTensor
    from ckpt_storage.inspect.nametree import Entry

__all__ = ["entries_of", "is_tensor", "tensor_of", "value_of"]


def entries_of(checkpoint: Checkpoint) -> list[Entry]:
    """Return name, dtype, shape and size of every value; reads none."""
    return list(checkpoint._entries())  # noqa: SLF001  # indexing would read what is no tensor


def is_tensor(checkpoint: Checkpoint, fqn: str) -> bool:
    """Return whether `fqn` is a tensor. Raises `InvalidInputError` if there is no such value."""
    if fqn not in checkpoint:
        # Indexing says which names are near.
        value_of(checkpoint, fqn)
    return checkpoint._holdings.is_tensor(fqn)  # noqa: SLF001  # indexing would read an object


def value_of(checkpoint: Checkpoint, fqn: str) -> Any:  # noqa: ANN401  # whatever was saved
    """Return a lazy tensor, or the object. Raises `InvalidInputError` for an unknown name."""
    try:
        return checkpoint[fqn]
    except KeyError as error:
        raise InvalidInputError(
            f"{error.args[0]}.", next_step="ckpt-storage tree shows the names."
        ) from None


def tensor_of(checkpoint: Checkpoint, fqn: str) -> LazyTensor:
    """Return a lazy tensor. Raises `InvalidInputError` for what is none."""
    if not is_tensor(checkpoint, fqn):
        raise InvalidInputError(
            f"{fqn} is an object, no tensor.", next_step="ckpt-storage cat prints it."
        )
    tensor: LazyTensor = value_of(checkpoint, fqn)
    return tensor
