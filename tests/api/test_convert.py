"""`convert` between all formats, read back by the tool whose format it is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import pathlib
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from copy_cases import files_below, flip, head_of, load_stock, make, save, saved_stock
from dcp_cases import Call, raw_bytes, same, seeded
from s3_server import S3Server
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.utils import serialization

import ckpt_storage
from ckpt_storage import errors, verify
from ckpt_storage.export.conversion import FORMATS, TargetFormat
from ckpt_storage.export.convert import convert
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import MIB, Timeouts
from ckpt_storage.store import open_store
from ckpt_storage.store.monitor import StallDetector

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

Flat = dict[str, torch.Tensor]

torch_config: Any = serialization.config
"""Its methods are added when it is imported."""

WEIGHTS: tuple[TargetFormat, ...] = ("safetensors", "dcp_safetensors")

INDEX = "model.safetensors.index.json"

OBJECTS = {"ckpt_storage", "dcp", "torch_save"}
"""Formats that hold what is no tensor."""


def flat_state() -> Flat:
    return {
        "model.w": seeded(1, 300, 70),
        "model.b": seeded(2, 7, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty((0, 4)),
        "count": torch.tensor([1, -2, 3]),
        "mask": seeded(3, 3, 5, 2, dtype=torch.bool),
        "größe": torch.arange(3),
    }


def nested_state() -> dict[str, Any]:
    return {
        "model": {"w": seeded(1, 30, 7), "b": seeded(2, 7, dtype=torch.bfloat16)},
        "optim": {"state": {"w": {"step": torch.tensor(3.0), "exp": seeded(4, 30, 7)}}},
        "epochs": [1, 2, 5],
        "name": "a run",
        "lr": 0.125,
        "nothing": None,
    }


def path_of(folder: Path, kind: str, name: str) -> Path:
    return folder / (f"{name}.pt" if kind == "torch_save" else name)


def read(kind: str, path: Path, like: dict[str, Any]) -> Any:
    if kind in {"ckpt_storage", "dcp"}:
        return load_stock(like, path)
    if kind == "dcp_safetensors":
        found = {name: torch.zeros_like(value) for name, value in like.items()}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
        return found
    if kind == "safetensors":
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        merged: dict[str, Any] = {}
        for file in sorted(set(weight_map.values())):
            held = load_file(path / file)
            assert {weight_map[name] for name in held} == {file}
            merged |= held
        return merged
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("to", FORMATS)
def test_values_of_every_format_arrive_in_every_other(
    tmp_path: Path, kind: TargetFormat, to: TargetFormat
) -> None:
    """The target's own tool reads what the source's tool wrote; nesting and objects survive."""
    state: dict[str, Any] = flat_state()
    has_objects = {kind, to} <= OBJECTS
    if has_objects:
        state["nested"] = nested_state()
    source, target = path_of(tmp_path, kind, "src"), path_of(tmp_path, to, "dst")
    make(kind, state, source)
    if kind == to:
        with pytest.raises(errors.InvalidInputError, match="already"):
            convert(source, target, to=to)
        return
    report = convert(source, target, to=to)
    assert (report.source_format, report.format) == (kind, to)
    assert report.tensor_count == len(flat_state()) + 4 * has_objects
    assert same(read(to, target, state), state)
    if to == "ckpt_storage":
        assert verify(target).ok
        assert report.save_id == head_of(files_below(target))
    if has_objects and to != "torch_save":
        # A file of torch's needs no template: lists stay lists, numbers numbers.
        convert(target, tmp_path / "back.pt", to="torch_save")
        assert same(torch.load(tmp_path / "back.pt", weights_only=True), state)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_goes_through_every_format_that_has_it(tmp_path: Path) -> None:
    """Bit by bit, by torch's own file, our checkpoint, torch's metadata and safetensors."""
    state = {}
    for name in DTYPES:
        kind: torch.dtype = getattr(torch, name)
        raw = torch.arange(6 * 4 * kind.itemsize, dtype=torch.uint8)
        state[name] = (raw % 2 if kind is torch.bool else raw).view(kind).reshape(6, -1)
    raws = {name: raw_bytes(one) for name, one in state.items()}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ours", to="ckpt_storage")
    convert(tmp_path / "ours", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "b.pt", to="torch_save")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    kinds = [{n: (t.dtype, t.shape, raw_bytes(t)) for n, t in s.items()} for s in (found, state)]
    assert kinds[0] == kinds[1]
    lacking = {name for name, kind in DTYPES.items() if kind.safetensors is None}
    for to in WEIGHTS:
        with pytest.raises(errors.InvalidInputError):
            convert(tmp_path / "ours", tmp_path / to, to=to)
        report = convert(tmp_path / "ours", tmp_path / to, to=to, unsupported="drop")
        assert set(report.dropped) == lacking
        (file,) = (tmp_path / to).glob("*.safetensors")
        with safe_open(file, framework="pt") as opened:
            for name in DTYPES.keys() - lacking:
                assert raw_bytes(opened.get_tensor(name)) == raws[name], name
    convert(tmp_path / "safetensors", tmp_path / "c.pt", to="torch_save")
    again = torch.load(tmp_path / "c.pt", weights_only=True)
    kept = {name: raw for name, raw in raws.items() if name not in lacking}
    assert {name: raw_bytes(one) for name, one in again.items()} == kept


def test_chunks_stay_where_the_format_has_them_and_join_where_not(tmp_path: Path) -> None:
    """Whatever the sharding of the source was."""
    tensor = seeded(5, 100, 30)
    cuts = [
        [slice(a, b), slice(c, d)] for a, b in ((0, 1), (1, 100)) for c, d in ((0, 29), (29, 30))
    ]
    (tmp_path / "src").mkdir()
    for number, index in enumerate(cuts, 1):
        # As torch's ranks write them.
        file = tmp_path / "src" / f"shard-{number:05d}-model-00001-of-00001.safetensors"
        info = json.dumps({"x": {"saved_offsets": [one.start for one in index]}})
        part = {"x": tensor[tuple(index)].contiguous()}
        save_file(part, file, metadata={"DCP_SHARDING_INFO": info})
    targets: tuple[TargetFormat, ...] = ("ckpt_storage", "dcp", "safetensors", "torch_save")
    for to in targets:
        target = path_of(tmp_path, to, to)
        convert(tmp_path / "src", target, to=to, memory_limit_bytes=16 * MIB)
        assert same(read(to, target, {"x": tensor}), {"x": tensor}), to
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    chunks = metadata.state_dict_metadata["x"].chunks  # type: ignore[union-attr]
    starts = {tuple(chunk.offsets) for chunk in chunks}
    assert starts == {tuple(one.start for one in cut) for cut in cuts}
    convert(tmp_path / "dcp", tmp_path / "again", to="dcp_safetensors")
    assert len(list((tmp_path / "again").glob("shard-*.safetensors"))) == len(cuts)
    assert same(read("dcp_safetensors", tmp_path / "again", {"x": tensor}), {"x": tensor})


def test_small_files_make_many(tmp_path: Path) -> None:
    """`max_file_bytes` is kept by all formats of several files."""
    state = {f"t{i}": seeded(i, 100) for i in range(10)}
    torch.save(state, tmp_path / "src.pt")
    patterns: dict[TargetFormat, str] = {
        "ckpt_storage": "saves/*/*.distcp",
        "dcp": "*.distcp",
        "safetensors": "model-*-of-00004.safetensors",
        "dcp_safetensors": "shard-*.safetensors",
    }
    for to, pattern in patterns.items():
        target = tmp_path / to
        convert(tmp_path / "src.pt", target, to=to, max_file_bytes=1200)
        assert len(list(target.glob(pattern))) == 4, to
        assert same(read(to, target, state), state), to


def test_what_goes_is_chosen_and_what_cannot_go_is_named(tmp_path: Path) -> None:
    """By patterns, by functions or by dropping; a pattern that matches nothing is an error."""
    source, dropped = tmp_path / "src", {"name", "lr", "epochs", "nothing"}
    save(nested_state(), source)
    with pytest.raises(errors.InvalidInputError, match="unsupported") as caught:
        convert(source, tmp_path / "dst", to="safetensors")
    assert all(f"{name} (an object" in str(caught.value) for name in ("name", "lr", "epochs"))
    assert not (tmp_path / "dst").exists()
    optimizer = {"optim.state.w.step", "optim.state.w.exp"}
    for at, (chosen, more) in enumerate(
        [
            ({"include": "model.*"}, set()),
            ({"include": lambda fqn: "." in fqn, "exclude": ["optim.*"]}, set()),
            ({"unsupported": "drop"}, optimizer),
        ]
    ):
        report = convert(source, tmp_path / f"{at}", to="safetensors", **chosen)  # type: ignore[arg-type]
        found = load_file(tmp_path / f"{at}" / "model.safetensors")
        assert found.keys() == {"model.w", "model.b"} | more
        assert {*(report.dropped if more else report.excluded)} >= dropped
    with pytest.raises(errors.InvalidInputError, match=r"optim\.\*"):
        convert(source, tmp_path / "c", to="dcp", exclude="optim")


def test_tied_tensors_share_their_memory_again(tmp_path: Path) -> None:
    """In a file of torch.save, and there and back through a checkpoint of ours."""
    weight = seeded(1, 8, 4)
    torch.save({"embed": weight, "head": weight}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ours", to="ckpt_storage")
    convert(tmp_path / "ours", tmp_path / "b.pt", to="torch_save")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert torch.equal(found["head"], weight)
    assert (tmp_path / "b.pt").stat().st_size < (tmp_path / "a.pt").stat().st_size + 1000


def test_a_torch_file_is_a_sound_zip_however_it_is_loaded(tmp_path: Path) -> None:
    """Checksums of all records hold, tensors are aligned, and each way to load gives the values.

    Whatever torch's default device is. No more address space is taken than for one tensor.
    """
    state: dict[str, Any] = {**flat_state(), "big": seeded(9, 1000, 100)}
    state["nested"] = nested_state()
    file = tmp_path / "a.pt"
    save(state, tmp_path / "src")
    with torch.device("meta"), mock.patch("mmap.mmap", wraps=mmap.mmap) as reserved:
        convert(tmp_path / "src", file, to="torch_save")
    assert [call.args[1] for call in reserved.call_args_list] == [state["big"].nbytes + 1]
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    data = file.read_bytes()
    assert data.index(raw_bytes(state["big"])) % 64 == 0
    for computed, mapped, safe in itertools.product([False, True], repeat=3):
        with torch_config.patch({"load.calculate_storage_offsets": computed}):
            found = torch.load(file, mmap=mapped, weights_only=safe)
        assert same(found, state), f"{computed=} {mapped=} {safe=}"
    with FakeTensorMode():
        places = torch.load(file, weights_only=True)
    for name in ("model.w", "model.b", "count"):
        start = places[name].untyped_storage()._checkpoint_offset  # noqa: SLF001  # torch's answer
        assert data[start:].startswith(raw_bytes(state[name])), name


def zip_again(source: Path, target: Path, change: Callable[..., dict[str, bytes]]) -> None:
    with zipfile.ZipFile(source) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(target, "w") as new:
        for name, data in change(records).items():
            new.writestr(name, data)


def test_records_in_any_order_and_strides_arrive_as_they_look(tmp_path: Path) -> None:
    """Torch's checkpoints store tensors with their strides; its files so are refused by name."""
    state = {name: seeded(seed, 5, 5) for seed, name in enumerate("abcd")}
    torch.save(state, tmp_path / "a.pt")
    zip_again(tmp_path / "a.pt", tmp_path / "b.pt", lambda records: dict(reversed(records.items())))
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    turned = {"t": seeded(3, 20, 30).t()}
    saved_stock(turned, tmp_path / "stock")
    for source, held in (("b.pt", state), ("stock", turned)):
        target = tmp_path / f"of-{source}"
        convert(tmp_path / source, target, to="safetensors")
        assert same(load_file(target / "model.safetensors"), held)
    torch.save(turned, tmp_path / "t.pt")
    with pytest.raises(errors.FormatError, match="stored with strides"):
        convert(tmp_path / "t.pt", tmp_path / "other", to="safetensors")


