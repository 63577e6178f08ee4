"""The checksums a request may carry: compute, compare, combine.

CRC64NVME and the XXH kinds are refused, never passed unchecked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from crc32c import crc32c

from ._s3memory import Payload
from ._s3model import S3Error

__all__ = ["as_headers", "claimed", "composite", "compute", "requested", "verify"]

_HEADER_PREFIX = "x-amz-checksum-"
_HASHES = ("md5", "sha1", "sha256", "sha512")
_ALGORITHMS = ("crc32", "crc32c", *_HASHES)
_NO_DIGEST = frozenset({"algorithm", "mode", "type"})


def as_headers(checksums: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the checksums as response headers."""
    return [(_HEADER_PREFIX + algorithm, value) for algorithm, value in checksums.items()]


def compute(algorithm: str, payload: Payload) -> str:
    """Return the base64 text that S3 puts into `x-amz-checksum-<algorithm>`."""
    return base64.b64encode(_raw(algorithm, payload)).decode("ascii")


def _raw(algorithm: str, payload: Payload) -> bytes:
    if algorithm in _HASHES:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for view in payload.views():
            digest.update(view)
        return digest.digest()
    value = 0
    update = crc32c if algorithm == "crc32c" else zlib.crc32
    for view in payload.views():
        value = update(view, value)
    return value.to_bytes(4, "big")


def composite(algorithm: str, checksums: Sequence[str]) -> str:
    """Return the checksum of the parts' raw checksums, with the number of parts after a dash."""
    raw = b"".join(base64.b64decode(text) for text in checksums)
    return f"{compute(algorithm, Payload.of_bytes(raw))}-{len(checksums)}"


def requested(headers: Mapping[str, str]) -> str | None:
    """Return the algorithm that `x-amz-checksum-algorithm` wants the server to compute, if any.

    Raises `S3Error` 501 for one this server cannot compute.
    """
    name = headers.get("x-amz-checksum-algorithm")
    return None if name is None else _known(name.lower())


def claimed(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the checksum in `headers`, keyed by algorithm; empty if there is none.

    Raises `S3Error`: InvalidRequest (several checksums, or one announced and not given),
    NotImplemented (an algorithm this server cannot compute).
    """
    found = {
        name.removeprefix(_HEADER_PREFIX): value
        for name, value in headers.items()
        if name.startswith(_HEADER_PREFIX) and name.removeprefix(_HEADER_PREFIX) not in _NO_DIGEST
    }
    if len(found) > 1 or (not found and "x-amz-sdk-checksum-algorithm" in headers):
        raise S3Error(
            HTTPStatus.BAD_REQUEST, "InvalidRequest", "Expecting a single x-amz-checksum- header"
        )
    return {_known(algorithm): value for algorithm, value in found.items()}


def verify(headers: Mapping[str, str], payload: Payload) -> dict[str, str]:
    """Compare the digests in `headers` (trailers included) with the body; return those to store.

    Raises `S3Error`: BadDigest, InvalidDigest (no base64 of the right length), and as `claimed`.
    """
    if "content-md5" in headers:
        _compare("md5", headers["content-md5"], payload)
    found = claimed(headers)
    for algorithm, value in found.items():
        _compare(algorithm, value, payload)
    return found


def _known(algorithm: str) -> str:
    if algorithm not in _ALGORITHMS:
        raise S3Error(
            HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", f"Checksum {algorithm} is not implemented"
        )
    return algorithm


def _compare(algorithm: str, value: str, payload: Payload) -> None:
    actual = _raw(algorithm, payload)
    try:
        claimed = base64.b64decode(value, validate=True)
    except binascii.Error:
        claimed = b""
    if len(claimed) != len(actual):
        raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidDigest", f"The {algorithm} is not valid")
    if claimed != actual:
        raise S3Error(
            HTTPStatus.BAD_REQUEST, "BadDigest", f"The {algorithm} did not match the body"
        )
