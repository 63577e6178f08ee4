"""Which function measures which scenario.

Called by `run` on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from .bench import Bench
from .compare import Comparison
from .exports import measure_export, measure_save_export
from .loads import (
    measure_cold_load,
    measure_cold_verify,
    measure_load,
    measure_partial,
    measure_verify,
)
from .saves import measure_save, measure_stall
from .settings import ScenarioName
from .small import measure_small_load, measure_small_save

MEASURE: Mapping[ScenarioName, Callable[[Bench], Comparison]] = {
    "save": measure_save,
    "load": measure_load,
    "load-cold": measure_cold_load,
    "reshard": functools.partial(
        measure_load, what="load, rows to columns", target_sharding="columns"
    ),
    "partial": measure_partial,
    "verify": measure_verify,
    "verify-cold": measure_cold_verify,
    "export": measure_export,
    "save-export": measure_save_export,
    "stall": measure_stall,
    "small-save": measure_small_save,
    "small-load": measure_small_load,
}
"""The function that measures each scenario."""
