"""One wrong byte in one answer of a source is read again, by copies and by conversions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from copy_cases import files_below, make, state_of
from dcp_cases import same, seeded
from flipping_server import FlippingServer
from rank_pool import RankPool
from safetensors.torch import load_file, save_file

from ckpt_storage import (
    CheckpointError,
    CheckpointExistsError,
    IntegrityError,
    consolidate,
    convert,
    copy,
    verify,
)
from ckpt_storage.format.names import INDEX_NAME
from ckpt_storage.options import MIB

URL = "s3://bkt/run"

FLAT = {"w": seeded(1, 1000, 70), "b": seeded(2, 7), "none": torch.empty((0, 4))}

Call = Callable[[Path], object]


@pytest.fixture
def server() -> Iterator[FlippingServer]:
    with FlippingServer() as server:
        server.create_bucket("bkt")
        yield server


def upload(server: FlippingServer, path: Path, key: str) -> None:
    """Put a file, or all files of a folder, into the bucket."""
    files = files_below(path) if path.is_dir() else {"": path.read_bytes()}
    for name, data in files.items():
        server.put("bkt", f"{key}/{name}".rstrip("/"), data)


def each_flip(server: FlippingServer, suffix: str, folder: Path, call: Call) -> Iterator[Path]:
    """Make the call with each of its reads answered wrongly in turn; yield what it made."""
    server.flip(suffix, 0)
    call(folder / "plain")
    count = server.read_count
    assert count
    for number in range(count):
        server.flip(suffix, after=number)
        target = folder / str(number)
        call(target)
        assert server.left_count == 0
        yield target


def test_a_copy_reads_a_wrong_byte_again(server: FlippingServer, tmp_path: Path) -> None:
    """Whichever answer has it, the checkpoint arrives whole."""
    make("ckpt_storage", state_of(1), tmp_path / "run")
    upload(server, tmp_path / "run", "run")
    call = partial(copy, URL, storage_options=server.storage_options)
    for target in each_flip(server, "", tmp_path / "to", call):
        assert verify(target).ok, target


def test_a_copy_of_a_part_reads_a_wrong_byte_again(server: FlippingServer, tmp_path: Path) -> None:
    """In files that are written anew, too."""
    make("ckpt_storage", state_of(1), tmp_path / "run")
    upload(server, tmp_path / "run", "run")
    call = partial(copy, URL, exclude="t1", storage_options=server.storage_options)
    for target in each_flip(server, "", tmp_path / "to", call):
        assert verify(target).ok, target


def test_a_second_wrong_byte_of_a_checkpoint_is_damage(
    server: FlippingServer, tmp_path: Path
) -> None:
    """What two reads over two connections give is not committed, and the file is named."""
    make("ckpt_storage", state_of(1), tmp_path / "run")
    upload(server, tmp_path / "run", "run")
    server.flip(".distcp", 2)
    with pytest.raises(IntegrityError, match="read twice") as caught:
        copy(URL, tmp_path / "copy", storage_options=server.storage_options)
    assert (caught.value.path or "").endswith(".distcp")
    assert server.left_count == 0
    assert not list(tmp_path.glob("copy/commits/*"))


def exported(path: Path) -> Path:
    """Return an export of several weight files, with a file beside them."""
    make("ckpt_storage", {"a": seeded(1, 900), "b": seeded(2, 900)}, path)
    consolidate(path, max_file_bytes=4000, extra_files={"config.json": b"{}"})
    return path / "hf"


def test_a_copy_of_an_export_by_its_own_url_reads_a_wrong_byte_again(
    server: FlippingServer, tmp_path: Path
) -> None:
    """Whichever answer about weights, index or documents has it, the export arrives whole."""
    export = exported(tmp_path / "run")
    upload(server, export, "hf")
    call = partial(copy, "s3://bkt/hf", storage_options=server.storage_options)
    for suffix in (".safetensors", "index.json", "output.json", "names.json"):
        for target in each_flip(server, suffix, tmp_path / suffix, call):
            assert verify(target).ok, target
            old, new = files_below(export), files_below(target)
            assert new == {name: data for name, data in old.items() if "job.json" not in name}


@pytest.mark.parametrize("suffix", ["00002-of-00002.safetensors", "index.json", "output.json"])
def test_a_copy_of_an_export_by_its_own_url_refuses_a_damaged_file(
    tmp_path: Path, suffix: str
) -> None:
    """One bit at rest, which no length shows; nothing that readers take is at the target."""
    export = exported(tmp_path / "run")
    (file,) = export.rglob(f"*{suffix}")
    data = bytearray(file.read_bytes())
    # In the index a number that no reader needs.
    at = data.index(b'total_size": ') + 13 if suffix == "index.json" else len(data) - 20
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        copy(export, tmp_path / "copy")
    assert (caught.value.path or "").endswith(suffix)
    assert not (tmp_path / "copy" / INDEX_NAME).exists()


def test_the_record_of_an_export_counts_without_its_list_of_names(tmp_path: Path) -> None:
    """A folder that another tool copied in part is checked as far as a record is there."""
    export = exported(tmp_path / "run")
    next(export.rglob("names.json")).unlink()
    copy(export, tmp_path / "sound")
    file = export / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match="model-00001-of-00002"):
        copy(export, tmp_path / "copy")


def test_a_copy_of_an_export_without_its_record_is_refused(tmp_path: Path) -> None:
    """Its index names a record, whose checksums are needed."""
    export = exported(tmp_path / "run")
    next(export.rglob("output.json")).unlink()
    with pytest.raises(IntegrityError, match="the record of the export"):
        copy(export, tmp_path / "copy")


def damage(file: Path) -> None:
    """Change one bit near the end of a file."""
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "consolidate": lambda export, target: consolidate(export, target, dtype="bfloat16"),
    "convert to ckpt_storage": partial(convert, to="ckpt_storage"),
    "convert to dcp": partial(convert, to="dcp"),
    "convert to torch_save": lambda export, target: convert(
        export, target.with_suffix(".pt"), to="torch_save"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_made_of_an_export_with_a_damaged_file(tmp_path: Path, name: str) -> None:
    """The new files would have checksums of the wrong bytes."""
    export = exported(tmp_path / "run")
    CALLS[name](export, tmp_path / "sound")
    file = export / "model-00002-of-00002.safetensors"
    damage(file)
    with pytest.raises(IntegrityError, match="record of this export") as caught:
        CALLS[name](export, tmp_path / "wrong")
    assert caught.value.path == file.name
    assert not [path for path in tmp_path.rglob("wrong*") if (path / INDEX_NAME).exists()]
    assert not (tmp_path / "wrong.pt").exists()


def test_weights_that_another_program_wrote_over_an_export_are_refused_with_a_way_out(
    tmp_path: Path,
) -> None:
    """`save_pretrained` leaves index and record there; its files have another length."""
    export = exported(tmp_path / "run")
    file = export / "model-00002-of-00002.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "by": "another program" * 20})
    with pytest.raises(IntegrityError, match="record of this export") as caught:
        convert(export, tmp_path / "ours", to="ckpt_storage")
    assert "delete .ckpt-storage there" in str(caught.value)
    shutil.rmtree(export / ".ckpt-storage")
    assert convert(export, tmp_path / "ours", to="ckpt_storage").tensor_count


def test_damage_in_a_file_that_is_not_read_does_not_matter(tmp_path: Path) -> None:
    """A part of an export costs no read of the other weight files."""
    export = exported(tmp_path / "run")
    damage(export / "model-00002-of-00002.safetensors")
    consolidate(export, tmp_path / "part", include="a")
    assert load_file(tmp_path / "part" / "model.safetensors").keys() == {"a"}
    with pytest.raises(IntegrityError, match="record of this export"):
        consolidate(export, tmp_path / "other", include="b")


def convert_on_rank(rank: int, export: Path, target: Path) -> tuple[str, bool]:
    """Convert; return the error, and whether this rank began to write."""
    with mock.patch("ckpt_storage.export.run.FileWriter", side_effect=ValueError) as writer:
        try:
            convert(export, target, to="dcp", process_group=dist.group.WORLD)
        except CheckpointError as error:
            return type(error).__name__, writer.called
    raise AssertionError(rank)


def test_no_rank_writes_what_another_rank_finds_damaged(ranks: RankPool, tmp_path: Path) -> None:
    """A later call would keep such a file: if the source is restored, it has the same time."""
    export = exported(tmp_path / "run")
    damage(export / "model-00002-of-00002.safetensors")  # which rank 1 checks
    outcomes = ranks.run(convert_on_rank, export, tmp_path / "to", world_size=2)
    assert outcomes == [("RankFailedError", False), ("IntegrityError", False)]


def test_weight_files_without_the_record_of_their_export_are_converted(tmp_path: Path) -> None:
    """Tools that pass over names with a dot leave it behind; only lengths are compared then."""
    export = exported(tmp_path / "run")
    next(export.rglob("output.json")).unlink()
    assert convert(export, tmp_path / "ours", to="ckpt_storage").tensor_count


def test_a_copy_of_an_export_by_its_own_url_overwrites_only_if_asked(tmp_path: Path) -> None:
    """The same export at the target is a checkpoint in the way, as one of another tool is."""
    export = exported(tmp_path / "run")
    copy(export, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("[]")
    with pytest.raises(CheckpointExistsError):
        copy(export, tmp_path / "copy")
    assert (tmp_path / "copy" / "config.json").read_text() == "[]"
    copy(export, tmp_path / "copy", overwrite=True)
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    assert verify(tmp_path / "copy").ok


def copy_on_rank(_rank: int, target: str, options: dict[str, Any]) -> object:
    return copy(URL, target, storage_options=options, process_group=dist.group.WORLD)


def test_ranks_read_a_wrong_byte_of_a_shared_file_again(
    server: FlippingServer, ranks: RankPool, tmp_path: Path
) -> None:
    """A file that two ranks write together is whole, and the reports agree."""
    make("ckpt_storage", {"w": seeded(1, 8 * MIB // 4)}, tmp_path / "run")
    upload(server, tmp_path / "run", "run")
    server.flip(".distcp")
    job = copy_on_rank, str(tmp_path / "copy"), server.storage_options
    reports = ranks.run(*job, world_size=2)
    assert server.left_count == 0
    assert reports[0] == reports[1]
    assert verify(tmp_path / "copy").ok


@pytest.mark.parametrize("to", ["safetensors", "torch_save"])
def test_a_conversion_of_ours_reads_a_wrong_byte_again(
    server: FlippingServer, tmp_path: Path, to: Any
) -> None:
    """The values arrive as they were saved."""
    make("ckpt_storage", FLAT, tmp_path / "run")
    upload(server, tmp_path / "run", "run")
    call = partial(convert, URL, to=to, storage_options=server.storage_options)
    for target in each_flip(server, "", tmp_path / "to", call):
        check_values(to, target)


@pytest.mark.parametrize("to", ["safetensors", "ckpt_storage"])
def test_a_conversion_of_a_torch_file_reads_a_wrong_byte_again(
    server: FlippingServer, tmp_path: Path, to: Any
) -> None:
    """Its records carry CRC-32, and none of its bytes goes over unchecked."""
    torch.save(FLAT, tmp_path / "run.pt")
    upload(server, tmp_path / "run.pt", "run.pt")
    call = partial(convert, f"{URL}.pt", to=to, storage_options=server.storage_options)
    for target in each_flip(server, "", tmp_path / "to", call):
        check_values(to, target)


def check_values(to: str, target: Path) -> None:
    if to == "safetensors":
        found: dict[str, torch.Tensor] = {}
        for file in target.glob("*.safetensors"):
            found |= load_file(file)
        assert same(found, FLAT), target
    elif to == "torch_save":
        assert same(torch.load(target), FLAT), target
    else:
        assert verify(target).ok
        convert(target, target.with_suffix(".pt"), to="torch_save")
        assert same(torch.load(target.with_suffix(".pt")), FLAT), target