def test_existing_targets_are_replaced_only_when_asked(tmp_path: Path) -> None:
    """For every format; then the result is the new one alone, but for files of other programs."""
    old, new = {"x": seeded(1, 5), "old": seeded(2, 5)}, {"x": seeded(3, 5)}
    for number, state in enumerate((old, new)):
        torch.save(state, tmp_path / f"{number}.pt")
        save(state, tmp_path / f"ours-{number}")
    adapter = {"adapter.safetensors": b"mine", "config.json": b"{}"}
    others = {"safetensors": adapter, "dcp": {**adapter, INDEX: b"{}"}}
    for to in FORMATS:
        name = "ours-{}" if to == "torch_save" else "{}.pt"
        target, beside = path_of(tmp_path, to, f"dst-{to}"), others.get(to, {})
        for file, data in beside.items():
            target.mkdir(exist_ok=True)
            (target / file).write_bytes(data)
        convert(tmp_path / name.format(0), target, to=to, overwrite=bool(beside))
        with pytest.raises(errors.CheckpointExistsError):
            convert(tmp_path / name.format(1), target, to=to)
        assert same(read(to, target, old), old), to
        convert(tmp_path / name.format(1), target, to=to, overwrite=True)
        assert same(read(to, target, new), new), to
        assert {file: (target / file).read_bytes() for file in beside} == beside, to


