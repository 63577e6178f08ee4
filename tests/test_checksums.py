"""Both libraries of `checksums`: equal results, the choice between them, the interpreter's lock."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crc32c import crc32c as reference_crc
from fastcrc.crc32 import iscsi
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage import checksums, integrity

if TYPE_CHECKING:
    from typing_extensions import Buffer

BLOCK = 64 << 10
DATA = Random(5).randbytes(5 * BLOCK + 17)
LENGTHS = st.integers(0, len(DATA)) | st.sampled_from(
    [near + by for near in (13 << 10, 16 << 10, BLOCK, 2 * BLOCK) for by in (-1, 0, 1)]
)
QUICK = settings(max_examples=150, deadline=None)

FAST: dict[str, checksums.Digest | None] = {"crc32c": None, "fastcrc": iscsi}


@pytest.fixture(params=FAST)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every long buffer be hashed by the library of this name."""
    name: str = request.param
    use(monkeypatch, FAST[name])
    return name


@pytest.fixture
def _untried() -> Iterator[None]:
    checksums._faster.cache_clear()  # noqa: SLF001  # what a fresh process has not done yet
    yield
    checksums._faster.cache_clear()  # noqa: SLF001  # the next test has the real answer again


def use(monkeypatch: pytest.MonkeyPatch, fast: checksums.Digest | None) -> None:
    """Make `fast` the choice, whatever is faster here."""
    monkeypatch.setattr(checksums, "_faster", lambda: fast)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fastcrc be imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastcrc"]:
        monkeypatch.delitem(sys.modules, name)


class Absent(MetaPathFinder):
    """Says that fastcrc is not installed, as the import system would."""

    def find_spec(self, fullname: str, *_: object) -> None:
        """Refuse one name; know nothing of others."""
        if fullname == "fastcrc":
            raise ModuleNotFoundError("No module named 'fastcrc'", name=fullname)


class Recorder:
    """fastcrc's function that also notes how many bytes it is given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, data: Buffer, crc: int) -> int:
        """Do what fastcrc does."""
        self.lengths.append(memoryview(data).nbytes)
        return iscsi(data, crc)


@QUICK
@given(
    length=LENGTHS,
    offset=st.integers(0, 100),
    crc=st.integers(0, 0xFFFFFFFF),
    name=st.sampled_from(sorted(FAST)),
)
def test_any_buffer_has_one_checksum(length: int, offset: int, crc: int, name: str) -> None:
    """Whichever library is taken, length, place in memory and beginning lead to the same sum."""
    part = memoryview(DATA)[offset : offset + length]
    with pytest.MonkeyPatch.context() as patch:
        use(patch, FAST[name])
        assert checksums.crc32c_of(part, crc) == reference_crc(part, crc)


@QUICK
@given(
    length=LENGTHS,
    offset=st.integers(0, 100),
    block_bytes=st.sampled_from([BLOCK, 16 << 10, 20_000, 100_001]) | st.integers(9000, 1 << 18),
    name=st.sampled_from(sorted(FAST)),
)
def test_every_block_has_its_checksum(
    length: int, offset: int, block_bytes: int, name: str
) -> None:
    """Blocks of any length, the last one shorter, have the checksums of their bytes."""
    part = memoryview(DATA)[offset : offset + length]
    with pytest.MonkeyPatch.context() as patch:
        use(patch, FAST[name])
        assert checksums.crcs_of_blocks(part, block_bytes) == [
            reference_crc(part[at : at + block_bytes]) for at in range(0, len(part), block_bytes)
        ]


def test_a_payload_in_pieces_has_the_blocks_of_the_whole(library: str) -> None:
    """Pieces that end within blocks, within fastcrc's pieces and between them change nothing."""
    pieces = [DATA[:100], DATA[100:70_000], b"", DATA[70_000 : 3 * BLOCK], DATA[3 * BLOCK :]]
    assert list(integrity.block_crcs(pieces, BLOCK)) == [
        reference_crc(DATA[at : at + BLOCK]) for at in range(0, len(DATA), BLOCK)
    ], library


@pytest.mark.parametrize("wrong", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 20_000, len(DATA) - 1])
def test_the_first_wrong_block_is_found(library: str, wrong: int) -> None:
    """Of two damaged blocks the first is told; sound ones, from any block on, are accepted."""
    crcs = array("I", [1, 2]) + integrity.block_crcs([DATA], BLOCK)
    assert integrity.first_wrong_block(memoryview(DATA), BLOCK, crcs, 2) is None, library
    damaged = bytearray(DATA)
    damaged[wrong] ^= 1
    damaged[-1] ^= 2
    found = integrity.first_wrong_block(memoryview(damaged), BLOCK, crcs, 2)
    assert found == wrong // BLOCK * BLOCK


