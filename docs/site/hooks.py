# ruff: noqa: INP001 - MkDocs loads this file by its path
"""What MkDocs must do to our pages before it renders them. Called by MkDocs."""

import re

_NO_RUN = re.compile(r"^(?P<fence>\s*```python) no-run: .*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_kwargs: object) -> str:
    """Return the page with plain Python fences: reasons not to run are for the tests."""
    return _NO_RUN.sub(r"\g<fence>", markdown)
