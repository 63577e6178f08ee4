"""S3 servers with the rules of single services, and small checkpoints on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest
import torch
from s3_rules import Profile
from s3_server import S3Server

import ckpt_storage
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    CheckpointNotFoundError,
    StorageError,
)
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store.backends.s3 import S3Backend

ALL: tuple[Profile, ...] = get_args(Profile)
PART_BYTES = 64 * 1024
QUICK = RetryPolicy(attempt_count=4, first_delay_s=0.0, max_delay_s=0.0)
_numbers = itertools.count(1)


def state_of(number: int) -> dict[str, Any]:
    """Return a state of two parts and a rest; equal only for one number."""
    return {"weight": torch.arange(40_000) + number, "step": number}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A server of one profile, and one bucket there."""

    server: S3Server
    bucket: str = field(default="")

    def __post_init__(self) -> None:
        self.server.reset_counters()
        # The suffix of names of directory buckets, by which clients know them.
        suffix = "--use1-az1--x-s3" if self.server.profile == "express" else ""
        object.__setattr__(self, "bucket", f"bucket-{next(_numbers):05}{suffix}")
        self.server.create_bucket(self.bucket)

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/run"

    @property
    def options(self) -> dict[str, Any]:
        return {"storage_options": self.server.storage_options, "retry": QUICK}

    @property
    def files(self) -> dict[str, bytes]:
        return self.server.dump(self.bucket)

    def url(self, step: int) -> str:
        return f"{self.root}/step-{step}"

    def save(self, number: int, url: str, **more: Any) -> ckpt_storage.CheckpointInfo:
        """Save a state of that number, with the requests in the same order each time."""
        one_by_one: dict[str, Any] = {"part_bytes": PART_BYTES, "thread_count": 1}
        return ckpt_storage.save(state_of(number), url, **one_by_one, **self.options, **more)

    def loaded(self, url: str) -> int | None:
        """Return which save is loaded, None if there is no checkpoint.

        Without the right to list, what is not there is forbidden, and the error names that right.
        """
        state = state_of(-1)
        try:
            ckpt_storage.load(state, url, **self.options)
        except (CheckpointGoneError, CheckpointInProgressError, CheckpointNotFoundError):
            return None
        except StorageError as error:
            if self.server.profile != "aws-no-list" or "s3:ListBucket" not in message_of(error):
                raise
            return None
        assert torch.equal(state["weight"], state_of(state["step"])["weight"])
        return int(state["step"])

    def verify(self, url: str) -> list[str]:
        return [str(problem) for problem in ckpt_storage.verify(url, **self.options).problems]


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let uploads and copies have parts of any size."""
    small = replace(S3Backend.capabilities, min_part_bytes=1, copy_min_bytes=1)
    monkeypatch.setattr(S3Backend, "capabilities", small)


def running(profile: Profile) -> S3Server:
    """Return a server of a profile, to be started, whose pages and parts are small."""
    return S3Server(profile=profile, min_part_bytes=1, list_page_count=40)


@pytest.fixture(scope="module", params=ALL)
def profile_server(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    """One server for each profile, for all tests of a file."""
    with running(request.param) as server:
        yield server


@pytest.fixture
def service(profile_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A new bucket on the server of a profile."""
    small_parts(monkeypatch)
    profile_server.faults([])
    return Service(server=profile_server)


def message_of(error: CheckpointError) -> str:
    """Return an error's text and what it says to do next."""
    return f"{error} {error.next_step}"
