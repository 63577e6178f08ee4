"""In which of AWS's regions a bucket lies: asked of AWS itself, by a request that needs no right.

Knows where AWS tells it; knows no option and no client. Found regions are kept for the life of
the process, and of its children by fork: a bucket never moves. Called by `obstore_s3`.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from urllib.parse import quote

from ckpt_storage.errors import StorageError

from .timed import TimedPool

__all__ = ["RegionUnknownError", "address_of", "region_of"]

_LOG = logging.getLogger(__name__)

_HEADER = "x-amz-bucket-region"

_PATIENCE_S = 10.0
"""As long as a connection may take to be made: whoever waits longer is better served by s3fs."""

_FAILED_FOR_S = 60.0
"""How long an answer that tells no region counts, so that not every store opened asks again."""

_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")

_FOUND: dict[str, str] = {}
_FAILED: dict[str, tuple[float, str]] = {}
_LOCKS: dict[int, threading.Lock] = {}


class RegionUnknownError(Exception):
    """AWS did not tell in which region a bucket lies; the text says what it did instead."""


def region_of(bucket: str, *, likely: str | None, timeout_s: float) -> str:
    """Return the region of a bucket at AWS, asked once per process.

    `likely` is the region that is configured, whose servers are asked if there is one: they can
    be reached where others cannot. Ends within `timeout_s` and within 10 s. Raises
    `RegionUnknownError`. The header, also of refusals and redirections, is documented with
    HeadBucket in the Amazon S3 API Reference.
    """
    address = address_of(bucket, likely)
    # One inherited by fork may be held by a thread that is gone.
    with _LOCKS.setdefault(os.getpid(), threading.Lock()):
        region = _FOUND.get(address)
        if region is not None:
            return region
        until_s, why = _FAILED.get(address, (0.0, ""))
        if time.monotonic() >= until_s:
            try:
                region = _FOUND[address] = _asked(address, min(timeout_s, _PATIENCE_S))
            except RegionUnknownError as error:
                why = str(error)
                _FAILED[address] = (time.monotonic() + _FAILED_FOR_S, why)
    if region is None:
        raise RegionUnknownError(why)
    if likely not in {None, region}:
        _LOG.info("The bucket %s lies in %s, not in %s as configured.", bucket, region, likely)
    return region


def address_of(bucket: str, region: str | None) -> str:
    """Return the URL of a bucket; without a region that of servers which know all buckets."""
    host = f"s3.{region}.amazonaws.com" if region else "s3.amazonaws.com"
    if _DNS_BUCKET.fullmatch(bucket):
        return f"https://{bucket}.{host}/"
    # A name with dots fits no certificate.
    return f"https://{host}/{quote(bucket, safe='')}"


def _asked(address: str, timeout_s: float) -> str:
    """Return the region that one HEAD tells; raises `RegionUnknownError`."""
    pool = TimedPool("ckpt-storage region")
    try:
        # In a thread, as looking up a name and slow answers have no deadline of their own.
        status, headers = pool.run(
            lambda: _head(address, timeout_s),
            timeout_s=timeout_s,
            what=f"request for {address}",
            repeatable=False,
        )
    except StorageError:
        raise RegionUnknownError(f"no answer from {address} within {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RegionUnknownError(f"no answer from {address}: {reason}") from None
    finally:
        pool.close()
    region = headers.get(_HEADER)
    if not region:
        raise RegionUnknownError(f"{address} answers {status} and names no region")
    return str(region)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes an answer that sends elsewhere for the answer: it names the region."""

    def redirect_request(self, *_: object) -> None:
        return None


def _head(address: str, timeout_s: float) -> tuple[int, Message]:
    """HEAD, without credentials and redirections; return status and headers of any answer."""
    request = urllib.request.Request(address, method="HEAD")  # noqa: S310  # our own URL
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers
