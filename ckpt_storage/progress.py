"""Telling a user how far a phase is: a callable of theirs, or a `tqdm` bar."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .options import Phase, Progress, ProgressEvent

log = logging.getLogger("ckpt_storage")


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

    `with_bar`: whether this rank shows the bar when `progress` is True. A callable or bar that
    raises costs no checkpoint: it is logged once, and not called again in this phase.
    """
    attempt, lock = _harmless(phase), threading.Lock()
    if callable(progress):
        done_bytes = 0
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
                attempt(lambda: callback(event))

        yield report
    elif progress and with_bar:
        bar: Any = None

        def begin() -> None:
            nonlocal bar
            from tqdm.auto import tqdm  # noqa: PLC0415  # costs an import only when a bar is shown

            bar = tqdm(total=total_bytes, desc=phase, unit="B", unit_scale=True)

        def advance(count: int) -> None:
            bar.total = max(bar.total, bar.n + count)
            bar.update(count)

        def report_to_bar(count: int) -> None:
            with lock:
                attempt(lambda: advance(count))

        def end() -> None:
            bar.close()

        attempt(begin)
        try:
            yield report_to_bar
        finally:
            attempt(end)
    else:
        yield lambda _: None


def _harmless(phase: Phase) -> Callable[[Callable[[], object]], None]:
    """Return what calls a function; the first failure is logged, and ends the showing."""
    is_broken = False

    def attempt(show: Callable[[], object]) -> None:
        nonlocal is_broken
        if is_broken:
            return
        try:
            show()
        except Exception as error:  # what a user's callable or a terminal raises
            is_broken = True
            log.warning(
                "The progress of the %s phase is shown no more, as showing it raised %s: %s",
                *(phase, type(error).__name__, error),
                exc_info=error,
            )

    return attempt
