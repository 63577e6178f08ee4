"""An export format of your own: each tensor of a checkpoint as a NumPy file.

    python examples/npy_export.py runs/demo/step-100 weights

docs/extending.md goes through it; tests/servers/test_extending.py runs it. Reads, checksums,
several ranks, repeats and the file names at the end are the business of `ckpt_storage.export`.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib import format as npy

from ckpt_storage import InvalidInputError
from ckpt_storage.export.folder import PlainFolder
from ckpt_storage.export.output import ExportSpec, WriteSummary
from ckpt_storage.export.plan import Fixed, OutFile, elements_of
from ckpt_storage.export.run import group_of, run_together
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import TensorRecord
from ckpt_storage.format.names import checked_path
from ckpt_storage.store import Location

if TYPE_CHECKING:
    import torch.distributed as dist


def header(tensor: TensorRecord) -> bytes:
    """Return the first bytes of a NumPy file of a tensor."""
    stream = io.BytesIO()
    descr = npy.dtype_to_descr(np.dtype(DTYPES[tensor.dtype].numpy))
    fields = {"descr": descr, "fortran_order": False, "shape": tensor.shape}
    npy.write_array_header_1_0(stream, fields)
    return stream.getvalue()


class NpyExport(PlainFolder[list[str]]):
    """One export on one rank; one that was cut is gone on with."""

    def lay_out(self) -> list[OutFile]:
        """Return one file a tensor: its header, then all its elements."""
        tensors = self.source.tensors
        unknown = [fqn for fqn, tensor in tensors.items() if not DTYPES[tensor.dtype].numpy]
        if unknown:
            raise InvalidInputError(f"NumPy has no type for these tensors: {', '.join(unknown)}.")
        return [
            OutFile(
                # A name may not lead out of the folder.
                name=checked_path(f"{fqn}.npy", where=self.spec.source.url),
                segments=[Fixed(header(tensor)), elements_of(fqn, tensor)],
            )
            for fqn, tensor in tensors.items()
        ]

    def content(self) -> object:
        """Return what stands for the bytes of the files; a re-run trusts files of equal content."""
        # A source of another tool has no save id.
        return ["npy/1", self.save_id or self.version.state]

    def report(self, made: WriteSummary, seconds: float) -> list[str]:
        """Return the names of the files."""
        del made, seconds
        return [file.name for file in self.plan.files]


def export_npy(
    source: str, target: str, *, process_group: dist.ProcessGroup | None = None
) -> list[str]:
    """Write each tensor of the checkpoint at `source` to a file in the folder `target`."""
    spec = ExportSpec(source=Location.of(source), target=Location.of(target))

    group, what = group_of(process_group, "npy"), f"export of {source}"
    return run_together(group, "npy", what, spec.timeouts, lambda: spec, NpyExport)


if __name__ == "__main__":
    print("\n".join(export_npy(*sys.argv[1:3])))
