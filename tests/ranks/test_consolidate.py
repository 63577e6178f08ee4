"""An export holds exactly the tensors that were saved, whoever writes it and however often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import consolidate_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from consolidate_cases import check, check_report, files_in
from dcp_cases import seeded

import ckpt_storage
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    InvalidInputError,
    RankMismatchError,
)
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.options import ProgressEvent
from ckpt_storage.testing.ranks import RankPool


@pytest.mark.parametrize("world_size", [1, 4])
def test_every_dtype_and_sharding_arrives(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """Every dtype in every shape and sharding, saved and exported by 1 to 4 ranks, bit by bit."""
    url = tmp_path / "run"
    reports = ranks.run(
        cases.save_and_export, url, {"max_file_bytes": 300_000}, world_size=world_size
    )
    files = files_in(url / "hf")
    check(files, cases.whole_state())
    check_report(reports[0], files)
    assert len(reports[0].files) > 2
    assert all(report == reports[0] for report in reports)
    assert len(reports[0].rank_bytes) == world_size
    assert sum(reports[0].rank_bytes) == reports[0].total_bytes


def test_other_ranks_than_saved_export_the_same_bytes(ranks: RankPool, tmp_path: Path) -> None:
    """One process and four ranks make the same files of what other ranks saved."""
    url = tmp_path / "run"
    dtypes = ["bfloat16", "int64"]
    ranks.run(cases.save_sharded, url, dtypes, world_size=3)
    consolidate(url, tmp_path / "one")
    ranks.run(cases.export, url, tmp_path / "four", world_size=4)
    one, four = files_in(tmp_path / "one"), files_in(tmp_path / "four")
    check(one, cases.whole_state(dtypes))
    assert {name: data for name, data in one.items() if not name.startswith(".ckpt-storage/")} == {
        name: data for name, data in four.items() if not name.startswith(".ckpt-storage/")
    }


def save_stock(_rank: int, url: Path) -> None:
    """Save with torch's own writer, which keeps strides: only what is contiguous."""
    dcp.save(_contiguous(cases.sharded_state(["bfloat16"])), storage_writer=_stock(url))


def _contiguous(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "turned" not in name}


