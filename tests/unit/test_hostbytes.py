"""Tensors as bytes, by every way there is, against what numpy makes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.saves.hostcopy import HostCopies, host_bytes

Make = Callable[[], torch.Tensor]


def expected(tensor: torch.Tensor) -> bytes:
    """Return the elements in C order, one after another, by torch's own indexing."""
    if not tensor.numel():
        return b""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor)
    return bytes(plain.reshape(-1).view(torch.uint8).tolist())


def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of any dtype whose bytes tell their place."""
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 2, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


class Named(torch.Tensor):
    """A tensor of a class that torch does not know."""


KINDS: dict[str, Make] = {
    "plain": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(4, 6).t(),
    "every-second": lambda: torch.arange(48.0)[::2],
    "within": lambda: torch.arange(24.0).reshape(4, 6)[1:3, 2:5],
    "rows-within": lambda: torch.arange(24.0).reshape(4, 6)[1:3],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 5),
    "scalar": lambda: torch.tensor(7.5),
    "empty": lambda: torch.empty(0, 3),
    "parameter": lambda: torch.nn.Parameter(torch.arange(5.0)),
    "conjugated": lambda: torch.view_as_complex(torch.arange(12.0).reshape(6, 2)).conj(),
    "negated": lambda: torch.view_as_complex(torch.arange(12.0).reshape(6, 2)).conj().imag,
    "subclass": lambda: torch.arange(5.0).as_subclass(Named),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_tensor_of_any_form_gives_its_elements_in_order(make: Make) -> None:
    """Copied as a whole or window by window, whatever the strides and the lazy flags."""
    tensor = make()
    want = expected(tensor.detach().as_subclass(torch.Tensor))
    assert host_bytes(tensor) == want
    for window_bytes in (1, 16, 40, 1 << 20):
        views = list(HostCopies().views(tensor, window_bytes))
        assert b"".join(views) == want
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not plain:
            assert max(view.nbytes for view in views) <= max(window_bytes, tensor.element_size())


@pytest.mark.parametrize("name", DTYPES)
def test_a_tensor_of_any_dtype_gives_its_bytes(name: str) -> None:
    """The bytes are those in memory."""
    tensor = numbers(5, getattr(torch, name))
    want = bytes(tensor.view(torch.uint8).tolist())
    assert host_bytes(tensor) == want
    assert b"".join(HostCopies().views(tensor, 1 << 20)) == want
