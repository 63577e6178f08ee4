"""`open_checkpoint` reads all formats as numpy and torch would, verified, torch-free till then."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import dcp_cases
import numpy as np
import pytest
import torch
from checkpoint_cases import EXTRAS, FORMATS, OBJECTS, WEIGHTS, numpy_of
from copy_cases import flip, make
from dcp_cases import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from rank_pool import RankPool

import ckpt_storage
from ckpt_storage import FormatError
from ckpt_storage.commit.cleaning import free_leftovers
from ckpt_storage.format.boxes import Box
from ckpt_storage.inspect.checkpoint import Checkpoint, open_checkpoint
from ckpt_storage.inspect.lazy_tensor import LazyTensor, select
from ckpt_storage.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    ranks.run(cases.save_all, folder, world_size=2)
    make("safetensors", WEIGHTS, folder / "safetensors" / "step-1000")
    return folder


@pytest.fixture(params=FORMATS)
def opened(request: pytest.FixtureRequest, saved: Path) -> Checkpoint:
    return open_checkpoint(saved / request.param / "step-1000")


def is_equal(left: Any, right: Any) -> bool:
    return (
        type(left) is type(right)
        and left.dtype == right.dtype
        and np.shape(left) == np.shape(right)
        and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
    )


def test_every_format_is_a_mapping_of_its_names(opened: Checkpoint) -> None:
    """Names, shapes, types and sizes are those of what was saved; asking reads no value."""
    expected = set(WEIGHTS)
    if opened.format in {"ckpt_storage", "dcp"}:
        expected |= {*EXTRAS, "step", "note", "tags", "groups.0.lr", "groups.1.lr"}
        with pytest.raises(KeyError, match="is an object, not a tensor"):
            opened.stats("step")
    assert set(opened) == expected
    assert len(opened) == len(expected)
    assert "model.rows" in opened
    assert "model.row" not in opened
    assert opened.get("model.row") is None
    with pytest.raises(KeyError, match=r"did you mean 'model\.rows'"):
        opened["model.row"]
    for name, tensor in WEIGHTS.items():
        lazy = opened[name]
        assert isinstance(lazy, LazyTensor)
        assert (lazy.fqn, lazy.shape, lazy.size) == (name, tuple(tensor.shape), tensor.numel())
        assert (lazy.dtype, lazy.nbytes) == (str(tensor.dtype)[6:], tensor.nbytes)
        assert len(lazy.sharding) == (1 if opened.format == "safetensors" else 2)
        cut = cases.CUTS[name]
        assert sum(chunk.sizes[cut] for chunk in lazy.sharding) == tensor.shape[cut]


def test_a_sound_checkpoint_of_any_format_is_called_so(opened: Checkpoint) -> None:
    """Its files end where their last tensor does, or behind it."""
    assert ckpt_storage.verify(opened.url).ok


def test_whole_tensors_come_as_numpy_and_as_torch(opened: Checkpoint) -> None:
    """Every type and shape is bit by bit what was saved, either way."""
    both = WEIGHTS | (EXTRAS if opened.format in {"ckpt_storage", "dcp"} else {})
    for name, tensor in both.items():
        assert is_equal(opened[name].numpy(), numpy_of(tensor)), name
        assert same(opened[name].torch(), tensor), name


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_index_gives_what_it_gives_in_numpy(opened: Checkpoint, data: st.DataObject) -> None:
    """For any basic index, in any format and sharding."""
    name = data.draw(st.sampled_from(sorted(WEIGHTS)))
    array = numpy_of(WEIGHTS[name])
    index = data.draw(npst.basic_indices(array.shape, allow_newaxis=True))
    assert is_equal(opened[name][index], array[index])
    told = opened[name].torch(index)
    assert is_equal(numpy_of(told), np.ascontiguousarray(array[index]).reshape(told.shape))
    assert tuple(told.shape) == np.shape(array[index])


@given(
    npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6),
    st.lists(
        st.one_of(
            st.integers(-9, 9),
            st.just(...),
            st.none(),
            st.slices(6),
            st.integers(-9, 9).map(np.int64),
        ),
        max_size=5,
    ).map(tuple),
)
def test_what_numpy_refuses_is_refused(shape: tuple[int, ...], index: Any) -> None:
    """An index raises IndexError, with numpy's words, exactly where it does in numpy."""
    refusal = ""
    try:
        count = np.empty(shape)[index].size
    except IndexError as error:
        refusal = str(error)
    if refusal:
        with pytest.raises(IndexError) as caught:
            select(index, shape)
        assert str(caught.value) == refusal
    else:
        assert math.prod(map(len, select(index, shape).ranges)) == count


