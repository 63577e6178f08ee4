"""The benchmark: what it computes from measurements, and one small run of every scenario."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_storage.benchmark.compare import Comparison, Contender, take_turns
from ckpt_storage.benchmark.memory import Curve
from ckpt_storage.benchmark.meter import Measurement, Meter, Summary
from ckpt_storage.benchmark.peers import NullWriter, left_out
from ckpt_storage.benchmark.plugins import PluginClock
from ckpt_storage.benchmark.report import (
    COLUMNS,
    as_json_body,
    check_plot,
    heading,
    plot,
    plot_memory,
    rows_of,
)
from ckpt_storage.benchmark.settings import SCENARIOS, BenchSettings
from ckpt_storage.cli.app import app
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.store import Location

_WHOLE_LOADS = {"load", "load, cold cache", "load, rows to columns"}

_FACTS = {
    "storage": "file",
    "latency_s": 0.0,
    "bandwidth_bytes_s": None,
    "rank_count": 2,
    "run_count": 3,
    "pause_s": 0.0,
    "processor_count": 2,
    "load_average": 0.5,
    "torch": "2",
    "python": "3",
}


def _inside(what: str) -> set[str]:
    """Return which contenders of small tensors DCP calls with a plug-in that stores."""
    call = what.partition(" ")[0]
    return {f"ckpt_storage, dcp.{call}", "torch FileSystem", "torch safetensors"}


def _measured(seconds: float, requests: int | None = None) -> Measurement:
    return Measurement(
        seconds=seconds, cpu_s=seconds / 2, extra_bytes=1 << 20, request_count=requests
    )


def _comparison(**changes: object) -> Comparison:
    runs: Mapping[str, list[float]] = {
        "planner": [1.0, 1.0, 1.0],
        "floor": [2.0, 1.5, 9.0],
        "ours": [5.0, 7.0, 4.0],
        "whole": [3.0, 3.0, 3.0],
    }
    summaries = {
        name: Summary.of([_measured(each) for each in seconds]) for name, seconds in runs.items()
    }
    arguments = {"what": "save", "moved_bytes": 10**9, "floor": "floor", "summaries": summaries}
    return Comparison(**{**arguments, **changes})  # type: ignore[arg-type]  # a test's defaults


def test_a_summary_has_median_and_extremes() -> None:
    """A summary holds the median and both extremes, so that one outlier moves one figure."""
    summary = Summary.of([_measured(3.0), _measured(1.0), _measured(10.0, requests=7)])
    assert (summary.median_s, summary.min_s, summary.max_s) == (3.0, 1.0, 10.0)
    assert (summary.request_count, summary.sent_bytes) == (7, None)
    assert summary.seconds == (3.0, 1.0, 10.0)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_contenders_take_turns_and_rest_before_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order rotates, the first round is not measured, and every run comes after a pause."""
    seen: list[str] = []

    def noted(what: str) -> Callable[[], None]:
        return lambda: seen.append(what)

    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append(f"{seconds} s"))
    contenders = [
        Contender(
            name=name, run=noted(name), before=noted(f"before {name}"), after=noted(f"after {name}")
        )
        for name in "ab"
    ]
    found = take_turns(Meter(None), contenders, run_count=2, pause_s=1.5)
    turns = {name: [f"before {name}", "1.5 s", name, f"after {name}"] for name in "ab"}
    assert seen == [step for name in "abbaab" for step in turns[name]]
    assert [len(found[name].seconds) for name in "ab"] == [2, 2]


def test_ratios_are_of_medians_to_the_floor() -> None:
    """A ratio is a contender's median over the floor's."""
    assert _comparison().ratio("ours") == pytest.approx(5.0 / 2.0)
    assert _comparison().ratio("floor") == 1.0


def test_a_second_floor_has_ratios_of_its_own() -> None:
    """Beside a floor with checksums the table shows both ratios; without one the cell is empty."""
    found = _comparison(checked="whole")
    assert found.checked_ratio("ours") == pytest.approx(5.0 / 3.0)
    assert dict(zip(COLUMNS, rows_of(found)[2], strict=True))["x floor+CRC"] == "1.67"
    assert dict(zip(COLUMNS, rows_of(_comparison())[2], strict=True))["x floor+CRC"] == ""


