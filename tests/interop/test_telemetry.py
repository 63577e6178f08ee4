"""Spans and metrics, as OpenTelemetry's SDK receives them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dcp_cases import seeded
from integration_tools import missing
from limits import HANG_S
from saver_cases import quick_saver

import ckpt_storage
from ckpt_storage import AsyncSaver

if importlib.util.find_spec("opentelemetry.sdk") is None:
    missing("opentelemetry-sdk is not installed: pip install -e '.[interop]'")

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

STATE: dict[str, Any] = {"weight": seeded(1, 100_000)}


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    """What is exported; a process has one provider for good."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def reader() -> InMemoryMetricReader:
    made = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider(metric_readers=[made]))
    return made


def points_of(reader: InMemoryMetricReader) -> dict[tuple[str, str, str], Any]:
    """Return points by instrument, operation, and phase or code."""
    data = reader.get_metrics_data()
    assert data is not None
    found = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    given = dict(point.attributes or {})
                    what = str(given.get("phase", given.get("code", "")))
                    found[metric.name, str(given.get("operation", "")), what] = point
    return found


def family(exporter: InMemorySpanExporter, name: str) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Return the one span of a name, and its children."""
    every = exporter.get_finished_spans()
    (span,) = [one for one in every if one.name == name]
    context = span.get_span_context()
    assert context is not None
    return span, [one for one in every if one.parent and one.parent.span_id == context.span_id]


@pytest.mark.parametrize("mode", ["save", "thread", "process"])
def test_a_save_is_a_span_with_its_phases(
    mode: Any, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """It lies below the span of the program that called it, also in the background."""
    spans.clear()
    with trace.get_tracer("training").start_as_current_span("step") as step:
        if mode == "save":
            info = ckpt_storage.save(STATE, tmp_path / "step-7", step=7)
        else:
            with quick_saver(mode) as saver:
                info = saver.save(STATE, tmp_path / "step-7", step=7).result()
    span, children = family(spans, "ckpt_storage.save")
    given = dict(span.attributes or {})
    assert given["ckpt_storage.url"] == info.url
    assert given["ckpt_storage.save_id"] == info.save_id
    assert (given["ckpt_storage.step"], given["ckpt_storage.rank"]) == (7, 0)
    assert int(str(given["ckpt_storage.bytes"])) >= 400_000
    assert span.parent is not None
    assert span.parent.span_id == step.get_span_context().span_id
    phases = {"plan", "write", "commit"} | ({"stage"} if mode != "save" else set())
    assert {child.name for child in children} == {f"ckpt_storage.save.{each}" for each in phases}
    assert span.start_time is not None
    assert span.end_time is not None
    for child in children:
        assert child.start_time is not None
        assert child.end_time is not None
        assert span.start_time <= child.start_time <= child.end_time <= span.end_time


def test_a_failed_save_is_a_span_with_its_error(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """Its status, its code, and the exception as an event."""
    ckpt_storage.save(STATE, tmp_path / "step-7")
    spans.clear()
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(STATE, tmp_path / "step-7")
    span, _ = family(spans, "ckpt_storage.save")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "exists"
    assert [event.name for event in span.events] == ["exception"]


def test_metrics_have_durations_bytes_and_failures(
    tmp_path: Path, reader: InMemoryMetricReader
) -> None:
    """By operation and phase; errors by code."""
    ckpt_storage.save(STATE, tmp_path / "step-7")
    ckpt_storage.load({"weight": seeded(2, 100_000)}, tmp_path / "step-7")
    before = points_of(reader)
    ckpt_storage.save(STATE, tmp_path / "step-8")
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(STATE, tmp_path / "step-8")
    points = points_of(reader)
    key = ("ckpt_storage.bytes", "save", "")
    assert points[key].value - before[key].value >= 400_000
    assert points["ckpt_storage.bytes", "load", ""].value >= 400_000
    assert points["ckpt_storage.failures", "save", "exists"].value >= 1
    for phase in ("plan", "write", "commit"):
        assert points["ckpt_storage.phase.duration", "save", phase].sum > 0
    assert points["ckpt_storage.operation.duration", "load", ""].count >= 1
    assert points["ckpt_storage.retries", "save", ""].value >= 0


def test_metrics_show_background_saves_in_flight(
    tmp_path: Path, reader: InMemoryMetricReader
) -> None:
    """How many, and the bytes of their copies; none once they have ended."""
    with AsyncSaver(mode="thread") as saver:
        handle = saver.save(STATE, tmp_path / "step-1", progress=lambda _: seen.append(look()))
        seen: list[tuple[int, int]] = []

        def look() -> tuple[int, int]:
            points = points_of(reader)
            saves = points["ckpt_storage.background.saves", "", ""].value
            return saves, points["ckpt_storage.staged.bytes", "", ""].value

        handle.result()
    assert [count for count, _ in seen] == [1] * len(seen)
    assert min(size for _, size in seen) >= 400_000
    assert look() == (0, 0)


def test_nothing_is_imported_for_a_program_that_does_not_use_it(tmp_path: Path) -> None:
    """A save leaves `opentelemetry` alone, although it is installed."""
    code = (
        "import sys, torch, ckpt_storage; "
        f"ckpt_storage.save({{'w': torch.ones(2)}}, {str(tmp_path / 'step-1')!r}); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert done.stdout.strip() == "[]"
