"""`copy` from a disk to Google Cloud Storage, on to Azure, and back."""

from __future__ import annotations

from pathlib import Path

from copy_cases import files_below, save, save_files, state_of
from servers import Running

from ckpt_storage import copy


def test_from_a_disk_to_google_and_azure(
    tmp_path: Path, gcs_root: Running, azure_root: Running
) -> None:
    """What comes back is the save that went out, byte for byte."""
    source = tmp_path / "src"
    save(state_of(1), source)
    copy(source, gcs_root.url, destination_storage_options=gcs_root.storage_options)
    copy(
        gcs_root.url,
        azure_root.url,
        storage_options=gcs_root.storage_options,
        destination_storage_options=azure_root.storage_options,
    )
    copy(azure_root.url, tmp_path / "back", storage_options=azure_root.storage_options)
    assert save_files(files_below(tmp_path / "back")) == save_files(files_below(source))
