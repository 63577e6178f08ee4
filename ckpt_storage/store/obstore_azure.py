"""What adlfs's options and environment mean to obstore, and what they cannot mean there.

Knows the options of adlfs in its order of precedence. What adlfs hands to azure.identity
(`anon=False` without credentials, and credential objects) looks elsewhere than obstore would, and
is not translated. Called by `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .location import Location
from .obstore_plan import Given, ObstorePlan, Provider, UntranslatableError, place_of, seconds_of

__all__ = ["plan_azure"]

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_SUFFIXES = (".dfs.core.windows.net", ".blob.core.windows.net")

_HARMLESS = frozenset(
    {
        "assume_container_exists",
        "asynchronous",
        "blocksize",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
"""Options of adlfs for what this package never asks of it: caches, listings, its own files."""

# Read by obstore only, before or besides what it is given.
_OBSTORE_VARIABLES = frozenset(
    {
        "AZURE_ALLOW_HTTP",
        "AZURE_ALLOW_INVALID_CERTIFICATES",
        "AZURE_CREDENTIAL_TYPE",
        "AZURE_DISABLE_TAGGING",
        "AZURE_ENCRYPTION_KEY",
        "AZURE_ENDPOINT",
        "AZURE_PROXY_URL",
        "AZURE_SKIP_SIGNATURE",
        "AZURE_STORAGE_ENDPOINT",
        "AZURE_STORAGE_TOKEN",
        "AZURE_STORAGE_USE_EMULATOR",
        "AZURE_USE_FABRIC_ENDPOINT",
    }
)

_VARIABLES = {
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "account_name": "AZURE_STORAGE_ACCOUNT_NAME",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
    "client_secret": "AZURE_STORAGE_CLIENT_SECRET",
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
    "tenant_id": "AZURE_STORAGE_TENANT_ID",
}
"""Options of adlfs, and the variables that it reads where they are not given."""

_CONNECTION_FIELDS = frozenset(
    {
        "accountkey",
        "accountname",
        "blobendpoint",
        "defaultendpointsprotocol",
        "endpointsuffix",
        "sharedaccesssignature",
    }
)
_OTHER_SERVICES = frozenset({"fileendpoint", "queueendpoint", "tableendpoint"})
_ANON_OFF = frozenset({"", "0", "f", "false"})


def plan_azure(
    location: Location,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    request_timeout_s: float,
) -> ObstorePlan:
    """Return how obstore reaches an Azure location as adlfs would.

    `options` are the storage options with fsspec's own defaults. Raises
    `UntranslatableError` naming the first option or variable that obstore cannot follow.
    """
    container, host, prefix = place_of(location)
    for name in sorted(_OBSTORE_VARIABLES & set(environ)):
        raise UntranslatableError(f"The variable {name}", "is obeyed by obstore only")
    given = Given(options)
    given.drop(_HARMLESS)
    given.must_be_off("credential", "request_session", "socket_timeout", "version_aware")
    if given.text("location_mode") not in {None, "primary"}:
        raise UntranslatableError(given.named("location_mode"), "is not 'primary'")
    found = {
        name: given.text(name) or environ.get(name_there) or None
        for name, name_there in _VARIABLES.items()
    }
    found["account_name"] = _account_of(host) or found["account_name"]
    account_host = given.text("account_host")
    anon = given.take("anon")
    if anon is None:
        anon = environ.get("AZURE_STORAGE_ANON", "false").lower() not in _ANON_OFF
    given.must_be_off("timeout")
    connect_s = seconds_of(given, "connection_timeout", min(_CONNECT_TIMEOUT_S, request_timeout_s))
    read_s = seconds_of(given, "read_timeout", min(_READ_TIMEOUT_S, request_timeout_s))
    given.end()
    if found["connection_string"]:
        config, provider = _by_connection_string(found["connection_string"])
    else:
        config, provider = _by_fields(found, account_host, anon=bool(anon))
    return ObstorePlan(
        family="azure",
        bucket=container,
        prefix=prefix,
        config=config,
        client_options={"allow_http": str(config.get("endpoint", "")).startswith("http://")},
        make_provider=provider,
        connect_timeout_s=connect_s,
        read_timeout_s=read_s,
    )


@dataclass(frozen=True, slots=True, repr=False)
class _Fixed:
    """Makes the provider of one key or signature; equal for equal ones."""

    kind: str
    value: str

    def __call__(self) -> Provider:
        credential = {self.kind: self.value, "expires_at": None}
        return lambda: credential


_Answer = tuple[dict[str, Any], Callable[[], Provider] | None]


def _account_of(host: str) -> str | None:
    if not host:
        return None
    for suffix in _SUFFIXES:
        if host.endswith(suffix):
            return host.removesuffix(suffix)
    raise UntranslatableError("The URL", "names a host that adlfs looks for elsewhere")


def _by_fields(found: Mapping[str, str | None], account_host: str | None, *, anon: bool) -> _Answer:
    account = found["account_name"]
    if not account:
        raise UntranslatableError("storage_options['account_name']", "is not given")
    config: dict[str, Any] = {
        "account_name": account,
        "endpoint": f"https://{account_host or f'{account}.blob.core.windows.net'}",
    }
    if found["account_key"]:
        return config, _Fixed("access_key", found["account_key"])
    if found["sas_token"]:
        return config, _Fixed("sas_token", found["sas_token"].lstrip("?"))
    if found["client_id"]:
        if not (found["client_secret"] and found["tenant_id"]):
            raise UntranslatableError("storage_options['client_id']", "is given without the rest")
        names = ("client_id", "client_secret", "tenant_id")
        return {**config, **{name: found[name] for name in names}}, None
    if anon:
        return {**config, "skip_signature": True}, None
    raise UntranslatableError(
        "storage_options['anon']", "is False without credentials, which azure.identity looks up"
    )


def _by_connection_string(text: str) -> _Answer:
    """Read a connection string, which adlfs takes in place of all else."""
    pairs = [field.partition("=") for field in text.strip().strip(";").split(";")]
    fields = {name.strip().lower(): value for name, _, value in pairs}
    if set(fields) - _CONNECTION_FIELDS - _OTHER_SERVICES:
        # It is not named: of a key that was given in the wrong place, the name is the key.
        raise UntranslatableError("The connection string", "has a field that is not known")
    account = fields.get("accountname")
    endpoint = fields.get("blobendpoint")
    if endpoint is None:
        scheme = fields.get("defaultendpointsprotocol", "https")
        suffix = fields.get("endpointsuffix", "core.windows.net")
        endpoint = f"{scheme}://{account}.blob.{suffix}"
    parts = urlsplit(endpoint)
    if not account or parts.scheme not in {"http", "https"} or parts.query:
        raise UntranslatableError("The connection string", "names no account, or no plain address")
    config: dict[str, Any] = {"account_name": account, "endpoint": endpoint.rstrip("/")}
    if fields.get("accountkey"):
        return config, _Fixed("access_key", fields["accountkey"])
    if fields.get("sharedaccesssignature"):
        return config, _Fixed("sas_token", fields["sharedaccesssignature"].lstrip("?"))
    raise UntranslatableError("The connection string", "has neither key nor signature")
