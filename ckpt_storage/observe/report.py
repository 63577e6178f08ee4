"""Reports the end of an operation: one line in the log, and telemetry."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

from . import telemetry
from .outcome import OUTCOME_LOGGER, Outcome

log = logging.getLogger(OUTCOME_LOGGER)

_DONE = {
    "save": "Saved",
    "load": "Loaded",
    "export": "Exported",
    "copy": "Copied",
    "convert": "Converted",
}


def report(outcome: Outcome) -> None:
    """Log the outcome on the coordinator, or on a rank that lost the coordinator; count it."""
    if outcome.is_coordinator or outcome.coordinator_rank in outcome.failed_ranks:
        level = logging.INFO
        if outcome.error is not None and not outcome.is_superseded:
            level = logging.WARNING
        if log.isEnabledFor(level):
            log.log(level, "%s %s", _sentence(outcome), " ".join(_pairs(outcome)))
    telemetry.record(outcome)


def _sentence(outcome: Outcome) -> str:
    stats, error = outcome.stats, outcome.error
    if error is not None:
        phase = getattr(error, "phase", None) or outcome.timeline.spans[-1].phase
        reason = " ".join(str(error).split()) or type(error).__name__
        noun = "conversion" if outcome.kind == "convert" else outcome.kind
        return f"The {noun} ended in the {phase} phase: {reason}"
    total_s = sum(outcome.timeline.phase_s().values())
    total_bytes = outcome.own.done_bytes if stats is None else stats.total_bytes
    rate = f", {total_bytes / total_s / 1e6:.1f} MB/s" if total_s > 0 else ""
    return f"{_DONE[outcome.kind]} {total_bytes / 1e6:.1f} MB in {total_s:.2f} s{rate}."


def _pairs(outcome: Outcome) -> Iterator[str]:
    """Yield `key=value`; a value with spaces is a JSON string."""
    stats, error, phase_s = outcome.stats, outcome.error, outcome.timeline.phase_s()
    yield f"operation={outcome.kind}"
    yield f"outcome={outcome.name}"
    yield f"url={_quoted(outcome.url)}"
    if outcome.step is not None:
        yield f"step={outcome.step}"
    if outcome.save_id is not None:
        yield f"save_id={outcome.save_id}"
    if error is not None:
        yield f"code={outcome.code}"
        yield f"phase={getattr(error, 'phase', None) or outcome.timeline.spans[-1].phase}"
        if outcome.failed_ranks:
            yield f"failed_ranks={','.join(map(str, outcome.failed_ranks))}"
    yield f"ranks={outcome.world_size}"
    yield f"seconds={sum(phase_s.values()):.3f}"
    yield from (f"{phase}_s={seconds:.3f}" for phase, seconds in phase_s.items())
    if stats is not None:
        yield f"bytes={stats.total_bytes}"
        yield f"retries={stats.retry_count}"
        yield f"slowest_rank={stats.slowest_rank}"
        yield f"slowest_s={stats.slowest_s:.3f}"
        yield f"slowest_share={stats.slowest_share:.2f}"


def _quoted(value: str) -> str:
    is_plain = value.isprintable() and not any(char in value for char in ' "=')
    return value if is_plain else json.dumps(value)
