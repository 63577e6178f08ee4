"""What a benchmark is asked to measure, as values.

Knows the names of scenarios and contenders; does nothing. Called by `run` and the command line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ckpt_storage.errors import InvalidInputError

ScenarioName = Literal[
    "save",
    "load",
    "load-cold",
    "reshard",
    "partial",
    "verify",
    "verify-cold",
    "export",
    "save-export",
    "stall",
    "small-save",
    "small-load",
]

SCENARIOS: tuple[ScenarioName, ...] = get_args(ScenarioName)
"""All of them, in the order in which they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """One run of `ckpt-storage bench`; pickles, so that ranks can be given it.

    url: a folder on the storage to measure; the bench works in a new folder below it.
    gib: size of the whole state, in GiB; run_count: measured runs of each contender, after one
    that warms up. pause_s: seconds to wait before each run, so that all of them find the machine
    alike. peers: measure stock torch and the
    AWS connector too, where they can reach the storage. latency_s: seconds that the bench's own
    S3 server waits before it serves a request. bandwidth_bytes_s: what that server's link carries
    each way, None where nothing bounds it. memory_curves: look at the memory of a
    first run of every contender, which is not timed.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    scenarios: Sequence[ScenarioName] = ("save", "load")
    rank_count: int = 2
    gib: float = 1.2
    small_count: int = 5_500
    run_count: int = 5
    pause_s: float = 0.0
    sharding: Literal["rows", "columns"] = "rows"
    peers: bool = False
    memory_limit_bytes: int | None = None
    latency_s: float = 0.0
    bandwidth_bytes_s: float | None = None
    memory_curves: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.scenarios if name not in SCENARIOS]
        if unknown:
            raise InvalidInputError(
                f"There is no scenario {unknown[0]!r}.",
                next_step=f"Choose among {', '.join(SCENARIOS)}.",
            )
        if min(self.rank_count, self.run_count, self.small_count) < 1 or self.gib <= 0:
            raise InvalidInputError(
                "A benchmark needs at least one rank, one run, one tensor and some bytes.",
                next_step="Give positive numbers.",
            )
        for name, seconds in (("latency_s", self.latency_s), ("pause_s", self.pause_s)):
            if not 0 <= seconds < math.inf:
                raise InvalidInputError(
                    f"{name} is {seconds}.", next_step="Give 0 or more seconds."
                )
        if self.bandwidth_bytes_s is not None and self.bandwidth_bytes_s <= 0:
            raise InvalidInputError(
                f"bandwidth_bytes_s is {self.bandwidth_bytes_s}.",
                next_step="Give bytes a second, more than 0, or None.",
            )
