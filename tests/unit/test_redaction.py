"""What hides credentials in texts, where one of them is part of another."""

from __future__ import annotations

from ckpt_storage.store.redaction import scrubber


def test_no_rest_of_a_secret_that_holds_another_stays() -> None:
    """The longest is hidden first, in whatever order they were passed."""
    short, long = "correct-horse", "correct-horse-battery"
    for secrets in ([short, long], [long, short]):
        scrub = scrubber({"secrets": secrets})
        assert scrub(f"{long} {short}") == "*** ***"
