"""Claims of units: whoever comes first checks, and nothing is taken for claimed that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage import namelessmemory
from ckpt_storage.namelessmemory import host_identity, make_memory, open_memory
from ckpt_storage.unitclaims import UnitClaims, units_of

needs_memory = pytest.mark.skipif(not host_identity(), reason="needs Linux's memory without a name")

MIB = 1 << 20
KEY = ("w", (0,))


def test_a_unit_is_claimed_once() -> None:
    """By one rank; the next one, and the same one again, is told not to check."""
    units = units_of("file", KEY, "inode", MIB)
    with closing(UnitClaims(10)) as claims:
        assert [claims.claim(units, at * MIB) for at in (0, 1, 0, 1, 2)] == [
            *(True, True),
            *(False, False),
            True,
        ]


@needs_memory
def test_mates_claim_in_one_table() -> None:
    """What any claimed is claimed for all that joined, before or after."""
    units = units_of("file", KEY, "inode", MIB)
    with closing(UnitClaims(10)) as first, closing(UnitClaims(1000)) as second:
        assert first.claim(units, 0)
        second.join(first.offer)
        assert not second.claim(units, 0)
        assert second.claim(units, MIB)
        assert not first.claim(units, MIB)
        assert first.offer != second.offer


def test_joining_oneself_or_nobody_changes_nothing() -> None:
    """The first of a host is told its own table; one alone none."""
    units = units_of("file", KEY, "inode", MIB)
    with closing(UnitClaims(10)) as claims:
        assert claims.claim(units, 0)
        claims.join(claims.offer)
        claims.join(None)
        assert not claims.claim(units, 0)
        assert claims.claim(units, MIB)


@pytest.mark.parametrize("trouble", ["no process", "another memory", "no offer at all"])
def test_a_table_that_cannot_be_reached_leaves_ones_own(trouble: str) -> None:
    """Then all is checked here."""
    units = units_of("file", KEY, "inode", MIB)
    with closing(UnitClaims(10)) as mate, closing(UnitClaims(10)) as claims:
        mate.claim(units, 0)
        offer = mate.offer or json.dumps({"pid": 1, "fd": 1, "name": "n", "size_bytes": 4096})
        wrong: dict[str, Any] = json.loads(offer)
        if trouble == "no process":
            wrong["pid"] = 2**30
        elif trouble == "another memory":
            wrong["name"] = "another"
        else:
            wrong["fd"] = -1
        claims.join(json.dumps(wrong))
        assert claims.claim(units, 0)


def test_without_such_memory_ranks_check_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to offer, and each claims in its own table."""

    def refused(*_: object) -> int:
        raise OSError("no memory")

    monkeypatch.setattr("ckpt_storage.unitclaims.make_memory", refused)
    with closing(UnitClaims(10)) as claims:
        assert claims.offer is None
        assert claims.claim(7, 0)
        assert not claims.claim(7, 0)


TEXTS = st.sampled_from(["a", "b", "a b", "a', 'b"])


@given(
    st.lists(
        st.tuples(
            st.tuples(
                TEXTS,
                st.tuples(TEXTS, st.lists(st.integers(0, 3), max_size=2).map(tuple)),
                TEXTS,
                st.sampled_from([MIB, 4 * MIB]),
            ),
            st.integers(0, 10**13),
        ),
        unique=True,
        max_size=200,
    )
)
def test_no_unit_is_taken_for_another(
    units: list[tuple[tuple[str, tuple[str, tuple[int, ...]], str, int], int]],
) -> None:
    """Of whatever path, chunk, file, length and place: all that were never claimed are free."""
    with closing(UnitClaims(1)) as claims:
        for chunk, start in units:
            assert claims.claim(units_of(*chunk), start)


@pytest.mark.parametrize("step", [64, 4096, MIB, 4 * MIB])
def test_claims_are_remembered(step: int) -> None:
    """Whatever lies between the units' beginnings: nearly all are known when they come again."""
    count = 3000
    units = units_of("file", KEY, "inode", MIB)
    with closing(UnitClaims(count)) as claims:
        for at in range(count):
            claims.claim(units, 64 + at * step)
        again = sum(claims.claim(units, 64 + at * step) for at in range(count))
        assert again < count / 100


def test_a_table_that_is_full_forgets() -> None:
    """More units than were expected are checked twice, none not at all."""
    units = units_of("file", KEY, "inode", MIB)
    with closing(UnitClaims(1)) as claims:
        assert all(claims.claim(units, at * MIB) for at in range(5000))
        again = sum(claims.claim(units, at * MIB) for at in range(5000))
        assert again > 4000


_MATE = """
import sys
from ckpt_storage.unitclaims import UnitClaims, units_of
claims = UnitClaims(1)
claims.join(sys.argv[1])
units = units_of("file", ("w", (0,)), "inode", 1 << 20)
print(sum(claims.claim(units, at << 20) for at in range(int(sys.argv[2]))))
"""


@needs_memory
def test_processes_divide_the_units() -> None:
    """All that run at the same time: together they claim each unit, and few of them twice."""
    count = 20_000
    with closing(UnitClaims(count)) as claims:
        assert claims.offer is not None
        command = [sys.executable, "-c", _MATE, claims.offer, str(count)]
        mates = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        own = [int(mate.communicate(timeout=120)[0]) for mate in mates]
    assert [mate.returncode for mate in mates] == [0, 0, 0]
    assert count <= sum(own) < 1.5 * count


@needs_memory
def test_nothing_is_left_open() -> None:
    """Neither by who made the table, once it is closed, nor by who joined it."""

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    first, second = UnitClaims(10), UnitClaims(10)
    second.join(first.offer)
    assert descriptors() <= before + 4
    for claims in (first, second):
        claims.close()
        claims.close()
    assert first.claim(1, 0)
    assert not second.claim(1, 0)
    del first, second, claims
    assert descriptors() == before


@needs_memory
def test_memory_keeps_its_length_and_is_known_by_its_name() -> None:
    """Nobody can shorten it beneath who looks at it."""
    fd = make_memory("ckpt_storage-test", 8192)
    try:
        memory = open_memory(pid=os.getpid(), fd=fd, name="ckpt_storage-test", size_bytes=8192)
        memory[5] = 1
        assert os.pread(fd, 1, 5) == b"\1"
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 0)
        with pytest.raises(ValueError, match="its memory is"):
            open_memory(pid=os.getpid(), fd=fd, name="another", size_bytes=8192)
    finally:
        os.close(fd)


@needs_memory
def test_memory_that_cannot_be_had_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, and no descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))

    def refused(_fd: int) -> None:
        raise PermissionError("no seals")

    monkeypatch.setattr(namelessmemory, "_seal", refused)
    with pytest.raises(PermissionError):
        make_memory("ckpt_storage-test", 4096)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
