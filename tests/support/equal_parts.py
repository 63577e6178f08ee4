"""An S3 server that takes only uploads of equal parts with the numbers 1, 2, 3 and so on.

Cloudflare R2, "Multipart upload", Limitations: "All parts except the last one must be the same
size." Garage refuses parts of other lengths, too. Amazon S3, "CompleteMultipartUpload", for
directory buckets: "the part numbers must start at 1 and be consecutive".
"""

from __future__ import annotations

from typing import Any

from s3_objects import S3Error
from s3_server import S3Server


class EqualPartsServer(S3Server):
    """Refuses the completion of an upload with unequal parts, or with a gap in their numbers."""

    part_counts: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.part_counts = []

    def _complete(self, request: Any, home: Any) -> Any:
        _, parts = self._uploads[request.query["uploadId"]]
        numbers = [int(part["PartNumber"]) for part in request.items("Part")]
        *sizes, last = (len(parts[number].body) for number in numbers)
        if numbers != list(range(1, len(numbers) + 1)):
            raise S3Error(400, "InvalidPartOrder", f"Part numbers have a gap: {numbers}")
        if sizes and (len({*sizes}) > 1 or last > sizes[0]):
            raise S3Error(400, "InvalidPart", "All non-trailing parts must have the same length.")
        self.part_counts.append(len(numbers))
        return super()._complete(request, home)