@pytest.mark.parametrize("index", [True, [0, 1], np.array([True, False]), "a", 1.0, (0, [1])])
def test_lists_masks_and_nonsense_are_refused(index: object) -> None:
    """What is no basic index raises IndexError and says what to do."""
    with pytest.raises(IndexError, match="read a region first"):
        select(index, (2, 2))


def test_numpys_protocols_are_kept(opened: Checkpoint) -> None:
    """np.asarray, iteration, item and errors are what an array's would be."""
    lazy, array = opened["model.rows"], numpy_of(WEIGHTS["model.rows"])
    assert is_equal(np.asarray(lazy), array)
    assert np.asarray(lazy, dtype=np.float64).dtype == np.float64
    assert is_equal(np.array(lazy, copy=True), array)
    with pytest.raises(ValueError, match="without a copy"):
        lazy.__array__(copy=False)  # as numpy 2 calls it
    assert all(is_equal(row, expected) for row, expected in zip(lazy, array, strict=True))
    with pytest.raises(IndexError, match="out of bounds for axis 0 with size 301"):
        lazy[301]
    with pytest.raises(TypeError, match="has not been read"):
        bool(lazy)


def test_scalars_and_objects_are_loaded(saved: Path) -> None:
    """A tensor without dimensions cannot be iterated; objects are new each time."""
    for name in ("ckpt_storage", "dcp"):
        opened = open_checkpoint(saved / name / "step-1000")
        assert {key: opened[key] for key in ("step", "note", "tags")}.items() <= OBJECTS.items()
        assert opened["groups.1.lr"] == 0.25
        assert opened["tags"] is not opened["tags"]
        lazy = opened["scalar"]
        assert isinstance(lazy[()], np.float32)
        assert isinstance(lazy[...], np.ndarray)
        assert lazy.torch().shape == ()
        for call in (len, list):
            with pytest.raises(TypeError):
                call(lazy)


def test_load_takes_names_a_prefix_or_a_predicate(opened: Checkpoint) -> None:
    """Each chooses; all are returned by name, in order, as arrays or tensors."""
    chosen = opened.load(["model.cube", "model.rows"])
    assert list(chosen) == ["model.cube", "model.rows"]
    assert all(is_equal(chosen[name], numpy_of(WEIGHTS[name])) for name in chosen)
    assert opened.load("model.rows").keys() == {"model.rows"}
    assert opened.load(prefix="model.").keys() == WEIGHTS.keys()
    assert opened.load(lambda name: name.endswith("s"), prefix="model.c").keys() == {
        "model.columns"
    }
    tensors = opened.load(prefix="model.", kind="torch")
    assert all(same(tensors[name], WEIGHTS[name]) for name in WEIGHTS)
    wrong: list[tuple[Any, str]] = [
        ({"names": ["model.rows", "nothing"]}, "nothing"),
        ({"prefix": "modle."}, "begins with 'modle"),
        ({"kind": "pandas"}, "kind"),
    ]
    for options, told in wrong:
        with pytest.raises((KeyError, ckpt_storage.InvalidInputError), match=told):
            opened.load(**options)
    events: list[ckpt_storage.ProgressEvent] = []
    opened.load(prefix="model.", progress=events.append)
    last, total_bytes = events[-1], sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert last.done_bytes == last.total_bytes >= total_bytes, "the last event is complete"


