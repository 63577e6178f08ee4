"""How `.metadata` follows the head, whoever is slow, dies or writes there besides."""

from __future__ import annotations

import pytest
from commit_tools import (
    BOTH,
    DictStore,
    attempted,
    committed,
    fenced,
    just_committed,
    published,
    saved,
    seen,
)
from hypothesis import given
from hypothesis import strategies as st

from ckpt_storage.commit import publishing
from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.format.commit_record import split_footer
from ckpt_storage.testing.faults import Rule


@BOTH
def test_publishing_shows_the_head_to_stock_readers(store: DictStore) -> None:
    """After it `.metadata` is the head's pickle and a footer with its slot; again is nothing."""
    attempt, record = just_committed(store)
    assert published(store, attempt, record)
    now = seen(store.disk.files)
    assert (now.stock, now.footer) == (attempt.save_id, 1)
    before = store.disk.changes
    assert publishing.publish(store)
    assert store.disk.changes == before


@BOTH
def test_a_rebased_commit_is_published_under_the_slot_it_got(store: DictStore) -> None:
    """The copy was written for the slot aimed at; the footer names the one that was taken."""
    other, attempt = attempted(store), attempted(store)
    fenced(store, other.save_id)
    published(store, attempt, committed(store, attempt))
    assert seen(store.disk.files).footer == 2


@BOTH
@pytest.mark.parametrize("before", ["nothing", "an older one"])
@pytest.mark.parametrize("action", ["error", "lost_answer"])
def test_a_failed_answer_while_publishing_is_looked_into(
    store: DictStore, before: str, action: str
) -> None:
    """Done or not, `.metadata` names the head afterwards."""
    if before == "an older one":
        saved(store)
    attempt, record = just_committed(store)
    rule = Rule(action=action, operation="put.*", path="metadata")  # type: ignore[arg-type]
    assert published(store.failing(rule), attempt, record)
    assert seen(store.disk.files).stock == attempt.save_id


@BOTH
def test_publishing_that_fails_for_good_says_so(store: DictStore) -> None:
    """Without the right to write there is an error; the commit stands and nothing is marked."""
    attempt, record = just_committed(store)
    rule = Rule(
        action="error",
        operation="put.*",
        kind="permission",
        retryable=False,
        hit_count=None,
    )
    with pytest.raises(StorageError):
        published(store.failing(rule), attempt, record)
    assert seen(store.disk.files).head == attempt.save_id
    assert publishing.roll_forward(store, attempt.save_id)
    assert seen(store.disk.files).stock == attempt.save_id


@BOTH
def test_rolling_forward_costs_two_requests_when_there_is_nothing_to_do(store: DictStore) -> None:
    """However large `.metadata` is, its length and its last bytes are all that is asked for."""
    save_id = saved(store)
    calls: list[tuple[str, str]] = []
    store.gate = lambda operation, path: calls.append((operation, path))
    assert publishing.roll_forward(store, save_id)
    assert calls == [("stat", ".metadata"), ("read", ".metadata")]


@BOTH
@pytest.mark.parametrize("harm", ["removed", "cut", "a footer that is no JSON", "an older copy"])
def test_rolling_forward_repairs_what_is_not_ours(store: DictStore, harm: str) -> None:
    """A `.metadata` that is gone, cut or not of this save is put back, marker or not."""
    older = saved(store)
    older_bytes = store.disk.files[".metadata"]
    save_id = saved(store)
    good = store.disk.files[".metadata"]
    harmed = {
        "cut": good[:-1],
        "a footer that is no JSON": good[:-20] + b"\xff[{(" + good[-16:],
        "an older copy": older_bytes,
    }
    store.disk.drop(".metadata")
    if harm != "removed":
        store.disk.put(".metadata", harmed[harm])
    assert publishing.roll_forward(store, save_id)
    assert store.disk.files[".metadata"] == good
    assert older != save_id


@BOTH
@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_damaged_copy_is_not_published(store: DictStore, harm: str) -> None:
    """Rolling forward refuses a bad `stock.metadata`, and leaves the older view in place."""
    older = saved(store)
    attempt, _ = just_committed(store)
    path = f"saves/{attempt.save_id}/stock.metadata"
    data = store.disk.files[path]
    store.disk.drop(path)
    if harm == "damaged":
        store.disk.put(path, data[:9] + bytes([data[9] ^ 1]) + data[10:])
    assert not publishing.roll_forward(store, attempt.save_id)
    assert seen(store.disk.files).stock == older
    with pytest.raises(IntegrityError):
        publishing.publish(store)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.builds(
            lambda text, length: text + b"%08d" % length + b"CKPTSTO1",
            st.one_of(
                st.binary(max_size=40),
                st.sampled_from(
                    [
                        b'{"slot":1e999,"save_id":"x"}',
                        b'{"slot":Infinity,"save_id":"x"}',
                        b"[" * 100_000,
                        b'{"slot":{},"save_id":1}',
                        b"[1]",
                        b"null",
                    ]
                ),
            ),
            st.integers(0, 99_999_999),
        ),
    )
)
def test_no_footer_makes_the_reader_of_footers_fail(data: bytes) -> None:
    """Whatever stands at the end of a `.metadata`, a footer is found or it is not."""
    _, named = split_footer(data)
    assert named is None or isinstance(named.slot, int)
