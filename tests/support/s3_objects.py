"""Objects and uploads of the S3 server, and S3's rules for them; unknown requests get 501."""

from __future__ import annotations

import base64
import re
import secrets
import threading
import time

# Only test clients on this machine reach the server, and expat expands no external entities.
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote
from xml.sax.saxutils import escape

from crc32c import crc32c
from s3_rules import Profile, Refusal, ServiceRules, rules_of

_SOURCE, _CHECKSUM = "x-amz-copy-source", "x-amz-checksum-"
_MARKERS = ("uploads", "uploadId", "delete", "list-type", "session")
# Operations by method, place, marker among the parameters, and whether it is a copy.
_ROUTES = {
    "HEAD bucket": "head_bucket",
    "GET bucket list-type": "list",
    "GET bucket uploads": "list_uploads",
    "GET bucket session": "create_session",
    "POST bucket delete": "bulk_delete",
    "GET object": "get",
    "HEAD object": "head",
    "PUT object": "put",
    "PUT object copy": "copy",
    "DELETE object": "delete",
    "POST object uploads": "create_upload",
    "PUT object uploadId": "part",
    "PUT object uploadId copy": "part_copy",
    "POST object uploadId": "complete",
    "DELETE object uploadId": "abort",
}
_KNOWN = {
    *(*_MARKERS, "if-match", "if-none-match", f"{_SOURCE}-if-match"),
    *("continuation-token", "delimiter", "encoding-type", "key-marker", "max-keys", "max-uploads"),
    *("partNumber", "prefix", "upload-id-marker", "x-id"),
}
"""Parameters and conditions."""
_CRCS = {f"{_CHECKSUM}crc32": zlib.crc32, f"{_CHECKSUM}crc32c": crc32c}
_SETTINGS = {_CHECKSUM + name for name in ("algorithm", "mode", "type")}

_Home = dict[str, "_Stored"]
_Parts = dict[int, "_Stored"]


