"""Replicated values: samples of what ranks hold under one name, and what is done where they differ.

A sample is bounded, so a difference of few elements of a large tensor may stay unnoticed.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import string_at
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ckpt_storage.coordination.rank_names import spell_ranks
from ckpt_storage.errors import RankMismatchError
from ckpt_storage.format.crc import crc32c_of, crc32c_of_all
from ckpt_storage.loads.tensors import PLAIN, declared_chunks
from ckpt_storage.options import MIB, Replicas

from .devices import as_integers, byte_view
from .items import fault_of, is_as_stored

log = logging.getLogger("ckpt_storage")

BLOCK_BYTES = 4096
SAMPLE_BYTES = 8 * BLOCK_BYTES
"""A tensor of up to so many bytes is read whole; of a larger tensor, blocks at equal distances."""

LARGE_BYTES = MIB
"""The size from which tensors that differ fail a save.

Running statistics of a model are smaller, weights are larger.
"""

_MAX_LEAVES = 10_000
"""How many values inside a container are compared."""

_NO_TENSOR = -1

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")

_warned_keys: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """What a rank holds under names that are not sharded: bytes and a checksum of each, in columns.

    Values that are no tensors have size -1.
    """

    names: tuple[str, ...]
    sizes: array[int]
    checksums: array[int]

    @property
    def digest(self) -> bytes:
        """The digest of the sample; equal samples have equal digests."""
        text = "\0".join(self.names).encode(errors="surrogatepass")
        columns = (text, self.sizes.tobytes(), self.checksums.tobytes())
        return array("I", map(crc32c_of, columns)).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A name under which ranks hold different values, and the ranks of each checksum."""

    name: str
    size_bytes: int
    ranks_of: dict[int, list[int]]

    @property
    def is_tensor(self) -> bool:
        """Whether the values are tensors."""
        return self.size_bytes != _NO_TENSOR

    @property
    def is_large(self) -> bool:
        """Whether the values are tensors of `LARGE_BYTES` or more."""
        return self.size_bytes >= LARGE_BYTES

    def __str__(self) -> str:
        kind = f"tensors of {self.size_bytes} bytes" if self.is_tensor else "values"
        return f"{self.name} ({kind}; ranks {' | '.join(map(spell_ranks, self.ranks_of.values()))})"


def blocks_of(size_bytes: int) -> list[tuple[int, int]]:
    """Return where the blocks of a sample begin and end: the first, the last and some between."""
    if size_bytes <= SAMPLE_BYTES:
        return [(0, size_bytes)]
    count = SAMPLE_BYTES // BLOCK_BYTES
    # At multiples of any element's size, as long as that is a power of two.
    stride = (size_bytes - BLOCK_BYTES) // (count - 1) // 64 * 64
    starts = [*range(0, (count - 1) * stride, stride), size_bytes - BLOCK_BYTES]
    return [(start, start + BLOCK_BYTES) for start in starts]


def sample_of(state: Mapping[str, Any]) -> ReplicaSample:
    """Return the sample of a flat state; sharded tensors and subclasses are left out."""
    names, sizes, checksums = list[str](), array("q"), array("I")
    on_devices: dict[torch.device, list[tuple[int, list[torch.Tensor]]]] = {}
    for name, value in state.items():
        # States have many small tensors: as few calls as there can be.
        if type(value) not in PLAIN or (value.__dict__ and declared_chunks(value) is not None):
            continue
        size_bytes, checksum = value.nbytes, 0
        if is_as_stored(value):
            first = value.data_ptr()
            if size_bytes <= SAMPLE_BYTES:
                checksum = crc32c_of(string_at(first, size_bytes))
            else:
                checksum = crc32c_of_all(
                    string_at(first + start, stop - start) for start, stop in blocks_of(size_bytes)
                )
        elif fault_of(value) is not None:
            continue
        elif value.is_cpu:
            checksum = crc32c_of_all(map(byte_view, _pieces_of(value)))
        else:
            sampled = list(_pieces_of(value))
            on_devices.setdefault(value.device, []).append((len(names), sampled))
        names.append(name)
        sizes.append(size_bytes)
        checksums.append(checksum)
    for tensors in on_devices.values():
        # One copy for all: each costs a round trip to the device.
        joined = torch.cat([block for _, sampled in tensors for block in sampled] or [_EMPTY]).cpu()
        lengths = [sum(block.numel() for block in sampled) for _, sampled in tensors]
        for (row, _), block in zip(tensors, torch.split(joined, lengths), strict=True):
            checksums[row] = crc32c_of(byte_view(block))
    return _with_values(names, sizes, checksums, values_of(state))


def staged_sample(
    tensors: Iterable[tuple[str, memoryview]], values: Mapping[str, int]
) -> ReplicaSample:
    """Return the sample of tensors whose elements lie in memory in C order, and of other values."""
    names, sizes, checksums = list[str](), array("q"), array("I")
    for name, memory in tensors:
        names.append(name)
        sizes.append(len(memory))
        blocks = (memory[start:stop] for start, stop in blocks_of(len(memory)))
        checksums.append(crc32c_of_all(blocks))
    return _with_values(names, sizes, checksums, values)


def _with_values(
    names: Sequence[str], sizes: array[int], checksums: array[int], values: Mapping[str, int]
) -> ReplicaSample:
    return ReplicaSample(
        names=(*names, *values),
        sizes=sizes + array("q", [_NO_TENSOR] * len(values)),
        checksums=checksums + array("I", values.values()),
    )


