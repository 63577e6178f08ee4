"""Exports, conversions and copies by the rules of single S3 services, each of several parts."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from profiles import QUICK, Service, message_of, profile_server, service
from safetensors.torch import load as parse_safetensors

import ckpt_storage
from ckpt_storage.export.conversion import TargetFormat

__all__ = ["profile_server", "service"]

LEAST: dict[str, Any] = {"memory_limit_bytes": 1 << 20, "retry": QUICK}
"""Files of the states below then have parts of 64 KiB and a rest."""

State = dict[str, torch.Tensor]


@pytest.fixture
def unlisted(service: Service) -> dict[str, Any]:
    """The options of calls with credentials that may not list."""
    if service.server.profile != "aws-no-list":
        pytest.skip("the credentials may list")
    ckpt_storage.save({"w": torch.ones(3)}, service.url(1), **service.options)
    return {**LEAST, "storage_options": service.server.storage_options}


def test_folders_are_filled_by_credentials_that_may_list(
    service: Service, unlisted: dict[str, Any]
) -> None:
    """Files in the way cannot be looked for: the error names the right, and nothing is written."""
    before, url = service.files, service.url(1)
    calls: tuple[Callable[[], object], ...] = (
        partial(ckpt_storage.consolidate, url, **unlisted),
        partial(ckpt_storage.convert, url, f"{service.root}/out", to="dcp", **unlisted),
    )
    for call in calls:
        with pytest.raises(ckpt_storage.StorageError) as caught:
            call()
        assert "s3:ListBucket" in message_of(caught.value)
        assert service.files == before


def test_without_the_right_to_list_a_checkpoint_is_copied(
    service: Service, unlisted: dict[str, Any]
) -> None:
    """Its commit record names it; what lies beside it is not known."""
    report = ckpt_storage.copy(service.url(1), f"s3://{service.bucket}/copy", **unlisted)
    assert report.left_out == (".",)
    found = {"w": torch.zeros(3)}
    ckpt_storage.load(found, report.url, **service.options)
    assert same(found, {"w": torch.ones(3)})


@pytest.fixture
def target(service: Service) -> dict[str, Any]:
    """The options of a destination on the same server, and of the source."""
    if service.server.profile == "aws-no-list":
        pytest.skip("the credentials may not list")
    options = service.server.storage_options
    return {**LEAST, "storage_options": options, "destination_storage_options": options}


def saved(service: Service, seed: int) -> State:
    """Save three tensors, which no part holds, over what is there; return them."""
    state = {f"t{number}": torch.arange(30_000) + seed * number for number in range(3)}
    ckpt_storage.save(state, service.url(1), part_bytes=70_000, overwrite=True, **service.options)
    return state


def weights(service: Service, folder: str) -> State:
    """Return all that a reader finds that loads every weight file of a folder."""
    files = {path: data for path, data in service.files.items() if path.startswith(f"{folder}/")}
    found = [parse_safetensors(files[path]) for path in files if path.endswith(".safetensors")]
    return {name: value for some in found for name, value in some.items()}


def same(found: State, state: State) -> bool:
    return found.keys() == state.keys() and all(torch.equal(found[k], state[k]) for k in state)


def test_an_export_replaces_another(service: Service, target: dict[str, Any]) -> None:
    """From several files to one, and back: each is what a reader of all files gets."""
    options = {**target, "output_storage_options": target["storage_options"]}
    del options["destination_storage_options"]
    for seed, size in enumerate(("300kB", "5GB", "300kB", "300kB", "5GB", "5GB"), 1):
        state = saved(service, seed)
        report = ckpt_storage.consolidate(service.url(1), max_file_bytes=size, **options)
        assert same(weights(service, "run/step-1/hf"), state), (seed, size)
        assert len(report.files) == (1 if size == "5GB" else 3), (seed, size)
    assert service.verify(service.url(1)) == []


def test_a_torch_file_is_written(service: Service, target: dict[str, Any]) -> None:
    """`torch.load` reads it; it can be replaced."""
    for seed in (1, 2):
        state = saved(service, seed)
        url = f"s3://{service.bucket}/model.pt"
        ckpt_storage.convert(service.url(1), url, to="torch_save", overwrite=seed > 1, **target)
        assert same(torch.load(io.BytesIO(service.files["model.pt"])), state)


@pytest.mark.parametrize("to", ["dcp", "dcp_safetensors", "safetensors"])
def test_another_format_is_written(
    service: Service, target: dict[str, Any], to: TargetFormat
) -> None:
    """What was converted is loaded; it can be replaced."""
    for seed in (1, 2):
        state = saved(service, seed)
        url = f"s3://{service.bucket}/out"
        ckpt_storage.convert(
            service.url(1), url, to=to, overwrite=seed > 1, max_file_bytes="300kB", **target
        )
        found = {name: torch.zeros_like(value) for name, value in state.items()}
        ckpt_storage.load(found, url, **service.options)
        assert same(found, state)


def test_another_format_becomes_a_checkpoint(service: Service, target: dict[str, Any]) -> None:
    """Of stock DCP on the service, on the service; it is sound, and can be replaced."""
    for seed in (1, 2):
        state = saved(service, seed)
        stock, ours = (f"s3://{service.bucket}/{name}" for name in ("stock", "ours"))
        is_second: dict[str, Any] = {**target, "overwrite": seed > 1, "max_file_bytes": "300kB"}
        ckpt_storage.convert(service.url(1), stock, to="dcp", **is_second)
        ckpt_storage.convert(stock, ours, to="ckpt_storage", **is_second)
        found = {name: torch.zeros_like(value) for name, value in state.items()}
        ckpt_storage.load(found, ours, **service.options)
        assert same(found, state)
        assert service.verify(ours) == []


def test_an_export_is_copied_by_its_own_url(service: Service, target: dict[str, Any]) -> None:
    """The storage copies its files by itself, or they are read and sent."""
    state = saved(service, 1)
    options = {**LEAST, "storage_options": target["storage_options"]}
    export = ckpt_storage.consolidate(service.url(1), max_file_bytes="300kB", **options)
    for copies in ("auto", "never"):
        copied = f"s3://{service.bucket}/{copies}"
        ckpt_storage.copy(export.output_url, copied, copies=copies, **target)
        assert same(weights(service, copies), state)
        assert service.verify(copied) == []


def test_a_deletion_takes_exports_along(service: Service, target: dict[str, Any]) -> None:
    """Nothing of an export stays beside the record of the deletion."""
    saved(service, 1)
    options = {**LEAST, "storage_options": target["storage_options"]}
    ckpt_storage.consolidate(service.url(1), max_file_bytes="300kB", **options)
    assert ckpt_storage.delete(service.url(1), **service.options)
    assert {path.split("/")[2] for path in service.files} <= {"commits"}