class Answer(NamedTuple):
    """A response; its length is added when it is sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes | memoryview = b""


@dataclass
class S3Error(Exception):
    """An error response: HTTP status and S3's code."""

    status: int
    code: str
    message: str = ""

    def answer(self) -> Answer:
        """Return the response."""
        return _document("Error", {"Code": self.code, "Message": self.message}, self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request of path style; names of headers are in lower case."""

    method: str
    bucket: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def op(self) -> str:
        """The operation, "unknown" if it is not implemented."""
        place = "object" if self.key else "bucket" if self.bucket else "service"
        marker = [name for name in _MARKERS if name in self.query]
        copy = ["copy"] if _SOURCE in self.headers else []
        return _ROUTES.get(" ".join([self.method, place, *marker, *copy]), "unknown")

    def checksum(self) -> dict[str, str]:
        """Return the header with a checksum of the body, if there is any."""
        checksums = [item for item in self.headers.items() if item[0].startswith(_CHECKSUM)]
        return {name: text for name, text in checksums if name not in _SETTINGS}

    def checksum_of(self, body: bytes | memoryview) -> dict[str, str]:
        """Return the checksum of a part or object, by the algorithm that this request named."""
        name = _CHECKSUM + self.headers.get(f"{_CHECKSUM}algorithm", "").lower()
        return {name: _digest(name, body)} if name != _CHECKSUM else {}

    def kept(self) -> dict[str, str]:
        """Return the headers that are stored with an object."""
        kept = {name: text for name, text in self.headers.items() if name.startswith("x-amz-meta-")}
        return {"content-type": self.headers.get("content-type", "binary/octet-stream"), **kept}

    def items(self, name: str) -> list[dict[str, str]]:
        """Return the elements of that name in the body's document; raise if there are none."""
        elements = [
            {child.tag.rpartition("}")[2]: child.text or "" for child in node}
            for node in ET.fromstring(self.body)  # noqa: S314 - as for the import
            if node.tag.rpartition("}")[2] == name
        ]
        if not elements:
            raise S3Error(400, "MalformedXML")
        return elements


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object or a part, which may be a view of its source; `kept` and `checksum` are headers."""

    body: bytes | memoryview
    kept: Mapping[str, str] = field(default_factory=dict)
    checksum: Mapping[str, str] = field(default_factory=dict)
    etag: str = field(default_factory=lambda: f'"{secrets.token_hex(16)}"')
    time_s: float = field(default_factory=time.time)

    def headers(self) -> dict[str, str]:
        is_composite = any("-" in text for text in self.checksum.values())
        kind = {f"{_CHECKSUM}type": "COMPOSITE" if is_composite else "FULL_OBJECT"}
        return {"ETag": self.etag, **self.checksum, **(kind if self.checksum else {})}

    def fields(self) -> dict[str, object]:
        time_text = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.time_s))
        crcs = {_element(name): crc for name, crc in self.checksum.items()}
        return {"ETag": self.etag, "LastModified": time_text, **crcs}


@dataclass(kw_only=True, eq=False)
class S3Objects:
    """All buckets, objects and open uploads; requests are served under a lock.

    `ignore_preconditions` models a store from before conditional writes: it overwrites silently.
    `min_part_bytes` is the minimum size of a part that is not the last, and `list_page_count` the
    maximum of entries in a page; tests lower them to get many parts and pages from little data.
    `profile` names a service whose rules apply, too.
    """

    profile: Profile | None = None
    ignore_preconditions: bool = False
    min_part_bytes: int = 5 << 20
    list_page_count: int = 1000
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _buckets: dict[str, _Home] = field(default_factory=dict, init=False)
    _uploads: dict[str, tuple[Request, _Parts]] = field(default_factory=dict, init=False)
    _distorted: set[tuple[str, str]] = field(default_factory=set, init=False)
    _service: ServiceRules = field(default_factory=ServiceRules, init=False)

    def __post_init__(self) -> None:
        self._service = rules_of(self.profile)

    def create_bucket(self, name: str) -> None:
        """Create a bucket; idempotent."""
        self._buckets.setdefault(name, {})

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Put an object."""
        with self._lock:
            self._buckets[bucket][key] = _Stored(data)

    def dump(self, bucket: str | None = None) -> dict[str, bytes]:
        """Return all objects of a bucket by key, sorted; None: of the only bucket."""
        with self._lock:
            [objects] = self._buckets.values() if bucket is None else [self._buckets[bucket]]
            return {key: bytes(stored.body) for key, stored in sorted(objects.items())}

    @property
    def open_upload_count(self) -> int:
        """The number of open multipart uploads."""
        return len(self._uploads)

    def answer(self, request: Request) -> Answer:
        """Serve a request; an error response means that nothing was changed."""
        try:
            _refuse(self._service.refusal(request.op, request.query, request.headers))
            _refuse_unknown(request)
            with self._lock:
                self._check_place(request)
                home = self._buckets[request.bucket]
                self._check(request, home.get(request.key))
                answer: Answer = getattr(self, f"_{request.op}")(request, home)
        except S3Error as error:
            if error.code == "NoSuchKey" and not self._service.list_right:
                error = S3Error(403, "AccessDenied", "Access Denied")
            return error.answer()
        except (KeyError, ValueError, ET.ParseError) as error:
            return S3Error(400, "InvalidArgument", repr(error)).answer()
        return answer

    def _check_place(self, request: Request) -> None:
        if request.bucket not in self._buckets:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist")
        name = request.query.get("uploadId")
        if name and (name not in self._uploads or self._uploads[name][0].key != request.key):
            raise S3Error(404, "NoSuchUpload", "It may have been aborted or completed")

    def _check(self, request: Request, present: _Stored | None, prefix: str = "") -> None:
        """Raise unless the conditions hold for the present object."""
        match, absent = request.headers.get(f"{prefix}if-match"), None
        if not prefix:
            in_parts = present is not None and "-" in present.etag
            match, absent = self._service.conditions_of(
                request.op, request.headers, in_parts=in_parts
            )
        if self.ignore_preconditions or match is absent is None:
            return
        if absent not in (None, "*") or re.search(r"\*|,|W/", match or ""):
            raise S3Error(501, "NotImplemented", "A condition with anything but one ETag")
        if match is not None:
            present = _existing(present)
        if present is not None and (absent or (match or "").strip('"') != present.etag.strip('"')):
            raise S3Error(412, "PreconditionFailed", "The condition does not hold")

    def _list(self, request: Request, home: _Home) -> Answer:
        prefix, delimiter = (request.query.get(name, "") for name in ("prefix", "delimiter"))
        after = bytes.fromhex(request.query.get("continuation-token", "")).decode()
        entries: dict[str, _Stored | None] = {}
        keys = {*home}
        if self._service.directory_bucket and delimiter:
            # AWS, "Differences for directory buckets": prefixes of uploads in progress, too.
            keys |= {f"{begun.key}/" for begun, _ in self._of_bucket(request)}
        for key in sorted(key for key in keys if key.startswith(prefix)):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            # Common prefixes are in the order of their keys, so a page may end at any of them.
            if name > after and (cut >= 0 or key in home):
                entries[name] = home[key] if cut < 0 else None
        page = list(entries.items())[: int(request.query.get("max-keys", 1000))]
        page = page[: self.list_page_count]
        is_cut = 0 < len(page) < len(entries)
        token = page[-1][0].encode().hex() if is_cut else None
        if self._service.directory_bucket:
            # AWS, "Differences for directory buckets": no lexicographical order.
            page.sort(key=lambda entry: zlib.crc32(entry[0].encode()))
        fields = {
            "Prefix": prefix,
            "KeyCount": len(page),
            "IsTruncated": is_cut,
            "NextContinuationToken": token,
            "Contents": [
                {"Key": key, "Size": len(stored.body), **stored.fields()}
                for key, stored in page
                if stored
            ],
            "CommonPrefixes": [{"Prefix": key} for key, stored in page if not stored],
        }
        return _document("ListBucketResult", fields)

    _head_bucket = _list

    def _list_uploads(self, request: Request, _home: _Home) -> Answer:
        query = request.query
        if self._service.streams_parts and not self._of_bucket(request):
            raise S3Error(404, "NoSuchUpload", "No upload is open")
        # Without an id the marker comes after all uploads of its key.
        marker = query.get("key-marker", ""), query.get("upload-id-marker", "~")
        remaining = sorted(
            (begun.key, name)
            for begun, name in self._of_bucket(request)
            if begun.key.startswith(query.get("prefix", "")) and (begun.key, name) > marker
        )
        page, is_directory = remaining[: self.list_page_count], self._service.directory_bucket
        fields = {
            "Bucket": request.bucket,
            "IsTruncated": len(page) < len(remaining),
            "NextKeyMarker": page[-1][0] if page else "",
            "NextUploadIdMarker": page[-1][1] if page and not is_directory else "",
            "Upload": [{"Key": key, "UploadId": name} for key, name in page],
        }
        return _document("ListMultipartUploadsResult", fields)

    def _of_bucket(self, request: Request) -> list[tuple[Request, str]]:
        """Return the creating request and the id of each open upload of the bucket."""
        uploads = [(begun, name) for name, (begun, _) in self._uploads.items()]
        return [(begun, name) for begun, name in uploads if begun.bucket == request.bucket]

    def _create_session(self, _request: Request, _home: _Home) -> Answer:
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
        names = ("SessionToken", "SecretAccessKey", "AccessKeyId")
        fields = {"Credentials": dict.fromkeys(names, "session") | {"Expiration": ends}}
        return _document("CreateSessionOutput", fields)

    def _bulk_delete(self, request: Request, home: _Home) -> Answer:
        items = request.items("Object")
        if len(items) > 1000 or any(item.keys() != {"Key"} for item in items):
            raise S3Error(400, "MalformedXML")
        for item in items:
            home.pop(item["Key"], None)
        return _document("DeleteResult", {"Deleted": items})

    def _get(self, request: Request, home: _Home) -> Answer:
        stored = _existing(home.get(request.key))
        modified = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(stored.time_s))
        headers = {**stored.kept, "ETag": stored.etag, "Last-Modified": modified}
        if asked := request.headers.get("range"):
            start, stop = _range(asked, len(stored.body))
            if start >= stop:
                raise S3Error(416, "InvalidRange", "The requested range is not satisfiable")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(stored.body)}"
            return Answer(
                self._service.range_status,
                headers,
                self._sent(request, memoryview(stored.body)[start:stop]),
            )
        if request.headers.get(f"{_CHECKSUM}mode") == "ENABLED":
            headers |= stored.headers()
        return Answer(200, headers, self._sent(request, stored.body))

    _head = _get

    def _sent(self, request: Request, body: bytes | memoryview) -> bytes | memoryview:
        """Return the content of a response, with a wrong byte if the profile says so."""
        name = request.bucket, request.key
        if (
            not self._service.wrong_byte
            or request.op != "get"
            or not body
            or name in self._distorted
        ):
            return body
        self._distorted.add(name)
        middle = len(body) // 2
        return bytes(body[:middle]) + bytes([body[middle] ^ 1]) + bytes(body[middle + 1 :])

    def _put(self, request: Request, home: _Home) -> Answer:
        home[request.key] = stored = _Stored(request.body, request.kept(), request.checksum())
        return Answer(200, stored.headers())

    def _copy(self, request: Request, home: _Home) -> Answer:
        # Stock torch's writer over fsspec renames with it and a bulk deletion.
        source = self._source(request)
        home[request.key] = stored = _Stored(source.body, source.kept)
        return _document("CopyObjectResult", stored.fields())

    def _source(self, request: Request) -> _Stored:
        bucket, _, key = unquote(request.headers[_SOURCE]).removeprefix("/").partition("/")
        source = _existing(self._buckets.get(bucket, {}).get(key))
        self._check(request, source, f"{_SOURCE}-")
        return source

    def _delete(self, request: Request, home: _Home) -> Answer:
        home.pop(request.key, None)
        # AWS, "How S3 Object Lock works": versions stay below a delete marker, not modelled here.
        return Answer(204, {"x-amz-delete-marker": "true"} if self._service.object_lock else {})

    def _create_upload(self, request: Request, _home: _Home) -> Answer:
        # Uploads of a key are listed by age, so ids are sorted by age.
        upload_id = f"{time.time_ns()}{secrets.token_hex(8)}"
        self._uploads[upload_id] = request, {}
        fields = {"Bucket": request.bucket, "Key": request.key, "UploadId": upload_id}
        answer = _document("InitiateMultipartUploadResult", fields)
        settings = {name: request.headers[name] for name in _SETTINGS & request.headers.keys()}
        return answer._replace(headers={**answer.headers, **settings})

    def _part(self, request: Request, _home: _Home) -> Answer:
        body: bytes | memoryview = request.body
        streams = self._service.streams_parts
        if is_copy := request.op == "part_copy" and not streams:
            whole = self._source(request).body
            asked = request.headers.get(f"{_SOURCE}-range", f"bytes=0-{len(whole) - 1}")
            if f"{_SOURCE}-range" in request.headers and len(whole) <= self.min_part_bytes:
                # AWS, "UploadPartCopy" (x-amz-copy-source-range): "You can copy a range only if
                # the source object is greater than 5 MB." The text is that of its list of errors.
                what = "The specified copy source is not supported as a byte-range copy source"
                raise S3Error(400, "InvalidRequest", what)
            start, stop = _range(asked, len(whole))
            if asked != f"bytes={start}-{stop - 1}":
                raise S3Error(400, "InvalidArgument", f"{asked} of {len(whole)} bytes")
            body = memoryview(whole)[start:stop]
        number = int(request.query["partNumber"])
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument", "The part number is not within 1 and 10000")
        begun, parts = self._uploads[request.query["uploadId"]]
        declared = begun.headers.get(f"{_CHECKSUM}algorithm", "").lower()
        for name in request.checksum():
            _refuse(self._service.refusal_of_part_checksum(declared, name.removeprefix(_CHECKSUM)))
        if streams and number in parts and parts[number].body != body:
            raise S3Error(501, "NotImplemented", f"part {number} has already been streamed")
        checksum = request.checksum() or begun.checksum_of(body)
        parts[number] = part = _Stored(body, checksum=checksum)
        if is_copy:
            return _document("CopyPartResult", part.fields())
        return Answer(200, part.headers())

    _part_copy = _part

    def _complete(self, request: Request, home: _Home) -> Answer:
        # A complete upload is removed, so that a repeated request gets NoSuchUpload, as from MinIO
        # and Ceph; AWS repeats its response for a while. After an error the upload stays open.
        begun, parts = self._uploads[request.query["uploadId"]]
        items = request.items("Part")
        named = [(int(part["PartNumber"]), part["ETag"].strip('"')) for part in items]
        numbers = [number for number, _ in named]
        if sorted(set(numbers)) != numbers:
            raise S3Error(400, "InvalidPartOrder", "The parts are not in ascending order")
        if not {*named} <= {(number, part.etag.strip('"')) for number, part in parts.items()}:
            raise S3Error(400, "InvalidPart", "A part is missing or has another ETag")
        for (number, _), part in zip(named, items, strict=True):
            for name, text in parts[number].checksum.items():
                if part.get(_element(name), text) != text:
                    raise S3Error(400, "InvalidPart", f"{name} of part {number} is {text}")
        if any(len(parts[number].body) < self.min_part_bytes for number in numbers[:-1]):
            raise S3Error(400, "EntityTooSmall", f"A part is below {self.min_part_bytes} bytes")
        sizes = [len(parts[number].body) for number in numbers]
        has_checksums = any(parts[number].checksum for number in numbers)
        _refuse(self._service.refusal_of_parts(numbers, sizes, has_checksums=has_checksums))
        body = b"".join(parts[number].body for number in numbers)
        _verify(request.checksum(), body)
        etag = f'"{secrets.token_hex(16)}-{len(numbers)}"'
        checksum = begun.checksum_of(body)
        if begun.headers.get(f"{_CHECKSUM}type") == "COMPOSITE":
            digests = [next(iter(parts[number].checksum.values())) for number in numbers]
            whole = begun.checksum_of(b"".join(map(base64.b64decode, digests)))
            checksum = {name: f"{text}-{len(numbers)}" for name, text in whole.items()}
        home[request.key] = stored = _Stored(body, begun.kept(), checksum, etag)
        self._abort(request, home)
        fields = {"Bucket": request.bucket, "Key": request.key, **stored.fields()}
        return _document("CompleteMultipartUploadResult", fields)

    def _abort(self, request: Request, _home: _Home) -> Answer:
        del self._uploads[request.query["uploadId"]]
        return Answer(204, {})


