"""The example over Redis passes the suite of all backends, and a job saves to it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from servers import Running
from suites import SuiteAt

import ckpt_storage

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

pytest.importorskip("redis")

from redis_backend import RedisBackend  # from the folder above

ckpt_storage.register_backend("redis", RedisBackend)


class TestRedis(SuiteAt):
    """A whole backend of one's own, over a network."""

    at = "redis_root"


def test_a_run_is_kept_in_redis(redis_root: Running) -> None:
    """Saved, overwritten, listed, loaded, checked, deleted."""
    for step in (1, 2):
        ckpt_storage.save({"step": step}, f"{redis_root.url}/latest", overwrite=True)
    state = {"step": 0}
    ckpt_storage.load(state, f"{redis_root.url}/latest")
    assert state == {"step": 2}
    assert ckpt_storage.verify(f"{redis_root.url}/latest").ok
    assert [info.name for info in ckpt_storage.list_checkpoints(redis_root.url)] == ["latest"]
    ckpt_storage.delete(f"{redis_root.url}/latest")
    assert ckpt_storage.list_checkpoints(redis_root.url) == []
