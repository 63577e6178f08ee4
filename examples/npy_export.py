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

from ckpt_storage.export.folder import PlainFolder
from ckpt_storage.export.layout import Fixed, Layout, OutFile, elements_of
from ckpt_storage.export.output import Made, Output, Setting
from ckpt_storage.export.plan import Plan
from ckpt_storage.export.run import Task, run_together
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.source.model import Source, TensorInfo
from ckpt_storage.store import Location

if TYPE_CHECKING:
    import torch.distributed as dist


def header(info: TensorInfo) -> bytes:
    """Return the first bytes of a NumPy file of a tensor."""
    stream = io.BytesIO()
    descr = npy.dtype_to_descr(np.dtype(DTYPES[info.dtype].numpy))
    fields = {"descr": descr, "fortran_order": False, "shape": info.shape}
    npy.write_array_header_1_0(stream, fields)
    return stream.getvalue()


class NpyExport(Task[list[str]]):
    """One export on one rank; returns the names of the files."""

    source: Source

    def lay_out(self) -> Layout:
        """Return one file a tensor: its header, then all its elements."""
        tensors = [one for one in self.source.tensors.values() if DTYPES[one.dtype].numpy]
        return Layout(
            files=tuple(
                OutFile(
                    number=number,
                    name=f"{info.fqn}.npy",
                    segments=[Fixed(header(info)), elements_of(info)],
                )
                for number, info in enumerate(tensors, 1)
            )
        )

    def content(self) -> object:
        """Return what stands for the bytes of the files; a re-run trusts files of equal content."""
        return ["npy/1", self.save_id or self.found.state]

    def output(self, plan: Plan) -> Output:
        """Return the folder; an export that was cut is gone on with."""
        return PlainFolder(self, plan, overwrite=False)

    def report(self, output: Output, made: Made, seconds: float) -> list[str]:
        """Return the names of the files."""
        del made, seconds
        return [file.name for file in output.plan.files]


def export_npy(
    source: str, target: str, *, process_group: dist.ProcessGroup | None = None
) -> list[str]:
    """Write each tensor of the checkpoint at `source` to a file in the folder `target`."""
    setting = Setting(source=Location.of(source), target=Location.of(target))

    def job() -> tuple[Setting, dict[str, str], type[NpyExport]]:
        return setting, setting.terms(), NpyExport

    return run_together(process_group, "npy", f"export of {source}", setting.timeouts, job)


if __name__ == "__main__":
    print("\n".join(export_npy(*sys.argv[1:3])))
