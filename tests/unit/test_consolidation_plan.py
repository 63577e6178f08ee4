"""Which tensors go out under which names; files, regions and pieces, held against safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from consolidation_sources import (
    BLOCK_BYTES,
    SHARED,
    MemorySource,
    array_source,
    assemble,
    bare_source,
    nested_source,
    plan_export,
    reading,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load as load_numpy

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.layout import index_document, lay_out_model
from ckpt_storage.export.options import ConsolidateOptions, parse_bytes
from ckpt_storage.export.plan import Elements, Part, Region, cut_region, divide, number_unit_bytes
from ckpt_storage.export.select import Skipped, check_ties, choose_model
from ckpt_storage.format.boxes import Box
from ckpt_storage.options import DEFAULT_PART_BYTES, default_memory_limit_bytes
from ckpt_storage.transfer.chunks import ChunkPlace

QUICK = settings(max_examples=100, deadline=None)
MIB = 1 << 20
S3 = replace(SHARED, min_part_bytes=5 * MIB, max_part_count=10_000)
WHOLE = replace(SHARED, tokens_travel=False)
NUMPY_DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "uint8", "bool")


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw boxes that tile `shape`, made by cutting boxes in two, in any order."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        wide = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not wide:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(wide))
        cut = draw(st.integers(1, box.sizes[dim] - 1))
        for start, size in ((0, cut), (cut, box.sizes[dim] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return draw(st.permutations(boxes))


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[MemorySource, dict[str, NDArray[np.generic]]]:
    """Draw a checkpoint of up to 6 small tensors, sharded anyhow, and its arrays."""
    arrays: dict[str, tuple[NDArray[np.generic], str, Sequence[Box]]] = {}
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from(NUMPY_DTYPES))
        data = np.random.default_rng(number).integers(0, 2, math.prod(shape) * 16, np.uint8)
        array = data[: math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
        arrays[f"t{number}"] = (array, dtype, draw(tilings(shape)))
    return array_source(arrays), {fqn: array for fqn, (array, _, _) in arrays.items()}


@QUICK
@given(st.data())
def test_files_made_by_a_plan_are_what_safetensors_reads(draws: st.DataObject) -> None:
    """Every byte is written, and the safetensors library finds every array unchanged."""
    source, arrays = draws.draw(checkpoints())
    limit = draws.draw(st.sampled_from(["1000", "5kB", "5GB"]))
    plan = plan_export(
        source,
        options=ConsolidateOptions(max_file_bytes=limit),
        world_size=draws.draw(st.integers(1, 9)),
        able=draws.draw(st.sampled_from([SHARED, S3, WHOLE])),
        part_bytes=draws.draw(st.sampled_from([64, 8 * MIB])),
    )
    found: dict[str, NDArray[np.generic]] = {}
    for data in assemble(plan, source, draws.draw(st.integers(64, 20_000))):
        found |= load_numpy(data)
    assert found.keys() == arrays.keys()
    for fqn, array in arrays.items():
        assert found[fqn].shape == array.shape
        assert found[fqn].dtype == array.dtype
        assert found[fqn].tobytes() == array.tobytes()


def test_the_order_of_sets_and_dicts_does_not_matter() -> None:
    """A source and options that list the same in another order give the same plan."""
    plans = []
    for names in (["a", "b", "c", "d"], ["d", "b", "a", "c"]):
        options = ConsolidateOptions(
            fqn_to_index_mapping={name: 1 + ord(name) % 2 for name in names},
            rename={name: f"x.{name}" for name in names},
            include=names,
        )
        source = bare_source(*(tensor(name, (9,)) for name in names))
        plans.append(plan_export(source, options=options, world_size=3))
    assert plans[0] == plans[1]


def test_a_dtype_that_safetensors_lacks_is_refused() -> None:
    """The error names the tensor and how to leave it out, the same one on all ranks."""
    bad = [tensor(f"layers.{at}.bad", (2,), "complex128") for at in range(9)]
    source = bare_source(tensor("good", (2,)), *bad)
    with pytest.raises(InvalidInputError, match=r"layers\.0\.bad has dtype .*exclude="):
        plan_export(source, options=ConsolidateOptions(), world_size=1)
    options = ConsolidateOptions(exclude="layers.*", dtype=torch.bfloat16)
    assert plan_export(source, options=options, world_size=1).files


def hugging_face_split(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return what `split_state_dict_into_shards_factory` is documented to do."""
    shards: list[list[int]] = []
    open_shard: list[int] = []
    for at, size in enumerate(sizes):
        if size > limit:
            shards.append([at])
        elif sum(sizes[i] for i in open_shard) + size > limit:
            shards.append(open_shard)
            open_shard = [at]
        else:
            open_shard.append(at)
    return [*shards, open_shard] if open_shard else shards


