"""What only `torch.load` can read: blobs, and tensors that do not lie in their item as plain bytes.

Runs nothing that a checkpoint names (invariant I10).
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import torch

from ckpt_storage.errors import CheckpointError, FormatError, UnsafeContentError
from ckpt_storage.format.inert_pickle import is_inert_with_numpy
from ckpt_storage.transfer.chunks import ChunkPlace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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


def words_of(buffer: bytearray, place: ChunkPlace, word: str) -> NDArray[Any]:
    """Return the tensor in an item that is no plain contiguous one, as numpy words."""
    whole = load_whole(buffer, place).resolve_conj().resolve_neg().contiguous()
    flat = whole.reshape(-1).view(torch.uint8).numpy()
    words: NDArray[Any] = flat.view(word).reshape(tuple(whole.shape))
    return words


def blob_value(buffer: bytearray, place: ChunkPlace, *, unsafe_pickle: bool) -> object:
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


_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")

_ZIP_START = b"PK\x03\x04"


def load_whole(buffer: bytearray, place: ChunkPlace) -> torch.Tensor:
    """Return the tensor in an item that is no plain contiguous one, read by torch itself."""
    try:
        tensor = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    except Exception as error:
        raise _not_loadable(error, place, "add_safe_globals.") from error
    if not isinstance(tensor, torch.Tensor):
        raise FormatError(
            f"The item of {place.fqn} in {place.path} holds a {type(tensor).__name__}.",
            path=place.path,
            next_step="Check the metadata beside it.",
        )
    return tensor.detach()


def refusal_of(blob: io.BytesIO) -> Exception | None:
    """Return why unpickling a blob could do more than make inert values; None if it cannot.

    Planners call `torch.load(weights_only=False)`; what torch's restricted unpickler accepts
    resolves only allow-listed names there too. Arrays of numbers and buffers, which it refuses,
    are inert as well.
    """
    blob.seek(0)
    if _is_inert(blob):
        return None
    blob.seek(0)
    try:
        torch.load(blob, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # torch raises what it likes; each is a refusal
        return error
    return None


def name_in(refusal: Exception) -> str:
    """Return the class or function for which a blob was refused."""
    found = _FORBIDDEN.search(str(refusal))
    return found[1] if found else "unknown type"


def scan_blob(buffer: bytearray, place: ChunkPlace) -> None:
    """Raise `UnsafeContentError` or `FormatError` if `refusal_of` a blob says why."""
    refusal = refusal_of(io.BytesIO(buffer))
    if refusal is not None:
        step = "add_safe_globals, or pass unsafe_pickle=True."
        raise _not_loadable(refusal, place, step) from refusal


def _not_loadable(error: Exception, place: ChunkPlace, step: str) -> CheckpointError:
    """Return in one line what torch's restricted unpickler says in many."""
    found = _FORBIDDEN.search(str(error))
    if isinstance(error, EOFError) or "PytorchStreamReader" in str(error):
        return FormatError(
            f"{place.fqn} in {place.path} cannot be read ({type(error).__name__}).",
            path=place.path,
            phase="load",
            next_step="Check that the checkpoint is complete and not damaged.",
        )
    return UnsafeContentError(
        f"{place.fqn} in {place.path} is not a value that torch loads with weights_only=True"
        f"{': it names ' + found.group(1) if found else ''}.",
        path=place.path,
        phase="load",
        next_step=f"If you trust who wrote it, allow its types by torch.serialization.{step}",
    )


def _is_inert(blob: io.BytesIO) -> bool:
    # A reader of archives looks at the end of the bytes, torch.load at their start: where no
    # archive starts it runs the pickle there, whatever archive may follow.
    if blob.getbuffer()[: len(_ZIP_START)] != _ZIP_START:
        return False
    try:
        # What torch.load itself opens, so that both see the same records.
        archive: Any = torch._C.PyTorchFileReader(blob)  # noqa: SLF001
        # torch.load gives an archive with this record to TorchScript.
        if archive.has_record("constants.pkl"):
            return False
        return is_inert_with_numpy(archive.get_record("data.pkl"))
    except RuntimeError:
        return False
