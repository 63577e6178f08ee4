"""Values that are no tensors of a model: nested containers, int keys, views and empty ones."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import dcp_cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import same, seeded
from saver_cases import quick_saver
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt_storage
from ckpt_storage import AsyncSaver, InvalidInputError


def _by_dcp(state: dict[str, Any], path: Path) -> None:
    dcp_cases.save(state, path)


def _in_thread(state: dict[str, Any], path: Path) -> None:
    with AsyncSaver(mode="thread") as saver:
        saver.save(state, path, sync_files=False).result()


def _by_us(state: dict[str, Any], path: Path) -> None:
    ckpt_storage.save(state, path, sync_files=False)


each_save = pytest.mark.parametrize("save", [_by_us, _by_dcp, _in_thread])
each_load = pytest.mark.parametrize(
    "load", [ckpt_storage.load, dcp_cases.load], ids=["ours", "dcp"]
)


def test_stock_dcp_puts_values_of_int_keys_beside_them(tmp_path: Path) -> None:
    """Stock `dcp.load` leaves the int key as it was, and the next save fails (pytorch 153842)."""
    dcp.save({"m": {5: 1}}, checkpoint_id=tmp_path, no_dist=True)
    target: dict[str, Any] = {"m": {5: 0}}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target == {"m": {5: 0, "5": 1}}
    with pytest.raises((ValueError, CheckpointException), match="duplicated flatten key"):
        dcp.save(target, checkpoint_id=tmp_path, no_dist=True)


@each_load
def test_int_keys_are_restored_under_themselves(tmp_path: Path, load: Any) -> None:
    """Values go back under the target's own keys, nested ones and lists included; saved again."""
    state: dict[str, Any] = {
        "milestones": {5: 1, 8: 2},
        "nested": {0: {"lr": 0.1, 1: [{2: "x"}, 3]}, "7": {7: True}},
        "tensors": {1: torch.ones(2)},
        "new": {},
    }
    target: dict[str, Any] = {
        "milestones": {5: 0, 8: 0},
        "nested": {0: {"lr": 0.0, 1: [{2: ""}, 0]}, "7": {7: False}},
        "tensors": {1: torch.zeros(2)},
        "new": {},
    }
    ckpt_storage.save(state, tmp_path / "1", sync_files=False)
    load(target, tmp_path / "1")
    assert same(target, state)
    ckpt_storage.save(target, tmp_path / "2", sync_files=False)
    load(target, tmp_path / "2")
    assert same(target, state)


def test_int_keys_at_the_top_are_restored(tmp_path: Path) -> None:
    """Keys of several types may stand beside each other at the top of a state."""
    state: dict[Any, Any] = {3: "top", "a": 1, 4: torch.ones(2)}
    ckpt_storage.save(state, tmp_path, sync_files=False)
    target: dict[Any, Any] = {3: "", "a": 0, 4: torch.zeros(2)}
    ckpt_storage.load(target, tmp_path)
    assert same(target, state)


INT_KEYS: dict[Any, Any] = {
    "milestones": {5: 1, -8: 2, "name": "x"},
    "nested": {0: {"lr": 0.1, 1: [{2: torch.ones(2)}, 3]}, "inner": {7: True}},
    9: torch.ones(2),
}


def test_stock_exports_turn_int_keys_into_texts(tmp_path: Path) -> None:
    """`dcp_to_torch_save` of stock torch writes "5" for 5."""
    dcp.save({"m": {5: 1}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == {"m": {"5": 1}}


@pytest.mark.parametrize("way", ["save", "thread", "process"])
def test_exports_to_torch_save_keep_int_keys(tmp_path: Path, way: Any) -> None:
    """Ints are keys of the exported state again, also below dicts and lists, and after a detour."""
    if way == "save":
        ckpt_storage.save(INT_KEYS, tmp_path / "1", sync_files=False)
    else:
        with quick_saver(way) as saver:
            saver.save(INT_KEYS, tmp_path / "1", sync_files=False).result()
    ckpt_storage.convert(tmp_path / "1", tmp_path / "1.pt", to="torch_save")
    assert same(torch.load(tmp_path / "1.pt"), INT_KEYS)
    ckpt_storage.convert(tmp_path / "1.pt", tmp_path / "2", to="ckpt_storage")
    ckpt_storage.copy(tmp_path / "2", tmp_path / "3", include="nested*")
    ckpt_storage.convert(tmp_path / "3", tmp_path / "3.pt", to="torch_save")
    assert same(torch.load(tmp_path / "3.pt"), {"nested": INT_KEYS["nested"]})


def test_texts_that_spell_integers_stay_texts(tmp_path: Path) -> None:
    """Keys of texts alone are exported as they are; beside ints the ints become texts, too."""
    state: dict[str, Any] = {"texts": {"5": 1, "07": 2}, "mixed": {0: 1, "2": 3}}
    ckpt_storage.save(state, tmp_path / "1", sync_files=False)
    ckpt_storage.convert(tmp_path / "1", tmp_path / "1.pt", to="torch_save")
    found = torch.load(tmp_path / "1.pt")
    assert found == {"texts": {"5": 1, "07": 2}, "mixed": {"0": 1, "2": 3}}


@each_load
def test_a_schedulers_milestones_are_restored(tmp_path: Path, load: Any) -> None:
    """`MultiStepLR` keeps a `Counter` of ints, which a load restores."""
    rates = []
    for is_resumed in (False, True):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 3])
        if is_resumed:
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 7, 9])
            target = {"s": scheduler.state_dict()}
            target["s"]["milestones"].clear()
            target["s"]["milestones"].update({1: 0, 2: 0, 3: 0})
            load(target, tmp_path)
            scheduler.load_state_dict(target["s"])
        else:
            optimizer.step()
            scheduler.step()
            ckpt_storage.save({"s": scheduler.state_dict()}, tmp_path, sync_files=False)
        rates.append(dict(scheduler.milestones))
    assert rates == [{1: 1, 2: 1, 3: 1}] * 2


