"""Checksums, packed checksums and sealed documents, held against a bit-by-bit CRC-32C."""

from __future__ import annotations

import base64
import math
import struct
import tracemalloc
import zlib
from array import array
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c as reference_crc
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_storage.errors import FormatError, IntegrityError, InvalidInputError
from ckpt_storage.format import columns, documents
from ckpt_storage.format.crc import combine_blocks, crc32c_of
from ckpt_storage.format.fields import Fields

QUICK = settings(max_examples=150, deadline=None)


def slow_crc(data: bytes) -> int:
    """Compute CRC-32C one bit at a time, as RFC 3720 defines it."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def sealed_by_hand(body: bytes) -> bytes:
    """Put `body`, JSON or not, into the envelope of docs/format.md."""
    return b'{"crc32c":"' + f"{slow_crc(body):08x}".encode() + b'","body":' + body + b"}\n"


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_checksum_is_that_of_the_rfc(data: bytes, crc: int) -> None:
    """The vectors of RFC 3720, B.4, and the customary check value come out."""
    assert crc32c_of(data) == crc
    assert slow_crc(data) == crc


@QUICK
@given(data=st.binary(max_size=250), block_bytes=st.integers(1, 20))
def test_block_checksums_combine_to_that_of_the_payload(data: bytes, block_bytes: int) -> None:
    """Few blocks and many, with a whole or a shorter last one, give the payload's checksum."""
    crcs = [slow_crc(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
    for given_crcs in (crcs, array("I", crcs), np.array(crcs, dtype=np.uint32)):
        combined = combine_blocks(given_crcs, block_bytes, len(data))  # type: ignore[arg-type]  # numpy's arrays are no Sequence to mypy
        assert combined == slow_crc(data)
        assert type(combined) is int


@QUICK
@given(crcs=st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_packed_checksums_are_little_endian_words(crcs: list[int]) -> None:
    """Packing writes base64 of little-endian 32-bit words, and unpacking reads it."""
    packed = base64.b64encode(struct.pack(f"<{len(crcs)}I", *crcs)).decode()
    assert columns.pack_crcs(array("I", crcs)) == packed
    assert list(Fields({"crcs": packed}, "x").crcs("crcs", len(crcs))) == crcs


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("AAAAAA==", 0),
        ("AAAAAA==", 2),
        ("AAAAAA", 1),
        ("AAAA AA==", 1),
        ("AAAAAA==\n", 1),
        ("AAAAAé==", 1),
    ],
)
def test_packed_checksums_of_another_number_are_refused(text: str, count: int) -> None:
    """Text of another length, or that is not strictly base64, names the document."""
    with pytest.raises(FormatError, match=r"ranks/rank-00003\.json .*checksums") as caught:
        Fields({"crcs": text}, "ranks/rank-00003.json").crcs("crcs", count)
    assert caught.value.path == "ranks/rank-00003.json"


def test_a_sealed_document_is_one_line_of_compact_json() -> None:
    """Keys keep their order, nothing is escaped that JSON allows, and the envelope is exact."""
    body = b'{"z":[1,2.5,null,true],"a":{"\xc3\xa9":"\\n"}}'
    sealed = documents.seal({"z": [1, 2.5, None, True], "a": {"é": "\n"}})
    assert sealed == sealed_by_hand(body)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, b"bytes", {1}, "\ud800"],
    ids=["nan", "inf", "bytes", "set", "half"],
)
def test_what_json_cannot_say_is_not_sealed(value: object) -> None:
    """A value that a strict JSON reader could not read back is refused before it is written."""
    with pytest.raises(InvalidInputError, match="cannot be written as JSON"):
        documents.seal({"key": value})


