"""Without credentials: the error says how to read a public bucket, and that works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from s3_server import S3Server

import ckpt_storage


@pytest.fixture
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.mark.usefixtures("_no_credentials")
def test_the_error_names_anonymous_access() -> None:
    """A load without credentials names the option of public buckets; with it the load works."""
    with S3Server() as server:
        server.create_bucket("bucket")
        options = server.storage_options
        ckpt_storage.save({"w": torch.ones(2)}, "s3://bucket/c", storage_options=options)
        nobody = {key: value for key, value in options.items() if key not in {"key", "secret"}}
        target = {"w": torch.zeros(2)}
        with pytest.raises(ckpt_storage.StorageError, match=r"anon.*True.*public") as caught:
            ckpt_storage.load(target, "s3://bucket/c", storage_options=nobody)
        assert caught.value.kind == "credentials"
        ckpt_storage.load(target, "s3://bucket/c", storage_options={**nobody, "anon": True})
        assert target["w"].tolist() == [1, 1]
