"""A copy within S3, where the storage copies by itself, cut at every operation."""

from __future__ import annotations

import pytest
import torch
from copy_cases import attempt, head_of, save, save_files
from fault_tools import Faulty

import ckpt_storage.export.output
from ckpt_storage.export import pieces
from ckpt_storage.export.copy import copy
from ckpt_storage.options import MIB
from ckpt_storage.store import Location, open_store
from ckpt_storage.testing.faults import Rule
from ckpt_storage.testing.s3_server import S3Server


def test_copies_within_s3_cut_anywhere_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the storage copying by itself: nothing commits half, no upload stays open."""
    monkeypatch.setattr(pieces, "_COPY_BYTES", 6 * MIB)
    with S3Server() as server:
        server.create_bucket("bkt")
        options = server.storage_options
        save(
            {"a": torch.arange(4 * MIB, dtype=torch.float32)},
            "s3://bkt/src",
            storage_options=options,
        )
        faulty = Faulty("s3://bkt/dst")
        monkeypatch.setattr(ckpt_storage.export.output, "open_store", faulty)

        def stored(prefix: str) -> dict[str, bytes]:
            return {
                key.removeprefix(prefix): data
                for key, data in server.dump("bkt").items()
                if key.startswith(prefix)
            }

        whole = save_files(stored("src/"))
        new_id = head_of(stored("src/"))
        copy("s3://bkt/src", "s3://bkt/dst-dry", storage_options=options)
        calls = faulty.calls()
        assert [call.operation for call in calls].count("copy_part") == 2
        for number, call in enumerate(calls):
            root = f"dst-{number}"
            faulty.rules = [Rule(action="crash_after", skip_count=number)]
            attempt("s3://bkt/src", f"s3://bkt/{root}", storage_options=options)
            faulty.rules = ()
            found = stored(f"{root}/")
            at = f"{number} ({call.operation} {call.path})"
            if head_of(found) is not None:
                assert save_files(found) == whole, at
            copy("s3://bkt/src", f"s3://bkt/{root}", storage_options=options)
            found = stored(f"{root}/")
            assert (head_of(found), save_files(found)) == (new_id, whole), at
            plain = open_store(Location.of(f"s3://bkt/{root}", options))
            assert plain.abort_uploads("") == 0, f"{at}: an upload stayed open"
            plain.delete_folder("saves")
            plain.close()
        faulty.close()
