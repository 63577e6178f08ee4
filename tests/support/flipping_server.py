"""A server of S3's protocol that answers single reads with one wrong byte."""

from __future__ import annotations

from s3_objects import Answer, Request
from s3_server import S3Server


class FlippingServer(S3Server):
    """Answers some of the reads of the names that end with `suffix` with one wrong byte.

    `spared_count` reads are answered as they are, and then `left_count` wrongly.
    """

    suffix, spared_count, left_count, read_count = "nothing", 0, 0, 0

    def flip(self, suffix: str, count: int = 1, *, after: int = 0) -> None:
        """Answer `count` reads of these names wrongly, and the `after` reads before as they are."""
        self.suffix, self.spared_count, self.left_count = suffix, after, count
        self.read_count = 0

    def answer(self, request: Request) -> Answer:
        """Return what any server answers, or that with a wrong byte in its middle."""
        response = super().answer(request)
        if request.op != "get" or not request.key.endswith(self.suffix) or not len(response.body):
            return response
        self.read_count += 1
        if self.read_count <= self.spared_count or not self.left_count:
            return response
        self.left_count -= 1
        body = bytearray(response.body)
        body[len(body) // 2] ^= 4
        return response._replace(body=bytes(body))
