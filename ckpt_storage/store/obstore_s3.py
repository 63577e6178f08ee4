"""What s3fs's options and botocore's environment mean to obstore; what they cannot mean there.

Knows the options of s3fs, of botocore's client and of its configuration, and which variables of
the environment only one of the two obeys. Credentials that are not given outright are looked
up by botocore, so that profiles, SSO, roles and instances work as with s3fs; a bucket's region is
AWS's own word, since s3fs follows a bucket and obstore does not. Called by `engine`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .bodies import is_private_path
from .location import Location
from .obstore_plan import Given, ObstorePlan, Provider, UntranslatableError, place_of, seconds_of

__all__ = ["plan_s3"]

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_DEFAULT_REGION = "us-east-1"

_HARMLESS = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "fixed_upload_size",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
"""Options of s3fs for what this package never asks of it: caches, listings, its own files."""

_HARMLESS_CONFIG = frozenset({"max_pool_connections", "tcp_keepalive"})

# Read by one of the two only, so the two planes would not mean the same.
_OBSTORE_VARIABLES = frozenset(
    {
        "AWS_ALLOW_HTTP",
        "AWS_ALLOW_INVALID_CERTIFICATES",
        "AWS_CHECKSUM_ALGORITHM",
        "AWS_CONDITIONAL_PUT",
        "AWS_DEFAULT_CONTENT_TYPE",
        "AWS_ENDPOINT",
        "AWS_METADATA_ENDPOINT",
        "AWS_PROXY_CA_CERTIFICATE",
        "AWS_PROXY_EXCLUDES",
        "AWS_PROXY_URL",
        "AWS_REQUEST_PAYER",
        "AWS_S3_EXPRESS",
        "AWS_SERVER_SIDE_ENCRYPTION",
        "AWS_SKIP_SIGNATURE",
        "AWS_SSE_BUCKET_KEY_ENABLED",
        "AWS_SSE_CUSTOMER_KEY_BASE64",
        "AWS_SSE_KMS_KEY_ID",
    }
)
_BOTOCORE_VARIABLES = frozenset(
    {
        "AWS_DISABLE_S3_EXPRESS_SESSION_AUTH",
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
        "AWS_S3_DISABLE_MULTIREGION_ACCESS_POINTS",
        "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT",
        "AWS_USE_DUALSTACK_ENDPOINT",
        "AWS_USE_FIPS_ENDPOINT",
    }
)
_CERTIFICATE_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")

# Of a profile: what says where credentials come from, which botocore looks up itself, and
# what concerns the command line only.
_PROFILE_KEYS = re.compile(
    r"aws_(access_key_id|secret_access_key|session_token|account_id)|region|output|cli_.*|sso_.*|"
    r"role_.*|source_profile|credential_.*|external_id|mfa_serial|duration_seconds|"
    r"web_identity_token_file|sts_regional_endpoints|retry_mode|max_attempts|"
    r"(request|response)_checksum_.*|metadata_service_.*|defaults_mode|parameter_validation|"
    r"login_session"
)

_COMMERCIAL_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us|us-gov)-[a-z]+-\d")
_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


def plan_s3(
    location: Location,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    request_timeout_s: float,
) -> ObstorePlan:
    """Return how obstore reaches an S3 location as s3fs would.

    `options` are the storage options with fsspec's own defaults. Last of all, and at AWS only, the
    bucket's region is asked for. Raises `UntranslatableError` naming the first option or variable
    that obstore cannot follow.
    """
    bucket, host, prefix = place_of(location)
    if host or ":" in bucket or bucket.endswith("--x-s3"):
        raise UntranslatableError("The URL", "names an access point or a bucket of S3 Express")
    for name in sorted((_OBSTORE_VARIABLES | _BOTOCORE_VARIABLES) & set(environ)):
        reader = "obstore" if name in _OBSTORE_VARIABLES else "botocore"
        raise UntranslatableError(f"The variable {name}", f"is obeyed by {reader} only")
    given = Given(options)
    given.drop(_HARMLESS)
    given.must_be_off("version_aware", "session", "local_expiry_check")
    inner, tuned = given.inner("client_kwargs"), given.inner("config_kwargs")
    profile = given.text("profile")
    scoped = _scoped_config(profile, environ)
    endpoint = _endpoint(given, inner, environ)
    told = inner.text("region_name")
    likely = told or environ.get("AWS_DEFAULT_REGION") or scoped.get("region")
    address = _address(bucket, endpoint, likely or _DEFAULT_REGION, tuned)
    config = {**address, **_written_as(given)}
    make_provider = _credentials(config, given, inner, environ, profile)
    client_options = _security(given, inner, endpoint, environ)
    connect_s = seconds_of(tuned, "connect_timeout", min(_CONNECT_TIMEOUT_S, request_timeout_s))
    read_s = seconds_of(tuned, "read_timeout", min(_READ_TIMEOUT_S, request_timeout_s))
    tuned.drop(_HARMLESS_CONFIG)
    for rest in (tuned, inner, given):
        rest.end()
    if endpoint is None or _is_aws(endpoint):
        config["region"] = _region(bucket, told, likely, timeout_s=request_timeout_s)
    return ObstorePlan(
        family="s3",
        bucket=bucket,
        prefix=prefix,
        config=config,
        client_options=client_options,
        make_provider=make_provider,
        connect_timeout_s=connect_s,
        read_timeout_s=read_s,
    )


def _endpoint(given: Given, inner: Given, environ: Mapping[str, str]) -> str | None:
    named = {given.text("endpoint_url"), inner.text("endpoint_url")} - {None}
    if len(named) > 1:
        raise UntranslatableError("endpoint_url", "is given twice")
    found = named.pop() if named else None
    endpoint = found or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UntranslatableError("endpoint_url", "is no http:// or https:// URL")
    if parts.path.strip("/") or parts.query or parts.username:
        raise UntranslatableError("endpoint_url", "has more than a host and a port")
    if _is_aws(endpoint) and not parts.hostname.startswith("s3."):
        raise UntranslatableError("endpoint_url", "is one of AWS's special ones")
    return f"{parts.scheme}://{parts.netloc}"


def _is_aws(endpoint: str) -> bool:
    return (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com")


def _address(bucket: str, endpoint: str | None, region: str, tuned: Given) -> Mapping[str, Any]:
    """Return endpoint, region and style of address as botocore would choose them."""
    ours = tuned.inner("s3")
    style = ours.text("addressing_style") or "auto"
    signs = ours.take("payload_signing_enabled")
    ours.end()
    if tuned.text("signature_version") not in {None, "s3v4"}:
        raise UntranslatableError(tuned.named("signature_version"), "is not 's3v4'")
    for name in ("request_checksum_calculation", "response_checksum_validation"):
        if tuned.text(name) not in {None, "when_required"}:
            raise UntranslatableError(tuned.named(name), "is not 'when_required'")
    config: dict[str, Any] = {
        "region": region,
        "unsigned_payload": is_private_path(endpoint) if signs is None else not signs,
    }
    if endpoint is not None:
        if style == "virtual":
            parts = urlsplit(endpoint)
            endpoint = f"{parts.scheme}://{bucket}.{parts.netloc}"
        return {
            **config,
            "endpoint": endpoint,
            "virtual_hosted_style_request": style == "virtual",
        }
    _check(region)
    is_virtual = style != "path" and _DNS_BUCKET.fullmatch(bucket) is not None
    return {**config, "virtual_hosted_style_request": is_virtual}


def _check(region: str) -> None:
    if not _COMMERCIAL_REGION.fullmatch(region):
        raise UntranslatableError("The region", "has an address of its own")


def _region(bucket: str, told: str | None, likely: str | None, *, timeout_s: float) -> str:
    """Return the region in which AWS says a bucket lies; the one that was `told`, if it is silent.

    A region that is wrong, as a default or a profile's often is, botocore notices and
    corrects, but obstore does not.
    """
    from .obstore_region import (  # noqa: PLC0415  # an endpoint of one's own needs none of it
        RegionUnknownError,
        region_of,
    )

    try:
        region = region_of(bucket, likely=likely, timeout_s=timeout_s)
    except RegionUnknownError as error:
        if told is None:
            raise UntranslatableError(
                "storage_options['client_kwargs']['region_name']",
                f"is not given, and AWS does not tell it: {error}",
            ) from None
        return told
    _check(region)
    return region


def _written_as(given: Given) -> Mapping[str, Any]:
    """Return what every request, or every object that is written, bears."""
    config: dict[str, Any] = {}
    payer = given.take("requester_pays")
    if payer:
        config["request_payer"] = True
    extra = given.inner("s3_additional_kwargs")
    kind = extra.text("ServerSideEncryption")
    if kind is not None:
        config["server_side_encryption"] = kind
        if (key := extra.text("SSEKMSKeyId")) is not None:
            config["sse_kms_key_id"] = key
        elif kind != "AES256":
            # obstore cannot ask for the account's own key.
            raise UntranslatableError(extra.named("ServerSideEncryption"), "needs SSEKMSKeyId")
    extra.end()
    return config


def _credentials(
    config: dict[str, Any],
    given: Given,
    inner: Given,
    environ: Mapping[str, str],
    profile: str | None,
) -> Callable[[], Provider] | None:
    """Put credentials that were given outright into `config`; else return who looks them up."""
    key = given.text("key") or given.text("username") or None
    secret = given.text("secret") or given.text("password")
    token = given.text("token")
    # Both places may name them, as s3fs lets the inner ones win.
    key = inner.text("aws_access_key_id") or key
    secret = inner.text("aws_secret_access_key") or secret
    token = inner.text("aws_session_token") or token
    if given.take("anon"):
        config["skip_signature"] = True
        return None
    if (key is None) != (secret is None):
        raise UntranslatableError("storage_options['key']", "is given without its secret")
    if key is None and profile is None:
        key = environ.get("AWS_ACCESS_KEY_ID")
        secret = environ.get("AWS_SECRET_ACCESS_KEY")
        token = environ.get("AWS_SESSION_TOKEN") or token
    if key and secret:
        # By a provider, since obstore would fill in what is missing from the environment.
        return _Fixed(key, secret, token)
    return _Chain(profile)


@dataclass(frozen=True, slots=True, repr=False)
class _Fixed:
    """Makes the provider of credentials that were given outright; equal for equal ones."""

    key: str
    secret: str
    token: str | None

    def __call__(self) -> Provider:
        credential = {
            "access_key_id": self.key,
            "secret_access_key": self.secret,
            "token": self.token,
            "expires_at": None,
        }
        return lambda: credential


@dataclass(frozen=True, slots=True)
class _Chain:
    """Makes the provider that looks where botocore looks: profile, SSO, role, instance."""

    profile: str | None

    def __call__(self) -> Provider:
        return _ChainProvider(self.profile)


class _ChainProvider:
    """A `Provider` that looks where botocore looks: profile, SSO, role, container, instance."""

    # botocore renews credentials that have less than this left before it hands them out.
    _VALID_FOR = timedelta(minutes=10)

    def __init__(self, profile: str | None) -> None:
        self._session = _session(profile)

    def __repr__(self) -> str:
        return "credentials"

    def __call__(self) -> Mapping[str, Any]:
        found = self._session.get_credentials()
        if found is None:
            raise importlib.import_module("botocore.exceptions").NoCredentialsError
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + self._VALID_FOR,
        }


def _session(profile: str | None) -> Any:  # noqa: ANN401  # botocore ships no types
    # It comes with s3fs, and costs time that credentials which are given need not spend.
    return importlib.import_module("botocore.session").Session(profile=profile)


def _scoped_config(profile: str | None, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what botocore's files say about the profile; refuse what obstore cannot follow."""
    files = [
        environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
        environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    ]
    if not any(Path(name).expanduser().is_file() for name in files):
        if profile is not None:
            raise UntranslatableError("storage_options['profile']", "is not to be found")
        return {}
    try:
        scoped: Mapping[str, Any] = _session(profile).get_scoped_config()
    except Exception as error:
        # s3fs says best what is wrong with it.
        raise UntranslatableError("AWS's configuration", "cannot be read") from error
    for name in sorted(scoped):
        if not _PROFILE_KEYS.fullmatch(name):
            raise UntranslatableError(f"The setting {name} of AWS's configuration", "is not known")
    return {name: value for name, value in scoped.items() if isinstance(value, str)}


def _security(
    given: Given, inner: Given, endpoint: str | None, environ: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return whether plain HTTP and unknown certificates are put up with."""
    switches = (given.take("use_ssl"), inner.take("use_ssl"))
    if endpoint is None and any(value is not None and not value for value in switches):
        raise UntranslatableError("storage_options['use_ssl']", "is off without an endpoint_url")
    verify = inner.take("verify")
    is_plain = endpoint is not None and endpoint.startswith("http://")
    named = [name for name in _CERTIFICATE_VARIABLES if environ.get(name)] if verify is None else []
    if not is_plain and (named or not isinstance(verify, bool | None)):
        raise UntranslatableError(
            f"The variable {named[0]}" if named else inner.named("verify"),
            "names certificates, to which obstore adds the system's",
        )
    return {"allow_http": is_plain, "allow_invalid_certificates": verify is False}
