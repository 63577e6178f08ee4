"""What `consolidate` makes of options and states; how its plan divides files among ranks."""

from __future__ import annotations

import itertools
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from consolidate_cases import INDEX, check, tensors_of
from copy_cases import make
from dcp_cases import Tiled, raw_bytes, seeded, tiled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_assemble import tilings
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.utils._pytree import tree_map

import ckpt_storage
from ckpt_storage import ConsolidateOptions, ConsolidationReport, InvalidInputError, consolidate
from ckpt_storage.export.layout import lay_out_model
from ckpt_storage.export.options import parse_bytes
from ckpt_storage.export.plan import Plan, divide, plan
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.options import DEFAULT_PART_BYTES, MIB
from ckpt_storage.store.backend import Capabilities

QUICK = settings(max_examples=100, deadline=None)
SHARED = Capabilities(kind="s3", tokens_travel=True, parallel_parts=True)
"""Of a storage that several processes may write one file of."""


def export(state: dict[str, Any], **options: Any) -> tuple[dict[str, bytes], ConsolidationReport]:
    """Save and consolidate in memory; return the files and the report."""
    root = f"memory://{uuid.uuid4().hex}"
    ckpt_storage.save(state, f"{root}/run")
    found = exported(f"{root}/run", f"{root}/hf", **options)
    fsspec.filesystem("memory").rm(root, recursive=True)
    return found


def exported(url: str, to: str, **options: Any) -> tuple[dict[str, bytes], ConsolidationReport]:
    report = consolidate(url, to, **options)
    fs = fsspec.filesystem("memory")
    return {Path(path).name: fs.cat_file(path) for path in fs.find(to)}, report


def files_of(files: dict[str, bytes]) -> list[list[str]]:
    """Return the names of the tensors of each weight file that the index names, in their order."""
    found = []
    for file in sorted({*json.loads(files[INDEX])["weight_map"].values()}):
        header = json.loads(files[file][8 : 8 + int.from_bytes(files[file][:8], "little")])
        found.append([name for name in header if name != "__metadata__"])
    return found


DTYPES = ["float64", "float32", "bfloat16", "int64", "int16", "uint8", "bool"]


@st.composite
def states(draw: st.DrawFn) -> dict[str, Tiled]:
    """Draw up to 6 tensors, sharded anyhow; the large ones are of several parts."""
    state: dict[str, Tiled] = {}
    for number in range(draw(st.integers(1, 6))):
        shape, chunks = draw(tilings())
        by = draw(st.sampled_from([1, (1, 9000, 90, 8)[len(shape)]]))
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        boxes = [Box(*(tuple(by * n for n in ends) for ends in chunk)) for chunk in chunks]
        values = seeded(number, *(by * size for size in shape), dtype=dtype)
        state[f"t{number}"] = tiled(values, draw(st.permutations(boxes)))
    return state


@settings(max_examples=50, deadline=None)
@given(
    state=states(),
    limit=st.sampled_from([1000, "5kB", "5GB"]),
    memory=st.sampled_from([None, 1_500_000]),
)
def test_any_sharding_arrives_as_safetensors_reads_it(
    state: dict[str, Tiled], limit: int | str, memory: int | None
) -> None:
    """Every byte is written, and the safetensors library finds every tensor unchanged."""
    files, _ = export(dict(state), max_file_bytes=limit, memory_limit_bytes=memory)
    check(files, {name: tensor.as_subclass(torch.Tensor) for name, tensor in state.items()})


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


@settings(max_examples=30, deadline=None)
@example(sizes=[400, 600, 1])
@given(sizes=st.lists(st.integers(0, 1500), min_size=1, max_size=30))
def test_files_are_cut_as_hugging_face_cuts(sizes: list[int]) -> None:
    """Tensors fill a file up to the limit; a larger one than that has a file of its own."""
    state = {f"t{at}": torch.zeros(size, dtype=torch.uint8) for at, size in enumerate(sizes)}
    files, report = export(state, max_file_bytes=1000)
    expected = hugging_face_split(sizes, 1000)
    count = len(expected)
    assert [[int(name[1:]) for name in names] for names in files_of(files)] == expected
    if count > 1:
        assert [file.name for file in report.files] == [
            f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
        ]


