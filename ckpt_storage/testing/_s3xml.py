"""S3's documents: write answers, read the two that clients send."""

from __future__ import annotations

# Only test clients on this machine reach the server, and expat expands no external entities.
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from xml.sax.saxutils import escape

from ._s3memory import Payload
from ._s3model import PartClaim, S3Error

__all__ = [
    "checksum_elements",
    "document",
    "element",
    "error_document",
    "etag_element",
    "read_complete",
    "read_delete",
    "text",
    "timestamp",
]

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def text(name: str, value: object) -> str:
    """Return an element that holds text."""
    return f"<{name}>{escape(str(value))}</{name}>"


def element(name: str, *content: str) -> str:
    """Return an element that holds elements."""
    return f"<{name}>{''.join(content)}</{name}>"


def etag_element(etag: str) -> str:
    """Return the ETag in its quotes."""
    return text("ETag", f'"{etag}"')


def checksum_elements(checksums: Mapping[str, str]) -> str:
    """Return one element per checksum, `ChecksumCRC32C` and so on."""
    return "".join(text(f"Checksum{name.upper()}", value) for name, value in checksums.items())


def timestamp(time_s: float) -> str:
    """Return a time as documents spell it; S3 shows whole seconds."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def document(name: str, *content: str) -> Payload:
    """Return a whole document in S3's namespace."""
    body = f'<{name} xmlns="{_NAMESPACE}">{"".join(content)}</{name}>'
    return Payload.of_bytes(f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode())


def error_document(error: S3Error, *, resource: str, has_condition: bool) -> Payload:
    """Return the document of a refusal, which has no namespace."""
    condition = error.condition if has_condition else None
    body = element(
        "Error",
        text("Code", error.code),
        text("Message", error.message),
        text("Condition", condition) if condition else "",
        text("Resource", resource),
        text("RequestId", "0"),
    )
    return Payload.of_bytes(f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode())


def _malformed() -> S3Error:
    return S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", "The document is not as S3 defines it")


def _parse(payload: Payload, name: str) -> ET.Element:
    try:
        root = ET.fromstring(payload.to_bytes())  # noqa: S314 - as for the import
    except ET.ParseError:
        raise _malformed() from None
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    if root.tag != name:
        raise _malformed()
    return root


def read_complete(payload: Payload) -> list[PartClaim]:
    """Read the parts of a CompleteMultipartUpload; raises `S3Error` 400 MalformedXML."""
    claims: list[PartClaim] = []
    for node in _parse(payload, "CompleteMultipartUpload").findall("Part"):
        values = {child.tag: (child.text or "").strip() for child in node}
        try:
            number, etag = int(values.pop("PartNumber")), values.pop("ETag").strip('"')
        except (KeyError, ValueError):
            raise _malformed() from None
        checksums = {
            tag.removeprefix("Checksum").lower(): value
            for tag, value in values.items()
            if tag.startswith("Checksum")
        }
        claims.append(PartClaim(number=number, etag=etag, checksums=checksums))
    return claims


def read_delete(payload: Payload) -> tuple[list[str], bool]:
    """Read the keys of a multi-object delete and whether it wants to hear of failures only.

    Raises `S3Error`: MalformedXML, or NotImplemented for a versioned or conditional delete.
    """
    root = _parse(payload, "Delete")
    keys: list[str] = []
    for node in root.findall("Object"):
        values = {child.tag: child.text or "" for child in node}
        if not values.get("Key"):
            raise _malformed()
        if len(values) > 1:
            raise S3Error(
                HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", "Only plain keys can be deleted"
            )
        keys.append(values["Key"])
    if not 0 < len(keys) <= 1000:
        raise _malformed()
    return keys, root.findtext("Quiet") == "true"
