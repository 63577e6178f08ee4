r"""Credentials: the same save and load on S3, Google Cloud Storage and Azure, three ways.

    python examples/credentials.py URL [OPTION ...]

    export AWS_PROFILE=training                                  # the environment, by a profile
    python examples/credentials.py s3://bucket/run

    export GOOGLE_APPLICATION_CREDENTIALS=/path/key.json         # the environment, by a key file
    python examples/credentials.py gs://bucket/run

    python examples/credentials.py s3://bucket/run profile=training          # a profile, by name
    python examples/credentials.py az://container/run account_name=mine anon=false

An OPTION, KEY=VALUE, becomes one of `storage_options`. `KEY=env:NAME` takes the value of the
variable NAME: what is secret must not stand on a command line, where every user of the machine can
read it.

    python examples/credentials.py s3://bucket/run key=env:MY_KEY secret=env:MY_SECRET \
        endpoint_url=https://host:9000
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

import ckpt_storage

WORDS = {"false": False, "true": True}

HINTS = {
    "credentials": "there are none, or they have expired: see docs/storages.md",
    "permission": "they are not sufficient: ask for the rights listed there",
}


def options_of(arguments: Sequence[str]) -> dict[str, object]:
    """Return the `storage_options` that KEY=VALUE and KEY=env:NAME spell."""
    options: dict[str, object] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            sys.exit(f"{key}: write KEY=VALUE or KEY=env:NAME")
        if value.startswith("env:"):
            name = value.removeprefix("env:")
            if name not in os.environ:
                sys.exit(f"{key}: the environment has no {name}")
            options[key] = os.environ[name]
        else:
            options[key] = WORDS.get(value, value)
    return options


def main(url: str, options: dict[str, object]) -> None:
    """Save a small checkpoint below `url`, load it, and say so; options reach every call."""
    state: dict[str, Any] = {"weights": torch.arange(8.0), "step": 3}
    place = f"{url}/step-3"
    try:
        info = ckpt_storage.save(
            state, place, overwrite=True, storage_options=options or None, timeout=60
        )
        target: dict[str, Any] = {"weights": torch.zeros(8), "step": 0}
        ckpt_storage.load(target, place, storage_options=options or None, timeout=60)
    except ckpt_storage.StorageError as error:
        # Neither the text nor the kind holds a secret.
        sys.exit(f"{error.kind}: {HINTS.get(error.kind, 'no question of credentials')}\n{error}")
    same = torch.equal(target["weights"], state["weights"]) and target["step"] == state["step"]
    if not same:
        sys.exit(f"saved {info.url} and loaded something else")
    print(f"saved {info.url} and loaded the same")


if __name__ == "__main__":
    if len(sys.argv) < 2:  # noqa: PLR2004  # a URL
        sys.exit(__doc__)
    main(sys.argv[1], options_of(sys.argv[2:]))
