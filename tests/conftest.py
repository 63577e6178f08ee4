"""Fixtures that several test files share: storage servers, started once and ended for sure.

A server that is missing skips its tests, loudly; where the environment variable CI is set it
fails them.
"""

from __future__ import annotations

import atexit
import gc
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import servers
from hypothesis import HealthCheck, settings
from limits import JOB_S
from rank_pool import RankPool
from s3_server import S3Server
from server_fixtures import new_root, session_server
from servers import Running

pytest_plugins = ["commit_tools", "fault_tools", "real_roots", "remote_tools"]

servers.isolate_credentials()

# By default an example fails that takes longer than 200 ms, as any may on a busy machine.
settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Let pytest's closing line be the last: fsspec's clients keep sockets to the very end."""
    # Once for what is collected now, and once for interpreter exit, where the last to register
    # is the first to run.
    warnings.simplefilter("ignore", ResourceWarning)
    atexit.register(warnings.simplefilter, "ignore", ResourceWarning)


_TIERS = {"docs", "faults", "interop", "profiles", "ranks", "realservers", "servers"}
"""The folders that plain `pytest` leaves out; their tests bear a marker of that name."""


_LONG = (
    "test_example",
    "test_fault_matrix",
    "test_output_faults",
    "test_integration_torchtitan",
    "test_damage_everywhere",
    "test_prune_attack",
    "test_integration_examples",
    "test_integration_transformers",
    "test_saver_workers",
    "test_dcp_saves",
    "test_consolidate",
)
"""Files that take minutes: they begin first, so that no worker ends long after the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of each tier, and let long files begin; each test states its fact."""
    for item in items:
        if item.name.startswith("test_") and not getattr(item, "obj", item).__doc__:
            raise pytest.UsageError(f"{item.nodeid} needs a docstring: the fact that it holds")
        if item.path.parent.name in _TIERS:
            item.add_marker(item.path.parent.name)
    rank = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Let the collector pass over what was imported so far, a million objects that stay."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """Keep the threads of this process on one core: they hand over to one another all the time."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    known = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for cores in ({sorted(known)[number % len(known)]}, known):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
        if cores is not known:
            yield


moto_server = session_server("moto", servers.moto)
gcs_server = session_server("gcs", servers.fake_gcs)
azure_server = session_server("azure", servers.azurite)
webdav_server = session_server("webdav", servers.webdav)
sftp_server = session_server("sftp", servers.sftp)


def _moto_bucket(running: Running, name: str) -> str:
    assert servers.ask(running.url, "PUT", f"/{name}")[0] == 200
    return f"s3://{name}/run"


def _gcs_bucket(running: Running, name: str) -> str:
    request = f'{{"name": "{name}"}}'.encode(), {"Content-Type": "application/json"}
    assert servers.ask(running.url, "POST", "/storage/v1/b?project=test", *request)[0] == 200
    return f"gs://{name}/run"


def _azure_container(running: Running, name: str) -> str:
    from azure.storage.blob import BlobServiceClient  # noqa: PLC0415  # not on every machine

    connection = running.storage_options["connection_string"]
    with BlobServiceClient.from_connection_string(connection) as client:
        client.create_container(name)
    return f"az://{name}/run"


moto_root = new_root("moto", _moto_bucket)
gcs_root = new_root("gcs", _gcs_bucket)
azure_root = new_root("azure", _azure_container)
webdav_root = new_root("webdav", lambda _, name: f"webdav://{name}/run")
sftp_root = new_root("sftp", lambda running, name: f"{running.url}/{name}/run")


@pytest.fixture
def server() -> Iterator[S3Server]:
    """An S3 server in this process, with two buckets."""
    with S3Server() as running:
        running.create_bucket("bkt")
        running.create_bucket("bucket")
        yield running


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where the system has it, so that nothing waits for a disk."""
    memory = Path("/dev/shm")  # noqa: S108  # TemporaryDirectory chooses a name of its own there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four live processes for jobs of one to four ranks; they start with the first job."""
    with RankPool(4, timeout_s=JOB_S) as pool:
        yield pool