def test_facts_are_told(saved: Path) -> None:
    """Format, step, ranks, files and bytes are those of the folder."""
    for name in FORMATS:
        path = saved / name / "step-1000"
        opened = open_checkpoint(path)
        assert (opened.format, opened.step, opened.info.name) == (name, 1000, "step-1000")
        assert opened.info.url == opened.url == f"file://{path}"
        files = {file.path: file.size_bytes for file in opened.files}
        assert files == {
            str(found.relative_to(path)): found.stat().st_size
            for found in path.rglob("*")
            if found.suffix in {".distcp", ".safetensors"}
        }
        assert opened.verify().ok


def test_formats_and_shardings_make_no_difference(saved: Path, tmp_path: Path) -> None:
    """A diff over other ranks, cuts and containers finds a single element, and nothing else."""
    dcp_cases.save(dict(WEIGHTS), tmp_path / "whole")
    changed = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    changed["model.cube"][3, 4, 5] += 7
    dcp_cases.save(changed, tmp_path / "changed")
    for name in FORMATS:
        other = open_checkpoint(saved / name / "step-1000")
        found = other.diff(tmp_path / "whole", prefix="model.")
        assert (found.is_equal, found.same_count) == (True, len(WEIGHTS))
        (change,) = ckpt_storage.diff(other, tmp_path / "changed", names=list(WEIGHTS)).changed
        assert (change.fqn, change.kind, change.at) == ("model.cube", "values", (3, 4, 5))
        assert (change.different_count, change.max_absolute) == (1, 7.0)


def test_the_step_is_read_off_the_name(tmp_path: Path) -> None:
    """A number at the end of the folder's name, alone or behind a word for steps."""
    steps = {"step-1000": 1000, "7": 7, "epoch=3-step=40": 40, "checkpoint-500": 500}
    ckpt_storage.save({"a": torch.ones(1)}, tmp_path / "run")
    for name, step in {**steps, "gpt-2": None, "step-10-final": None}.items():
        (tmp_path / name).symlink_to("run")
        assert open_checkpoint(tmp_path / name).step == step


