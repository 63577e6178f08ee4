"""What is asked for by who looks at all values of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

from ckpt_storage.format.boxes import Box
from ckpt_storage.source.model import TensorInfo
from ckpt_storage.source.sourcekeys import value_keys


def test_every_value_has_its_key_and_nothing_else_has() -> None:
    """Each chunk with elements once, also one without dimensions; then blobs, in order of name."""
    boxes = {
        "cut": [Box((0, 0), (2, 3)), Box((2, 0), (0, 3)), Box((2, 0), (1, 3))],
        "empty": [Box((0,), (0,))],
        "scalar": [Box((), ())],
    }
    tensors = {
        fqn: TensorInfo(fqn=fqn, dtype="float32", shape=(1,), boxes=held)
        for fqn, held in boxes.items()
    }
    source = SimpleNamespace(tensors=tensors, blobs={"b", "a"})
    chunks = [("cut", (0, 0)), ("cut", (2, 0)), ("scalar", ())]
    assert value_keys(source) == [*chunks, ("a", None), ("b", None)]
