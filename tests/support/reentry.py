"""Calls that are interrupted before each of their lines, as a signal handler interrupts them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupt_each_line(
    call: Callable[[], object], handler: Callable[[], object], limit_s: float = 10.0
) -> None:
    """Make a call, and `handler`'s before each line of it, in one thread.

    Raises what either raises, or `AssertionError` if they have not ended after `limit_s`.
    """
    line_count, errors = 0, list[BaseException]()

    def trace(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal line_count
        if event == "line":
            line_count += 1
            handler()
        return trace

    def run() -> None:
        sys.settrace(trace)
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"The call waits for itself after {line_count} lines."
    if errors:
        raise errors[0]
    assert line_count
