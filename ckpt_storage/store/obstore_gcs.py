"""What gcsfs's options and environment mean to obstore, and what they cannot mean there.

Knows the options of gcsfs. Credentials are google-auth's, as with gcsfs. obstore speaks Google's
XML API, which emulators of the JSON API do not have, so an address of one's own is not translated.
Called by `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any

from .location import Location
from .obstore_plan import Given, ObstorePlan, Provider, UntranslatableError, place_of

__all__ = ["plan_gcs"]

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_SCOPE = "https://www.googleapis.com/auth/devstorage.full_control"

_HARMLESS = frozenset(
    {
        "asynchronous",
        "block_size",
        "cache_timeout",
        "check_connection",
        "consistency",
        "default_location",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "project",
        "secure_serialize",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
"""Options of gcsfs for what this package never asks of it: caches, listings, buckets."""

_VARIABLES = {
    "GOOGLE_API_USE_CLIENT_CERTIFICATE": "gcsfs",
    "GOOGLE_BASE_URL": "obstore",
    "GOOGLE_BEARER_TOKEN": "obstore",
    "GOOGLE_PROXY_URL": "obstore",
    "GOOGLE_SERVICE_ACCOUNT": "obstore",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "obstore",
    "GOOGLE_SERVICE_ACCOUNT_PATH": "obstore",
    "GOOGLE_SKIP_SIGNATURE": "obstore",
    "STORAGE_EMULATOR_HOST": "gcsfs",
}
"""Variables that only one of the two obeys."""

_SEARCHING = frozenset({"browser", "cache", "cloud"})


def plan_gcs(
    location: Location,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    request_timeout_s: float,
) -> ObstorePlan:
    """Return how obstore reaches a location on Google Cloud Storage as gcsfs would.

    `options` are the storage options with fsspec's own defaults. Raises
    `UntranslatableError` naming the first option or variable that obstore cannot follow.
    """
    bucket, host, prefix = place_of(location)
    if host:
        raise UntranslatableError("The URL", "has a user or a host")
    for name in sorted(set(_VARIABLES) & set(environ)):
        raise UntranslatableError(f"The variable {name}", f"is obeyed by {_VARIABLES[name]} only")
    given = Given(options)
    given.drop(_HARMLESS)
    given.must_be_off("requester_pays", "version_aware", "session_kwargs", "timeout")
    given.must_be_off("requests_timeout", "endpoint_url")
    if given.text("access") not in {None, "full_control"}:
        raise UntranslatableError(given.named("access"), "is not 'full_control'")
    token = given.take("token")
    given.end()
    return ObstorePlan(
        family="gcs",
        bucket=bucket,
        prefix=prefix,
        config={},
        client_options={},
        make_provider=_maker_of(token, environ),
        connect_timeout_s=min(_CONNECT_TIMEOUT_S, request_timeout_s),
        read_timeout_s=min(_READ_TIMEOUT_S, request_timeout_s),
    )


def _maker_of(token: object, environ: Mapping[str, str]) -> _Default | _ServiceFile:
    if token == "google_default" or (  # noqa: S105  # the word for google-auth's own search
        token is None and environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    ):
        return _Default()
    if token == "anon":  # noqa: S105  # the word for no credentials
        # `skip_signature` is heeded by reads only; a write asks the metadata server all the same.
        raise UntranslatableError(
            "storage_options['token']", "is 'anon', but obstore writes with credentials only"
        )
    if token is None or not isinstance(token, str) or token in _SEARCHING:
        raise UntranslatableError(
            "storage_options['token']",
            "leaves it to gcsfs where to look for credentials ('google_default' would not)",
        )
    if not Path(token).is_file():
        raise UntranslatableError("storage_options['token']", "is no file of a service account")
    return _ServiceFile(token)


@dataclass(frozen=True, slots=True)
class _Default:
    """Makes the provider of google-auth's default credentials."""

    def __call__(self) -> Provider:
        import google.auth  # noqa: PLC0415  # comes with gcsfs

        return _Provider(google.auth.default(scopes=[_SCOPE])[0])


@dataclass(frozen=True, slots=True, repr=False)
class _ServiceFile:
    """Makes the provider of a service account's credentials."""

    path: str

    def __call__(self) -> Provider:
        from google.oauth2 import service_account  # noqa: PLC0415  # comes with gcsfs

        load: Any = service_account.Credentials.from_service_account_file
        made = load(self.path, scopes=[_SCOPE])
        return _Provider(made)


class _Provider:
    """A `Provider` of google-auth's tokens."""

    def __init__(self, credentials: Any) -> None:  # noqa: ANN401  # google-auth's
        self._credentials = credentials

    def __repr__(self) -> str:
        return "credentials"

    def __call__(self) -> Mapping[str, Any]:
        from google.auth.transport.requests import Request  # noqa: PLC0415  # comes with gcsfs

        if not self._credentials.valid:
            self._credentials.refresh(Request())
        expiry = self._credentials.expiry
        return {
            "token": self._credentials.token,
            "expires_at": None if expiry is None else expiry.replace(tzinfo=UTC),
        }
