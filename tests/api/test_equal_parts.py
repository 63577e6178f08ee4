"""Storages that take only parts of one length, numbered without a gap, get such parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dcp_cases import seeded
from equal_parts import EqualPartsServer
from fault_tools import Opener

import ckpt_storage
from ckpt_storage.errors import IntegrityError
from ckpt_storage.options import MIB
from ckpt_storage.testing.faults import FaultBackend, Rule

STATE = {
    # Neither the tensors nor the header end at a multiple of a part.
    "a": seeded(1, 3, MIB + 17),
    "b": seeded(2, 1, MIB + 1, dtype=torch.bfloat16),
    "c": seeded(3, 7),
    "d": seeded(4, MIB),
}


@pytest.fixture
def equal_parts() -> Iterator[EqualPartsServer]:
    """A server with that rule, and an empty bucket."""
    with EqualPartsServer() as server:
        server.create_bucket("bkt")
        yield server


def copy(source: str, target: str, **options: Any) -> object:
    return ckpt_storage.copy(source, target, **options)


def converted(source: str, target: str, **options: Any) -> object:
    return ckpt_storage.convert(source, target, to="dcp", **options)


CALLS: dict[str, Callable[..., object]] = {
    "consolidate": ckpt_storage.consolidate,
    "copy": copy,
    "convert": converted,
}


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_parts_have_one_length_and_no_gap(
    equal_parts: EqualPartsServer, monkeypatch: pytest.MonkeyPatch, call: str, *, copies: bool
) -> None:
    """Exports, copies and conversions are sound, whether the storage copies by itself or not."""
    monkeypatch.setattr("ckpt_storage.export.copy_base._COPY_PART_BYTES", MIB)
    options: dict[str, Any] = {"storage_options": equal_parts.storage_options}
    ckpt_storage.save(STATE, "s3://bkt/run", **options)
    equal_parts.part_counts.clear()
    if not copies:
        rule = Rule(action="error", operation="copy_part", kind="unsupported", hit_count=None)
        opener = Opener(lambda _, backend: FaultBackend(backend, [rule]))
        monkeypatch.setattr("ckpt_storage.export.output.open_store", opener)
    CALLS[call]("s3://bkt/run", "s3://bkt/out", **options)
    assert max(equal_parts.part_counts) > 1
    assert ckpt_storage.verify("s3://bkt/out", **options).ok
    with ckpt_storage.open_checkpoint("s3://bkt/out", **options) as found:
        for name, tensor in STATE.items():
            assert torch.equal(found[name].torch(), tensor), name


def test_a_flipped_bit_in_what_is_exported_names_the_tensor(equal_parts: EqualPartsServer) -> None:
    """Exports read and send all bytes, also within a bucket."""
    options: dict[str, Any] = {"storage_options": equal_parts.storage_options}
    ckpt_storage.save({"w": seeded(1, 7001, 1003), "v": seeded(2, 9)}, "s3://bkt/run", **options)
    report = ckpt_storage.consolidate("s3://bkt/run", max_file_bytes="5GB", **options)
    assert report.sent_bytes == report.total_bytes
    assert ckpt_storage.verify("s3://bkt/run", **options).ok
    (shard,) = (key for key in equal_parts.dump("bkt") if key.endswith(".distcp"))
    data = bytearray(equal_parts.dump("bkt")[shard])
    data[len(data) // 2] ^= 1
    equal_parts.put("bkt", shard, bytes(data))
    with pytest.raises(IntegrityError) as caught:
        ckpt_storage.consolidate("s3://bkt/run", "s3://bkt/other", **options)
    assert caught.value.fqn == "w"
