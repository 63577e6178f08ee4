"""`ckpt-storage doctor URL`: what a storage can do, how fast, and what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import output
from .options import byte_count, common, json_option, storage_options, url_argument
from .output import FOUND, SOUND

if TYPE_CHECKING:
    from ckpt_storage.inspect.doctor import Diagnosis, Measure


_MS_FROM = 0.001
_MARK = {"yes": "yes", "no": "no", "skipped": "-"}


@click.command(short_help="What a storage can do and how fast.")
@url_argument()
@click.option("--size", default="16MiB", show_default=True, help="Bytes of a large object.")
@json_option
@storage_options()
@common
def doctor(
    url: str,
    *,
    size: str,
    as_json: bool,
    storage_options: dict[str, Any] | None,
    timeout: float | None,
) -> int:
    """Try out the storage at URL: abilities, rights, latency, throughput, clock.

    Writes below a name of its own there and removes it. Exits with 1 if checkpoints cannot be
    saved to it and loaded from it.
    """
    from ckpt_storage.inspect.doctor import DEFAULT_TIMEOUT_S, diagnose  # noqa: PLC0415  # called

    found = diagnose(
        url,
        storage_options=storage_options,
        large_bytes=byte_count(size, "--size"),
        timeout=timeout or DEFAULT_TIMEOUT_S,
    )
    if as_json:
        output.emit("doctor", **_as_data(found))
    else:
        _print(found)
    return SOUND if found.ok else FOUND


def _as_data(found: Diagnosis) -> dict[str, object]:
    return {
        "url": found.url,
        "ok": found.ok,
        "kind": found.kind,
        "capabilities": found.capabilities,
        "probes": [
            {"name": probe.name, "outcome": probe.outcome, "detail": probe.detail}
            for probe in found.probes
        ],
        "measures": [
            {
                "name": one.name,
                "count": one.count,
                "median_s": one.median_s,
                "least_s": one.least_s,
                "most_s": one.most_s,
                "bytes": one.size_bytes,
                "bytes_per_s": one.bytes_per_s,
            }
            for one in found.measures
        ],
        "clock_offset_s": found.clock_offset_s,
        "clock_doubt_s": found.clock_doubt_s,
        "advice": [
            {"option": one.option, "value": one.value, "why": one.why} for one in found.advice
        ],
        "leftovers": found.leftovers,
        "seconds": found.seconds,
    }


def _print(found: Diagnosis) -> None:
    output.line(f"{found.url} ({found.kind})")
    output.line()
    output.table(
        ("can it", "", ""),
        [(probe.name, _MARK[probe.outcome], probe.detail) for probe in found.probes],
    )
    output.line()
    output.table(
        ("takes", "median", "from", "to", ""),
        [
            (one.name, _ms(one.median_s), _ms(one.least_s), _ms(one.most_s), _rate(one))
            for one in found.measures
        ],
        right="median from to",
    )
    if found.clock_offset_s is not None:
        output.line()
        output.line(
            f"Its clock is {found.clock_offset_s:+.1f} s from this machine's "
            f"(to {found.clock_doubt_s:.1f} s)."
        )
    output.line()
    if found.advice:
        output.line("What to set:")
        for one in found.advice:
            what = f"{one.option}={one.value}" if one.option else one.value
            output.line(f"- {what}: {one.why}.")
    else:
        output.line("The defaults suit it.")
    for path in found.leftovers:
        output.line(f"Could not remove {path}.")
    output.line(
        "Checkpoints can be saved and loaded here."
        if found.ok
        else "Checkpoints cannot be saved and loaded here."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < _MS_FROM else f"{seconds * 1000:.1f} ms"


def _rate(one: Measure) -> str:
    rate = one.bytes_per_s
    return "" if rate is None else f"{output.size(round(rate))}/s"