def assert_found(damaged: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^commits/00000001\.json ") as caught:
        documents.unseal(damaged, path="commits/00000001.json")
    assert caught.value.path == "commits/00000001.json"


SEALED = sealed_by_hand(b'{"format":"ckpt_storage.commit/1","slot":11}')


@pytest.mark.parametrize("at", range(len(SEALED)))
def test_every_single_fault_in_a_document_is_found(at: int) -> None:
    """At each place: each other byte, each extra byte, a missing byte, a cut, a swap."""
    head, byte, tail = SEALED[:at], SEALED[at : at + 1], SEALED[at + 1 :]
    assert_found(head + tail)
    assert_found(head)
    if tail[:1] not in {b"", byte}:
        assert_found(head + tail[:1] + byte + tail[1:])
    for value in range(256):
        other = bytes([value])
        assert_found(head + other + byte + tail)
        if other != byte:
            assert_found(head + other + tail)


@pytest.mark.parametrize(
    "data",
    [b'{"weight_map": {}}', b"\x80\x02ccollections\nOrderedDict\n", b"PK\x03\x04" * 20, b"\0" * 99],
)
def test_a_file_that_never_was_sealed_is_of_another_format(data: bytes) -> None:
    """Foreign content is not called damaged."""
    with pytest.raises(FormatError, match="is not a document of a checkpoint") as caught:
        documents.unseal(data, path="manifest.json")
    assert caught.value.path == "manifest.json"


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"null",
        b"",
        b"{",
        b"{} {}",
        b'{"a":1,"a":1}',
        b'{"a":[{"b":1,"c":2,"b":3}]}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":"\xff"}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_sound_body_must_be_a_strict_json_object(body: bytes) -> None:
    """A body that was written wrong is a format error although its checksum matches."""
    sealed = b'{"crc32c":"%08x","body":' % reference_crc(body) + body + b"}\n"
    with pytest.raises(FormatError, match="was written with a body") as caught:
        documents.unseal(sealed, path="manifest.json")
    assert caught.value.path == "manifest.json"


PACKED = columns.pack_column([n * n for n in range(100)])
NAMES = columns.pack_names([f"model.layers.{n}.weight" for n in range(200)])


def deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("packed", "change"),
    [
        (PACKED, {"count": 99}),
        (PACKED, {"count": 101}),
        (PACKED, {"count": True}),
        (PACKED, {"count": 1 << 62}),
        (PACKED, {"zlib": "?"}),
        (PACKED, {"zlib": None}),
        (PACKED, {"zlib": deflated(bytes(99))}),
        (PACKED, {"zlib": deflated(bytes(1 << 20))}),
        (PACKED, {"zlib": base64.b64encode(b"no stream").decode()}),
        (NAMES, {"count": 199}),
        (NAMES, {"bytes": 10}),
        (NAMES, {"bytes": 1 << 40}),
        (NAMES, {"zlib": deflated(b"x" * 10), "bytes": 10}),
        (NAMES, {"zlib": deflated(b"[1,2]"), "bytes": 5, "count": 2}),
        (NAMES, {"zlib": deflated(b'["\\ud800"]'), "bytes": 10, "count": 1}),
        (NAMES, {"zlib": deflated(b"[" * 100_000), "bytes": 100_000, "count": 1}),
    ],
)
def test_what_is_packed_otherwise_than_it_says_is_refused(
    packed: dict[str, object], change: dict[str, object]
) -> None:
    """Another number or length, what is no stream at all, and texts that are no list of strings."""
    fields = Fields({"key": packed | change}, "here")
    with pytest.raises(FormatError, match="here"):
        fields.names("key") if packed is NAMES else fields.column("key")


def test_bytes_behind_a_packed_stream_are_refused() -> None:
    """What stands there is no part of the column, so somebody else wrote it."""
    packed: Any = columns.pack_column(range(300))
    assert len(Fields({"key": packed}, "here").column("key")) == 300
    data = base64.b64decode(packed["zlib"]) + b"more"
    packed["zlib"] = base64.b64encode(data).decode()
    with pytest.raises(FormatError, match="packed 'key'"):
        Fields({"key": packed}, "here").column("key")


def test_nothing_is_inflated_beyond_what_was_declared() -> None:
    """A stream of 64 MiB that says it has ten bytes is given up after ten."""
    bomb = zlib.compressobj(9)
    data = b"".join(bomb.compress(bytes(1 << 20)) for _ in range(64)) + bomb.flush()
    body = {"key": {"count": 10, "zlib": base64.b64encode(data).decode()}}
    fields = Fields(body, "here")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            fields.column("key")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert fields.budget.remaining_bytes == columns.MAX_INFLATED_BYTES - 80


def test_all_columns_of_a_document_share_one_limit() -> None:
    """What one takes, the next cannot."""
    fields = Fields({"key": PACKED}, "here", columns.InflateBudget(1000))
    fields.column("key")
    with pytest.raises(FormatError, match="declares more than"):
        fields.column("key")
