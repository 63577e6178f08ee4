"""What a copy that was cut or overtaken leaves, and what the next one believes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from copy_cases import attempt, files_below, flip, head_of, save, save_files, state_of
from fault_tools import Faulty

import ckpt_storage.export.output
from ckpt_storage import consolidate, convert, copy, verify
from ckpt_storage.export import plan as export_plan
from ckpt_storage.format.names import INDEX_NAME
from ckpt_storage.options import MIB
from ckpt_storage.store import Location, open_store
from ckpt_storage.testing.faults import Rule, SimulatedCrash
from ckpt_storage.testing.s3_server import S3Server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A committed checkpoint in four shard files."""
    torch.save(state_of(1), tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "src", to="ckpt_storage", max_file_bytes=1000)
    assert len(list((tmp_path / "src").rglob("*.distcp"))) >= 3
    return tmp_path / "src"


def test_half_written_files_are_sent_again(source: Path, tmp_path: Path, faulty: Faulty) -> None:
    """A file whose name is there but whose bytes are not right is not believed."""
    faulty.rules = [Rule(action="crash_before", operation="put_absent", path="commits")]
    assert isinstance(attempt(source, tmp_path / "dst" / "x"), SimulatedCrash)
    faulty.rules = ()
    first, second, *_ = sorted((tmp_path / "dst" / "x").rglob("*.distcp"))
    first.write_bytes(first.read_bytes()[:-1])
    flip(second, -1)
    report = copy(source, tmp_path / "dst" / "x")
    sent = {call.path for call in faulty.calls() if call.operation == "complete_upload"}
    assert sent == {str(one.relative_to(tmp_path / "dst" / "x")) for one in (first, second)}
    assert report.kept_count >= 1
    assert verify(tmp_path / "dst" / "x").ok


def test_an_export_whose_copy_was_cut_goes_over_with_the_next(
    source: Path, tmp_path: Path, faulty: Faulty
) -> None:
    """Cut anywhere it is no export of the copy, or the whole one, and the next call ends it."""
    consolidate(source)
    (source / "hf" / "config.json").write_text("{}")
    copy(source, tmp_path / "dst" / "dry")
    calls = faulty.calls()
    assert INDEX_NAME in {call.path for call in calls}
    # A copy has the same bytes, but for who holds the folder.
    files = files_below(source / "hf").items()
    whole = {path: data for path, data in files if not path.endswith("job.json")}
    assert len(calls) > 15
    for number, call in enumerate(calls):
        root = tmp_path / "dst" / f"{number}"
        faulty.target = f"file://{root / 'hf'}"
        copy(source, root)
        shutil.rmtree(root / "hf")
        faulty.rules = [Rule(action="crash_before", skip_count=number)]
        assert copy(source, root).failed_exports, call
        faulty.rules = ()
        found = verify(root)
        assert found.ok or "still being written" in found.problems[0].message, call
        assert copy(source, root).exports == ("hf",), call
        assert files_below(root / "hf").items() >= whole.items(), call
        assert verify(root).ok, call


def test_copies_within_s3_cut_anywhere_go_on(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the storage copying by itself: nothing commits half, no upload stays open."""
    monkeypatch.setattr(export_plan, "_COPY_BYTES", 6 * MIB)
    options = server.storage_options
    save(
        {"a": torch.arange(3 * MIB, dtype=torch.float32)},
        "s3://bkt/src",
        storage_options=options,
    )
    faulty = Faulty("s3://bkt/dst")
    monkeypatch.setattr(ckpt_storage.export.output, "open_store", faulty)

    def stored(prefix: str) -> dict[str, bytes]:
        return {
            key.removeprefix(prefix): data
            for key, data in server.dump("bkt").items()
            if key.startswith(prefix)
        }

    whole = save_files(stored("src/"))
    new_id = head_of(stored("src/"))
    copy("s3://bkt/src", "s3://bkt/dst-dry", storage_options=options)
    calls = faulty.calls()
    assert [call.operation for call in calls].count("copy_part") == 2
    for number, call in enumerate(calls):
        root = f"dst-{number}"
        faulty.rules = [Rule(action="crash_after", skip_count=number)]
        attempt("s3://bkt/src", f"s3://bkt/{root}", storage_options=options)
        faulty.rules = ()
        found = stored(f"{root}/")
        at = f"{number} ({call.operation} {call.path})"
        if head_of(found) is not None:
            assert save_files(found) == whole, at
        copy("s3://bkt/src", f"s3://bkt/{root}", storage_options=options)
        found = stored(f"{root}/")
        assert (head_of(found), save_files(found)) == (new_id, whole), at
        plain = open_store(Location.of(f"s3://bkt/{root}", options))
        assert plain.abort_uploads("") == 0, f"{at}: an upload stayed open"
        plain.delete_folder("saves")
        plain.close()
    faulty.close()
