"""Spans and metrics for OpenTelemetry.

Nothing is imported here unless the program has imported `opentelemetry` itself: without an SDK,
which a program sets up that wants telemetry, spans and metrics have no receiver.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ckpt_storage._version import __version__

from .outcome import Outcome

if TYPE_CHECKING:
    from opentelemetry import metrics

log = logging.getLogger("ckpt_storage")

_NAME = "ckpt_storage"


class _Background:
    """What background saves of this process hold at present."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may save in the middle of a save
        self.save_count = 0
        self.staged_bytes = 0


_background = _Background()


class _Instruments:
    def __init__(self) -> None:
        from opentelemetry import metrics, trace  # noqa: PLC0415  # only where it is used already

        self.trace = trace
        self.tracer = trace.get_tracer(_NAME, __version__)
        meter = metrics.get_meter(_NAME, __version__)
        observation = metrics.Observation

        def observe_saves(_options: object) -> Iterable[metrics.Observation]:
            return [observation(_background.save_count)]

        def observe_bytes(_options: object) -> Iterable[metrics.Observation]:
            return [observation(_background.staged_bytes)]

        self.duration = meter.create_histogram(
            "ckpt_storage.operation.duration", "s", "Seconds of a save, load, export or copy."
        )
        self.phase_duration = meter.create_histogram(
            "ckpt_storage.phase.duration", "s", "Seconds of one phase of an operation."
        )
        self.moved = meter.create_counter(
            "ckpt_storage.bytes", "By", "Bytes that this rank wrote or read."
        )
        self.retries = meter.create_counter(
            "ckpt_storage.retries", "{request}", "Storage requests that this rank repeated."
        )
        self.failures = meter.create_counter(
            "ckpt_storage.failures", "{operation}", "Operations that ended with an error, by code."
        )
        meter.create_observable_up_down_counter(
            "ckpt_storage.background.saves",
            [observe_saves],
            "{save}",
            "Background saves that have not ended.",
        )
        meter.create_observable_up_down_counter(
            "ckpt_storage.staged.bytes",
            [observe_bytes],
            "By",
            "Host memory that holds copies of states of background saves.",
        )


_made: list[_Instruments] = []


def _instruments() -> _Instruments | None:
    if not _made and "opentelemetry" in sys.modules:
        try:
            _made.append(_Instruments())
        except ImportError:  # another package's namespace, without the API
            return None
    return _made[0] if _made else None


def record(outcome: Outcome) -> None:
    """Record the end of an operation on this rank. What an exporter raises is logged."""
    instruments = _instruments()
    if instruments is None:
        return
    try:
        _record(instruments, outcome)
    except Exception:
        log.exception("Telemetry of the %s was not recorded.", outcome.kind)


def _record(instruments: _Instruments, outcome: Outcome) -> None:
    own, spans = outcome.own, outcome.timeline.spans
    operation: dict[str, Any] = {"operation": outcome.kind, "outcome": outcome.name}
    instruments.duration.record(sum(own.phase_s.values()), operation)
    for phase, seconds in own.phase_s.items():
        instruments.phase_duration.record(seconds, {**operation, "phase": phase})
    instruments.moved.add(own.done_bytes, {"operation": outcome.kind})
    instruments.retries.add(own.retry_count, {"operation": outcome.kind})
    if outcome.error is not None:
        instruments.failures.add(1, {"operation": outcome.kind, "code": outcome.code})

    # Monotonic instants as nanoseconds since 1970.
    offset_ns = time.time_ns() - round(time.monotonic() * 1e9)
    trace = instruments.trace
    attributes = {
        "ckpt_storage.url": outcome.url,
        "ckpt_storage.step": outcome.step,
        "ckpt_storage.save_id": outcome.save_id,
        "ckpt_storage.rank": own.rank,
        "ckpt_storage.ranks": outcome.world_size,
        "ckpt_storage.bytes": own.done_bytes,
        "ckpt_storage.retries": own.retry_count,
        "error.type": outcome.code or None,
    }
    span = instruments.tracer.start_span(
        f"ckpt_storage.{outcome.kind}",
        start_time=offset_ns + round(outcome.timeline.start_s * 1e9),
        attributes={name: value for name, value in attributes.items() if value is not None},
    )
    context = trace.set_span_in_context(span)
    for each in spans:
        child = instruments.tracer.start_span(
            f"ckpt_storage.{outcome.kind}.{each.phase}",
            context=context,
            start_time=offset_ns + round(each.start_s * 1e9),
        )
        child.end(offset_ns + round(each.end_s * 1e9))
    if outcome.error is not None:
        span.record_exception(outcome.error)
        span.set_status(trace.StatusCode.ERROR, str(outcome.error))
    span.end(offset_ns + round(spans[-1].end_s * 1e9))


def note_background(save_count: int, staged_bytes: int) -> None:
    """Add to what background saves of this process hold; negative numbers take away."""
    with _background.lock:
        _background.save_count += save_count
        _background.staged_bytes += staged_bytes
    _instruments()