@pytest.mark.parametrize("to", FORMATS[1:])
def test_damage_of_the_source_leaves_nothing_that_looks_whole(
    tmp_path: Path, to: TargetFormat
) -> None:
    """The error names the tensor; the target is no checkpoint; the next call needs no leave."""
    state = {f"t{i}": seeded(i, 50_000) for i in range(4)}
    save(state, tmp_path / "src")
    (shard,) = (tmp_path / "src").rglob("*.distcp")
    at = shard.read_bytes().index(raw_bytes(state["t3"])) + 100_000
    flip(shard, at)
    target = path_of(tmp_path, to, "dst")
    with pytest.raises(errors.IntegrityError) as caught:
        convert(tmp_path / "src", target, to=to, max_file_bytes=250_000)
    assert caught.value.fqn == "t3"
    if to == "torch_save":
        assert not target.exists()
    else:
        with pytest.raises(errors.CheckpointError):
            convert(target, tmp_path / "never.pt", to="torch_save")
    flip(shard, at)
    convert(tmp_path / "src", target, to=to)
    assert same(read(to, target, state), state)


def test_no_code_of_a_checkpoint_runs_nor_costs_it_an_old_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to do; the old file goes only when the new one can be made."""
    torch.save({"x": torch.ones(2), "evil": Call(print, ("executed",))}, tmp_path / "a.pt")
    with pytest.raises(errors.UnsafeContentError, match="unsafe_pickle"):
        convert(tmp_path / "a.pt", tmp_path / "dst", to="dcp")
    ours, target = tmp_path / "ours", tmp_path / "out" / "model.pt"
    saved_stock({"x": torch.ones(2), "evil": pathlib.PurePosixPath("a/b")}, tmp_path / "src")
    convert(tmp_path / "src", ours, to="ckpt_storage")
    convert(ours, target, to="torch_save", exclude="evil")
    before = target.read_bytes()
    store = open_store(tmp_path / "out")
    weaker = dataclasses.replace(store.capabilities, atomic_replace=False)
    monkeypatch.setattr(type(store), "capabilities", property(lambda _: weaker))
    with pytest.raises(errors.UnsafeContentError, match="evil"):
        convert(ours, target, to="torch_save", overwrite=True)
    assert target.read_bytes() == before
    assert capsys.readouterr().out == ""
    convert(ours, target, to="torch_save", unsafe_pickle=True, overwrite=True)
    assert torch.load(target, weights_only=False)["evil"].name == "b"


def test_what_cannot_be_read_of_a_torch_file_is_told(tmp_path: Path) -> None:
    """Other files, cut ones, ones without names; what was compressed is not even inflated."""
    (tmp_path / "a.pt").write_bytes(b"hello")
    cases: dict[str, tuple[Any, str]] = {
        "b": ({"x": torch.ones(100)}, "cut short"),
        "c": (torch.ones(3), "not a state dict"),
        "d": ({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, r"a\.b"),
        "e": ({"s": torch.eye(4).to_sparse()}, "sparse_coo"),
        "g": ({"t": torch.arange(4.0)}, "big-endian"),
        "m": ({"m": torch.ones(2, device="meta")}, "no bytes of m"),
        "t": ({"l": [1, (torch.ones(2),)]}, "tensors inside l"),
        "z": ({"w": torch.ones(3)}, "compressed record"),
    }
    for name, (state, _) in cases.items():
        torch.save(state, tmp_path / f"{name}.pt")
    (tmp_path / "b.pt").write_bytes((tmp_path / "b.pt").read_bytes()[:-50])
    big = {"g/byteorder": b"big"}
    zip_again(tmp_path / "g.pt", tmp_path / "g.pt", lambda records: records | big)
    with zipfile.ZipFile(tmp_path / "z.pt", "a", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("bomb/big", bytes(200_000_000))
    tracemalloc.start()
    try:
        for name, (_, says) in {"a": ("", "is no file of torch.save"), **cases}.items():
            with pytest.raises(errors.FormatError, match=says):
                convert(tmp_path / f"{name}.pt", tmp_path / "dst", to="dcp")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "dst").exists()


def test_from_s3_to_s3(server: S3Server, tmp_path: Path) -> None:
    """A torch file becomes a checkpoint and files again, by ranged reads that small ones share."""
    state = flat_state() | {"big": seeded(8, 3 * MIB)}
    state |= {f"small.{number}": seeded(number, 10) for number in range(300)}
    torch.save(state, tmp_path / "a.pt")
    options, ours = server.storage_options, "s3://bkt/ours"
    store = open_store("s3://bkt/in", storage_options=options)
    store.put("a.pt", (tmp_path / "a.pt").read_bytes())
    convert("s3://bkt/in/a.pt", ours, to="ckpt_storage", storage_options=options)
    for to in ("torch_save", "safetensors", "dcp"):
        server.reset_counters()
        target = path_of(tmp_path, to, "back")
        goal = "s3://bkt/out/b.pt" if to == "torch_save" else target
        convert(ours, goal, to=to, storage_options=options)
        reads = [r for r in server.requests if r.op == "get" and r.key.endswith(".distcp")]
        assert len(reads) <= 12, to
        if to == "torch_save":
            target.write_bytes(server.dump("bkt")["out/b.pt"])
        assert same(read(to, target, state), state)
        shutil.rmtree(target, ignore_errors=True)
    store.close()


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """One tensor of ten times the limit goes out of a torch file, and into one, in pieces."""
    limit = 16 * MIB
    numbers = torch.arange(10 * limit // 4, dtype=torch.int32)
    # What is imported and cached once does not count.
    for name, held in (("small", numbers[:9].clone()), ("large", numbers)):
        torch.save({"x": held}, tmp_path / f"{name}.pt")
        back = tmp_path / f"{name}-back.pt"
        tracemalloc.start()
        for source, target in ((tmp_path / f"{name}.pt", tmp_path / name), (tmp_path / name, back)):
            to: TargetFormat = "torch_save" if target == back else "ckpt_storage"
            convert(source, target, to=to, memory_limit_bytes=limit)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1.5 * limit
    assert same(torch.load(back), {"x": numbers})
    assert verify(tmp_path / "large").ok


@pytest.mark.parametrize("to", FORMATS[1:])
def test_bytes_that_move_are_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: TargetFormat
) -> None:
    """A process alone has no other limit than that of standing still, not even while it plans."""
    moved: list[int] = []
    monkeypatch.setattr(StallDetector, "advanced", lambda _, count=0, **_files: moved.append(count))
    save({"w": seeded(1, 5000)}, tmp_path / "src")
    convert(tmp_path / "src", path_of(tmp_path, to, "dst"), to=to, timeout=Timeouts(plan=1e-9))
    assert sum(moved) >= 20_000


def test_a_conversion_never_eats_its_source(tmp_path: Path) -> None:
    """A symlink to the source is the source, for every format; every file stays."""
    source = tmp_path / "a"
    saved_stock(nested_state(), source)
    (tmp_path / "b").symlink_to(source)
    before = files_below(source)
    for to in ("ckpt_storage", *WEIGHTS):
        with pytest.raises(errors.InvalidInputError, match="onto itself"):
            convert(source, tmp_path / "b", to=to, overwrite=True, unsupported="drop")
        assert files_below(source) == before
    shard = next(source.glob("*.distcp")).name
    with pytest.raises(errors.InvalidInputError, match="onto itself"):
        convert(source, tmp_path / "b" / shard, to="torch_save", overwrite=True)
    assert files_below(source) == before
    (source / "model.pt").write_bytes(b"of before")
    convert(source, tmp_path / "b" / "model.pt", to="torch_save", overwrite=True)
    assert torch.load(source / "model.pt")["name"] == "a run"
    # The folder of a torch file may take what is made of it.
    for _ in range(2):
        convert(source / "model.pt", source, to="safetensors", overwrite=True, unsupported="drop")
    assert (source / "model.pt").exists()


@pytest.mark.parametrize(
    ("part", "to"),
    [("whole", "dcp"), ("view", "safetensors"), ("pickle", "dcp"), ("small", "dcp_safetensors")],
)
def test_every_flipped_bit_of_a_torch_file_is_found(
    tmp_path: Path, part: str, to: TargetFormat
) -> None:
    """Its records carry CRC-32; a tensor may be all of a record, or a part of one."""
    base = seeded(1, 3000)
    state = {"whole": seeded(2, 1000), "view": base[1000:2000], "small": seeded(3, 3)}
    text = {"text": "some words in the pickle"} if to == "dcp" else {}
    torch.save(state | text, tmp_path / "a.pt")
    what = b"view" if part == "pickle" else raw_bytes(base if part == "view" else state[part])
    flip(tmp_path / "a.pt", (tmp_path / "a.pt").read_bytes().index(what) + len(what) // 2)
    with pytest.raises((errors.IntegrityError, errors.FormatError)) as caught:
        convert(tmp_path / "a.pt", tmp_path / "dst", to=to)
    if part != "pickle":
        assert isinstance(caught.value, errors.IntegrityError)
        assert caught.value.fqn == part
        assert caught.value.path == "a.pt"
    with pytest.raises(errors.CheckpointError):
        convert(tmp_path / "dst", tmp_path / "never.pt", to="torch_save")


def test_a_conversion_that_takes_long_goes_on_while_bytes_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the whole takes: the limit is of standing still."""
    torch.save({f"t{number}": seeded(number, 5000) for number in range(40)}, tmp_path / "m.pt")
    now_s = 0.0

    def wait(_event: object) -> None:
        nonlocal now_s
        now_s += 1

    defaults: Any = StallDetector.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", lambda: now_s)
    given: dict[str, Any] = {"max_file_bytes": 20_000, "timeout": 17}
    convert(tmp_path / "m.pt", tmp_path / "out", to="dcp", progress=wait, **given)
    assert now_s > 34


