"""Items that only `torch.load` can read: blobs, and tensors without plain bytes in their item.

Runs no code of a checkpoint (invariant I10).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt_storage.errors import CheckpointError, FormatError, UnsafeContentError
from ckpt_storage.format.inert_pickle import is_inert_with_numpy
from ckpt_storage.transfer.chunks import ChunkPlace, ChunkRead, ChunkReader
from ckpt_storage.transfer.ranges import ignore

Tensor = torch.Tensor
Device = torch.device | str | int

_FORBIDDEN = re.compile(r"GLOBAL ([\w.]+)")

_ZIP_START = b"PK\x03\x04"


def tensor_of(words: NDArray[np.generic], dtype: str, device: Device | None) -> Tensor:
    """Return words as a tensor of torch's `dtype`, in the same memory if possible."""
    flat = np.require(words.reshape(-1), requirements=["C", "W"])
    tensor = torch.from_numpy(flat.view("u1")).view(getattr(torch, dtype)).reshape(words.shape)
    return tensor if device is None else tensor.to(device)


def words_of(tensor: Tensor, dtype: str) -> NDArray[Any]:
    """Return a tensor as numpy words of the size of its elements."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    words: NDArray[Any] = plain.reshape(-1).view(torch.uint8).numpy().view(dtype)
    return words.reshape(tuple(tensor.shape))


def read_opaque(
    chunks: ChunkReader, reads: Sequence[ChunkRead], *, on_bytes: Callable[[int], None] = ignore
) -> Iterator[tuple[ChunkRead, Tensor]]:
    """Yield each of `reads` whose item only torch can read, with its elements, item by item."""
    users: dict[tuple[str, int], list[ChunkRead]] = {}
    for read in reads:
        if read.place.kind == "opaque":
            users.setdefault((read.place.path, read.place.start), []).append(read)
    for item_reads in users.values():
        place = item_reads[0].place
        (buffer,) = chunks.read_bytes([place], on_bytes=on_bytes)
        whole = load_whole(buffer, place)
        for read in item_reads:
            if tuple(whole.shape) != read.chunk_sizes:
                raise FormatError(
                    f"{place.fqn} in {place.path} has shape {list(whole.shape)}; the metadata "
                    f"says {list(read.chunk_sizes)}.",
                    path=place.path,
                    next_step="Check that the checkpoint is complete and that its files belong "
                    "together.",
                )
            where = tuple(map(range, read.chunk_sizes)) if read.where is None else read.where
            yield read, whole[tuple(slice(r.start, r.stop, r.step) for r in where)]


def load_whole(buffer: bytearray, place: ChunkPlace) -> Tensor:
    """Return the tensor in an item. Raises `UnsafeContentError`, `FormatError`."""
    try:
        tensor = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    except Exception as error:
        raise _not_loadable(error, place, "add_safe_globals.") from error
    if not isinstance(tensor, Tensor):
        what = f"The item of {place.fqn} in {place.path} holds a {type(tensor).__name__}."
        raise FormatError(what, path=place.path, next_step="Check the metadata beside it.")
    return tensor.detach()


def blob_value(buffer: bytearray, place: ChunkPlace, *, unsafe_pickle: bool) -> object:
    """Return the object in a blob; with `unsafe_pickle`, run the code that its pickle names.

    Raises `UnsafeContentError`, `FormatError`.
    """
    if not unsafe_pickle:
        scan_blob(buffer, place)
    try:
        value: object = torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
        raise FormatError(
            f"{place.fqn} in {place.path} cannot be unpickled ({reason}).",
            path=place.path,
            phase="load",
            next_step="Check that the checkpoint is not damaged, and that the modules of its "
            "classes can be imported here.",
        ) from error
    return value


def scan_blob(buffer: bytearray, place: ChunkPlace) -> None:
    """Raise `UnsafeContentError` or `FormatError` if there is a `refusal_of` a blob."""
    refusal = refusal_of(io.BytesIO(buffer))
    if refusal is not None:
        step = "add_safe_globals, or pass unsafe_pickle=True."
        raise _not_loadable(refusal, place, step) from refusal


def refusal_of(blob: io.BytesIO) -> Exception | None:
    """Return why unpickling a blob may run code; None if it makes inert values only.

    Planners call `torch.load(weights_only=False)`. A pickle that torch's restricted unpickler
    accepts resolves only allow-listed names there, too. Arrays of numbers and buffers, which the
    restricted unpickler refuses, are also inert.
    """
    blob.seek(0)
    try:
        if not _is_inert(blob):
            blob.seek(0)
            torch.load(blob, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  # torch raises many types; each is a refusal
        return error
    return None


def name_in(refusal: Exception) -> str:
    """Return the class or function for which a blob was refused."""
    match = _FORBIDDEN.search(str(refusal))
    return match[1] if match else "unknown type"


def _not_loadable(error: Exception, place: ChunkPlace, step: str) -> CheckpointError:
    """Return the error for a refusal of torch's restricted unpickler."""
    if isinstance(error, EOFError) or "PytorchStreamReader" in str(error):
        return FormatError(
            f"{place.fqn} in {place.path} cannot be read ({type(error).__name__}).",
            path=place.path,
            phase="load",
            next_step="Check that the checkpoint is complete and not damaged.",
        )
    match = _FORBIDDEN.search(str(error))
    return UnsafeContentError(
        f"{place.fqn} in {place.path} is not a value that torch loads with weights_only=True"
        f"{': it names ' + match[1] if match else ''}.",
        path=place.path,
        phase="load",
        next_step=f"If you trust its writer, allow its types by torch.serialization.{step}",
    )


def _is_inert(blob: io.BytesIO) -> bool:
    # Readers of archives start at the end of the bytes, but torch.load at their beginning: without
    # the magic of an archive there, it runs them as a pickle.
    if blob.getbuffer()[: len(_ZIP_START)] != _ZIP_START:
        return False
    try:
        # The reader of torch.load, so that both see the same records.
        archive: Any = torch._C.PyTorchFileReader(blob)  # noqa: SLF001
        # torch.load gives an archive with this record to TorchScript.
        if archive.has_record("constants.pkl"):
            return False
        return is_inert_with_numpy(archive.get_record("data.pkl"))
    except RuntimeError:
        return False