def test_what_is_deducted_is_taken_off_those_that_contain_it() -> None:
    """The planner's time comes off the others, but not off the floor or what plans by itself."""
    found = _comparison(deducted="planner", whole=frozenset({"whole"}))
    assert found.net_s("ours") == pytest.approx(4.0)
    assert found.net_s("whole") == pytest.approx(3.0)
    assert found.net_s("floor") == pytest.approx(2.0)


def test_a_plugin_is_timed_in_all_that_dcp_calls() -> None:
    """Also where it fails, and until what it returns has ended; torch still tells it its rank."""

    class Waits(torch.futures.Future[list[Any]]):
        def wait(self) -> list[Any]:
            if not self.done():
                time.sleep(0.02)
                self.set_result([])
            return []

    class Plugin(NullWriter):
        told: Mapping[str, object] = MappingProxyType({})

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001  # torch's
            self.told = kwargs
            time.sleep(0.02)

        def write_data(self, plan: object, planner: object) -> Waits:  # noqa: ARG002  # torch's
            return Waits()

        def finish(self, metadata: object, results: object) -> None:  # noqa: ARG002  # torch's
            time.sleep(0.02)
            raise KeyError

    clock, plugin = PluginClock(), Plugin()
    assert clock.seconds is None
    assert clock.of(plugin) is plugin
    with pytest.raises(CheckpointException):
        dcp.save({"a": torch.zeros(1)}, storage_writer=plugin, no_dist=True)
    assert clock.seconds is not None
    assert clock.seconds >= 0.06
    assert plugin.told["rank"] == 0


def test_what_moves_nothing_has_neither_ratio_nor_throughput() -> None:
    """A plug-in that does nothing has seconds, and those that are net of the planner's."""
    found = _comparison(deducted="planner", idle=frozenset({"planner", "whole"}))
    assert found.ratio("planner") is None
    assert found.ratio("whole") is None
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in rows_of(found)}
    for name, net_s in (("planner", ""), ("whole", "2.0000")):
        assert (rows[name]["x floor"], rows[name]["GB/s"]) == ("", "")
        assert rows[name]["net s"] == net_s
    assert rows["ours"]["net s"] == "4.0000"
    assert rows["ours"]["x floor"] == "2.00"
    assert dict(zip(COLUMNS, rows_of(_comparison())[2], strict=True))["net s"] == ""


def test_rows_leave_out_what_was_not_measured() -> None:
    """A figure that the storage does not tell is an empty cell, not a zero."""
    row = dict(zip(COLUMNS, rows_of(_comparison())[2], strict=True))
    assert row["who"] == "ours"
    assert row["x floor"] == "2.50"
    assert row["requests"] == ""
    assert row["extra MiB"] == "1"


def test_json_has_every_figure() -> None:
    """The JSON body holds the facts of the run and each contender's figures and ratio."""
    body = json.loads(json.dumps(as_json_body([_comparison()], _FACTS)))
    assert body["rank_count"] == 2
    ours = body["comparisons"][0]["contenders"]["ours"]
    assert (ours["median_s"], ours["floor_ratio"]) == (5.0, 2.5)
    assert ours["seconds"] == [5.0, 7.0, 4.0]


def test_ratios_can_be_computed_from_the_json() -> None:
    """From its medians, and the lists of who contains what is deducted and who moves nothing."""
    found = _comparison(
        deducted="planner",
        whole=frozenset({"whole"}),
        idle=frozenset({"planner"}),
        checked="whole",
    )
    (told,) = json.loads(json.dumps(as_json_body([found], _FACTS)))["comparisons"]
    medians = {name: each["median_s"] for name, each in told["contenders"].items()}
    for name, each in told["contenders"].items():
        is_net = name in {told["deducted"], told["floor"], *told["whole"]}
        assert each["net_s"] == medians[name] - (0 if is_net else medians[told["deducted"]])
        for ratio, floor in (("floor_ratio", "floor"), ("checked_floor_ratio", "checked_floor")):
            expected = None if name in told["idle"] else each["net_s"] / medians[told[floor]]
            assert each[ratio] == expected


@pytest.mark.parametrize("name", ["figures.svg", "figures.png"])
def test_a_plot_is_a_picture_of_its_kind(tmp_path: Path, name: str) -> None:
    """`plot` writes SVG or PNG, by the ending of the name."""
    plot([_comparison(), _comparison(deducted="planner")], str(tmp_path / name), "a run")
    head = (tmp_path / name).read_bytes()[:100]
    assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in head


