"""Tests whose body runs on every rank of a pool."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import RankPool

Body = Callable[..., None]


def on_ranks(*world_sizes: int) -> Callable[[Body], Body]:
    """Make a test of a function that all ranks run: two, or one of several numbers in turn.

    Its parameters are fixtures and values that can be pickled, and `rank` if it wants it.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def test(ranks: RankPool, world_size: int, **arguments: Any) -> None:
            job = _run, body.__module__, body.__name__, arguments
            ranks.run(*job, world_size=world_size)

        names = [name for name in inspect.signature(body).parameters if name != "rank"]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, kind) for name in ("ranks", "world_size", *names)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest's
        made: Body = pytest.mark.parametrize("world_size", world_sizes or [2])(test)
        return made

    return decorate


def _run(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    body = getattr(importlib.import_module(module), name).__wrapped__
    wanted = {"rank": rank} if "rank" in inspect.signature(body).parameters else {}
    body(**arguments, **wanted)


def gathered(value: object = None) -> list[Any]:
    """Return the values of all ranks, in order of rank, once all have called this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