def _refuse(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise S3Error(refusal.status, refusal.code, refusal.message)


def _refuse_unknown(request: Request) -> None:
    conditions = {name for name in request.headers if re.match("(x-amz-.*)?if-", name)}
    claims = request.checksum()
    unknown = ({*request.query} | conditions) - _KNOWN | (claims.keys() - _CRCS.keys())
    if request.op == "unknown" or unknown:
        raise S3Error(501, "NotImplemented", f"{request.op} with {sorted(unknown)}")
    # The checksum with a completion is that of the object.
    if request.op != "complete":
        _verify(claims, request.body)


def _element(header: str) -> str:
    """Return the name of the element for a header with a checksum."""
    return f"Checksum{header.removeprefix(_CHECKSUM).upper()}"


def _existing(stored: _Stored | None) -> _Stored:
    if stored is None:
        raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
    return stored


def _document(name: str, fields: Mapping[str, object], status: int = 200) -> Answer:
    # None values are omitted.
    space = "" if name == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{space}>{_xml(fields)}</{name}>'
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())


def _xml(value: object) -> str:
    if not isinstance(value, Mapping):
        return escape(str(value).lower() if isinstance(value, bool) else str(value))
    elements = ""
    for name, inner in value.items():
        for each in inner if isinstance(inner, list) else [inner]:
            elements += "" if each is None else f"<{name}>{_xml(each)}</{name}>"
    return elements


def _range(text: str, size: int) -> tuple[int, int]:
    """Return start and stop of a range."""
    first, _, last = text.removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, size - int(last))
    return start, min(size, int(last) + 1) if first and last else size


def _verify(claims: Mapping[str, str], body: bytes) -> None:
    for name, text in claims.items():
        if text != (actual := _digest(name, body)):
            raise S3Error(400, "BadDigest", f"{name} of the body is {actual}")


def _digest(header: str, body: bytes | memoryview) -> str:
    """Return the value of a checksum header for a body."""
    return base64.b64encode(_CRCS[header](body).to_bytes(4, "big")).decode()
