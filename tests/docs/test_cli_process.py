"""The command line as a process: pipes, signals, missing packages, torchrun, shells."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
from cli_tools import make_run, process
from integration_tools import finish, torchrun
from limits import HANG_S
from s3_server import FaultRule, S3Server
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("cli") / "run") / "step-00001100"


def test_looking_imports_no_torch(last: Path) -> None:
    """Neither ls, show, tree, verify nor the help; nor cat, stats and cp of plain tensors."""
    code = (
        "import sys\n"
        "from ckpt_storage.cli.app import app\n"
        "run, last, other = sys.argv[1:]\n"
        "for line in (['--help'], ['ls', run], ['show', last], ['show', last, 'model.w'],\n"
        "             ['tree', last], ['verify', last], ['cat', last, 'model.w'],\n"
        "             ['stats', last, 'model.w'], ['cp', last, other], ['doctor', other + '-x'],\n"
        "             ['prune', run, '--keep-latest', '9']):\n"
        "    code = app(line, standalone_mode=False)\n"
        "    assert code == 0, (line, code)\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    result = process(last.parent, last, last.parent.parent / "copied", code=code)
    assert result.returncode == 0, result.stderr


def test_a_missing_package_is_one_line_that_names_the_extra() -> None:
    """And exit code 2."""
    code = (
        "import sys\n"
        "sys.modules['click'] = None\n"
        "sys.argv = ['ckpt-storage', 'ls', '/tmp']\n"
        "from ckpt_storage.cli import main\n"
        "main()\n"
    )
    result = process(code=code)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "ckpt-storage[cli]" in result.stderr


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ckpt_storage", *map(str, arguments)]
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)


def test_a_reader_that_leaves_is_no_error(last: Path) -> None:
    """As in `ckpt-storage ls ... | head`: no traceback, and the code of SIGPIPE."""
    with started("ls", last.parent) as listing:
        assert listing.stdout is not None
        assert listing.stderr is not None
        listing.stdout.close()
        errors = listing.stderr.read()
        assert listing.wait(60) == 141
    assert errors == ""


@contextmanager
def interruptible() -> Iterator[None]:
    """Start processes that heed SIGINT: jobs that a shell put into the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_an_interrupt_ends_it_at_once(server: S3Server, command: str, tmp_path: Path) -> None:
    """While the storage hangs: one line, exit code 130."""
    options = tmp_path / "options.json"
    options.write_text(json.dumps(server.storage_options))
    server.faults([FaultRule(times=0, action="hang")])
    line = (command, "s3://bkt/x", "--storage-options-file", options)
    with interruptible(), started(*line) as hanging:
        server.wait_for(lambda requests: len(requests) > 0, timeout_s=HANG_S)
        hanging.send_signal(signal.SIGINT)
        output, errors = hanging.communicate(timeout=HANG_S)
        assert hanging.returncode == 130, errors
    assert output == ""
    assert errors.strip() == "ckpt-storage: interrupted."


@pytest.mark.parametrize("command", ["cp", "verify"])
def test_a_bar_is_drawn_on_a_terminal_only(last: Path, tmp_path: Path, command: str) -> None:
    """Standard error decides."""
    more = [str(tmp_path / "a")] if command == "cp" else []
    plain = process(command, last, *more)
    assert (plain.returncode, plain.stderr) == (0, "")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    again = [str(tmp_path / "b")] if command == "cp" else more
    result = process(command, last, *again, stderr=theirs)
    os.close(theirs)
    drawn = os.read(ours, 4096).decode()
    os.close(ours)
    assert result.returncode == 0
    assert ("write" if command == "cp" else "load") in drawn
    assert "%" in drawn


def test_torchrun_shares_the_work(last: Path, tmp_path: Path) -> None:
    """Two ranks write one export, and only one of them prints."""
    words = ("consolidate", str(last), str(tmp_path / "out"), "--json", "--include", "model.*")
    code, output = finish(torchrun("-m", "ckpt_storage", *words), tmp_path)
    assert code == 0, output
    assert output.count('"tensor_count": 3') == 1
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 3


def test_shells_complete() -> None:
    """Commands, options and paths."""
    for words, expected in (
        ("ckpt-storage ver", "plain,verify"),
        ("ckpt-storage verify ", "file,"),
        ("ckpt-storage verify --sha", "plain,--shallow"),
    ):
        typed = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        result = process(env={"_CKPT_STORAGE_COMPLETE": "bash_complete", **typed})
        assert any(line.startswith(expected) for line in result.stdout.splitlines()), result.stdout
    script = process(env={"_CKPT_STORAGE_COMPLETE": "zsh_source"})
    assert "ckpt-storage" in script.stdout


@pytest.mark.parametrize("stream", ["0<&-", ">&-", "2>&-", "2>/dev/full", ">&- 2>&- 0<&-"])
@pytest.mark.parametrize("is_sound", [True, False])
def test_a_stream_that_takes_nothing_changes_no_exit_code(
    last: Path, tmp_path: Path, stream: str, *, is_sound: bool
) -> None:
    """The exit code says whether it is sound, whichever standard streams are closed."""
    folder = Path(shutil.copytree(last, tmp_path / "run"))
    if not is_sound:
        (shard,) = folder.glob("saves/*/*.distcp")
        shard.write_bytes(shard.read_bytes()[:-1])
    line = f"exec {sys.executable} -m ckpt_storage verify {folder} {stream}"
    assert subprocess.run(["/bin/sh", "-c", line], check=False).returncode == (0 if is_sound else 1)


@pytest.mark.parametrize("command", ["verify", "ls", "--help"])
def test_a_full_standard_output_is_told(last: Path, command: str) -> None:
    """What could not be printed is an error of its own: exit code 2, in one line."""
    where = {"verify": last, "ls": last.parent, "--help": ""}[command]
    line = f"exec {sys.executable} -m ckpt_storage {command} {where} >/dev/full"
    result = subprocess.run(["/bin/sh", "-c", line], check=False, capture_output=True, text=True)
    assert result.returncode == 2
    message = "ckpt-storage: standard output cannot be written: No space left on device."
    assert result.stderr.splitlines() == [message]
