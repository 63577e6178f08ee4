"""Values of an open checkpoint as torch has them: tensors from words, and unpickled blobs.

The only room under `open_checkpoint` that imports torch; imported when torch is asked for. Runs
nothing that a checkpoint names (invariant I10) unless told to.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from ckpt_storage.errors import FormatError
from ckpt_storage.source.model import Place

from .torchload import load_whole, scan_blob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Device", "Tensor", "blob_value", "tensor_of", "words_of"]

Tensor = torch.Tensor
Device = torch.device | str | int


def tensor_of(words: NDArray[np.generic], dtype: str, device: Device | None) -> Tensor:
    """Return words as a tensor of torch's type `dtype`, in the same memory where it is the CPU's.

    Every stride of `words` counts: what torch cannot express is copied.
    """
    shape = words.shape
    flat = words.reshape(-1)
    if not flat.flags.c_contiguous or not flat.flags.writeable:
        flat = flat.copy()
    kind: torch.dtype = getattr(torch, dtype)
    if flat.size:
        tensor = torch.from_numpy(flat.view("u1")).view(kind).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=kind)
    return tensor if device is None else tensor.to(device)


def words_of(buffer: bytearray, place: Place, word: str) -> NDArray[Any]:
    """Return the tensor in an item that is no plain contiguous one, as numpy words."""
    whole = load_whole(buffer, place).resolve_conj().resolve_neg().contiguous()
    flat = whole.reshape(-1).view(torch.uint8).numpy()
    words: NDArray[Any] = flat.view(word).reshape(tuple(whole.shape))
    return words


def blob_value(buffer: bytearray, place: Place, *, unsafe_pickle: bool) -> object:
    """Return the object in a blob.

    What torch loads with `weights_only=True`, and arrays of numbers; with `unsafe_pickle`
    anything, running what it names. Raises `UnsafeContentError`, `FormatError`.
    """
    if not unsafe_pickle:
        try:
            value: object = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001  # the scan says what is wrong, if anything is
            # Lets arrays of numbers pass, which torch refuses; they run nothing either.
            scan_blob(buffer, place)
        else:
            return value
    try:
        trusted: object = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=False)
    except Exception as error:
        raise FormatError(
            f"{place.fqn} in {place.path} cannot be unpickled ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200].rstrip('.')}).",
            path=place.path,
            phase="load",
            next_step="Check that the checkpoint is not damaged, and that the modules its classes "
            "come from can be imported here.",
        ) from error
    return trusted
