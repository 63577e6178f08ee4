"""One-line mutants of the package, and the tests that must notice each.

    python tests/mutants.py                 every mutant
    python tests/mutants.py --room export   those of one room

Each mutant is applied to a copy of the checkout, and its tests run there, in a fork of a process
that has imported torch. It is killed if a test fails; it survives if all pass. First the tests run
without a mutant: they must pass. The exit code is 1 if more than one in twenty survives.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "tests" / "support"))

from fork_server import ForkServer, exit_codes, run_pytest  # noqa: E402
from mutant_list import MUTANTS, Mutant  # noqa: E402

_LIMIT_S = 600.0
"""Past pytest's own limit for a test, so that a test that hangs mostly fails."""
_GOAL = 0.95
_IMPORTED = (
    "torch.distributed.checkpoint",
    "hypothesis",
    "s3fs",
    "safetensors",
    "pytest",
    "fork_server",
)
"""What forks need not import again: neither the package nor what imports it."""
_PYTEST = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
# Plugins are imported before pytest can rewrite what they assert.
_PYTEST += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]

Outcome = Literal["killed", "hung", "survived", "not applied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A mutant and the outcome of its tests."""

    mutant: Mutant
    outcome: Outcome

    @property
    def is_killed(self) -> bool:
        """Whether a test failed, or did not end."""
        return self.outcome in {"killed", "hung"}


class Copy:
    """A copy of the checkout, in which one mutant at a time is tested."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self._folder = folder
        self._fork_server = fork_server
        self._run_count = 0
        names = subprocess.run(  # files that git knows, and new ones
            ["git", "ls-files", "-co", "--exclude-standard"],  # noqa: S607  # the user's git
            cwd=_ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        for name in names:
            if (_ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(_ROOT / name, folder / name)

    def check_tests(self, mutants: list[Mutant]) -> None:
        """Exit unless the tests of all mutants pass without one."""
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        code, output = self._run_tests(tests, limit_s=10 * _LIMIT_S)
        if code != 0:
            sys.exit(f"The tests fail without a mutant:\n{output[-4000:]}")

    def run_all(self, mutants: list[Mutant]) -> list[Result]:
        """Test mutants one after another; print a line for each."""
        return [self._run(mutant) for mutant in mutants]

    def _run(self, mutant: Mutant) -> Result:
        path = self._folder / "ckpt_storage" / mutant.path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        outcome: Outcome = "not applied"
        start_s = time.monotonic()
        if text.count(mutant.old) == 1:
            _replace(path, text.replace(mutant.old, mutant.new))
            try:
                code, _ = self._run_tests(mutant.tests, limit_s=_LIMIT_S)
            finally:
                _replace(path, text)
            outcomes: dict[int | None, Outcome] = {0: "survived", None: "hung"}
            outcome = outcomes.get(code, "killed")
        change = f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}"
        line = f"{outcome:11} {time.monotonic() - start_s:4.0f} s  {mutant.path}: {change}"
        print(line, flush=True)  # noqa: T201  # a script
        return Result(mutant=mutant, outcome=outcome)

    def _run_tests(self, tests: list[str], *, limit_s: float) -> tuple[int | None, str]:
        """Return the exit code of pytest, None if it did not end in time, and what it printed."""
        self._run_count += 1
        log = Path(f"{self._folder}-run-{self._run_count}")
        arguments = [*_PYTEST, *tests]
        self._fork_server.start(log, run_pytest, str(self._folder), arguments)
        (code,) = exit_codes([log], limit_s)
        output = Path(f"{log}.out").read_text(errors="replace")
        # Codes of tests are 0 to 2; after failed tests, threads that still run may abort pytest.
        if code is not None and code > 2:
            print(f"pytest ended with {code}:\n{output[-4000:]}")  # noqa: T201  # a script
            os._exit(2)
        return code, output


def main() -> int:
    """Run the mutants that the command line names; print a line for each, and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", action="append", help="only mutants of this room")
    parser.add_argument("--match", default="", help="only mutants whose path or new line has this")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at a time")
    arguments = parser.parse_args()
    rooms = arguments.room
    mutants = [
        mutant
        for mutant in MUTANTS
        if (rooms is None or mutant.room in rooms)
        and (arguments.match in mutant.path or arguments.match in mutant.new)
    ]
    start_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ForkServer(*_IMPORTED) as fork_server,
    ):
        # Tests import modules as another user, too.
        Path(folder).chmod(0o755)
        copies = [Copy(Path(folder, f"copy-{n}"), fork_server) for n in range(arguments.jobs)]
        copies[0].check_tests(mutants)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            shares = [mutants[number :: len(copies)] for number in range(len(copies))]
            runs = pool.map(Copy.run_all, copies, shares)
            results = [result for share in runs for result in share]
    return _report(results, time.monotonic() - start_s)


def _replace(path: Path, text: str) -> None:
    """Replace the text of a module, whose bytecode may bear the same time and size."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _report(results: list[Result], seconds: float) -> int:
    """Print the score by room and by the tier of the tests; return the exit code."""
    row = "{:14} {:>7} {:>7} {:>14} {:>14}".format
    print(row("room", "mutants", "killed", "by quick tier", "by other tiers"))  # noqa: T201  # a script
    for room in [*sorted({result.mutant.room for result in results}), "all"]:
        own = [result for result in results if room in {"all", result.mutant.room}]
        killers = Counter(result.mutant.tier for result in own if result.is_killed)
        print(row(room, len(own), killers.total(), killers["quick"], killers["other"]))  # noqa: T201  # a script
    killed = sum(result.is_killed for result in results)
    print(f"killed {killed} of {len(results)} in {seconds:.0f} s")  # noqa: T201  # a script
    return 0 if results and killed >= _GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
