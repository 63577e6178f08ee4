"""Progress of a phase, shown by a user's callable or a `tqdm` bar."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from .options import Phase, Progress, ProgressEvent

log = logging.getLogger("ckpt_storage")


@contextmanager
def reporting(
    progress: Progress,
    phase: Phase,
    rank: int,
    total_bytes: int,
    save_id: str | None,
    *,
    with_bar: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of bytes just done; thread-safe.

    `with_bar`: whether this rank shows the bar if `progress` is True. An error of the callable or
    the bar fails no checkpoint: it is logged once, and there are no more calls in this phase.
    """
    if not callable(progress) and not (progress and with_bar):
        yield lambda _: None
        return
    bar = _Bar()
    show = progress if callable(progress) else bar
    event = ProgressEvent(phase=phase, rank=rank, total_bytes=total_bytes, save_id=save_id)
    lock, is_broken = threading.Lock(), False

    def attempt(shows: Callable[[], object]) -> None:
        nonlocal is_broken
        if is_broken:
            return
        try:
            shows()
        except Exception as error:  # what a user's callable or a terminal raises
            is_broken = True
            log.warning(
                "Progress of the %s phase is no longer shown, as showing it raised %s: %s",
                *(phase, type(error).__name__, error),
                exc_info=error,
            )

    def report(count: int) -> None:
        nonlocal event
        with lock:
            done = event.done_bytes + count
            # A plan has neither the sizes of blobs nor the dtypes that a planner converts to.
            event = replace(event, done_bytes=done, total_bytes=max(total_bytes, done))
            attempt(lambda: show(event))

    try:
        yield report
    finally:
        attempt(bar.close)


class _Bar:
    """A `tqdm` bar that appears with the first event."""

    _bar: Any = None

    def __call__(self, event: ProgressEvent) -> None:
        from tqdm.auto import tqdm  # noqa: PLC0415  # costs an import only when a bar is shown

        if self._bar is None:
            self._bar = tqdm(desc=event.phase, total=event.total_bytes, unit="B", unit_scale=True)
        self._bar.total = event.total_bytes
        self._bar.update(event.done_bytes - self._bar.n)

    def close(self) -> None:
        """End the bar, if it is shown."""
        if self._bar is not None:
            self._bar.close()
