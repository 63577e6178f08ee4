"""The state of the S3 server: buckets, objects, open uploads, and the rules between them.

Every method is atomic: a conditional write is decided and done under one lock, so of racing creates
of a key exactly one wins.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from ._s3memory import Payload

__all__ = [
    "Absent",
    "Condition",
    "Listing",
    "ListingToken",
    "Matches",
    "Part",
    "PartClaim",
    "S3Error",
    "S3State",
    "StoredObject",
    "Upload",
]


class S3Error(Exception):
    """A refusal: HTTP status, S3 code, message, and the condition that failed, if one did."""

    def __init__(
        self, status: int, code: str, message: str = "", *, condition: str | None = None
    ) -> None:
        super().__init__(f"{status} {code}: {message or code}")
        self.status = status
        self.code = code
        self.message = message or code
        self.condition = condition


@dataclass(frozen=True, slots=True)
class Absent:
    """The key must not exist: `If-None-Match: *`."""


@dataclass(frozen=True, slots=True)
class Matches:
    """The key must exist with this ETag: `If-Match`."""

    etag: str


Condition = Absent | Matches | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object; `etag` has no quotes, `metadata` and `checksums` are headers as they came."""

    payload: Payload
    etag: str
    metadata: Mapping[str, str]
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = "FULL_OBJECT"
    modified_s: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One uploaded part."""

    payload: Payload
    etag: str
    checksums: Mapping[str, str]
    modified_s: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartClaim:
    """A part as the client names it when it completes an upload."""

    number: int
    etag: str
    checksums: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class Upload:
    """One open multipart upload; `parts` changes under the state's lock only."""

    key: str
    upload_id: str
    metadata: Mapping[str, str]
    algorithm: str | None
    checksum_type: str
    started_s: float = field(default_factory=time.time)
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingToken:
    """Where a listing goes on: after a key, or after a whole common prefix."""

    after: str
    is_prefix: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One page: objects and common prefixes, each in order, and where the next page starts."""

    objects: Sequence[tuple[str, StoredObject]]
    prefixes: Sequence[str]
    next_token: ListingToken | None


@dataclass(slots=True)
class _Bucket:
    created_s: float = field(default_factory=time.time)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    # Sorted by code point, which is the order of the UTF-8 bytes that S3 promises.
    keys: list[str] = field(default_factory=list)
    uploads: dict[str, Upload] = field(default_factory=dict)


def _check(condition: Condition, existing: StoredObject | None) -> None:
    if condition is None:
        return
    if isinstance(condition, Absent):
        name, holds = "If-None-Match", existing is None
    elif existing is None:
        raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchKey", "The specified key does not exist.")
    else:
        name, holds = "If-Match", existing.etag == condition.etag
    if not holds:
        raise S3Error(
            HTTPStatus.PRECONDITION_FAILED,
            "PreconditionFailed",
            f"The condition {name} does not hold",
            condition=name,
        )


class S3State:
    """All buckets of one server; safe to share between threads."""

    def __init__(self, *, min_part_bytes: int) -> None:
        self._lock = threading.RLock()
        self._buckets: dict[str, _Bucket] = {}
        self._min_part_bytes = min_part_bytes

    def _bucket(self, name: str) -> _Bucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            raise S3Error(
                HTTPStatus.NOT_FOUND, "NoSuchBucket", "The specified bucket does not exist"
            )
        return bucket

    def buckets(self) -> dict[str, float]:
        """Return the names in order, each with its time of creation."""
        with self._lock:
            return {name: bucket.created_s for name, bucket in sorted(self._buckets.items())}

    def require_bucket(self, name: str) -> None:
        """Raise `S3Error` 404 NoSuchBucket unless the bucket exists."""
        with self._lock:
            self._bucket(name)

    def create_bucket(self, name: str) -> bool:
        """Create a bucket; False if it was there already."""
        with self._lock:
            if name in self._buckets:
                return False
            self._buckets[name] = _Bucket()
            return True

    def delete_bucket(self, name: str) -> None:
        """Delete an empty bucket; raises `S3Error` 409 BucketNotEmpty for another."""
        with self._lock:
            if self._bucket(name).objects:
                raise S3Error(HTTPStatus.CONFLICT, "BucketNotEmpty", "The bucket is not empty")
            del self._buckets[name]

    def get(self, bucket: str, key: str) -> StoredObject:
        """Return an object; raises `S3Error` 404 NoSuchKey."""
        with self._lock:
            found = self._bucket(bucket).objects.get(key)
        if found is None:
            raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchKey", "The specified key does not exist.")
        return found

    def put(self, bucket: str, key: str, stored: StoredObject, condition: Condition) -> None:
        """Create or replace an object if `condition` holds; raises `S3Error` 412 or 404 if not."""
        with self._lock:
            self._put(self._bucket(bucket), key, stored, condition)

    @staticmethod
    def _put(bucket: _Bucket, key: str, stored: StoredObject, condition: Condition) -> None:
        existing = bucket.objects.get(key)
        _check(condition, existing)
        if existing is None:
            insort(bucket.keys, key)
        bucket.objects[key] = stored

    def mutate(self, bucket: str, key: str, change: Callable[[bytes], bytes]) -> None:
        """Replace the bytes of an object and nothing else: ETag, time and checksums stay."""
        with self._lock:
            found = self.get(bucket, key)
            payload = Payload.of_bytes(bytes(change(found.payload.to_bytes())))
            self._bucket(bucket).objects[key] = dataclasses.replace(found, payload=payload)

    def delete(self, bucket: str, key: str, condition: Condition = None) -> None:
        """Delete an object; without a condition nothing happens if there is none."""
        with self._lock:
            home = self._bucket(bucket)
            _check(condition, home.objects.get(key))
            if home.objects.pop(key, None) is not None:
                del home.keys[bisect_left(home.keys, key)]

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        """Return all objects of a bucket by key, in order."""
        with self._lock:
            home = self._bucket(bucket)
            return {key: home.objects[key] for key in home.keys}

    def page(
        self, bucket: str, *, prefix: str, delimiter: str, token: ListingToken, limit: int
    ) -> Listing:
        """List the keys that start with `prefix` and come after `token`, `limit` entries at most.

        With a delimiter, keys that have it behind the prefix are rolled up to one entry each.
        """
        with self._lock:
            home = self._bucket(bucket)
            objects: list[tuple[str, StoredObject]] = []
            prefixes: list[str] = []
            last = ListingToken(after="")
            skip = token.after if token.is_prefix else None
            first = max(bisect_right(home.keys, token.after), bisect_left(home.keys, prefix))
            for index in range(first, len(home.keys)):
                key = home.keys[index]
                if not key.startswith(prefix):
                    break
                if skip is not None and key.startswith(skip):
                    continue
                if len(objects) + len(prefixes) >= limit:
                    more = last if limit else None
                    return Listing(objects=objects, prefixes=prefixes, next_token=more)
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut < 0:
                    objects.append((key, home.objects[key]))
                    last = ListingToken(after=key)
                else:
                    skip = key[: cut + len(delimiter)]
                    prefixes.append(skip)
                    last = ListingToken(after=skip, is_prefix=True)
            return Listing(objects=objects, prefixes=prefixes, next_token=None)

    def create_upload(
        self,
        bucket: str,
        key: str,
        *,
        metadata: Mapping[str, str],
        algorithm: str | None,
        checksum_type: str,
    ) -> Upload:
        """Open a multipart upload under a new random id."""
        upload = Upload(
            key=key,
            upload_id=secrets.token_hex(16),
            metadata=metadata,
            algorithm=algorithm,
            checksum_type=checksum_type,
        )
        with self._lock:
            self._bucket(bucket).uploads[upload.upload_id] = upload
        return upload

    def upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        """Return a snapshot of an open upload; raises `S3Error` 404 NoSuchUpload."""
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            return dataclasses.replace(upload, parts=dict(sorted(upload.parts.items())))

    def _upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        upload = self._bucket(bucket).uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise S3Error(
                HTTPStatus.NOT_FOUND,
                "NoSuchUpload",
                "There is no such upload; it may have been aborted or completed.",
            )
        return upload

    def uploads(self, bucket: str) -> list[Upload]:
        """Return the open uploads of a bucket, ordered by key and then by age."""
        with self._lock:
            found = list(self._bucket(bucket).uploads.values())
        return sorted(found, key=lambda upload: (upload.key, upload.started_s, upload.upload_id))

    def open_upload_count(self) -> int:
        """Count the open uploads of all buckets."""
        with self._lock:
            return sum(len(bucket.uploads) for bucket in self._buckets.values())

    def put_part(self, bucket: str, key: str, upload_id: str, number: int, part: Part) -> None:
        """Store a part, in place of an earlier one with its number."""
        with self._lock:
            self._upload(bucket, key, upload_id).parts[number] = part

    def abort(self, bucket: str, key: str, upload_id: str) -> None:
        """End an upload and drop its parts; raises `S3Error` 404 NoSuchUpload."""
        with self._lock:
            self._upload(bucket, key, upload_id)
            del self._bucket(bucket).uploads[upload_id]

    def complete(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        *,
        claims: Sequence[PartClaim],
        condition: Condition,
        assemble: Callable[[Upload, Sequence[Part]], StoredObject],
    ) -> StoredObject:
        """Make the claimed parts the object and end the upload, in one step.

        A refused upload stays open. A completed one is forgotten at once, so that a repeated
        request gets NoSuchUpload, as from MinIO and Ceph; AWS repeats its answer for a while.
        `assemble` builds the object. Raises `S3Error`: NoSuchUpload, MalformedXML, InvalidPart,
        InvalidPartOrder, EntityTooSmall, PreconditionFailed.
        """
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            parts = self._claimed(upload, claims)
            home = self._bucket(bucket)
            _check(condition, home.objects.get(key))
            stored = assemble(upload, parts)
            self._put(home, key, stored, None)
            del home.uploads[upload_id]
            return stored

    def _claimed(self, upload: Upload, claims: Sequence[PartClaim]) -> list[Part]:
        if not claims:
            raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", "No parts are named")
        numbers = [claim.number for claim in claims]
        if any(low >= high for low, high in itertools.pairwise(numbers)):
            raise S3Error(
                HTTPStatus.BAD_REQUEST, "InvalidPartOrder", "The parts are not in ascending order"
            )
        parts: list[Part] = []
        for claim in claims:
            part = upload.parts.get(claim.number)
            if (
                part is None
                or part.etag != claim.etag
                or any(part.checksums.get(name) != text for name, text in claim.checksums.items())
            ):
                raise S3Error(
                    HTTPStatus.BAD_REQUEST, "InvalidPart", f"Part {claim.number} is not as named"
                )
            parts.append(part)
        if any(part.payload.size_bytes < self._min_part_bytes for part in parts[:-1]):
            raise S3Error(
                HTTPStatus.BAD_REQUEST,
                "EntityTooSmall",
                f"A part that is not the last has less than {self._min_part_bytes} bytes",
            )
        return parts