@QUICK
@given(sizes=st.lists(st.integers(0, 1500), min_size=1, max_size=30))
def test_files_are_cut_as_hugging_face_cuts(sizes: list[int]) -> None:
    """Tensors fill a file up to the limit; a larger one than that has a file of its own."""
    source = bare_source(*(tensor(f"t{at}", (size,), "uint8") for at, size in enumerate(sizes)))
    options = ConsolidateOptions(max_file_bytes=1000)
    plan = plan_export(source, options=options, world_size=1)
    expected = hugging_face_split(sizes, 1000)
    count = len(expected)
    assert [[int(t.name[1:]) for t in file.elements] for file in plan.files] == expected
    if count > 1:
        assert [f.name for f in plan.files] == [
            f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
        ]


def test_an_index_mapping_decides_the_files() -> None:
    """Names and FQNs are its keys; a file of dropped aliases or absent tensors only is no file."""
    source = bare_source(
        tensor("model.a", (2,)),
        tensor("model.b", (2,)),
        tensor("model.head", (2,)),
        tensor("ema.embed", (2,)),
        paths={n: tuple(n.split(".")) for n in ("model.a", "model.b", "model.head", "ema.embed")},
    )
    options = ConsolidateOptions(
        fqn_to_index_mapping={"a": 5, "model.b": 2, "head": 3, "absent": 4, "ema.embed": 1}
    )
    source.ties = {"model.head": "model.a"}
    plan = plan_export(source, options=options, world_size=1)
    assert [[t.name for t in file.elements] for file in plan.files] == [["b"], ["a"]]
    document = json.loads(index_document(plan.files, save_id=source.save_id, fingerprint="f"))
    assert document["weight_map"] == {
        "b": "model-00001-of-00002.safetensors",
        "a": "model-00002-of-00002.safetensors",
    }
    assert document["metadata"]["total_size"] == 16
    assert document["metadata"]["save_id"] == source.save_id


