"""Tensors as host bytes: views where the memory can be used as it is, bounded copies elsewhere.

Knows torch tensors; knows no file and no plan. Called by `writer`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .errors import InvalidInputError


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without the prefix, as the format spells it."""
    return str(dtype).removeprefix("torch.")


def check_plain(tensor: torch.Tensor, fqn: str) -> None:
    """Raise `InvalidInputError` unless the tensor is dense, with its elements stored as such."""
    reason = None
    if tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}"
    elif tensor.is_quantized:
        reason = "it is quantised"
    elif tensor.device.type == "meta":
        reason = "it is on the meta device and has no data"
    if reason:
        raise InvalidInputError(
            f"{fqn} cannot be saved: {reason}.",
            phase="write",
            next_step="Convert it to a dense tensor with data before saving, or leave it out.",
        )


def host_views(tensor: torch.Tensor, window_bytes: int) -> Iterator[memoryview]:
    """Yield the elements of `tensor` in C order as consecutive byte views.

    A contiguous CPU tensor is one view of its own memory, not copied, and must not change while
    the view is in use. Anything else is copied window by window, each of at most `window_bytes`
    (or one element), so memory stays bounded whatever the tensor's size.
    """
    tensor = tensor.detach()
    if (
        tensor.is_conj()
        or tensor.is_neg()
        or not (tensor.device.type == "cpu" and tensor.is_contiguous())
    ):
        for window in _windows(tensor, max(1, window_bytes // max(1, tensor.element_size()))):
            yield _view(window.resolve_conj().resolve_neg().to("cpu").contiguous())
    else:
        yield _view(tensor)


def _view(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.numel() == 0:
        return memoryview(b"")
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy 2 types no buffer on 3.11


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
