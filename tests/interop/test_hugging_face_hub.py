"""The Hub as a storage: `hf://`, by the client of huggingface_hub."""

from __future__ import annotations

import pytest

from ckpt_storage import RetryPolicy, StorageError
from ckpt_storage.store import open_store


def test_a_hub_that_does_not_answer_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client's errors are of a library that fsspec's other clients do not use."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    store = open_store("hf://datasets/me/run", retry=RetryPolicy(attempt_count=1))
    with pytest.raises(StorageError) as caught:
        store.stat("x")
    assert (caught.value.kind, caught.value.retryable) == ("connection", True)
    store.close()
