"""How long documents may be: what writers refuse to write, and readers to read.

A root may be shared with strangers, and what lies at a name may be anybody's: without a ceiling a
sparse file of a terabyte in place of a commit record ends the process that looks. Each is far above
what real checkpoints have.
"""

from __future__ import annotations

MOST_RANKS = 1 << 20
"""Of one save."""

MOST_NAMES = 1 << 24
"""In one list of a document."""

MOST_ENTRIES = 1 << 26
"""In one column of a document."""

MOST_MANIFEST_BYTES = 256 << 20
"""Of all columns and names of a manifest, inflated."""

MOST_SLOT_BYTES = 4 << 20
"""Of a commit record; metrics take 16 KiB of it at most, and a fenced attempt 36 bytes."""

MOST_DOCUMENT_BYTES = 1 << 30
"""Of every other document of ours, and of an index of others; no reader inflates more either."""

MOST_STOCK_BYTES = 4 << 30
"""Of `.metadata`: ten thousand ranks with two thousand tensors each have 3.4 GB by torch's count.

Storages take twice that in no single put (S3 5 GiB, Azure 5,000 MiB), and need no more of us.
"""
