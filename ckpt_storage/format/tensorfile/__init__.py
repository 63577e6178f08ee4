"""The containers tensors lie in: items of a shard file, and safetensors headers.

Knows the zip that torch 2 writes for one tensor (head, raw bytes, tail), how to find the
raw bytes in such a zip without running its pickle, and the header of a safetensors file.
It does not know where containers lie, moves no tensor bytes, and imports no torch.
Called by `manifest`, `stockmeta`, `writer`, `reader` and `consolidate`.
"""

from __future__ import annotations

from .dtypes import DTYPES, DType
from .envelope import PAYLOAD_ALIGN_BYTES, Envelope, tensor_envelope
from .inertnumpy import is_inert_with_numpy
from .item import ItemHeader, NeedMoreBytes, parse_tensor_item
from .safetensors_header import (
    SafetensorsEntry,
    SafetensorsHeader,
    encode_safetensors_header,
    parse_safetensors_header,
)

__all__ = [
    "DTYPES",
    "PAYLOAD_ALIGN_BYTES",
    "DType",
    "Envelope",
    "ItemHeader",
    "NeedMoreBytes",
    "SafetensorsEntry",
    "SafetensorsHeader",
    "encode_safetensors_header",
    "is_inert_with_numpy",
    "parse_safetensors_header",
    "parse_tensor_item",
    "tensor_envelope",
]
