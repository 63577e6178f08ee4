"""Telling a user how far a phase is: a callable of theirs, or a `tqdm` bar.

Prints nothing unless asked to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .options import Phase, Progress, ProgressEvent


@contextmanager
def reporting(
    progress: Progress,
    *,
    phase: Phase,
    rank: int,
    total_bytes: int,
    save_id: str | None,
    with_bar: bool,
) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the number of bytes just done; callable from any thread.

    `with_bar`: whether this rank shows the bar when `progress` is True. Errors of a user's callable
    reach the transfer that called it.
    """
    if callable(progress):
        done_bytes = 0
        lock = threading.Lock()
        callback = progress

        def report(count: int) -> None:
            nonlocal done_bytes
            with lock:
                done_bytes += count
                event = ProgressEvent(
                    phase=phase,
                    rank=rank,
                    done_bytes=done_bytes,
                    # A plan knows neither the bytes of blobs nor what a planner converts to.
                    total_bytes=max(total_bytes, done_bytes),
                    save_id=save_id,
                )
                callback(event)

        yield report
    elif progress and with_bar:
        from tqdm.auto import tqdm  # noqa: PLC0415  # costs an import only when a bar is shown

        bar: Any = tqdm(total=total_bytes, desc=phase, unit="B", unit_scale=True)
        with bar:
            lock = threading.Lock()

            def advance(count: int) -> None:
                with lock:
                    bar.total = max(bar.total, bar.n + count)
                    bar.update(count)

            yield advance
    else:
        yield lambda _: None