def test_any_contiguous_buffer_is_taken(library: str, tmp_path: Path) -> None:
    """Read-only, mapped, of other elements and dimensions, empty: what counts are the bytes."""
    values = np.frombuffer(DATA[:120_000], dtype=np.float32).reshape(3, 100, 100)
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert checksums.crc32c_of(mapped) == reference_crc(DATA), library
    buffers = (values.data, memoryview(array("d", values.ravel())), memoryview(DATA).cast("c"))
    for buffer in buffers:
        assert checksums.crc32c_of(buffer) == reference_crc(buffer.tobytes())
    for nothing in (b"", np.empty((0, 7)).data, memoryview(b"")):
        assert checksums.crc32c_of(nothing, 5) == 5


def test_a_strided_buffer_is_refused(library: str) -> None:
    """A long view whose bytes are not consecutive is an error, not a wrong checksum."""
    strided = memoryview(DATA)[::2]
    with pytest.raises((BufferError, TypeError)):
        checksums.crc32c_of(strided)
    with pytest.raises((BufferError, TypeError)):
        checksums.crcs_of_blocks(strided, BLOCK)
    assert library


class Lock:
    """What `checksums` thinks of the interpreter's lock: whatever a test wants it to."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, *, is_wanted: bool, late_calls: Iterable[bool] = ()) -> None:
        self.is_wanted = is_wanted
        self._late_calls = iter(late_calls)

    def came_late(self, begin_s: float, size_bytes: int) -> bool:
        """Say so of the calls that were to be late."""
        assert begin_s <= time.perf_counter()
        assert size_bytes > 0
        self.is_wanted = next(self._late_calls, False)
        return self.is_wanted


@pytest.mark.parametrize("block_bytes", [BLOCK, 16 << 10, 1 << 20])
def test_fastcrc_gets_less_than_makes_it_release_the_lock_that_others_want(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    """Pieces stay below the 16 KiB that its README names; only beyond 16 MiB all goes at once."""
    recorder = Recorder()
    use(monkeypatch, recorder)
    monkeypatch.setattr(checksums, "_lock", Lock(is_wanted=True))
    checksums.crcs_of_blocks(memoryview(bytes(3 << 20)), block_bytes)
    checksums.crc32c_of(bytes(16 << 20))
    assert 0 < max(recorder.lengths) < 16 << 10
    recorder.lengths.clear()
    checksums.crc32c_of(bytes((16 << 20) + 1))
    checksums.crcs_of_blocks(memoryview(bytes((17 << 20) + 1)), 17 << 20)
    assert recorder.lengths == [(16 << 20) + 1, 17 << 20]


def test_while_nobody_wants_the_lock_each_block_is_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As is each buffer that is hashed alone."""
    recorder = Recorder()
    use(monkeypatch, recorder)
    monkeypatch.setattr(checksums, "_lock", Lock(is_wanted=False))
    checksums.crcs_of_blocks(memoryview(bytes(9 * BLOCK + 5)), BLOCK)
    checksums.crc32c_of(bytes(1 << 20))
    assert recorder.lengths == [*[BLOCK] * 9, 5, 1 << 20]


@pytest.mark.parametrize("block_bytes", [None, 1 << 20, 4 << 20, 16 << 20])
def test_a_wait_for_the_lock_shows_whatever_the_length(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int | None
) -> None:
    """One of 5 ms in a call is noticed, and calls are short from then on."""
    recorder, data = Recorder(), memoryview(bytes(16 << 20))
    waited_s = 0.0

    def waiting(part: Buffer, crc: int) -> int:
        nonlocal waited_s
        # The library itself takes no time here.
        waited_s += 5e-3 if memoryview(part).nbytes >= 16 << 10 else 0.0
        return recorder(part, crc)

    use(monkeypatch, waiting)
    monkeypatch.setattr(checksums, "_lock", checksums._Lock(lambda: waited_s))  # noqa: SLF001
    if block_bytes is None:
        checksums.crc32c_of(data)
    else:
        checksums.crcs_of_blocks(data, block_bytes)
    assert recorder.lengths[0] >= BLOCK
    assert max(recorder.lengths[1:]) < 16 << 10


@QUICK
@given(late=st.lists(st.booleans(), max_size=7), length=st.integers(0, len(DATA)))
def test_a_call_that_came_late_changes_no_checksum(late: list[bool], length: int) -> None:
    """The blocks behind it are hashed by pieces; all have the checksums of their bytes."""
    part = memoryview(DATA)[:length]
    recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        use(patch, recorder)
        patch.setattr(checksums, "_lock", Lock(is_wanted=False, late_calls=late))
        patch.setattr(checksums, "_LOOK_BYTES", 20_000)
        found = checksums.crcs_of_blocks(part, 20_000)
    starts = range(0, length, 20_000)
    assert found == [reference_crc(part[at : at + 20_000]) for at in starts]
    if True in late[: len(starts) - 1] and length >= 20_000:
        assert max(recorder.lengths[late.index(True) + 1 :], default=0) < 16 << 10


