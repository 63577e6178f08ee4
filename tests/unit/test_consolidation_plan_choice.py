"""Which tensors go out under which names: nesting, selections, renaming, ties, bad options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from consolidation_sources import (
    MemorySource,
    array_source,
    bare_source,
    nested_source,
    tensor,
)

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.export.layout import Elements, Skipped
from ckpt_storage.export.options import ConsolidateOptions, parse_bytes
from ckpt_storage.export.select import check_ties, choose_model
from ckpt_storage.export.weights import lay_out_model
from ckpt_storage.format.boxes import Box

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
    source, ties = tied_state(), {"head": "embed"}
    dropped = choose_model(source, ConsolidateOptions(), ties)
    assert "head" not in out(dropped)
    (skip,) = dropped[1]
    assert (skip.fqn, skip.reason, skip.target) == ("head", "tied", "embed")
    for options in (ConsolidateOptions(tied="keep"), ConsolidateOptions(exclude="embed")):
        assert out(choose_model(source, options, ties))["head"] == "head"


def test_a_caller_may_confirm_ties_by_either_name() -> None:
    """Names of weight files and FQNs are understood; recorded ties are dropped too."""
    source = nested_source({"model": {"embed": W, "head": W, "tail": W}})
    for pair in ({"head": "embed"}, {"model.head": "model.embed"}, {"head": "model.embed"}):
        choice = choose_model(source, ConsolidateOptions(tied=pair), {"model.tail": "model.embed"})
        assert out(choice) == {"embed": "model.embed"}
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


def test_a_tie_that_checksums_deny_is_refused() -> None:
    """A caller cannot drop a tensor that differs from its target."""
    source = tied_state()
    refused = lay_out_model(source, ConsolidateOptions(tied={"other": "embed"})).ties
    with pytest.raises(InvalidInputError, match="other is said to be tied to embed; their check"):
        check_ties(source, refused)
    told = {"whole": "embed", "head": "embed", "absent": "embed"}
    good = lay_out_model(source, ConsolidateOptions(tied=told)).ties
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