def test_memory_curves_are_told_and_drawn(tmp_path: Path) -> None:
    """The JSON has the curve of each contender that was looked at; the picture names them."""
    curve = Curve(seconds=(0.0, 0.5), extra_bytes=(0, 3 << 20))
    found = _comparison(curves={"ours": curve})
    told = json.loads(json.dumps(as_json_body([found], _FACTS)))["comparisons"][0]["contenders"]
    assert told["ours"]["memory_curve"] == {"seconds": [0.0, 0.5], "extra_bytes": [0, 3 << 20]}
    assert "memory_curve" not in told["floor"]
    for name in ("memory.svg", "memory.png"):
        plot_memory([found], str(tmp_path / name), "a run")
        head = (tmp_path / name).read_bytes()[:100]
        assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in head


def test_a_plot_of_another_kind_is_refused_before_measuring() -> None:
    """A name that says neither PNG nor SVG is refused with what to write."""
    with pytest.raises(InvalidInputError, match=r"\.png or \.svg"):
        check_plot("figures.pdf")


@pytest.mark.parametrize(
    "wrong",
    [
        {"scenarios": ("save", "fly")},
        {"rank_count": 0},
        {"gib": 0.0},
        {"run_count": 0},
        {"latency_s": -1.0},
        {"pause_s": -1.0},
        {"pause_s": math.inf},
        {"bandwidth_bytes_s": 0.0},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    """Settings that cannot be measured raise `InvalidInputError` before a rank starts."""
    with pytest.raises(InvalidInputError):
        BenchSettings(url="/tmp", **wrong)  # type: ignore[arg-type]  # wrong on purpose  # noqa: S108


def test_the_command_knows_all_scenarios() -> None:
    """The command line offers exactly the scenarios that can be measured."""
    help_text = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in help_text for name in SCENARIOS)


def test_either_a_url_or_a_served_storage() -> None:
    """Neither or both of URL and --serve is an error in the arguments, exit code 2."""
    for arguments in ([], ["/x", "--serve"], ["/x", "--latency-ms", "5"], ["/x", "--gbit-s", "5"]):
        assert CliRunner().invoke(app, ["bench", *arguments]).exit_code == 2


@pytest.mark.timeout(600)
def test_every_scenario_runs_on_a_disk(tmp_path: Path) -> None:
    """All scenarios with all peers on a small state: each has its floor, and nothing is left."""
    arguments = ["bench", str(tmp_path), "--json", "--peers", "--runs", "1", "--gib", "0.004"]
    ended = CliRunner().invoke(app, [*arguments, "--small", "20"])
    assert ended.exit_code == 0, ended.output
    body = json.loads(ended.output[ended.output.index("{\n") :])
    assert len(body["comparisons"]) == len(SCENARIOS)
    for comparison in body["comparisons"]:
        assert comparison["contenders"][comparison["floor"]]["floor_ratio"] == 1.0
        assert any(name.startswith("ckpt_storage") for name in comparison["contenders"])
        # What torch's own call takes when it does no more than the floor: loads of a whole model.
        has_least = "that by torch's dcp.load" in comparison["contenders"]
        assert has_least == (comparison["what"] in _WHOLE_LOADS), comparison["what"]
        # How long DCP's calls are inside a plug-in, where planning takes most of the time.
        inside = {name for name, told in comparison["contenders"].items() if told["plugin_s"]}
        is_small = comparison["what"].endswith("small tensors")
        assert inside == (_inside(comparison["what"]) if is_small else set())
        for name in inside:
            told = comparison["contenders"][name]
            assert 0 < told["plugin_s"] < told["median_s"]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a small run of all scenarios with all peers prints, on the bench's own S3 server."""
    arguments = ["bench", "--serve", "--json", "--peers", "--runs", "1", "--gib", "0.004"]
    picture = tmp_path_factory.mktemp("bench") / "memory.svg"
    arguments += ["--memory-plot", str(picture)]
    ended = CliRunner().invoke(app, [*arguments, "--small", "20"])
    assert ended.exit_code == 0, ended.output
    assert picture.stat().st_size
    body: dict[str, Any] = json.loads(ended.output[ended.output.index("{\n") :])
    return body


@pytest.mark.timeout(600)
def test_every_scenario_runs_on_s3(served: dict[str, Any]) -> None:
    """All but those of a cold cache, each with its floor."""
    scenarios = [name for name in SCENARIOS if not name.endswith("-cold")]
    assert len(served["comparisons"]) == len(scenarios)
    for scenario, comparison in zip(scenarios, served["comparisons"], strict=True):
        contenders = comparison["contenders"]
        assert contenders[comparison["floor"]]["floor_ratio"] == 1.0
        assert any(name.startswith("ckpt_storage") for name in contenders)
        if scenario != "stall":
            assert comparison["floor"].endswith(" by fsspec's S3FileSystem alone")


@pytest.mark.timeout(600)
def test_every_scenario_has_its_peers_on_s3(served: dict[str, Any]) -> None:
    """Also those for which stock has no call of its own; who is missing is named with a reason."""
    names = ["torch Fsspec"]
    if any(line.startswith("the AWS connector") for line in served["left_out"]):
        assert importlib.util.find_spec("s3torchconnector") is None
    else:
        names.append("AWS connector")
    for comparison in served["comparisons"]:
        contenders = list(comparison["contenders"])
        for name in names if "verify" not in comparison["what"] else []:
            if comparison["what"].startswith("trainer") and name != "torch Fsspec":
                continue
            assert [each for each in contenders if each.startswith(name)], comparison["what"]


def test_the_link_of_the_served_storage_can_be_bounded() -> None:
    """No load is faster than the link, and the heading says what that carries."""
    arguments = ["bench", "--serve", "--runs", "1", "--gib", "0.05", "--scenario", "load"]
    ended = CliRunner().invoke(app, [*arguments, "--gbit-s", "2", "--json"])
    assert ended.exit_code == 0, ended.output
    body = json.loads(ended.output[ended.output.index("{\n") :])
    assert body["bandwidth_bytes_s"] == 2.5e8
    assert "a link of 2 Gbit/s" in heading(body)
    (comparison,) = body["comparisons"]
    least_s = comparison["moved_bytes"] / 2.5e8
    assert all(found["min_s"] >= least_s for found in comparison["contenders"].values())


@pytest.mark.timeout(600)
def test_served_storage_counts_requests(served: dict[str, Any]) -> None:
    """A save's and a load's requests and bytes are known, those of all ranks."""
    for comparison, direction in zip(
        served["comparisons"][:2], ("sent_bytes", "received_bytes"), strict=True
    ):
        ours = comparison["contenders"]["ckpt_storage"]
        assert ours["request_count"] > 0
        assert ours[direction] >= comparison["moved_bytes"]


@pytest.mark.timeout(600)
def test_a_slice_takes_one_request_or_three(served: dict[str, Any]) -> None:
    """One of a checkpoint that is open; opened anew two more, for the slots."""
    (found,) = [one for one in served["comparisons"] if one["what"].startswith("one slice")]
    for name, count in (("already open", 1), ("opened anew", 3)):
        for plane in ("", ", fsspec"):
            told = found["contenders"][f"ckpt_storage, {name}{plane}"]
            assert told["request_count"] == count


@pytest.mark.timeout(600)
def test_memory_is_looked_at_in_a_run_of_its_own(served: dict[str, Any]) -> None:
    """Of every contender, from nothing on, in order of time."""
    for comparison in served["comparisons"]:
        for told in comparison["contenders"].values():
            curve = told["memory_curve"]
            assert (curve["seconds"][0], curve["extra_bytes"][0]) == (0.0, 0)
            assert len(curve["seconds"]) == len(curve["extra_bytes"]) > 1
            assert curve["seconds"] == sorted(curve["seconds"])


def test_a_missing_peer_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an empty place in a table is not taken for a contender that lost."""
    location = Location.of("s3://bucket/run")
    monkeypatch.setitem(sys.modules, "s3torchconnector", None)
    monkeypatch.setattr("ckpt_storage.benchmark.peers.has_safetensors", lambda: False)
    assert [reason.rpartition(": ")[2] for reason in left_out(location)] == [
        "s3torchconnector cannot be imported",
        "safetensors is not installed",
    ]