def test_a_busy_thread_shows_and_is_remembered_for_a_while() -> None:
    """A call that took far longer than its bytes do counts, and nothing else does."""
    lock = checksums._Lock()  # noqa: SLF001  # what the calls share
    now_s = time.perf_counter()
    assert not lock.is_wanted
    assert not lock.came_late(now_s + 100, BLOCK)
    # So many bytes take so long.
    assert not lock.came_late(now_s - 1, 10 << 30)
    assert not lock.is_wanted
    assert lock.came_late(now_s - 1, BLOCK)
    assert lock.is_wanted
    lock._wanted_until_s = time.perf_counter()  # noqa: SLF001  # a second later
    assert not lock.is_wanted


def test_no_other_thread_runs_while_blocks_are_hashed_by_pieces(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither library gives the interpreter's lock away, which may take 5 ms to come back.

    The other thread cannot ask for the lock here, and takes it whenever it is given away.
    """
    monkeypatch.setattr(checksums, "_lock", Lock(is_wanted=True))
    steps, is_done = 0, threading.Event()

    def step() -> None:
        nonlocal steps
        while not is_done.is_set():
            steps += 1
            time.sleep(0)

    other = threading.Thread(target=step, daemon=True)
    view = memoryview(bytes(64 << 20))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        other.start()
        end_s = time.monotonic() + 60
        while steps < 3 and time.monotonic() < end_s:
            time.sleep(0.001)
        before = steps
        checksums.crcs_of_blocks(view, BLOCK)
        checksums.crc32c_of(view[: 16 << 20])
        after = steps
    finally:
        sys.setswitchinterval(interval_s)
        is_done.set()
    other.join(60)
    assert before >= 3
    assert after == before, library


@pytest.mark.usefixtures("_untried")
def test_without_fastcrc_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The extra is optional: where it is not installed, crc32c does all."""
    forget(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    assert checksums.crc32c_of(DATA) == reference_crc(DATA)
    assert checksums._faster() is None  # noqa: SLF001  # the choice itself
    assert caplog.messages == []


@pytest.mark.parametrize(
    "source", ["import no_such_part", "raise OSError('no such symbol')", "raise RuntimeError('x')"]
)
@pytest.mark.usefixtures("_untried")
def test_a_broken_fastcrc_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    source: str,
) -> None:
    """One that is installed and cannot be imported leaves a warning, and crc32c does all."""
    package = tmp_path / "fastcrc"
    package.mkdir()
    (package / "__init__.py").write_text(f"{source}\n", encoding="ascii")
    forget(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        assert checksums.crc32c_of(DATA) == reference_crc(DATA)
    assert checksums._faster() is None  # noqa: SLF001  # the choice itself
    assert len(caplog.messages) == 1
    assert "fastcrc cannot be imported" in caplog.text


class Clock:
    """Time that passes only while one of the functions it made runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def lasting(self, digest: Callable[..., int], took_s: Iterable[float]) -> Callable[..., int]:
        """Return `digest` with calls that last so long, one after another."""
        each_s = iter(took_s)

        def run(*arguments: object) -> int:
            self.now_s += next(each_s)
            return digest(*arguments)

        return run

    def finds_worth_it(self, monkeypatch: pytest.MonkeyPatch, fast: checksums.Digest) -> bool:
        """Hold `fast` against a crc32c that takes a second a block."""
        plain = self.lasting(reference_crc, itertools.repeat(1.0))
        monkeypatch.setattr(checksums, "_crc32c", plain)
        return checksums.is_worth_it(fast, clock=lambda: self.now_s)


@pytest.mark.parametrize(
    ("piece_s", "is_taken"), [(0.1, True), (0.18, True), (0.2, False), (1.0, False)]
)
def test_the_trial_decides(
    monkeypatch: pytest.MonkeyPatch, *, piece_s: float, is_taken: bool
) -> None:
    """It is taken if the five pieces of a block take it clearly less than crc32c a block."""
    clock = Clock()
    fast = clock.lasting(iscsi, itertools.repeat(piece_s))
    assert clock.finds_worth_it(monkeypatch, fast) is is_taken


def test_slow_moments_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of several trials counts: a process that stands still now and then tells nothing."""
    clock = Clock()
    # A trial has some 20 pieces; the seven of them stand still twice, once of it in the last.
    fast = clock.lasting(iscsi, itertools.cycle([0.1] * 78 + [100.0]))
    assert clock.finds_worth_it(monkeypatch, fast)


def test_one_that_computes_something_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However fast it is; the log names it."""
    clock = Clock()
    assert clock.finds_worth_it(monkeypatch, iscsi)
    assert not clock.finds_worth_it(monkeypatch, lambda data, crc: iscsi(data, crc) ^ 1)
    assert "computes another CRC-32C" in caplog.text


def test_fastcrc_is_loaded_by_the_first_long_buffer() -> None:
    """Importing the package and hashing documents does not load it."""
    code = """
import sys
from ckpt_storage import integrity
integrity.crc32c_of(bytes(1000)), integrity.block_crcs([bytes(100_000)], 1000)
assert "fastcrc" not in sys.modules
integrity.block_crcs([bytes(100_000)], 65536)
assert "fastcrc.crc32" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