def _stock(url: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(url, sync_files=False)


def save_torch_safetensors(_rank: int, url: Path) -> None:
    """Save torch's sharded safetensors."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415  # prints

    state = {k: v for k, v in cases.sharded_state(["bfloat16"]).items() if "large" in k}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(url), save_distributed=True))


def test_checkpoints_of_stock_dcp_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    """What `FileSystemWriter` saved is exported; without a save id, changed files make it anew."""
    url = tmp_path / "run"
    ranks.run(save_stock, url, world_size=2)
    first = ranks.run(cases.export, url, world_size=2)[0]
    check(files_in(url / "hf"), _contiguous(cases.whole_state(["bfloat16"])))
    assert (first.source_format, first.save_id) == ("dcp", None)
    assert ranks.run(cases.export, url, world_size=3)[0].resumed == ("model.safetensors",)
    ranks.run(save_stock, url, world_size=2)
    again = ranks.run(cases.export, url, world_size=2)[0]
    assert not again.resumed
    assert again.fingerprint != first.fingerprint


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torchs_sharded_safetensors_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    """What `HuggingFaceStorageWriter(save_distributed=True)` saved is exported."""
    ranks.run(save_torch_safetensors, tmp_path / "run", world_size=2)
    report = ranks.run(cases.export, tmp_path / "run", world_size=2)[0]
    state = {k: v for k, v in cases.whole_state(["bfloat16"]).items() if "large" in k}
    check(files_in(tmp_path / "run" / "hf"), state)
    assert report.source_format == "dcp_safetensors"


def model(version: int, rows: int = 40) -> dict[str, Any]:
    """Return a small model; versions differ in every tensor."""
    return {"model": {f"w{i}": seeded(100 * version + i, rows, 50) for i in range(6)}}


def test_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    """An export that is complete is only checked: nothing of it is written again."""
    ckpt_storage.save(model(1), tmp_path / "run")
    consolidate(tmp_path / "run", max_file_bytes=20_000)
    folder = tmp_path / "run" / "hf"
    times = {path: path.stat().st_mtime_ns for path in folder.glob("model*")}
    report = consolidate(tmp_path / "run", max_file_bytes=20_000)
    assert (report.read_bytes, report.sent_bytes, report.copied_bytes) == (0, 0, 0)
    assert len(report.resumed) == len(report.files) == 3
    assert {path: path.stat().st_mtime_ns for path in folder.glob("model*")} == times


def test_a_file_that_was_lost_cut_or_damaged_is_made_again(tmp_path: Path) -> None:
    """Of a complete export only what is missing, of another length or of other bytes is written."""
    ckpt_storage.save(model(1), tmp_path / "run")
    consolidate(tmp_path / "run", max_file_bytes=10_000)
    folder = tmp_path / "run" / "hf"
    before = files_in(folder)
    one, two, three, *others = sorted(name for name in before if name.endswith(".safetensors"))
    (folder / one).unlink()
    (folder / two).write_bytes(before[two][:-1])
    (folder / three).write_bytes(before[three][:-1] + bytes([before[three][-1] ^ 1]))
    report = consolidate(tmp_path / "run", max_file_bytes=10_000)
    assert report.resumed == tuple(others)
    assert files_in(folder).keys() == before.keys()
    check(files_in(folder), model(1)["model"])


def test_another_content_replaces_an_export(tmp_path: Path) -> None:
    """After an overwriting save the export goes to other names; the old files are deleted then."""
    url = tmp_path / "run"
    ckpt_storage.save(model(1), url)
    first = consolidate(url)
    ckpt_storage.save(model(2), url, overwrite=True)
    second = consolidate(url)
    files = files_in(url / "hf")
    check(files, model(2)["model"])
    check_report(second, files)
    assert [file.name for file in first.files] == ["model.safetensors"] == list(second.removed)
    (name,) = [file.name for file in second.files]
    assert name == f"model-00001-of-00001-{second.fingerprint[:8]}.safetensors"
    assert json.loads(files[cases.INDEX])["metadata"]["save_id"] == second.save_id


def test_other_options_replace_an_export(tmp_path: Path) -> None:
    """The same save with another dtype and other files is other content, and back again too."""
    url = tmp_path / "run"
    ckpt_storage.save(model(1), url)
    consolidate(url, max_file_bytes=20_000)
    cast = consolidate(url, dtype=torch.bfloat16, max_file_bytes=20_000)
    assert len(cast.removed) == 3
    as_bfloat16 = {name: value.bfloat16() for name, value in model(1)["model"].items()}
    check(files_in(url / "hf"), as_bfloat16)
    back = consolidate(url, max_file_bytes=20_000)
    check(files_in(url / "hf"), model(1)["model"])
    assert all(file.name.count("-") == 3 for file in back.files)


def test_files_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    """A folder with weights that we did not write is refused, untouched; others may be there."""
    ckpt_storage.save(model(1), tmp_path / "run")
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("{}")
    (output / "model.safetensors").write_bytes(b"theirs")
    with pytest.raises(CheckpointExistsError, match="did not export"):
        consolidate(tmp_path / "run", output)
    assert files_in(output) == {"config.json": b"{}", "model.safetensors": b"theirs"}
    (output / "model.safetensors").unlink()
    (output / "tokenizer").mkdir()
    consolidate(tmp_path / "run", output)
    assert (output / "config.json").read_text() == "{}"
    check(files_in(output), model(1)["model"])


@pytest.mark.parametrize("output", ["", "saves", "commits/x"])
def test_the_checkpoints_own_folders_are_no_output(tmp_path: Path, output: str) -> None:
    """An output where the checkpoint's own files lie is refused."""
    ckpt_storage.save(model(1), tmp_path / "run")
    before = files_in(tmp_path / "run")
    with pytest.raises(InvalidInputError, match="own files"):
        consolidate(tmp_path / "run", tmp_path / "run" / output)
    assert files_in(tmp_path / "run") == before


def disagree(rank: int, url: Path) -> None:
    """Consolidate with a function that answers differently."""
    consolidate(url, rename=lambda fqn: f"{rank}.{fqn}")


def test_ranks_that_disagree_are_told_so(ranks: RankPool, tmp_path: Path) -> None:
    """Options that differ between ranks are an error on all of them; nothing is written."""
    ckpt_storage.save(model(1), tmp_path / "run")
    outcomes = ranks.outcomes(disagree, tmp_path / "run", world_size=2)
    assert {type(outcome.error) for outcome in outcomes} == {RankMismatchError}
    assert files_in(tmp_path / "run" / "hf") == {}


def ask_for_the_impossible(rank: int, url: Path) -> None:
    """Give an option that one rank refuses before it meets the others."""
    consolidate(url, max_file_bytes="much" if rank else "5GB")


def test_a_rank_that_refuses_its_options_tells_the_others(ranks: RankPool, tmp_path: Path) -> None:
    """Rank 1's wrong option is an error on rank 0, too, which names it."""
    ckpt_storage.save(model(1), tmp_path / "run")
    zero, one = ranks.outcomes(ask_for_the_impossible, tmp_path / "run", world_size=2)
    assert "much" in str(zero.error)
    assert "ank 1" in str(zero.error)
    assert isinstance(one.error, CheckpointError)


def export_with_progress(rank: int, url: Path) -> tuple[int, list[ProgressEvent]]:
    """Consolidate and note the progress."""
    events: list[ProgressEvent] = []
    report = consolidate(url, progress=events.append)
    return report.rank_bytes[rank], events


def test_progress_adds_up_to_the_ranks_share(ranks: RankPool, tmp_path: Path) -> None:
    """Each rank's callable sees its bytes, phase and save id."""
    ckpt_storage.save(model(1, rows=4000), tmp_path / "run")
    for rank, (share, events) in enumerate(
        ranks.run(export_with_progress, tmp_path / "run", world_size=2)
    ):
        last = events[-1]
        assert (last.phase, last.rank) == ("consolidate", rank)
        assert last.done_bytes == last.total_bytes == share
        assert last.save_id is not None


def test_a_group_of_some_ranks_exports(ranks: RankPool, tmp_path: Path) -> None:
    """`process_group=` of two of three ranks: these two do it, with ranks of that group."""
    ckpt_storage.save(model(1), tmp_path / "run")
    reports = ranks.run(export_in_a_group, tmp_path / "run", world_size=3)
    assert reports[0] is None
    assert reports[1] == reports[2]
    check(files_in(tmp_path / "run" / "hf"), model(1)["model"])


def export_in_a_group(rank: int, url: Path) -> Any:
    """Consolidate on ranks 1 and 2."""
    group = torch.distributed.new_group([1, 2], backend="gloo")
    return consolidate(url, process_group=group) if rank else None
