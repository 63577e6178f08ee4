"""How test files get storage servers: started once by the first test, ended for sure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from servers import Running, ServerMissingError


def is_ci(_name: str) -> bool:
    """Return whether no server may be missing."""
    return bool(os.environ.get("CI"))


def session_server(
    name: str,
    start: Callable[[Path], AbstractContextManager[Running]],
    *,
    is_required: Callable[[str], bool] = is_ci,
) -> Callable[[pytest.TempPathFactory], Iterator[Running]]:
    """Return a fixture: a server that starts with the first test that wants it.

    Where its program is missing, its tests are skipped, or fail if it is required.
    """

    @pytest.fixture(scope="session", name=f"{name}_server")
    def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
        with ExitStack() as stack:
            try:
                made = stack.enter_context(start(tmp_path_factory.mktemp(name)))
            except ServerMissingError as error:
                reason = f"{start.__name__} is not installed: {error}"
                if is_required(name):
                    pytest.fail(reason)
                pytest.skip(reason)
            yield made

    return running


def new_root(
    name: str, make: Callable[[Running, str], str]
) -> Callable[[pytest.FixtureRequest], Running]:
    """Return a fixture: a root at a server, in a bucket or folder of its own."""

    @pytest.fixture(name=f"{name}_root")
    def root(request: pytest.FixtureRequest) -> Running:
        running: Running = request.getfixturevalue(f"{name}_server")
        return replace(running, url=make(running, f"test-{uuid4().hex[:20]}"))

    return root