@pytest.mark.parametrize("to", ["ckpt_storage", "safetensors", "torch_save"])
def test_a_strided_tensor_counts_as_often_as_it_is_held(tmp_path: Path, to: TargetFormat) -> None:
    """It is rearranged in memory: the limit for buffers is kept, or the call is refused."""
    turned = {"t": seeded(3, 500, 600).t()}
    saved_stock(turned, tmp_path / "stock")
    target = path_of(tmp_path, to, "dst")
    with pytest.raises(errors.InvalidInputError, match="memory") as caught:
        convert(tmp_path / "stock", target, to=to, memory_limit_bytes=2 * MIB)
    assert "Raise memory_limit_bytes" in (caught.value.next_step or "")
    convert(tmp_path / "stock", target, to=to, memory_limit_bytes=8 * MIB, overwrite=True)
    assert same(read(to, target, turned), turned)


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_shards_of_what_is_overwritten_do_not_stay(tmp_path: Path, to: TargetFormat) -> None:
    """Of a checkpoint of stock DCP that is replaced no file is left over."""
    state = {f"t{number}": seeded(number, 5000) for number in range(4)}
    save(state, tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "dst", to="dcp", max_file_bytes=20_000)
    assert len(list((tmp_path / "dst").glob("*.distcp"))) == 4
    if to == "dcp":
        convert(tmp_path / "src", tmp_path / "dst", to=to, overwrite=True, include="t0")
    else:
        convert(tmp_path / "src", tmp_path / "dst", to=to, overwrite=True)
    assert len(list((tmp_path / "dst").glob("*.distcp"))) == (to == "dcp")


def test_metadata_of_torch_names_no_class_of_this_package(tmp_path: Path) -> None:
    """Stock torch reads a conversion where this package is not installed; `verify` accepts it."""
    ckpt_storage.save({"a": {1: torch.ones(3)}}, tmp_path / "run")
    ckpt_storage.convert(tmp_path / "run", tmp_path / "dcp", to="dcp")
    assert b"ckpt_storage" not in (tmp_path / "dcp" / ".metadata").read_bytes()
    assert ckpt_storage.verify(tmp_path / "dcp").ok


@pytest.mark.parametrize("content", [{"a": 1}, pathlib.PurePosixPath("a")])
def test_weights_beside_another_programs_pickle_are_read(tmp_path: Path, content: object) -> None:
    """Only beside files of items is `metadata.pkl` that of torch_checkpointing."""
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/metadata.pkl").write_bytes(pickle.dumps(content))
    convert(tmp_path / "hf", tmp_path / "ours", to="ckpt_storage")
    with ckpt_storage.open_checkpoint(tmp_path / "ours") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), torch.ones(4))
