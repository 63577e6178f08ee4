"""Saves of thousands of ranks, simulated: what is counted, and that it does not multiply."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ckpt_storage.benchmark.scale import ScaleFigures, simulate
from ckpt_storage.benchmark.scaletable import scale_table
from ckpt_storage.cli.app import app
from ckpt_storage.manifest import INLINE_LIMIT_BYTES


def test_a_small_world_is_counted_to_the_last_request() -> None:
    """Chunks, files and reads are those of a real save and a real load of that world."""
    found = simulate(8, 20)
    # 15 tensors cut into 8 chunks each; 5 are whole on one rank.
    assert found.item_count == 15 * 8 + 5
    # Slot 1, the absence of slot 2, the manifest.
    assert found.metadata_read_count == 3
    assert found.metadata_bytes <= found.written_bytes
    # The manifest, .metadata, its copy and the note that it is published, slot 1.
    assert found.write_count == 5
    assert not found.has_stock_metadata
    assert found.gather_s < found.coordinator_s
    assert min(found.report_s, found.metadata_s, found.plan_s, found.places_s) > 0
    assert found.peak_resident_bytes
    assert found.resident_bytes


@pytest.mark.parametrize("limit_bytes", [0, INLINE_LIMIT_BYTES])
def test_documents_are_inlined_where_a_save_inlines_them(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    """What the ranks send of them lies in the manifest, and every reader reads it."""
    monkeypatch.setattr("ckpt_storage.rankreport.INLINE_LIMIT_BYTES", limit_bytes)
    found = simulate(8, 100)
    assert (found.inlined_bytes > 0) == (limit_bytes > 0)
    assert found.inlined_bytes < found.report_bytes
    # There, they are not deflated.
    assert (found.metadata_bytes > 10_000 + 8 * found.inlined_bytes) == (limit_bytes > 0)


def test_the_documents_in_reports_stay_below_their_limit() -> None:
    """Whatever the world: those of few ranks are large, and those of many are left out."""
    worlds = ((4, 2000, True), (64, 600, True), (400, 600, False))
    for rank_count, tensor_count, is_inlined in worlds:
        found = simulate(rank_count, tensor_count)
        assert (found.inlined_bytes > 0) == is_inlined
        assert found.inlined_bytes * rank_count <= INLINE_LIMIT_BYTES


def grown(few: ScaleFigures, many: ScaleFigures) -> dict[str, float]:
    """Return how many times as much more ranks take."""
    return {
        "written": many.written_bytes / few.written_bytes,
        "read": many.metadata_bytes / few.metadata_bytes,
        "report": many.report_bytes / few.report_bytes,
        "items": many.item_count / few.item_count,
    }


def test_nothing_grows_as_tensors_times_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times the ranks, eight times the chunks: not twice the bytes, and reports as large.

    The documents of ranks, which have a limit of their own, are left out of both.
    """
    monkeypatch.setattr("ckpt_storage.rankreport.INLINE_LIMIT_BYTES", 0)
    times = grown(simulate(64, 500), simulate(512, 500))
    assert times["items"] > 7.9
    assert times["written"] < 2.2
    assert times["read"] < 2.2
    assert 0.9 < times["report"] < 1.1


def test_the_measure_sees_what_does_grow() -> None:
    """`.metadata` has an entry for each chunk: with it bytes grow as chunks do."""
    few, many = (simulate(ranks, 60, stock_metadata=True) for ranks in (16, 128))
    assert few.has_stock_metadata
    assert many.has_stock_metadata
    assert grown(few, many)["written"] > 4
    assert grown(few, many)["report"] > 0.9


@pytest.mark.parametrize("sharding", ["rows", "uneven", "hybrid"])
def test_every_sharding_is_committed_and_read(sharding: str) -> None:
    """The real commit refuses a world with holes, so all of them are whole."""
    found = simulate(16, 12, sharding=sharding)  # type: ignore[arg-type]  # one of them
    assert found.item_count == (12 * 2 if sharding == "hybrid" else 12 * 16)


def test_the_table_has_names_units_and_goals() -> None:
    """With as many tensors as the goals are for they stand beside the figures, else not."""
    ended = CliRunner().invoke(app, ["bench", "--simulate-ranks", "4", "--simulate-tensors", "500"])
    assert ended.exit_code == 0, ended.output
    lines = {line.split("  ")[0]: line for line in ended.output.splitlines()}
    assert "kB" in lines["coordinator: bytes written"]
    assert "≤ 5 MB" in lines["coordinator: bytes written"]
    assert "≤ 1 s" in lines["coordinator: all storage work of a save"]
    assert "≤ 0.5 s" in lines["every rank: read_metadata"]
    assert "_" not in "".join(name for name in lines if name != "every rank: read_metadata")
    large = simulate(2, 20)
    head, rows = scale_table([large, large])
    assert len(head) == 3
    assert all(len(row) == 3 for row in rows)


def test_json_has_the_raw_figures() -> None:
    """In bytes and seconds, by the names of the fields."""
    tensors = ("--simulate-tensors", "8")
    ended = CliRunner().invoke(
        app, ["bench", "--json", "--simulate-ranks", "2", "--simulate-ranks", "3", *tensors]
    )
    first, second = json.loads(ended.output)["simulated"]
    assert (first["rank_count"], second["rank_count"]) == (2, 3)
    assert first["metadata_read_count"] == 3
