"""The options that commands share, and what their texts mean."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_TEXT_KEYS = re.compile(
    r".*(account|credentials?|key|name|passphrase|passwd|password|secret|token)"
    r"|auth|creds?|id|pass|pin|project|pwd|sas|sig|signature|str|string|user"
)
"""Last parts of the names of options whose values are text, even if they look like numbers."""

_NAME_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")

_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_NUMBER = r"\s*(-?[0-9]{1,18})?\s*"
_PART = re.compile(rf"{_NUMBER}(?::{_NUMBER}(?::{_NUMBER})?)?")


def reads(of: str = "the URL") -> Callable[[Command], Command]:
    """Add what all commands have: `--json`, `--timeout`, `--debug`, storage options `of` a URL."""

    def add(command: Command) -> Command:
        json_option = click.option(
            "--json", "as_json", is_flag=True, help="Print one JSON object with documented keys."
        )
        timeout = click.option(
            "--timeout",
            metavar="SECONDS",
            callback=duration,
            help="Give up after this time without progress; 90, 30m, 2h. Default an hour. "
            "consolidate, ls, rm, prune and doctor: the limit of each step.",
        )
        debug = click.option(
            "--debug", is_flag=True, expose_value=False, help="Show the traceback of an error."
        )
        return json_option(storage_options(of=of)(timeout(debug(command))))

    return add


def storage_options(name: str = "storage", *, of: str = "the URL") -> Callable[[Command], Command]:
    """Add `--<name>-option` and `--<name>-options-file`; the command gets `<name>_options`."""
    spelt = name.replace("_", "-")

    def add(command: Command) -> Command:
        pairs = click.option(
            f"--{spelt}-option",
            f"{name}_options",
            multiple=True,
            metavar="KEY=VALUE",
            callback=_pairs,
            help=f"Passed to the file system of {of}; may be repeated, and KEY may be nested: "
            "client_kwargs.endpoint_url=http://host. Others see your command line: for secrets "
            f"use --{spelt}-options-file or the environment.",
        )
        file = click.option(
            f"--{spelt}-options-file",
            f"{name}_options_file",
            type=click.Path(exists=True, dir_okay=False),
            expose_value=False,
            is_eager=True,
            callback=_from_file,
            help=f"A JSON object of options for {of}.",
        )
        return pairs(file(command))

    return add


def bytes_option(
    *names: str, help_text: str, default: str | None = None
) -> Callable[[Command], Command]:
    """Add an option that is a number of bytes, such as 512MiB; the command gets an `int`."""
    return click.option(
        *names, metavar="BYTES", default=default, show_default=True, callback=_bytes, help=help_text
    )


def patterns_options(command: Command) -> Command:
    """Add `--include` and `--exclude`; the command gets a tuple of each, or None."""
    for name, what in (("exclude", "are left out"), ("include", "are written")):
        command = click.option(
            f"--{name}",
            multiple=True,
            metavar="FQN",
            callback=lambda _ctx, _param, patterns: patterns or None,
            help=f"Names or patterns that {what}.",
        )(command)
    return command


def url_argument(name: str = "url", *, required: bool = True) -> Callable[[Command], Command]:
    """Add an argument that is a URL or a path; shells complete paths."""
    return click.argument(name, type=click.Path(), required=required)


def parse_slice(text: str) -> tuple[Any, ...]:
    """Return the index that a text such as "0:8,128:256" or "..., -1" means."""
    index: list[Any] = []
    for part in text.strip().strip("[]").split(","):
        if part.strip() == "...":
            index.append(...)
            continue
        match = _PART.fullmatch(part)
        if match is None or not part.strip():
            raise click.BadParameter(f"{text!r:.80} is no index; write '0:8,128:256' or '...,3'.")
        numbers = [None if group is None else int(group) for group in match.groups()]
        if numbers[2] is not None and numbers[2] < 1:
            raise click.BadParameter(f"{text!r} has a step that is less than 1.")
        index.append(slice(*numbers) if ":" in part else numbers[0])
    return tuple(index)


def duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return a length of time in seconds: "90", "1.5h", "7d"; the callback of such options."""
    if value is None:
        return None
    match = _DURATION.fullmatch(value.strip().lower())
    if match is None:
        problem = f"{value!r} is no length of time; write 90, 30m, 2h or 7d"
        raise click.BadParameter(problem, ctx=ctx, param=param)
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(_ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return a positive number of bytes: "4096", "512MiB"; the callback of such options."""
    from ckpt_storage.export.options import parse_bytes  # noqa: PLC0415  # only where it is used

    if value is None:
        return None
    option = str(param.opts[0])
    count = parse_bytes(value, option=option)
    if count < 1:
        raise click.BadParameter(f"{value!r:.80} is no size; give 1 or more.", param_hint=option)
    return count


def _from_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    try:
        options = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        # The parser's message is left out: it may quote a secret.
        raise click.BadParameter(f"{value} is no JSON file.") from error
    if not isinstance(options, dict):
        raise click.BadParameter(f"{value} holds no JSON object.")
    ctx.meta[f"ckpt_storage.{param.name}"] = options


def _pairs(
    ctx: click.Context, param: click.Parameter, values: Iterable[str]
) -> dict[str, Any] | None:
    """Return the options that pairs and a file spell; None if there are none of them."""
    options: dict[str, Any] = dict(ctx.meta.get(f"ckpt_storage.{param.name}_file", {}))
    for pair in values:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            # The text itself may be a secret.
            raise click.BadParameter("write KEY=VALUE.", ctx=ctx, param=param)
        *outer, last = key.split(".")
        inner = options
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise click.BadParameter(f"{name!r} in {key!r} holds no options.")
        inner[last] = _value(last, text)
    return options or None


def _value(key: str, text: str) -> object:
    """Return what a text on the command line means to a file system."""
    if text[:1] in {"{", "[", '"'}:
        try:
            parsed: object = json.loads(text)
        except ValueError:
            return text
        return parsed
    parts = _NAME_PART.findall(key)
    if parts and _TEXT_KEYS.fullmatch(parts[-1].lower()):
        return text
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    return int(text) if _INTEGER.fullmatch(text) else text


memory_option = bytes_option(
    "--memory-limit", "memory_limit_bytes", help_text="Ceiling of buffers, such as 512MiB."
)
threads_option = click.option(
    "--threads", "thread_count", type=click.IntRange(min=1), help="Requests in flight."
)
page_cache_option = click.option(
    "--page-cache",
    type=click.Choice(["keep", "drop"]),
    default="keep",
    show_default=True,
    help="Whether the kernel keeps a copy of local files that are on the disk.",
)