@each_save
def test_views_in_containers_store_their_own_elements(tmp_path: Path, save: Any) -> None:
    """A row of a large tensor in a tuple takes a row's bytes; it comes back equal."""

    class _Pair(NamedTuple):
        first: torch.Tensor
        second: int

    large = seeded(1, 1 << 18, 4)
    small = seeded(2, 7)
    state: dict[str, Any] = {
        "rows": (large[3], [large[5], {"x": large[:2, 1]}], small),
        "tied": (small, small),
        "transposed": (seeded(3, 4, 5).t(),),
        "expanded": (torch.ones(1).expand(9),),
        "ordered": OrderedDict(a=(large[1],)),
    }
    before = large.clone()
    save(state, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.distcp")) < 64 << 10
    ckpt_storage.load(target := dcp_cases.zeros_like(state), tmp_path)
    target["ordered"] = dict(target["ordered"] or {})
    assert same(target["rows"], state["rows"])
    assert same(target["tied"], state["tied"])
    assert target["tied"][0] is target["tied"][1]
    assert same(target["transposed"], state["transposed"])
    assert same(target["expanded"], state["expanded"])
    assert torch.equal(large, before)
    assert _Pair is not None


def test_stock_dcp_stores_whole_storages_of_views(tmp_path: Path) -> None:
    """Stock `dcp.save` pickles the storage that a view is of."""
    dcp.save({"rows": (seeded(1, 1 << 18, 4)[3],)}, checkpoint_id=tmp_path, no_dist=True)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.distcp")) > 1 << 22


SAME_SPELLING: dict[str, tuple[dict[Any, Any], str]] = {
    "leaves": ({5: 1, "5": 2}, "m.5"),
    "containers": ({5: {"a": 1}, "5": {"b": 2}}, "m.5"),
    "a leaf and a container": ({5: 1, "5": {"b": 2}}, "m.5"),
    "tensors": ({5: [torch.ones(1)], "5": {"b": torch.ones(1)}}, "m.5"),
    "in a list": ({"l": [{True: {"a": 1}, "True": {"b": 2}}]}, "m.l.0.True"),
}


def _by_manager(state: dict[str, Any], path: Path) -> None:
    with ckpt_storage.CheckpointManager(path) as manager:
        manager.save(1, state)


@pytest.mark.parametrize("kind", SAME_SPELLING)
@pytest.mark.parametrize("save", [_by_us, _in_thread, _by_manager])
def test_two_keys_of_one_spelling_are_refused_by_name(tmp_path: Path, kind: str, save: Any) -> None:
    """An int key and a text of the same spelling cannot both be stored; nothing is committed."""
    value, name = SAME_SPELLING[kind]
    with pytest.raises(InvalidInputError, match=rf"^{re.escape(name)} cannot be saved: two values"):
        save({"m": value}, tmp_path)
    assert ckpt_storage.list_checkpoints(tmp_path) == []


def test_torch_merges_dicts_of_one_spelling_before_a_writer_sees_them(tmp_path: Path) -> None:
    """Under `dcp.save` the planner's names and paths are those of one dict: no error."""
    _by_dcp({"m": {5: {"a": 1}, "5": {"b": 2}}}, tmp_path)
    with ckpt_storage.open_checkpoint(tmp_path) as opened:
        assert sorted(opened) == ["m.5.a", "m.5.b"]


def test_an_empty_dict_beside_another_of_its_spelling_is_saved(tmp_path: Path) -> None:
    """A dict that holds no value has no name, so its key may be spelt like another."""
    state: dict[str, Any] = {"m": {5: {}, "5": {"b": 2}}}
    ckpt_storage.save(state, tmp_path, sync_files=False)
    target: dict[str, Any] = {"m": {5: {}, "5": {"b": 0}}}
    ckpt_storage.load(target, tmp_path)
    assert target == state


def test_two_targets_of_one_spelling_are_refused_by_name(tmp_path: Path) -> None:
    """A target with both keys is refused with both named."""
    ckpt_storage.save({"m": {5: 1}}, tmp_path, sync_files=False)
    with pytest.raises(InvalidInputError, match=r"'m\.5'.*\['m', 5\] and \['m', '5'\]"):
        ckpt_storage.load({"m": {5: 0, "5": 0}}, tmp_path)


@each_save
@each_load
def test_bytes_beside_a_tensor_in_a_tuple_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save: Any, load: Any
) -> None:
    """Torch's own restricted unpickler knows no empty bytes; they are saved without a warning."""
    conjugate, other = (torch.ones(1, dtype=torch.complex64).conj() for _ in range(2))
    pair = (b"", torch.ones(2), conjugate, other.imag)
    state: dict[str, Any] = {"pair": pair, "rng": (np.arange(3.0), torch.ones(1))}
    with caplog.at_level(logging.WARNING, "ckpt_storage"):
        save(state, tmp_path)
    assert not [record for record in caplog.records if record.name == "ckpt_storage"]
    target: dict[str, Any] = {"pair": None, "rng": None}
    load(target, tmp_path)
    assert same(target["pair"], state["pair"])
    assert np.array_equal(target["rng"][0], state["rng"][0])
    ckpt_storage.convert(tmp_path, tmp_path / "out.pt", to="torch_save")
    exported = torch.load(tmp_path / "out.pt", weights_only=False)
    assert same(exported["pair"], state["pair"])
