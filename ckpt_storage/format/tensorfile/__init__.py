"""The containers tensors lie in: items of a shard file, and safetensors headers.

It does not know where containers lie, moves no tensor bytes, and imports no torch.
"""

from __future__ import annotations

from .dtypes import DTYPES, DType, is_inert_with_numpy
from .envelope import PAYLOAD_ALIGN_BYTES, Envelope, tensor_envelope
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
