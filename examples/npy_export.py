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

from ckpt_storage import RetryPolicy, Timeouts
from ckpt_storage.export.layout import Fixed, Layout, out_file
from ckpt_storage.export.opening import Found, Opening
from ckpt_storage.export.output import Made, Output, Setting, Site
from ckpt_storage.export.plain_folder import PlainFolder
from ckpt_storage.export.plan import Plan
from ckpt_storage.export.run import Task, run_together
from ckpt_storage.export.weights import elements_of
from ckpt_storage.format.boxes import Box
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

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._opening = Opening(site)
        self._state: object = None

    def find(self) -> Found:
        """Open the newest checkpoint at the source; coordinator only."""
        source, found = self._opening.find()
        self._keep(source, found)
        return found

    def open(self, found: object) -> None:
        """Open the same one."""
        assert isinstance(found, Found)  # noqa: S101  # as `find` returns
        self._keep(self._opening.open(found), found)

    def _keep(self, source: Source, found: Found) -> None:
        self.source, self.save_id, self._state = source, source.save_id, found.state

    def lay_out(self) -> Layout:
        """Return one file a tensor: its header, then all its elements."""
        tensors = [one for one in self.source.tensors.values() if DTYPES[one.dtype].numpy]
        return Layout(
            files=tuple(
                out_file(
                    number,
                    f"{info.fqn}.npy",
                    [
                        Fixed(header(info)),
                        elements_of(info, Box((0,) * len(info.shape), info.shape)),
                    ],
                )
                for number, info in enumerate(tensors, 1)
            )
        )

    def content(self) -> object:
        """Return what stands for the bytes of the files; a re-run trusts files of equal content."""
        return ["npy/1", self.save_id or self._state]

    def output(self, plan: Plan) -> Output:
        """Return the folder; an export that was cut is gone on with."""
        return PlainFolder(self.site, plan, shown="nothing", overwrite=False)

    def check_unchanged(self) -> None:
        """Raise if the source was written again."""
        self._opening.check_unchanged()

    def report(self, output: Output, made: Made, seconds: float) -> list[str]:
        """Return the names of the files."""
        del made, seconds
        return [file.name for file in output.plan.files]


def export_npy(
    source: str, target: str, *, process_group: dist.ProcessGroup | None = None
) -> list[str]:
    """Write each tensor of the checkpoint at `source` to a file in the folder `target`."""
    timeouts = Timeouts()
    setting = Setting(
        source=Location.of(source),
        target=Location.of(target),
        timeouts=timeouts,
        retry=RetryPolicy(),
    )

    def job() -> tuple[Setting, dict[str, str], type[NpyExport]]:
        return setting, {"source": source, "target": target}, NpyExport

    return run_together(process_group, "npy", f"export of {source}", timeouts, job)


if __name__ == "__main__":
    print("\n".join(export_npy(*sys.argv[1:3])))