def test_no_torch_is_imported_before_it_is_asked_for(saved: Path) -> None:
    """Opening, listing, indexing, statistics, comparing and drawing leave torch alone."""
    paths = [str(saved / name / "step-1000") for name in FORMATS]
    code = f"""if True:
        import sys
        from ckpt_storage.inspect.checkpoint import open_checkpoint

        assert not {{"torch", "fsspec"}} & sys.modules.keys()
        for path in {paths!r}:
            opened = open_checkpoint(path)
            list(opened), repr(opened), str(opened.tree()), opened._repr_html_()
            opened.files, opened.history
            opened["model.columns"][3:9, ::2], opened.load(prefix="model.")
            opened.stats("model.rows"), opened.diff(path, prefix="model."), opened.verify()
            assert "torch" not in sys.modules, path
        print(opened["model.columns"].torch().dtype)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "torch.bfloat16"), done.stderr


def test_types_that_only_torch_has_come_as_torch(tmp_path: Path) -> None:
    """complex32 and packed fours have no numpy type; their tensors are read all the same."""
    state = {
        "half": dcp_cases.seeded(1, 5, dtype=torch.complex32),
        "packed": dcp_cases.seeded(2, 4, 6, dtype=torch.float4_e2m1fn_x2),
    }
    dcp_cases.save(state, tmp_path / "run")
    opened = open_checkpoint(tmp_path / "run")
    for name, tensor in state.items():
        assert same(opened[name].torch(), tensor)
        with pytest.raises(ckpt_storage.CheckpointError, match=r"numpy has no type .*\.torch\(\)"):
            opened[name].numpy()
    for file in opened.files:
        (tmp_path / "run" / file.path).unlink()
    named = r"half \(complex32\), packed \(float4_e2m1fn_x2\).*kind='torch'"
    with pytest.raises(ckpt_storage.CheckpointError, match=named):
        opened.load()  # looks before it reads


def test_damage_is_found_where_it_is_read(tmp_path: Path) -> None:
    """A flipped bit fails what reads its block, naming file, tensor and offset; nothing else."""
    tensor = torch.arange(200_000, dtype=torch.int32).reshape(2000, 100)
    dcp_cases.save({"a": tensor, "step": 3}, tmp_path / "run")
    (file,) = (tmp_path / "run").rglob("*.distcp")
    at = file.read_bytes().index(np.int32(150_000).tobytes())
    flip(file, at)
    lazy = open_checkpoint(tmp_path / "run")["a"]
    assert is_equal(lazy[:1000], tensor[:1000].numpy())
    for read in (lazy.numpy, lazy.torch, lambda: lazy[1500, 0], lambda: list(lazy)):
        with pytest.raises(ckpt_storage.IntegrityError) as caught:
            read()
        assert caught.value.fqn == "a"
        assert "of this load" not in str(caught.value)
        assert f"{caught.value.path}".endswith(file.name)
        assert 0 <= at - (caught.value.offset or 0) < 65_536
    with pytest.raises(ckpt_storage.IntegrityError):
        open_checkpoint(tmp_path / "run").load()
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ckpt_storage.IntegrityError) as caught:
        lazy[0]
    assert caught.value.fqn == "a"
    assert "The file holds a, written by rank 0." in str(caught.value)


@pytest.mark.parametrize("how", ["overwritten", "deleted"])
def test_a_save_that_is_gone_says_so(tmp_path: Path, how: str) -> None:
    """Overwritten, an open checkpoint still reads its own bytes; freed, it raises, never lies."""
    path = tmp_path / "run"
    state = {"a": torch.arange(10), "step": 1}
    dcp_cases.save(state, path)
    opened = open_checkpoint(path)
    lazy = opened["a"]
    if how == "overwritten":
        ckpt_storage.save({"a": torch.zeros(10), "step": 2}, path, overwrite=True)
        assert lazy[:].tolist() == list(range(10))
        assert opened["step"] == 1
        free_leftovers(open_store(path), keep_previous=0)
    else:
        ckpt_storage.delete(path)
        assert [entry.type for entry in opened.history] == ["commit", "deleted"]
    for read in (lambda: lazy[:], lazy.torch, lambda: opened["step"], opened.load, opened.verify):
        with pytest.raises(ckpt_storage.CheckpointGoneError):
            read()
    if how == "overwritten":
        assert open_checkpoint(path)["step"] == 2


@pytest.mark.parametrize("name", ["dcp", "safetensors", "dcp_safetensors"])
def test_files_that_another_writer_replaced_are_noticed(
    saved: Path, tmp_path: Path, name: str
) -> None:
    """Foreign formats use names again: what was written since is refused, never mixed in."""
    path = tmp_path / "run"
    shutil.copytree(saved / name / "step-1000", path)
    opened = open_checkpoint(path)
    fresh = open_checkpoint(path)
    assert opened["model.rows"][0, 0] == WEIGHTS["model.rows"][0, 0]
    for file in path.iterdir():
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
    with pytest.raises(ckpt_storage.CheckpointGoneError, match="written again"):
        opened["model.rows"][:]
    shutil.rmtree(path)
    for either in (opened, fresh):
        with pytest.raises(ckpt_storage.CheckpointGoneError, match="gone"):
            either["model.rows"][:]


def test_elements_that_no_chunk_holds_are_not_made_up(tmp_path: Path) -> None:
    """A read that finds too few elements raises; the rest of its memory would pass for values."""
    ckpt_storage.save({"w": torch.ones(8)}, tmp_path)
    with open_checkpoint(tmp_path) as opened:
        handle = opened._handle  # noqa: SLF001  # opening refuses such documents before
        record = replace(handle.tensors["w"], boxes=[Box((0,), (5,))])
        handle.tensors = {"w": record}
        with pytest.raises(FormatError, match="hold 5 of the 8 selected"):
            opened["w"][:]


def test_a_closed_checkpoint_refuses_reads(opened: Checkpoint) -> None:
    """After the block names are still known, values are not."""
    with opened:
        lazy = opened["model.rows"]
        assert lazy[0].shape == (37,)
    opened.close()
    assert "model.rows" in opened
    with pytest.raises(ckpt_storage.InvalidInputError, match="was closed"):
        lazy[0]
