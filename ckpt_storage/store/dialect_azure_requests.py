"""How every request to Azure Blob Storage is sent: names, timeouts, no retries of the SDK's."""

from __future__ import annotations

import io
from typing import Any

from .clients import Client, ForeignFs

__all__ = ["AzureRequests"]

_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0


class AzureRequests:
    """The client of one container, and what every request is sent with."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.container, _, self._prefix = client.root.partition("/")
        self.settings = {
            "retry_total": 0,
            "connection_timeout": min(_CONNECT_TIMEOUT_S, client.request_timeout_s),
            "read_timeout": min(_READ_TIMEOUT_S, client.request_timeout_s),
        }

    def name(self, path: str) -> str:
        """Return the blob name of a path below the root."""
        return f"{self._prefix}/{path}" if self._prefix else path

    def blob(self, fs: ForeignFs, path: str) -> Any:  # noqa: ANN401  # the SDK's client
        """Return the SDK's client of one blob; it shares the connections of the service's."""
        return fs.service_client.get_blob_client(self.container, self.name(path))

    async def upload(self, fs: ForeignFs, path: str, data: bytes, **conditions: object) -> Any:  # noqa: ANN401  # the SDK's dict
        """Put Blob, in one request up to the SDK's limit of 64 MiB."""
        return await self.blob(fs, path).upload_blob(
            io.BytesIO(data), length=len(data), **{**self.settings, **conditions}
        )