def test_an_index_mapping_decides_the_files() -> None:
    """Names and FQNs are its keys; a file of dropped aliases or absent tensors only is no file."""
    head = torch.ones(2)
    state = {"model": {"a": head, "b": torch.zeros(2), "head": head}, "ema": {"embed": head + 1}}
    mapping = {"a": 5, "model.b": 2, "head": 3, "absent": 4, "ema.embed": 1}
    files, report = export(state, fqn_to_index_mapping=mapping)
    document = json.loads(files[INDEX])
    assert document["weight_map"] == {
        "b": "model-00001-of-00002.safetensors",
        "a": "model-00002-of-00002.safetensors",
    }
    assert document["metadata"]["total_size"] == 16
    assert document["metadata"]["save_id"] == report.save_id


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
    lengths: dict[int, int] = {}
    for region in regions:
        assert region.start == at[region.file] < region.stop
        assert region.start % math.lcm(multiple, 64) == 0
        least = max(min_part_bytes, -(-region.file_bytes // (max_part_count or region.file_bytes)))
        assert region.stop == region.file_bytes or region.size_bytes >= least
        # Numbered by their offsets, all parts of a file but the last have one length.
        *whole, (start, stop) = region.parts
        assert {(stop - start, start % region.part_bytes) for start, stop in whole} <= {
            (region.part_bytes, 0)
        }
        is_last = stop == region.file_bytes
        assert start % region.part_bytes == 0
        assert stop - start == region.part_bytes or (is_last and stop > start)
        assert region.part_bytes == lengths.setdefault(region.file, region.part_bytes)
        assert region.part_bytes >= least
        assert (region.file_bytes - 1) // region.part_bytes < (max_part_count or region.file_bytes)
        at[region.file] = region.stop
        loads[region.owner] += region.size_bytes
    assert at == sizes
    assert [r.owner for r in regions] == sorted(r.owner for r in regions)
    mean = sum(sizes) / world_size
    least_parts = [max(min_part_bytes, -(-size // (max_part_count or size))) for size in sizes]
    unit = max(math.lcm(multiple, 64), *least_parts)
    if mean >= 40 * unit:
        assert max(loads) <= 1.05 * mean


def test_whole_files_go_to_the_rank_that_has_least() -> None:
    """Without shared files every region is a file, and the largest file sets the pace."""
    sizes = [100, 900, 300, 500, 200, 400]
    alone = replace(SHARED, tokens_travel=False)
    regions = divide(dict(enumerate(sizes)), 3, alone, 8 * MIB)
    assert [(r.file, r.start, r.stop) for r in regions] == [(i, 0, s) for i, s in enumerate(sizes)]
    loads = [sum(r.size_bytes for r in regions if r.owner == rank) for rank in range(3)]
    assert sorted(loads) == [700, 800, 900]


def planned(tensors: dict[str, TensorRecord], world_size: int, options: ConsolidateOptions) -> Plan:
    """Return the plan of an export of these tensors by many ranks."""
    source: Any = SimpleNamespace(tensors=tensors, blobs=frozenset(), planner_data=None, ties={})
    files, _ = lay_out_model(source, options)
    how: dict[str, Any] = {"able": SHARED, "part_bytes": DEFAULT_PART_BYTES, "source": []}
    return plan(files, world_size=world_size, **how)


def test_the_order_of_sets_and_dicts_does_not_matter() -> None:
    """A source and options that list the same in another order give the same plan."""
    plans = []
    for names in (["a", "b", "c", "d"], ["d", "b", "a", "c"]):
        options = ConsolidateOptions(
            fqn_to_index_mapping={name: 1 + ord(name) % 2 for name in names},
            rename={name: f"x.{name}" for name in names},
            include=names,
        )
        whole = TensorRecord(dtype="float32", shape=(9,), boxes=[Box((0,), (9,))])
        plans.append(planned(dict.fromkeys(names, whole), 3, options))
    assert plans[0] == plans[1]


def test_a_large_plan_is_lazy_and_even() -> None:
    """1,000 tensors in 256 column shards for 256 ranks: planning looks at no chunk."""

    class Unseen(list[Box]):
        def __iter__(self) -> Iterator[Box]:
            raise AssertionError

    boxes = Unseen(Box((0, at), (4096, 4)) for at in range(0, 1024, 4))
    one = TensorRecord(dtype="bfloat16", shape=(4096, 1024), boxes=boxes)
    found = planned({f"layers.{at}.w": one for at in range(1000)}, 256, ConsolidateOptions())
    loads = [sum(r.size_bytes for r in found.regions_of(rank)) for rank in range(256)]
    assert max(loads) <= 1.2 * sum(loads) / 256


W = torch.zeros(4, 2)
HF = {"model.embed.weight": W, "model.layers.0.w": W, "lm_head.weight": W}
"""A Hugging Face state dict: its names begin with "model." themselves."""
TIED_HF = {"model.embed.weight": W, "model.layers.0.w": W}
"""One whose every name does, because the head is tied."""
OSD = {"state": {"model.embed.weight": {"exp_avg": W, "step": torch.zeros(())}}, "lr": 0.1}


def chosen(state: dict[str, Any], **options: Any) -> tuple[dict[str, str], ConsolidationReport]:
    """Export a state whose tensors differ; return name -> FQN of what goes out, and the report."""
    numbers = itertools.count(1)
    filled = tree_map(
        lambda leaf: (
            torch.full_like(leaf, next(numbers)) if isinstance(leaf, torch.Tensor) else leaf
        ),
        state,
    )
    files, report = export(filled, **options)
    flat = flatten_state_dict(filled)[0].items()
    fqns = {raw_bytes(value): fqn for fqn, value in flat if isinstance(value, torch.Tensor)}
    found = tensors_of(files)
    names = itertools.chain(*files_of(files))
    return {name: fqns[found[name][2]] for name in names}, report


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
def test_the_model_goes_out_under_its_own_names(state: dict[str, Any], stripped: str) -> None:
    """However a script nests it, what goes out is the model's state dict, and nothing else."""
    out, report = chosen(state)
    names = TIED_HF if "lm_head.weight" not in str(state) else HF
    assert out == {name: f"{stripped}{name}" for name in names}
    everything = flatten_state_dict(state)[0].keys()
    assert {skip.fqn for skip in report.skipped} == everything - set(out.values())


def test_what_is_left_out_says_why() -> None:
    """Blobs, optimizer state, training state and other models are listed with their reasons."""
    state = {"model": {"a": W}, "optim": {"s": W, "lr": 0.1}, "rng": {"s": W}, "ema": {"a": W}}
    _, report = chosen(state)
    assert {skip.fqn: (skip.reason, skip.size_bytes) for skip in report.skipped} == {
        "ema.a": ("outside the model", 32),
        "optim.lr": ("blob", None),
        "optim.s": ("optimizer", 32),
        "rng.s": ("training state", 32),
    }


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
def test_only_containers_are_judged_by_their_keys(state: dict[str, Any], names: list[str]) -> None:
    """Keys of tensors mean nothing, and below the model few keys do."""
    assert list(chosen(state)[0]) == names


def test_flat_names_are_judged_as_nested_ones_are() -> None:
    """Dotted names of optimizer and random state go out neither as paths nor as strings."""
    state = {"decoder.w": W, "optimizer.state.exp_avg.decoder.w": W, "rng_state": W}
    out, report = chosen(state)
    assert out == {"decoder.w": "decoder.w"}
    assert {skip.fqn: skip.reason for skip in report.skipped} == {
        "optimizer.state.exp_avg.decoder.w": "optimizer",
        "rng_state": "training state",
    }


@pytest.mark.parametrize(
    ("state", "dropped"),
    [
        ({"model": {"module.a": W, "module.l.b": W}}, ("model.module.",)),
        ({"module.a": W, "module.l.b": W}, ("module.",)),
        ({"_orig_mod.a": W, "_orig_mod.l.b": W}, ("_orig_mod.",)),
        ({"module._orig_mod.a": W, "module._orig_mod.l.b": W}, ("_orig_mod.", "module.")),
        ({"a": W, "l._orig_mod.b": W}, ("_orig_mod.",)),
        ({"a": W, "l.b": W}, ()),
    ],
)
def test_marks_of_wrappers_are_taken_off_and_reported(
    state: dict[str, Any], dropped: tuple[str, ...]
) -> None:
    """Names are those of the bare module, however it was wrapped when it was saved."""
    out, report = chosen(state)
    assert list(out) == ["a", "l.b"]
    assert report.dropped_prefixes == dropped


def test_a_module_named_module_keeps_its_name() -> None:
    """A prefix that not all names have is no mark of a wrapper."""
    out, report = chosen({"module.a": W, "head": W})
    assert list(out) == ["head", "module.a"]
    assert report.dropped_prefixes == ()


def test_dtypes_are_chosen_by_pattern() -> None:
    """The first pattern that matches a name or an FQN counts; what none matches stays as it is."""
    state = {"model": {"l.router.w": W.double(), "l.w": W.double(), "head": W.double()}}
    files, _ = export(state, dtype={"*.router.*": "float32", "model.l.*": torch.bfloat16})
    kinds = {name: dtype for name, (dtype, _, _) in tensors_of(files).items()}
    assert kinds == {"l.router.w": "F32", "l.w": "BF16", "head": "F64"}


def test_without_paths_names_stay_whole(tmp_path: Path) -> None:
    """Where the nesting is not known, nothing is taken off; optimizer state is still left out."""
    names = ["model.a", "model.b", "optimizer.state.a"]
    make("safetensors", {name: torch.zeros(2) for name in names}, tmp_path / "flat")
    files, report = exported(str(tmp_path / "flat"), f"memory://{uuid.uuid4().hex}/hf")
    assert files_of(files) == [["model.a", "model.b"]]
    assert {skip.fqn: skip.reason for skip in report.skipped} == {names[2]: "optimizer"}


STATE: dict[str, Any] = {
    "model": {"layers.0.w": W, "layers.1.w": W, "head": W},
    "ema": {"layers.0.w": W, "head": W},
    "optimizer": {"head": W},
}
# Brackets in an FQN stand for themselves if there is such a tensor.
ODD = {"a[0]": W, "a0": W}


@pytest.mark.parametrize(
    ("state", "options", "names"),
    [
        (STATE, {"include": "model.layers.*"}, {"layers.0.w", "layers.1.w"}),
        (STATE, {"include": {"ema.head", "model.head"}}, {"ema.head", "model.head"}),
        (STATE, {"include": "optimizer.*"}, {"head"}),
        (STATE, {"exclude": "*.head"}, {"layers.0.w", "layers.1.w"}),
        (STATE, {"exclude": lambda fqn: "layers" in fqn}, {"head"}),
        (
            STATE,
            {"include": "*", "exclude": ["ema.*", "optim*"]},
            {"layers.0.w", "layers.1.w", "head"},
        ),
        (STATE, {"rename": {"model.head": "lm_head"}}, {"layers.0.w", "layers.1.w", "lm_head"}),
        (STATE, {"rename": str.upper}, {"MODEL.LAYERS.0.W", "MODEL.LAYERS.1.W", "MODEL.HEAD"}),
        (ODD, {"include": "a[0]"}, {"a[0]"}),
        (ODD, {"include": "a[0]*"}, {"a0"}),
    ],
)
def test_selections_and_names_take_fqns_patterns_and_functions(
    state: dict[str, Any], options: dict[str, Any], names: set[str]
) -> None:
    """`include` replaces the default choice, `exclude` narrows it; one container is taken off.

    A mapping leaves other names at their default; a function gets whole FQNs.
    """
    assert set(chosen(state, **options)[0]) == names


def test_ties_are_dropped_or_kept() -> None:
    """A recorded alias is left out, unless it is to be kept or its target does not go out.

    A caller may name others by FQNs or by names of weight files, if their checksums agree.
    """
    data = torch.arange(64.0).reshape(8, 8)
    halves = [Box((0, 0), (4, 8)), Box((4, 0), (4, 8))]
    state = {"embed": data, "head": data, "other": data + 1, "like": tiled(data.clone(), halves)}
    _, report = export({"model": state})
    assert report.ties == {"model.head": "model.embed"}
    for options in ({"tied": "keep"}, {"exclude": "model.embed"}):
        _, report = export({"model": state}, **options)
        assert not report.ties
    for pair in (("like", "embed"), ("model.like", "model.embed"), ("like", "model.embed")):
        _, report = export({"model": state}, tied={**dict([pair]), "absent": "embed"})
        assert report.ties == {"model.like": "model.embed", "model.head": "model.embed"}
    with pytest.raises(InvalidInputError, match=r"other is said to be tied to .*; their check"):
        export({"model": state}, tied={"other": "embed"})


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
        consolidate("memory://no/checkpoint", **options)


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
        ({"dtype": {"*.nothing": "float32"}}, r"dtype names .*matches no tensor"),
        ({"include": "bad.*"}, r"bad.0 has dtype complex128.*exclude=\['bad.0'\]"),
    ],
)
def test_options_that_do_not_fit_the_checkpoint_are_refused(
    options: dict[str, Any], message: str
) -> None:
    """The error names what does not fit and the next step."""
    model = {**STATE["model"], "odd": torch.zeros(3, dtype=torch.int8)}
    bad = {str(at): torch.zeros(2, dtype=torch.complex128) for at in range(9)}
    state = {**STATE, "bad": bad, **({"model": model} if "tied" in options else {})}
    with pytest.raises(InvalidInputError, match=message) as caught:
        chosen(state, **options)
    assert caught.value.next_step


def test_sizes_are_read_decimal_and_binary() -> None:
    """A text of "5GB" is five thousand million bytes, and of "5GiB" five times 2 to the 30."""
    given = (12, "5GB", "5 gb", "5GiB", "1.5KiB", "0.1MB")
    expected = [12, 5 * 10**9, 5 * 10**9, 5 * 2**30, 1536, 100_000]
    assert [parse_bytes(one, option="x") for one in given] == expected
