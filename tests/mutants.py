"""One-line mutants of the package, and the tests that must notice each.

    python tests/mutants.py                 every mutant
    python tests/mutants.py --room export   those of one room

Each mutant is applied to a copy of the checkout, and its tests run there. It is killed if a test
fails, or hangs; it survives if all pass. First the tests run without a mutant: they must pass. The
exit code is 1 if more than one in twenty survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mutant_list import MUTANTS, Mutant

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT_S = 300.0
_GOAL = 0.95

Outcome = Literal["killed", "hung", "survived", "not applied"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    output: str = ""


def main() -> int:
    """Run the mutants that the command line names; print a line for each, and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", action="append", help="only mutants of this room")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at a time")
    arguments = parser.parse_args()
    rooms = arguments.room
    mutants = [mutant for mutant in MUTANTS if rooms is None or mutant.room in rooms]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [_copied(Path(folder, f"copy-{number}")) for number in range(arguments.jobs)]
        _check_tests(copies[0], mutants)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            shares = [mutants[number :: len(copies)] for number in range(len(copies))]
            results = [result for share in pool.map(_run_all, copies, shares) for result in share]
    return _report(results)


def _copied(copy: Path) -> Path:
    names = subprocess.run(  # files that git knows, and new ones
        ["git", "ls-files", "-co", "--exclude-standard"],  # noqa: S607  # the user's git
        cwd=_ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in names:
        if (_ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, copy / name)
    return copy


def _check_tests(copy: Path, mutants: list[Mutant]) -> None:
    """Exit unless the tests of all mutants pass without one."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    code, output = _run_tests(copy, tests, limit_s=10 * _LIMIT_S)
    if code != 0:
        sys.exit(f"The tests fail without a mutant:\n{output[-4000:]}")


def _run_all(copy: Path, mutants: list[Mutant]) -> list[Result]:
    return [_run(copy, mutant) for mutant in mutants]


def _run(copy: Path, mutant: Mutant) -> Result:
    path = copy / "ckpt_storage" / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return _said(Result(mutant=mutant, outcome="not applied"))
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code, output = _run_tests(copy, mutant.tests, limit_s=_LIMIT_S)
    finally:
        path.write_text(text, encoding="utf-8")
    outcomes: dict[int | None, Outcome] = {0: "survived", None: "hung"}
    return _said(Result(mutant=mutant, outcome=outcomes.get(code, "killed"), output=output))


def _run_tests(copy: Path, tests: list[str], *, limit_s: float) -> tuple[int | None, str]:
    """Return the exit code of pytest, None if it did not end in time, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=copy,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    if done.returncode not in {0, 1, 2}:
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr}")
    return done.returncode, done.stdout


def _said(result: Result) -> Result:
    mutant = result.mutant
    change = f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}"
    print(f"{result.outcome:11} {mutant.path}: {change}", flush=True)  # noqa: T201  # a script
    return result


def _report(results: list[Result]) -> int:
    """Print the score by room; return the exit code."""
    rooms = sorted({result.mutant.room for result in results})
    for room in rooms:
        counts = Counter(result.outcome for result in results if result.mutant.room == room)
        print(f"{room:14} {dict(counts)}")  # noqa: T201  # a script
    killed = sum(result.outcome in {"killed", "hung"} for result in results)
    print(f"killed {killed} of {len(results)}")  # noqa: T201  # a script
    return 0 if results and killed >= _GOAL * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