@QUICK
@given(st.data())
def test_regions_cover_files_with_lawful_parts_and_balance(draws: st.DataObject) -> None:
    """Every byte is in one region; regions are large enough and aligned, and ranks balanced."""
    some = st.integers(1, 5000) | st.integers(1, 1 << 34)
    sizes = draws.draw(st.lists(some, min_size=1, max_size=12))
    world_size = draws.draw(st.integers(1, 300))
    min_part_bytes = draws.draw(st.sampled_from([1, 5 * MIB]))
    max_part_count = draws.draw(st.sampled_from([None, 100, 10_000]))
    multiple = draws.draw(st.sampled_from([1, 4096, 256 * 1024]))
    part_bytes = draws.draw(st.sampled_from([8 * MIB, 16 * MIB, 100 * 1000 * 1000]))
    able = replace(
        SHARED,
        min_part_bytes=min_part_bytes,
        max_part_count=max_part_count,
        part_multiple_bytes=multiple,
    )
    regions = divide(dict(enumerate(sizes)), world_size, able, part_bytes)
    loads = [0] * world_size
    at = [0] * len(sizes)
    for region in regions:
        assert region.start == at[region.file] < region.stop
        assert region.start % math.lcm(multiple, 64) == 0
        least = max(min_part_bytes, -(-region.file_bytes // (max_part_count or region.file_bytes)))
        assert region.stop == region.file_bytes or region.size_bytes >= least
        at[region.file] = region.stop
        loads[region.owner] += region.size_bytes
    assert at == sizes
    assert [r.owner for r in regions] == sorted(r.owner for r in regions)
    mean = sum(sizes) / world_size
    least_parts = [max(min_part_bytes, -(-size // (max_part_count or size))) for size in sizes]
    unit = max(math.lcm(multiple, 64), *least_parts)
    if mean >= 40 * unit:
        assert max(loads) <= 1.05 * mean


@QUICK
@given(st.data())
def test_every_cut_of_a_region_is_legal(draws: st.DataObject) -> None:
    """Parts follow one another, none is too short or numbered twice, copies end at block edges."""
    least = draws.draw(st.sampled_from([1, 5 * MIB]))
    count = draws.draw(st.sampled_from([None, 9000]))
    tail_bytes = draws.draw(st.none() | st.integers(0, 8 * MIB - 1))
    gaps = st.sampled_from([0, 64, MIB, 7 * MIB])
    before = st.integers(0, 3 * BLOCK_BYTES // 8)
    run = st.tuples(st.integers(1, 800 * MIB), before, before, gaps)
    able = replace(
        SHARED,
        min_part_bytes=least,
        max_part_count=count,
        copy_min_bytes=least,
        copy_max_bytes=5 * 1024 * MIB,
    )
    part = 8 * MIB
    start = draws.draw(st.integers(0, 3)) * part
    stop = start + draws.draw(st.integers(1, 100)) * part + (tail_bytes or 0)
    file_bytes = stop + (part if tail_bytes is None else 0)
    region = Region(file=0, start=start, stop=stop, owner=0, file_bytes=file_bytes)
    runs = []
    at = start + 8 * draws.draw(st.integers(0, 200))
    for wanted, before_8, behind_8, gap in draws.draw(st.lists(run, max_size=8)):
        size = min(stop - at, wanted)
        if size <= 0:
            break
        offset, payload_bytes = 8 * before_8, 8 * before_8 + size + 8 * behind_8
        place = ChunkPlace(
            path="p",
            fqn="f",
            start=0,
            size_bytes=payload_bytes,
            block_bytes=BLOCK_BYTES,
            crcs=range(-(-payload_bytes // BLOCK_BYTES)),
        )
        runs.append(Part(start=at, stop=at + size, place=place, shift=at - offset))
        at += size + gap
    cut = cut_region(region, runs, able, stream_bytes=part)
    assert [p.start for p in cut] == [region.start, *(p.stop for p in cut[:-1])]
    assert cut[-1].stop == region.stop
    unit = number_unit_bytes(able, region.file_bytes)
    for p in cut:
        assert p.stop == region.file_bytes or p.stop - p.start >= unit
        if p.place is None:
            assert p.size_bytes <= max(part, 2 * unit) + 64
        else:
            source_stop = p.stop - p.shift
            assert (p.start - p.shift) % BLOCK_BYTES == 0
            assert source_stop % BLOCK_BYTES == 0 or source_stop == p.place.size_bytes
            assert p.size_bytes <= 512 * MIB
    numbers = [p.start // unit for p in cut]
    assert len(set(numbers)) == len(numbers)
    assert count is None or max(numbers) <= count


def test_where_many_ranks_share_a_node_one_part_is_read_while_another_is_written() -> None:
    """Two parts fit into the default memory of a rank, however many others the node has."""
    source = bare_source(tensor("w", (9,)))
    plan = plan_export(source, options=ConsolidateOptions(), world_size=1)
    with reading(plan, source) as reader:
        part_bytes = DEFAULT_PART_BYTES + reader.prepare(0, 0, plan.files[0].size_bytes)
    assert 2 * part_bytes <= default_memory_limit_bytes({"LOCAL_WORLD_SIZE": "256"})


def test_whole_files_go_to_the_rank_that_has_least() -> None:
    """Without shared files every region is a file, and the largest file sets the pace."""
    sizes = [100, 900, 300, 500, 200, 400]
    regions = divide(dict(enumerate(sizes)), 3, WHOLE, 8 * MIB)
    assert [(r.file, r.start, r.stop) for r in regions] == [(i, 0, s) for i, s in enumerate(sizes)]
    loads = [sum(r.size_bytes for r in regions if r.owner == rank) for rank in range(3)]
    assert sorted(loads) == [700, 800, 900]


def test_a_large_plan_is_lazy() -> None:
    """1,000 tensors in 256 column shards for 256 ranks: planning looks at no chunk."""

    class Watched(list[Box]):
        looks = 0

        def __iter__(self) -> Iterator[Box]:
            Watched.looks += 1
            return super().__iter__()

    shape = (4096, 1024)
    boxes = Watched(Box((0, at), (4096, 4)) for at in range(0, 1024, 4))
    tensors = [tensor(f"layers.{at}.w", shape, "bfloat16", boxes) for at in range(1000)]
    source = bare_source(*tensors)
    source.format = "dcp"
    plan = plan_export(source, options=ConsolidateOptions(), world_size=256, able=S3)
    assert Watched.looks == 0
    loads = [sum(r.size_bytes for r in plan.regions_of(rank)) for rank in range(256)]
    assert max(loads) <= 1.2 * sum(loads) / 256
    region = plan.regions_of(17)[0]
    with reading(plan, source) as reader:
        total = sum(
            piece.part.volume * 2
            for start in range(region.start, region.stop, 16 * MIB)
            for piece in reader.pieces(region.file, start, min(start + 16 * MIB, region.stop))
        )
    assert region.size_bytes - plan.files[0].segments[0].size_bytes <= total <= region.size_bytes
    assert 0 < Watched.looks < 3 * (2 + region.size_bytes // (4096 * 1024 * 2))


W = tensor("", (4, 2))
HF = {"model.embed.weight": W, "model.layers.0.w": W, "lm_head.weight": W}
"""A Hugging Face state dict: its names begin with "model." themselves."""
TIED_HF = {"model.embed.weight": W, "model.layers.0.w": W}
"""One whose every name does, because the head is tied."""
OSD = {"state": {"model.embed.weight": {"exp_avg": W, "step": tensor("", ())}}, "lr": 0.1}


Choice = tuple[list[Elements], tuple[Skipped, ...]]


def chosen(source: MemorySource, **options: Any) -> Choice:
    """Return the choice with these options."""
    return choose_model(source, ConsolidateOptions(**options))


def out(choice: Choice) -> dict[str, str]:
    """Return name -> FQN of what goes out."""
    return {t.name: t.fqn for t in choice[0]}


def left(choice: Choice) -> dict[str, str]:
    """Return FQN -> reason of what does not."""
    return {skip.fqn: skip.reason for skip in choice[1]}


@pytest.mark.parametrize(
    ("state", "stripped"),
    [
        (HF, ""),
        ({"model": HF}, "model."),
        ({"model": TIED_HF, "optimizer": OSD, "step": 7}, "model."),
        ({"model": HF, "ema_model": HF, "scheduler": {"last": W}}, "model."),
        ({"app": {"model": HF, "optim": OSD}}, "app.model."),
        ({"state_dict": HF, "optimizer_states": {"0": OSD}}, "state_dict."),
        ({"Net": HF, "optimizers": OSD}, "Net."),
        ({**HF, "optimizer": OSD, "train_state": {"step": W}}, ""),
    ],
)
def test_the_model_goes_out_under_its_own_names(state: dict[str, object], stripped: str) -> None:
    """However a script nests it, what goes out is the model's state dict, and nothing else."""
    source = nested_source(state)
    choice = chosen(source)
    names = TIED_HF if "lm_head.weight" not in str(state) else HF
    assert out(choice) == {name: f"{stripped}{name}" for name in names}
    everything = source.tensors.keys() | source.blobs
    assert left(choice).keys() == everything - set(out(choice).values())


def test_what_is_left_out_says_why() -> None:
    """Blobs, optimizer state, training state and other models are listed with their reasons."""
    source = nested_source(
        {"model": {"a": W}, "optim": {"s": W, "lr": 0.1}, "rng": {"s": W}, "ema": {"a": W}}
    )
    choice = chosen(source)
    assert left(choice) == {
        "ema.a": "outside the model",
        "optim.lr": "blob",
        "optim.s": "optimizer",
        "rng.s": "training state",
    }
    sizes = {skip.fqn: skip.size_bytes for skip in choice[1]}
    assert sizes == {"ema.a": 32, "optim.lr": None, "optim.s": 32, "rng.s": 32}


@pytest.mark.parametrize(
    ("state", "names"),
    [
        # A module may have parameters "scaler" and "opt"; only containers are left out.
        ({"model": {"scaler": W, "opt": W, "w": W}}, ["opt", "scaler", "w"]),
        # Nothing says which one is the model.
        ({"model": {"w": W}, "module": {"w": W}}, ["model.w", "module.w"]),
        # A module's own dictionaries are no containers; numbers sort as numbers.
        ({"model": {"l": {"10.w": W, "2.w": W, "b": W}}}, ["l.2.w", "l.10.w", "l.b"]),
    ],
)
def test_only_containers_are_judged_by_their_keys(
    state: dict[str, object], names: list[str]
) -> None:
    """Keys of tensors mean nothing, and below the model few keys do."""
    assert list(out(chosen(nested_source(state)))) == names


def test_without_paths_names_stay_whole() -> None:
    """Where the nesting is not known, nothing is taken off; optimizer state is still left out."""
    names = ["model.a", "model.b", "optimizer.state.a"]
    choice = chosen(bare_source(*(tensor(name, (2,)) for name in names)))
    assert set(out(choice)) == {"model.a", "model.b"}
    assert left(choice) == {"optimizer.state.a": "optimizer"}


STATE: dict[str, object] = {
    "model": {"layers.0.w": W, "layers.1.w": W, "head": W},
    "ema": {"layers.0.w": W, "head": W},
    "optimizer": {"head": W},
}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": "model.layers.*"}, {"layers.0.w", "layers.1.w"}),
        ({"include": {"ema.head", "model.head"}}, {"ema.head", "model.head"}),
        ({"include": "optimizer.*"}, {"head"}),
        ({"exclude": "*.head"}, {"layers.0.w", "layers.1.w"}),
        ({"exclude": lambda fqn: "layers" in fqn}, {"head"}),
        ({"include": "*", "exclude": ["ema.*", "optim*"]}, {"layers.0.w", "layers.1.w", "head"}),
        ({"rename": {"model.head": "lm_head"}}, {"layers.0.w", "layers.1.w", "lm_head"}),
        ({"rename": str.upper}, {"MODEL.LAYERS.0.W", "MODEL.LAYERS.1.W", "MODEL.HEAD"}),
    ],
)
def test_selections_and_names_take_fqns_patterns_and_functions(
    options: dict[str, Any], names: set[str]
) -> None:
    """`include` replaces the default choice, `exclude` narrows it; one container is taken off.

    A mapping leaves other names at their default; a function gets whole FQNs.
    """
    assert set(out(chosen(nested_source(STATE), **options))) == names
    # Brackets in an FQN stand for themselves if there is such a tensor.
    odd = bare_source(tensor("a[0]", (2,)), tensor("a0", (2,)))
    assert set(out(chosen(odd, include="a[0]"))) == {"a[0]"}
    assert set(out(chosen(odd, include="a[0]*"))) == {"a0"}


def tied_state() -> MemorySource:
    """Return a model whose head is its embedding, stored twice."""
    data = np.arange(64, dtype=np.float32).reshape(8, 8)
    boxes = [Box((0, 0), (4, 8)), Box((4, 0), (4, 8))]
    arrays = {
        "embed": (data, "float32", boxes),
        "head": (data, "float32", boxes),
        "other": (data + 1, "float32", boxes),
        "whole": (data, "float32", [Box((0, 0), (8, 8))]),
        "tail": (np.concatenate([data[:4], data[:4]]), "float32", boxes),
    }
    return array_source(arrays)


def test_recorded_ties_are_dropped_or_kept() -> None:
    """An alias is left out, unless it is to be kept or its target does not go out."""
    source = tied_state()
    source.ties = {"head": "embed"}
    dropped = choose_model(source, ConsolidateOptions())
    assert "head" not in out(dropped)
    (skip,) = dropped[1]
    assert (skip.fqn, skip.reason, skip.target) == ("head", "tied", "embed")
    for options in (ConsolidateOptions(tied="keep"), ConsolidateOptions(exclude="embed")):
        assert out(choose_model(source, options))["head"] == "head"


def test_a_caller_may_confirm_ties_by_either_name() -> None:
    """Names of weight files and FQNs are understood; recorded ties are dropped too."""
    source = nested_source({"model": {"embed": W, "head": W, "tail": W}})
    source.ties = {"model.tail": "model.embed"}
    for pair in ({"head": "embed"}, {"model.head": "model.embed"}, {"head": "model.embed"}):
        choice = choose_model(source, ConsolidateOptions(tied=pair))
        assert out(choice) == {"embed": "model.embed"}
    source.ties = {}
    absent = choose_model(source, ConsolidateOptions(tied={"lm_head.weight": "embed"}))
    assert not left(absent)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_file_bytes": 5}, r"max_file_bytes is 5\. Give 1000 or more"),
        ({"max_file_bytes": "5 GBs"}, r"max_file_bytes is '5 GBs'.*5GiB"),
        ({"max_file_bytes": True}, r"max_file_bytes is True"),
        ({"max_file_bytes": "1GB", "fqn_to_index_mapping": {"a": 1}}, r"Both .*Give one of them"),
        ({"fqn_to_index_mapping": {"a": "1"}}, r"from 1 on"),
        ({"fqn_to_index_mapping": {"a": 0, "b": 1}}, r"from 1 on"),
        ({"dtype": torch.float8_e4m3fn}, r"dtype is torch.float8_e4m3fn.*scales"),
        ({"rename": ["a"]}, r"rename is \['a'\]"),
        ({"include": 3}, r"include is 3"),
        ({"exclude": [1]}, r"exclude is \[1\]"),
        ({"tied": "both"}, r"tied is 'both'"),
        ({"memory_limit_bytes": 10}, r"memory_limit_bytes is 10"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    """The error names the option and says what to give, before any checkpoint is opened."""
    with pytest.raises(InvalidInputError, match=message):
        ConsolidateOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "model.x"}, r"include names 'model.x', which matches no value"),
        ({"include": "model"}, r'For all below it give "model\.\*"'),
        ({"exclude": "zzz*"}, r"exclude names 'zzz\*', which matches no value"),
        ({"exclude": "*"}, r"No tensor is left"),
        ({"rename": {"model.x": "y"}}, r"rename names 'model.x'"),
        ({"rename": {"model.head": "layers.0.w"}}, r"model.head and .*both be called 'layers.0.w'"),
        ({"rename": lambda _: "__metadata__"}, r"called '__metadata__'"),
        ({"rename": lambda _: None}, r"called None"),
        ({"rename": lambda fqn: f"{fqn}\ud800"}, r"text and not"),
        ({"fqn_to_index_mapping": {"head": 1}}, r"does not say which file layers.0.w"),
        ({"tied": {"head": "nope"}}, r"maps 'model.head' to 'model.nope', which is no tensor"),
        ({"tied": {"head": "odd"}}, r"float32, \[4, 2\]\) to model.odd \(int8, \[3\]\)"),
        ({"tied": {"head": "layers.0.w", "layers.0.w": "head"}}, r"is tied itself"),
    ],
)
def test_options_that_do_not_fit_the_checkpoint_are_refused(
    options: dict[str, Any], message: str
) -> None:
    """The error names what does not fit and the next step."""
    model = {"layers.0.w": W, "layers.1.w": W, "head": W}
    if "tied" in options:
        model["odd"] = tensor("", (3,), "int8")
    source = nested_source({**STATE, "model": model})
    with pytest.raises(InvalidInputError, match=message) as caught:
        lay_out_model(source, ConsolidateOptions(**options))
    assert caught.value.next_step


def ties_of(source: MemorySource, told: dict[str, str]) -> dict[str, str]:
    """Return the aliases that are left out when a caller tells of ties, and their targets."""
    _, skipped = lay_out_model(source, ConsolidateOptions(tied=told))
    return {one.fqn: one.target for one in skipped if one.target}


def test_a_tie_that_checksums_deny_is_refused() -> None:
    """A caller cannot drop a tensor that differs from its target."""
    source = tied_state()
    refused = ties_of(source, {"other": "embed"})
    with pytest.raises(InvalidInputError, match="other is said to be tied to embed; their check"):
        check_ties(source, refused)
    told = {"whole": "embed", "head": "embed", "absent": "embed"}
    good = ties_of(source, told)
    assert set(good) == {"whole", "head"}
    check_ties(source, good)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (12, 12),
        ("5GB", 5 * 10**9),
        ("5 gb", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("1.5KiB", 1536),
        ("0.1MB", 100_000),
    ],
)
def test_sizes_are_read_decimal_and_binary(text: int | str, number: int) -> None:
    """A text of "5GB" is five thousand million bytes, and of "5GiB" five times 2 to the 30."""
    assert parse_bytes(text, option="x") == number
