"""One S3 request at a time, through the client that s3fs configures."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_storage.errors import UnsupportedByStoreError

from .bodies import ViewsBody
from .clients import Client, ForeignFs
from .mapping import ForeignAnswer
from .timed import moved

__all__ = ["S3Requests", "code_of"]

_TELLING = {
    "complete_multipart_upload": {"ETag"},
    "create_multipart_upload": {"UploadId"},
    "get_object": {"ETag"},
    "head_object": {"ETag"},
    "list_multipart_uploads": {"Bucket", "IsTruncated"},
    "list_objects_v2": {"IsTruncated", "KeyCount", "Name"},
    "put_object": {"ETag"},
    "upload_part": {"ETag"},
}
"""Fields of which every answer of S3 has one; a page in its place, answered with 200, has none."""


class S3Requests:
    """Single requests to one bucket, with the options that s3fs was given."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @functools.cached_property
    def _place(self) -> tuple[str, str]:
        bucket, prefix, _ = self._client.fs.split_path(f"{self._client.root}/")
        return bucket, prefix.rstrip("/")

    @property
    def bucket(self) -> str:
        """The bucket, or the ARN of an access point."""
        return self._place[0]

    @property
    def prefix(self) -> str:
        """The key of the root, without a slash at its end."""
        return self._place[1]

    def key(self, path: str) -> str:
        """Return the key of a path below the root."""
        return f"{self.prefix}/{path}" if self.prefix else path

    def send(self, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send one request by the client's method and return the answer."""
        return self._client.run(lambda fs: self.request(fs, method, **arguments))

    async def request(self, fs: ForeignFs, method: str, **arguments: object) -> Mapping[str, Any]:
        """Send one request on the loop.

        Raises `UnsupportedByStoreError` if the installed botocore does not know an
        argument: a condition must never be left out in silence.
        """
        await fs.set_session()
        client = await fs.get_s3(self.bucket)
        name = client.meta.method_to_api_mapping[method]
        known = client.meta.service_model.operation_model(name).input_shape.members
        unknown = [argument for argument in arguments if argument not in known]
        if unknown:
            raise UnsupportedByStoreError(
                f"The installed botocore cannot send {', '.join(unknown)} with {name}.",
                kind="unsupported",
                next_step="Run: pip install -U 'ckpt-storage[s3]'",
            )
        body = arguments.get("Body")
        if isinstance(body, bytes):
            # In pieces, because aiohttp warns of large bytes.
            arguments["Body"] = ViewsBody([memoryview(body)])
        extra = {**fs.s3_additional_kwargs, **fs.req_kw}
        accepted = {key: value for key, value in extra.items() if key in known}
        answer: Mapping[str, Any] = await getattr(client, method)(
            Bucket=self.bucket, **{**accepted, **arguments}
        )
        telling = _TELLING.get(method)
        if telling and telling.isdisjoint(answer):
            raise ForeignAnswer(" or ".join(sorted(telling)))
        return answer

    def pages(self, method: str, cursors: Mapping[str, str], **arguments: object) -> Iterator[Any]:
        """Yield the pages of a listing; `cursors` maps an answer's field to the argument."""
        position: dict[str, object] = {}
        while True:
            page = self.send(method, **arguments, **position)
            moved()
            yield page
            position = {to: page[of] for of, to in cursors.items() if page.get(of)}
            if not page.get("IsTruncated") or not position:
                return


def code_of(error: Exception) -> str:
    """Return the S3 error code that a client error carries, or ""."""
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return ""
    return str(response.get("Error", {}).get("Code", ""))
