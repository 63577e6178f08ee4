"""The group of all commands: which there are, and how a call ends."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

from ckpt_storage._version import __version__
from ckpt_storage.errors import CheckpointError, IntegrityError
from ckpt_storage.inspect.views import shown
from ckpt_storage.observe.outcome import OUTCOME_LOGGER
from ckpt_storage.store.redaction import scrubber

from .output import BROKEN_PIPE, COULD_NOT_RUN, INTERRUPTED, SOUND, UNSOUND

_GRACE_S = 4.0
"""For discarding uploads that are under way; what stays is freed by a later save or copy."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT end the process within `_GRACE_S`, also where a client of a storage hangs."""
    timer = threading.Timer(_GRACE_S, _exit_now)
    timer.daemon = True

    def interrupt(_number: int, _frame: object) -> NoReturn:
        if not timer.ident:
            timer.start()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        # SIGINT is ignored, as in a background job, or handled by a program that calls `main`.
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit_now() -> None:
    """End the process although a thread still runs, which could delay an orderly exit."""
    _print_error("interrupted.")
    os._exit(INTERRUPTED)


_NAME = "ckpt-storage"

_COMMANDS = {
    **dict.fromkeys(("ls", "show", "tree"), "look"),
    "watch": "watch",
    **dict.fromkeys(("cat", "stats"), "values"),
    **dict.fromkeys(("verify", "diff"), "look"),
    **dict.fromkeys(("cp", "convert", "consolidate", "rm", "prune", "thin"), "change"),
    "doctor": "look",
}
"""Each command, in the order of the help, and the module here that defines it."""

_TYPED = {
    "overwrite=True": "--overwrite",
    'unsupported="drop"': "--drop-unsupported",
    "include=": "--include",
    "exclude=": "--exclude",
    "unsafe_pickle=True": "--unsafe-pickle",
    "ckpt_storage.list_checkpoints(root)": "ckpt-storage ls ROOT",
    "ckpt_storage.copy": "ckpt-storage cp",
}
"""Python arguments in the next steps of errors, and the options that are typed here."""
_ONE_NAME = re.compile(r"\b(include|exclude)=\[(['\"])(.*?)\2\]")


class _PipedError(Exception):
    """The reader of the output has closed the pipe."""


class App(click.Group):
    """A group whose commands are imported when they are called; `main` ends every call."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for a name that is none."""
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"{__package__}.{_COMMANDS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what it returns is the exit code."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise _PipedError from error
        return code

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run and exit; the code says how it ended (`docs/cli.md`)."""
        arguments = list(sys.argv[1:] if args is None else args)
        log, handler = logging.getLogger("ckpt_storage"), _Warnings(arguments)
        log.addHandler(handler)
        code: int = SOUND
        try:
            with _interruptible():
                name = prog_name or _NAME
                result = super().main(arguments, name, complete_var, standalone_mode=False, **extra)
                code = result if isinstance(result, int) else SOUND
        except (click.Abort, KeyboardInterrupt):
            _print_error("interrupted.")
            code = INTERRUPTED
        except _PipedError:
            code = BROKEN_PIPE
        except Exception as error:  # noqa: BLE001  # the last border; --debug shows what it was
            code = _report_error(error, arguments)
        finally:
            log.removeHandler(handler)
            _flush_streams()
        if standalone_mode:
            sys.exit(code)
        return code


def _flush_streams() -> None:
    """Drop what cannot be written: Python would exit with 120 for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Warnings(logging.Handler):
    """Prints warnings of the library as errors are printed."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(logging.WARNING)
        self._arguments = arguments

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning; the outcome of an operation is printed at the end of the call."""
        if record.name == OUTCOME_LOGGER:
            return
        _print_error(scrubber(_secrets(self._arguments))(record.getMessage()))


def _report_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print an error without the secrets of the arguments; return the exit code."""
    scrub = scrubber(_secrets(arguments))
    is_debug = "--debug" in arguments
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return COULD_NOT_RUN
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" Try '{context.command_path} --help'." if context is not None else ""
        _print_error(scrub(f"{error.format_message()}{hint}"))
        return COULD_NOT_RUN
    if is_debug:
        trace = scrub("".join(traceback.format_exception(error)))
        sys.stderr.write("".join(f"{shown(line)}\n" for line in trace.splitlines()))
    if isinstance(error, CheckpointError):
        step = error.next_step or ""
        what = str(error).removesuffix(step)
        # `what` stays as it is: it may name files and tensors that are spelt like arguments.
        step = _ONE_NAME.sub(lambda match: f"--{match[1]} {shlex.quote(match[3])}", step)
        for spelling, option in _TYPED.items():
            step = step.replace(spelling, option)
        _print_error(scrub(f"{what}{step}"))
        return UNSOUND if isinstance(error, IntegrityError) else COULD_NOT_RUN
    if isinstance(error, OSError) and error.filename is None:
        # The library raises only its own errors; an error without a file is of a stream.
        _print_error(f"standard output cannot be written: {error.strerror or error}.")
        return COULD_NOT_RUN
    hint = "" if is_debug else " Run it again with --debug and report what that prints."
    message = str(error).rstrip(". \n")
    _print_error(scrub(f"unexpected {type(error).__name__}: {message}.{hint}"))
    return COULD_NOT_RUN


def _secrets(arguments: Sequence[str]) -> dict[str, object]:
    """Return the values of storage options: on the command line, as JSON there, in files."""
    values: list[object] = []
    inner: list[object] = []
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        option, equals, rest = argument.partition("=")
        is_joined = bool(equals) and option.startswith("--")
        name, value = (option, rest) if is_joined else (previous, argument)
        if name.endswith("storage-option"):
            text = value.partition("=")[2]
            values.append(text)
            inner.append(_parsed(text))
        elif name.endswith("storage-options-file"):
            with contextlib.suppress(OSError, ValueError):
                inner.append(_parsed(Path(value).read_text(encoding="utf-8")))
    return {"secrets": values, "options": inner}


def _parsed(text: str) -> object:
    """Return JSON with numbers as text, since a password may be a number; None for no JSON."""
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except ValueError:
        return None


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):
        # Names in it may come from a checkpoint.
        sys.stderr.write(f"{_NAME}: {shown(' '.join(message.split()))}\n")


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(cls=App, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name=_NAME)
def app() -> None:
    """Look at, check, copy and tidy checkpoints of PyTorch on any storage.

    A URL is a local path or anything that fsspec reaches, such as s3://bucket/run/step-1000.

    Exit codes: 0 sound or equal, 1 damage or a difference, 2 could not run, 130 interrupted.
    """
