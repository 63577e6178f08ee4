"""What users write, as the pages show: backends, an export format; credentials."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, finish
from limits import HANG_S
from servers import AZURE_KEY, Running
from suites import SuiteAt

import ckpt_storage
from ckpt_storage.store import Backend, Location, Settings
from ckpt_storage.store.store import Store

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from npy_export import export_npy  # from the folder above
from obstore_reads import ObstoreBackend  # from the folder above
from sqlite_backend import SqliteBackend  # from the folder above

ckpt_storage.register_backend("sqlite", SqliteBackend)


class TestSqlite(SuiteAt):
    """A whole backend of one's own, over a database."""

    at = "database"

    @pytest.fixture
    def database(self, tmp_path: Path) -> Running:
        return Running(url=f"sqlite://{tmp_path}/runs.db/step-1")


def test_the_tests_on_the_page_run_as_they_stand(tmp_path: Path) -> None:
    """A file with the page's block alone, beside the example, passes the suite."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python no-run: a file of tests\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_page.py").write_text(block, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    environment = {"PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
    code, output = finish(command, tmp_path, environment)
    assert code == 0, output
    assert re.search(r"^\d\d passed", output, re.MULTILINE), output


def test_a_worker_says_where_a_backend_must_be_registered() -> None:
    """What a script registers for itself, below `__main__`, no worker process knows."""
    ckpt_storage.register_backend("homemade", SqliteBackend, replace=True)
    with (
        ckpt_storage.AsyncSaver(mode="process", timeout=HANG_S) as saver,
        pytest.raises(ckpt_storage.CheckpointError, match="worker process") as caught,
    ):
        saver.save({"step": 1}, "homemade:///tmp/runs.db/step-1").result(120)
    assert "ckpt_storage.backends" in str(caught.value)
    assert "Did you mean" not in str(caught.value)


def test_checkpoints_go_to_a_registered_backend(tmp_path: Path) -> None:
    """A URL of its scheme is all that saving, listing, loading and checking need."""
    root = f"sqlite://{tmp_path}/runs.db"
    state = {"w": torch.arange(100.0)}
    ckpt_storage.save(state, f"{root}/step-1")
    fresh = {"w": torch.zeros(100)}
    ckpt_storage.load(fresh, f"{root}/step-1")
    assert torch.equal(fresh["w"], state["w"])
    assert [info.name for info in ckpt_storage.list_checkpoints(root)] == ["step-1"]
    assert ckpt_storage.verify(f"{root}/step-1").ok
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(state, f"{root}/step-1")


class TestObstore(SuiteAt):
    """S3 with large reads and puts through obstore."""

    many, at = 30, "moto_root"

    def opened(self, location: Location, settings: Settings) -> Backend:
        return ObstoreBackend(location, settings)

    def test_large_objects_go_through_obstore(self, store: Store, backend: Backend) -> None:
        """What it cannot get is told by the backend that it derives from."""
        data = bytes(range(256)) * 8192
        store.put("saves/a/x", data)
        target = bytearray(len(data))
        store.read("saves/a/x", [(0, memoryview(target))])
        assert target == data
        assert "_obstore" in vars(backend)
        with pytest.raises(ckpt_storage.StorageError, match="NoSuchKey") as caught:
            store.read("saves/a/y", [(0, memoryview(target))])
        assert caught.value.kind == "not-found"


def test_an_export_format_of_ones_own(tmp_path: Path) -> None:
    """The files of the example are what NumPy reads, and nothing else lies beside them."""
    model = {"w": torch.rand(300, 7), "b": torch.arange(5)}
    ckpt_storage.save({"model": model, "step": 3}, tmp_path / "checkpoint")
    source, target = str(tmp_path / "checkpoint"), str(tmp_path / "out")
    assert sorted(export_npy(source, target)) == ["model.b.npy", "model.w.npy"]
    assert np.array_equal(np.load(tmp_path / "out" / "model.w.npy"), model["w"].numpy())
    assert np.array_equal(np.load(tmp_path / "out" / "model.b.npy"), model["b"].numpy())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.b.npy",
        "model.w.npy",
    ]
    for fqn, tensor in {"half": torch.ones(2, dtype=torch.bfloat16), "../out": model["w"]}.items():
        ckpt_storage.save({fqn: tensor}, source, overwrite=True)
        with pytest.raises(ckpt_storage.CheckpointError, match=re.escape(fqn)):
            export_npy(source, str(tmp_path / "refused"))


PLAIN = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "NO_GCE_CHECK": "true",
    "NO_PROXY": "127.0.0.1,localhost",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": str(ROOT),
}


S3_KEY = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret-of-moto"}


Way = tuple[Mapping[str, str], Mapping[str, str]]


def example(
    url: str, options: Mapping[str, str], environment: Mapping[str, str], home: Path
) -> tuple[int, str]:
    """Run the example with `environment` and nothing of ours; return its code and its output."""
    words = [f"{key}={value}" for key, value in options.items()]
    code, output = run_script(
        EXAMPLES / "credentials.py",
        url,
        *words,
        folder=home,
        environment={**PLAIN, "HOME": str(home), **environment},
    )
    assert "test-secret-of-moto" not in output
    assert AZURE_KEY not in output
    return code, output


def test_the_example_on_s3(moto_server: Running, moto_root: Running, tmp_path: Path) -> None:
    """A secret comes from a variable, not from the command line; a profile is enough."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        f"[profile training]\nregion = us-east-1\nendpoint_url = {moto_server.url}\n"
        "aws_access_key_id = test\naws_secret_access_key = test-secret-of-moto\n"
    )
    place = {"endpoint_url": moto_server.url}
    mine = {"MY_KEY": "test", "MY_SECRET": "test-secret-of-moto"}
    region = {"AWS_ENDPOINT_URL": moto_server.url, "AWS_DEFAULT_REGION": "us-east-1"}
    ways: list[Way] = [
        ({"key": "env:MY_KEY", "secret": "env:MY_SECRET", **place}, mine),
        ({"profile": "training"}, {}),
        ({}, {"AWS_PROFILE": "training"}),
        ({}, {**S3_KEY, **region}),
    ]
    all_work(moto_root, ways, tmp_path)
    code, output = example(moto_root.url, place, {}, tmp_path)
    assert code == 1
    # The log line of the failed save comes first.
    assert "\ncredentials: there are none" in output, output
    code, output = example(moto_root.url, {"secret": "env:MY_SECRET"}, {}, tmp_path)
    assert (code, output) == (1, "secret: the environment has no MY_SECRET\n")


def all_work(root: Running, ways: Sequence[Way], home: Path) -> None:
    for options, environment in ways:
        code, output = example(root.url, options, environment, home)
        assert code == 0, output
        assert f"saved {root.url}/step-3 and loaded the same" in output


def test_the_example_on_google_and_azure(
    gcs_root: Running, azure_root: Running, tmp_path: Path
) -> None:
    """By options, one of which may name a variable, and by the environment."""
    address = gcs_root.storage_options["endpoint_url"]
    plain = {"token": "anon", "project": "test"}
    emulator = {"STORAGE_EMULATOR_HOST": address}
    all_work(gcs_root, [({**plain, "endpoint_url": address}, {}), (plain, emulator)], tmp_path)
    connection = azure_root.storage_options["connection_string"]
    named = {"connection_string": "env:MY_CONNECTION"}
    known = {"AZURE_STORAGE_CONNECTION_STRING": connection}
    all_work(azure_root, [(named, {"MY_CONNECTION": connection}), ({}, known)], tmp_path)
