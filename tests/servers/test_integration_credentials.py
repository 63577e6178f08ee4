"""Credentials the ways docs/storages.md lists them, against the emulators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from integration_tools import EXAMPLES, ROOT
from servers import AZURE_KEY, Running
from warm import run_script

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
    ways: list[tuple[dict[str, str], dict[str, str]]] = [
        (
            {"key": "env:MY_KEY", "secret": "env:MY_SECRET", "endpoint_url": moto_server.url},
            {"MY_KEY": "test", "MY_SECRET": "test-secret-of-moto"},
        ),
        ({"profile": "training"}, {}),
        ({}, {"AWS_PROFILE": "training"}),
        ({}, {**S3_KEY, "AWS_ENDPOINT_URL": moto_server.url, "AWS_DEFAULT_REGION": "us-east-1"}),
    ]
    for options, environment in ways:
        code, output = example(moto_root.url, options, environment, tmp_path)
        assert code == 0, output
        assert f"saved {moto_root.url}/step-3 and loaded the same" in output
    code, output = example(moto_root.url, {"endpoint_url": moto_server.url}, {}, tmp_path)
    assert code == 1
    assert output.startswith("credentials: none were found"), output
    code, output = example(moto_root.url, {"secret": "env:MY_SECRET"}, {}, tmp_path)
    assert (code, output) == (1, "secret: the environment has no MY_SECRET\n")


def test_the_example_on_gcs(gcs_server: Running, gcs_root: Running, tmp_path: Path) -> None:
    """An emulator of Google Cloud Storage, by options and by the environment."""
    plain = {"token": "anon", "project": "test"}
    for options, environment in (
        ({**plain, "endpoint_url": gcs_server.url}, {}),
        (plain, {"STORAGE_EMULATOR_HOST": gcs_server.url}),
    ):
        code, output = example(gcs_root.url, options, environment, tmp_path)
        assert code == 0, output
        assert f"saved {gcs_root.url}/step-3 and loaded the same" in output


def test_the_example_on_azure(azure_root: Running, tmp_path: Path) -> None:
    """A connection string, by an option that names a variable and by the environment."""
    connection = azure_root.storage_options["connection_string"]
    for options, environment in (
        ({"connection_string": "env:MY_CONNECTION"}, {"MY_CONNECTION": connection}),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": connection}),
    ):
        code, output = example(azure_root.url, options, environment, tmp_path)
        assert code == 0, output
        assert f"saved {azure_root.url}/step-3 and loaded the same" in output
