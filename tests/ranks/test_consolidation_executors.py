"""Executors write exactly what the plan says, whichever way the bytes take, within their limits."""

from __future__ import annotations

import dataclasses
import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from consolidation_sources import SHARED, plan_export
from export_tools import (
    BLOCK_BYTES,
    ArraySource,
    Chunked,
    bits_of,
    saved,
    split,
    tensors_of,
    torch_dtype,
    whole,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from local_stores import store_on

from ckpt_storage.errors import IntegrityError, InvalidInputError
from ckpt_storage.export.options import ConsolidateOptions
from ckpt_storage.export.pieces import Part, cut_region
from ckpt_storage.export.plan import Plan, Region, number_unit_bytes
from ckpt_storage.export.write import Copies, Portion, RegionWriter
from ckpt_storage.options import MIB, TransferOptions
from ckpt_storage.store import open_store
from ckpt_storage.store.backend import Capabilities
from ckpt_storage.store.backend import Part as Receipt
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.transfer.chunks import ChunkPlace

OPTIONS = TransferOptions(thread_count=3, part_bytes=64 * 1024, memory_limit_bytes=8 * MIB)


def numbers(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bits, so that a shifted or swapped element is seen."""
    item = np.dtype(dtype).itemsize
    count = int(np.prod(shape)) * item
    return np.frombuffer(np.random.default_rng(seed).bytes(count), dtype).reshape(shape)


def mixed_state() -> dict[str, Chunked]:
    """Return tensors of many dtypes, shapes and shardings; some cross several windows."""
    return {
        "scalar": whole(numbers((), "f4", 1), "float32"),
        "empty": Chunked(np.zeros((0, 5), "f4"), "float32", [((0, 0), (0, 5))]),
        "byte": whole(numbers((7,), "u1", 2), "uint8"),
        "rows": split(numbers((301, 129), "u2", 3), "bfloat16", (3, 1)),
        "columns": split(numbers((257, 131), "u2", 4), "bfloat16", (1, 4)),
        "grid": split(numbers((120, 90), "f4", 5), "float32", (2, 3)),
        "deep": split(numbers((6, 30, 50), "f8", 6), "float64", (1, 2, 5)),
        "complex": split(numbers((50, 40), "c8", 7), "complex64", (1, 2)),
        "flags": split(numbers((1000,), "?", 8), "bool", (3,)),
        "long": split(numbers((200_000,), "i4", 9), "int32", (2,)),
    }


def plan_of(
    source: ArraySource, *, world_size: int = 1, share: bool = True, **options: Any
) -> Plan:
    """Return a plan whose parts are small enough that every file has many."""
    return plan_export(
        source,
        options=ConsolidateOptions(include="*", **options),
        world_size=world_size,
        able=dataclasses.replace(SHARED, tokens_travel=share),
        part_bytes=50 * 1024,
    )


def writer_of(
    plan: Plan,
    source: ArraySource,
    store: Store,
    *,
    target: Store | None = None,
    copies: Copies = "never",
    options: TransferOptions = OPTIONS,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> RegionWriter:
    """Return the writer of one rank."""
    return RegionWriter(
        plan,
        source=source,
        source_store=store,
        target_store=target or store,
        options=options,
        deadline=Deadline("consolidate", 120),
        copies=copies,
        on_bytes=on_bytes,
    )


def written(writer: RegionWriter, region: Region, upload: Upload) -> Portion:
    """Write one region to an upload that stays open."""
    portions: list[Portion] = []
    writer.write([region], lambda _: upload, lambda _, __, portion: portions.append(portion))
    (portion,) = portions
    return portion


def exported(
    plan: Plan, source: ArraySource, store: Store, **kw: Any
) -> tuple[dict[str, bytes], list[Portion]]:
    """Write all regions, each rank by a writer and an upload of its own; return files, portions."""
    target: Store = kw.get("target") or store
    portions = []
    owners = {}
    receipts: dict[int, list[Receipt]] = {at: [] for at in range(len(plan.files))}
    for at, file in enumerate(plan.files):
        owners[at] = target.upload(f"hf/{file.name}", if_absent=True, copies=True)
    for rank in range(plan.world_size):
        writer = writer_of(plan, source, store, **kw)
        for region in plan.regions_of(rank):
            path = f"hf/{plan.files[region.file].name}"
            ticket = owners[region.file].token()
            member = target.join(path, ticket)
            portions.append(written(writer, region, member))
            receipts[region.file] += member.receipts()
    for at, file in enumerate(plan.files):
        owners[at].complete(file.size_bytes, receipts=receipts[at])
    return {file.name: target.get(f"hf/{file.name}").data for file in plan.files}, portions


def check(files: Mapping[str, bytes], plan: Plan, state: Mapping[str, Chunked]) -> None:
    """Assert that the files hold exactly the tensors."""
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for data in files.values():
        found |= tensors_of(data)
    assert {name: value[2] for name, value in found.items()} == {
        name: tensor.array.tobytes() for name, tensor in state.items()
    }
    assert {name: value[1] for name, value in found.items()} == {
        name: tensor.array.shape for name, tensor in state.items()
    }
    assert {file.name: file.size_bytes for file in plan.files} == {
        name: len(data) for name, data in files.items()
    }


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store as users get it."""
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4().hex}/run")
    return open_store(str(tmp_path / "run"))


@pytest.mark.parametrize("copies", ["never", "always", "auto"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_files_hold_the_tensors(store: Store, world_size: int, copies: Copies) -> None:
    """Every dtype, shape and sharding arrives bit by bit, from one rank and from several."""
    state = mixed_state()
    source = saved(store, state)
    plan = plan_of(source, world_size=world_size, max_file_bytes=500_000)
    assert len(plan.files) == 2
    files, portions = exported(plan, source, store, copies=copies)
    check(files, plan, state)
    assert sum(p.sent_bytes + p.copied_bytes for p in portions) == sum(map(len, files.values()))


def big_rows() -> dict[str, Chunked]:
    """Return tensors in row shards of some MiB, and a column shard that nothing can copy."""
    return {
        "rows": split(numbers((3000, 500), "f4", 1), "float32", (2, 1)),
        "columns": split(numbers((500, 300), "f4", 2), "float32", (1, 2)),
        "one": whole(numbers((1_000_003,), "u2", 3), "bfloat16"),
    }


def test_refused_copies_are_streamed(tmp_path: Path) -> None:
    """A storage that turns out not to copy costs one refusal a thread, no failure."""
    rule = Rule(action="error", operation="copy_part", kind="unsupported", hit_count=None)
    backend = FaultBackend(LocalBackend(str(tmp_path / "run")), [rule])
    faults = store_on(backend)
    state = big_rows()
    source = saved(faults, state)
    plan = plan_of(source, world_size=2)
    files, portions = exported(plan, source, faults, copies="always")
    check(files, plan, state)
    assert sum(portion.copied_bytes for portion in portions) == 0


def flip(store: Store, place: ChunkPlace, byte: int) -> None:
    """Change one byte of a payload."""
    data = bytearray(store.get(place.path).data)
    data[place.start + byte] ^= 1
    store.replace(place.path, bytes(data))


@pytest.mark.parametrize("copies", ["never", "always"])
@pytest.mark.parametrize("fqn", ["rows", "columns", "one"])
def test_a_flipped_byte_is_found(store: Store, fqn: str, copies: Copies) -> None:
    """Damage of any chunk is an error that names file, tensor and rank."""
    source = saved(store, big_rows())
    place = next(place for key, place in source.known.items() if key[0] == fqn)
    flip(store, place, 100_000)
    with pytest.raises(IntegrityError) as caught:
        exported(plan_of(source, world_size=2), source, store, copies=copies)
    assert (caught.value.fqn, caught.value.rank) == (fqn, place.rank)
    assert caught.value.path == place.path
    assert place.start <= (caught.value.offset or -1) < place.start + place.size_bytes


class InOrder:
    """An upload that takes parts in order only, as a stream does."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.numbers: list[int] = []

    def write_part(
        self, number: int, offset: int, buffers: Sequence[memoryview], *, last: bool
    ) -> None:
        """Keep a part; it must be the next one."""
        assert offset == sum(map(len, self.parts))
        self.parts.append(b"".join(buffers))
        self.numbers.append(number)
        self.last = last

    def complete(self, total_bytes: int) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""


class Sequential(LocalBackend):
    """A folder that says that its parts come in order and cannot be shared."""

    capabilities = dataclasses.replace(
        LocalBackend.capabilities,
        parallel_parts=False,
        tokens_travel=False,
        copy_min_bytes=None,
        is_remote=True,
    )


def sequential(folder: Path) -> Store:
    """Return a store on such a folder."""
    return store_on(Sequential(str(folder)))


def test_a_storage_that_wants_parts_in_order_gets_them_so(tmp_path: Path) -> None:
    """Several threads read ahead, and parts arrive in order with the plan's numbers."""
    store = sequential(tmp_path / "run")
    state = mixed_state()
    source = saved(store, state)
    plan = plan_of(source, share=False)
    upload: Any = InOrder()
    writer = writer_of(plan, source, store, copies="auto")
    (region,) = plan.regions
    written(writer, region, upload)
    check({plan.files[0].name: b"".join(upload.parts)}, plan, state)
    assert upload.numbers == list(range(len(upload.parts)))
    assert len(upload.parts) > 1
    assert upload.last


def test_a_failure_ends_those_that_wait_for_their_turn(tmp_path: Path) -> None:
    """Where parts go in order, the failure of one is raised at once, not at the deadline."""
    store = sequential(tmp_path / "run")
    source = saved(store, big_rows())
    place = source.known["columns", (0, 0)]
    flip(store, place, 10)
    plan = plan_of(source, share=False)
    upload: Any = InOrder()
    with pytest.raises(IntegrityError) as caught:
        written(writer_of(plan, source, store), plan.regions[0], upload)
    assert caught.value.fqn == "columns"
    # A thread that still waited for its turn would be named in a note.
    assert not getattr(caught.value, "__notes__", [])


def test_too_little_memory_is_refused(store: Store) -> None:
    """If not even one part fits the limit, the error says how much is needed."""
    source = saved(store, big_rows())
    plan = plan_of(source)
    options = TransferOptions(part_bytes=MIB, memory_limit_bytes=MIB)
    upload = store.upload("hf/x", if_absent=True, copies=True)
    with pytest.raises(InvalidInputError, match="memory_limit_bytes"):
        written(writer_of(plan, source, store, options=options), plan.regions[0], upload)
    upload.abort()


def test_what_torch_alone_can_read_is_read_by_torch(store: Store) -> None:
    """An item whose payload was not found inside its zip arrives as any other."""
    state = big_rows()
    source = saved(store, state)
    item = io.BytesIO()
    bits = torch.from_numpy(state["one"].array.view("i2").copy()).view(torch.bfloat16)
    torch.save(bits.repeat_interleave(2)[::2], item)
    store.put("saves/s/item", item.getvalue())
    key, size = ("one", (0,)), len(item.getvalue())
    place = ChunkPlace(
        path="saves/s/item", fqn="one", start=0, size_bytes=size, rank=0, kind="opaque"
    )
    source.known = {**source.known, key: place}
    plan = plan_of(source)
    options = dataclasses.replace(OPTIONS, memory_limit_bytes=32 * MIB)
    files, _ = exported(plan, source, store, options=options)
    check(files, plan, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_cast_on_the_way(store: Store, dtype: str) -> None:
    """Floating-point tensors of any sharding arrive converted; all others as they are."""
    made = {
        "rows": torch.randn(301, 129, dtype=torch.bfloat16),
        "columns": torch.randn(257, 130, dtype=torch.float16),
        "grid": torch.randn(64, 64, dtype=torch.float64),
        "same": torch.randn(1000, dtype=torch.float32),
    }
    counts = {"rows": (3, 1), "columns": (1, 2), "grid": (2, 2), "same": (2,)}
    state = {
        name: split(bits_of(t), str(t.dtype).removeprefix("torch."), counts[name])
        for name, t in made.items()
    } | {"int": whole(numbers((100,), "i8"), "int64")}
    source = saved(store, state)
    plan = plan_of(source, world_size=2, dtype=dtype)
    files, _ = exported(plan, source, store, copies="always")
    (data,) = files.values()
    found = tensors_of(data)
    code = {"float32": "F32", "bfloat16": "BF16"}[dtype]
    for name, tensor in made.items():
        assert found[name][:2] == (code, tuple(tensor.shape))
        assert found[name][2] == bits_of(tensor.to(torch_dtype(dtype))).tobytes()
    assert found["int"][2] == state["int"].array.tobytes()


@settings(max_examples=300, deadline=None)
@given(
    least=st.sampled_from([1, 5 * MIB]),
    count=st.sampled_from([None, 9000]),
    before_count=st.integers(0, 3),
    part_count=st.integers(1, 100),
    tail_bytes=st.none() | st.integers(0, 8 * MIB - 1),
    lead_bytes=st.integers(0, 200).map(lambda n: 8 * n),
    run_sizes=st.lists(
        st.tuples(
            st.integers(1, 800 * MIB), st.integers(0, 3), st.sampled_from([0, 64, MIB, 7 * MIB])
        ),
        max_size=8,
    ),
)
def test_every_cut_of_a_region_is_legal(
    least: int,
    count: int | None,
    before_count: int,
    part_count: int,
    tail_bytes: int | None,
    lead_bytes: int,
    run_sizes: list[tuple[int, int, int]],
) -> None:
    """Parts follow one another, none is too short or numbered twice, copies end at block edges."""
    capabilities = Capabilities(
        kind="s3",
        exclusive_create=True,
        atomic_replace=True,
        if_match=True,
        parallel_parts=True,
        min_part_bytes=least,
        max_part_count=count,
        copy_min_bytes=least,
        copy_max_bytes=5 * 1024 * MIB,
    )
    part = 8 * MIB
    start = before_count * part
    stop = start + part_count * part + (tail_bytes or 0)
    file_bytes = stop + (part if tail_bytes is None else 0)
    region = Region(file=0, start=start, stop=stop, owner=0, file_bytes=file_bytes)
    runs = []
    at = start + lead_bytes
    for wanted, blocks_before, gap in run_sizes:
        size = min(stop - at, wanted)
        if size <= 0:
            break
        offset = blocks_before * BLOCK_BYTES
        place = ChunkPlace(
            path="p",
            fqn="f",
            start=0,
            size_bytes=offset + size,
            block_bytes=BLOCK_BYTES,
            crcs=range(-(-(offset + size) // BLOCK_BYTES)),
        )
        runs.append(Part(start=at, stop=at + size, place=place, source_start=offset))
        at += size + gap
    cut = cut_region(region, runs, capabilities, stream_bytes=part)
    assert [p.start for p in cut] == [region.start, *(p.stop for p in cut[:-1])]
    assert cut[-1].stop == region.stop
    unit = number_unit_bytes(capabilities, region.file_bytes)
    for p in cut:
        assert p.stop == region.file_bytes or p.stop - p.start >= unit
        if p.place is None:
            assert p.size_bytes <= max(part, 2 * unit) + 64
        else:
            source_stop = p.source_start + p.size_bytes
            assert p.source_start % BLOCK_BYTES == 0
            assert source_stop % BLOCK_BYTES == 0 or source_stop == p.place.size_bytes
            assert p.size_bytes <= 512 * MIB
    numbers_ = [p.start // unit for p in cut]
    assert len(set(numbers_)) == len(numbers_)
    assert count is None or max(numbers_) <= count
