"""What to set for a storage that was tried out: options by name, with the reason.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt_storage.options import DEFAULT_PART_BYTES, MIB, REMOTE_THREADS, Timeouts
from ckpt_storage.store.base import Capabilities

_FAR_S = 0.05
"""A round trip from which more requests in flight pay."""

_MOST_THREADS = 32
_SLOW_SYNC_S = 0.05
_CLOCK_S = 5 * 60.0
_SLOW_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to set, or to see to where `option` is empty."""

    option: str
    value: str
    why: str


def advise(
    capabilities: Capabilities,
    *,
    working: Mapping[str, bool],
    medians_s: Mapping[str, float],
    large_bytes: int,
    clock_offset_s: float | None,
) -> Iterator[Advice]:
    """Yield what to set; nothing where the defaults suit.

    `working` says of each probe whether it succeeded; `medians_s` has seconds by measure.
    """
    yield from _of_promises(capabilities, working)
    yield from _of_rights(working)
    if clock_offset_s is not None and abs(clock_offset_s) > _CLOCK_S:
        side = "behind" if clock_offset_s > 0 else "ahead of"
        yield Advice(
            option="",
            value="set this machine's clock",
            why=f"it is {abs(clock_offset_s):.0f} s {side} the storage's; object stores refuse "
            "requests signed so, and retention by age would be surprising",
        )
    yield from _of_speed(capabilities, medians_s, large_bytes)


def _of_promises(capabilities: Capabilities, working: Mapping[str, bool]) -> Iterator[Advice]:
    if not capabilities.shared:
        yield Advice(
            option="",
            value="save from one process",
            why="other processes do not see what is stored here",
        )
    if working.get("write") and not working.get("exclusive create", True):
        yield Advice(
            option="commit_url",
            value="the native URL of the same place, if this is a mount of an object store",
            why="names cannot be created exclusively: two jobs that save to one id at the same "
            "time are not told apart, so let one job write",
        )
    if not capabilities.atomic_replace:
        yield Advice(
            option="",
            value="read with ckpt_storage",
            why="replacing a file is not atomic: .metadata, which torch's own readers need, can be "
            "missing for an instant during a save",
        )


def _of_rights(working: Mapping[str, bool]) -> Iterator[Advice]:
    missing = {
        "list": "list_checkpoints, retention and the cleaning up of dead saves need to list",
        "delete": "superseded and dead saves stay, and the storage fills, without the right to "
        "delete",
        "list uploads": "parts of uploads that died stay and are paid for; have a lifecycle rule "
        "abort them",
    }
    for name, why in missing.items():
        if not working.get(name, True) and working.get("write"):
            yield Advice(option="", value=f"grant the right to {name}", why=why)


def _of_speed(
    capabilities: Capabilities, medians_s: Mapping[str, float], large_bytes: int
) -> Iterator[Advice]:
    get_s, put_s = medians_s.get("small get"), medians_s.get("small put")
    if capabilities.is_remote and get_s is not None and get_s > _FAR_S:
        threads = min(
            _MOST_THREADS, 2 * REMOTE_THREADS if get_s < 2 * _FAR_S else 4 * REMOTE_THREADS
        )
        yield Advice(
            option="thread_count",
            value=str(threads),
            why=f"a request takes {get_s * 1000:.0f} ms before its first byte; the default is "
            f"{REMOTE_THREADS} in flight",
        )
    large_s = medians_s.get("large put")
    if large_s is None:
        return
    part_s = large_s * DEFAULT_PART_BYTES / large_bytes
    if capabilities.is_remote and put_s is not None and put_s > _SLOW_SHARE * part_s:
        yield Advice(
            option="part_bytes",
            value=str(64 * MIB),
            why=f"a request costs {put_s * 1000:.0f} ms beside {part_s * 1000:.0f} ms for the "
            f"bytes of a part of {DEFAULT_PART_BYTES // MIB} MiB; memory_limit_bytes must hold "
            "two parts for each thread",
        )
    limit_s = Timeouts().request
    if part_s * REMOTE_THREADS > limit_s / 4:
        yield Advice(
            option="timeout",
            value=f"Timeouts(request={round(part_s * REMOTE_THREADS * 4)})",
            why=f"a part takes {part_s:.1f} s alone, and a request is given up after "
            f"{limit_s:.0f} s",
        )
    if not capabilities.is_remote and put_s is not None and put_s > _SLOW_SYNC_S:
        yield Advice(
            option="",
            value="keep sync_files=True and save less often, or in the background",
            why=f"making a small file durable takes {put_s * 1000:.0f} ms here",
        )