def values_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums of what is no tensor in a flat state."""
    return {
        name: checksum_of_value(value)
        for name, value in state.items()
        if not isinstance(value, torch.Tensor) and not hasattr(value, "__create_write_items__")
    }


def _pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the sampled elements of any dense tensor in C order, as bytes on its device."""
    tensor, item_bytes = tensor.detach(), tensor.element_size()
    is_flat = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    for start, stop in blocks_of(tensor.nbytes):
        first, last = start // item_bytes, stop // item_bytes
        if is_flat:
            # Where a dimension has one element, it may have any stride there.
            elements = tensor.as_strided((tensor.numel(),), (1,))[first:last]
        else:
            at = torch.arange(first, last, device=tensor.device)
            elements = as_integers(tensor)
            if tensor.ndim:
                elements = elements[torch.unravel_index(at, tensor.shape)]
            elements = elements.resolve_conj().resolve_neg().reshape(-1)
        if elements.numel():
            yield elements.view(torch.uint8)


def checksum_of_value(value: object) -> int:
    """Return a checksum that is equal for equal plain values; of other objects it has the type.

    Not of their pickles: those of equal values may differ.
    """
    return crc32c_of("\0".join(_spelt(value)).encode(errors="surrogatepass"))


_SPELT = (bool, int, float, complex, str, bytes, bytearray, type(None), np.generic, torch.dtype)


def _spelt(value: object) -> Iterator[str]:
    """Yield the texts by which values are compared, for at most `_MAX_LEAVES` values inside."""
    stack = [value]
    for _ in range(_MAX_LEAVES):
        if not stack:
            return
        item = stack.pop()
        yield type(item).__qualname__
        if isinstance(item, _SPELT):
            yield repr(item)
        elif isinstance(item, Mapping):
            pairs = sorted(item.items(), key=lambda pair: repr(pair[0]))
            stack += [key_or_value for pair in pairs for key_or_value in pair]
        elif isinstance(item, list | tuple):
            # A huge list is not copied.
            stack += item[:_MAX_LEAVES]
        elif isinstance(item, set | frozenset):
            stack += sorted(map(repr, item))[:_MAX_LEAVES]
        elif isinstance(item, np.ndarray) and item.dtype != object:
            yield repr((item.dtype, item.shape))
            yield item.ravel()[:BLOCK_BYTES].tobytes().hex()
        elif type(item) in PLAIN and fault_of(item) is None:  # type: ignore[arg-type]  # a tensor
            tensor: Any = item
            yield str(crc32c_of_all(map(byte_view, _pieces_of(tensor.cpu()))))


def find_differences(
    samples: Sequence[ReplicaSample], global_ranks: Sequence[int] | None = None
) -> list[Difference]:
    """Return the names that several ranks have, with values that differ."""
    base = samples[0]
    known = dict(zip(base.names, base.checksums, strict=True))
    names: dict[str, None] = {}
    base_checksums = np.frombuffer(base.checksums, dtype=np.uint32)
    for sample in samples[1:]:
        if sample.names == base.names:
            checksums = np.frombuffer(sample.checksums, dtype=np.uint32)
            differing = np.flatnonzero(checksums != base_checksums)
            names.update((sample.names[row], None) for row in differing)
            continue
        for name, checksum in zip(sample.names, sample.checksums, strict=True):
            if known.setdefault(name, checksum) != checksum:
                names[name] = None
    if not names:
        return []
    sizes = dict.fromkeys(names, _NO_TENSOR)
    ranks_of: dict[str, dict[int, list[int]]] = {name: {} for name in names}
    ranks = range(len(samples)) if global_ranks is None else global_ranks
    for rank, sample in zip(ranks, samples, strict=True):
        rows = zip(sample.names, sample.sizes, sample.checksums, strict=True)
        for name, size_bytes, checksum in rows:
            if name in ranks_of:
                sizes[name] = size_bytes
                ranks_of[name].setdefault(checksum, []).append(rank)
    return [
        Difference(name=name, size_bytes=sizes[name], ranks_of=ranks_of[name]) for name in names
    ]


def settle_differences(
    differences: Sequence[Difference],
    policy: Replicas,
    *,
    url: str,
    is_preemption: bool,
    stored: str = "those of the lowest rank are stored",
    effect: str = "Nothing was written.",
) -> None:
    """Raise `RankMismatchError` for differences that fail the save; log the other differences.

    `stored` and `effect` are for messages: which values are stored, and what a failed save wrote.
    """
    if policy == "first":
        return
    refused = [
        difference
        for difference in differences
        if difference.is_large or (policy == "raise" and difference.is_tensor)
    ]
    if refused and not is_preemption:
        first = refused[0]
        more = f" (and {len(refused) - 1} more names)" if len(refused) > 1 else ""
        values = {f"checksum {value:08x}": ranks for value, ranks in first.ranks_of.items()}
        listing = "; ".join(f"{text}: ranks {spell_ranks(of)}" for text, of in values.items())
        raise RankMismatchError(
            f"Ranks hold different tensors of {first.size_bytes} bytes by the name {first.name}"
            f"{more}: {listing}. {effect}",
            values=values,
            phase="plan",
            next_step="Give each rank's value a name of its own, wrap it in PerRank to keep all, "
            "or pass replicas='first' to keep that of the lowest rank.",
        )
    if refused:
        listing = ", ".join(map(str, refused))
        log.error("The preemption save to %s: ranks differ in %s; %s.", url, listing, stored)
    names = {difference.name for difference in refused}
    fresh = [
        difference
        for difference in differences
        if difference.name not in names and difference.name not in _warned_keys
    ]
    _warned_keys.update(difference.name for difference in fresh)
    if fresh:
        log.warning(
            "The save to %s: ranks differ in %s; %s, here and in later saves. Wrap a value in "
            "PerRank to keep that of every rank.",
            url,
            ", ".join(map(str, fresh)),
            stored,
        )
