"""The notebook of the examples runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from integration_tools import EXAMPLES, ROOT, need
from limits import HANG_S

need("nbclient")
need("ipykernel")

NOTEBOOK = EXAMPLES / "read_checkpoint.ipynb"

# Jupyter's packages warn of one another while they are imported and closed.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(path: Path, folder: Path) -> Any:
    import nbformat  # noqa: PLC0415  # comes with nbclient
    from jupyter_client.kernelspec import KernelSpec  # noqa: PLC0415  # as above
    from jupyter_client.manager import KernelManager  # noqa: PLC0415  # as above
    from nbclient import NotebookClient  # noqa: PLC0415  # optional

    # The kernel is of this environment, whatever "python3" means elsewhere.
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = KernelSpec(argv=command, language="python", env={"PYTHONPATH": str(ROOT)})
    here = type("Here", (KernelManager,), {"kernel_spec": spec})
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # its own
    client = NotebookClient(
        notebook,
        timeout=int(HANG_S),
        kernel_manager_class=here,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def shown(notebook: Any, source: str) -> dict[str, Any]:
    (cell,) = [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.strip().endswith(source)
    ]
    results = [output for output in cell.outputs if output.output_type == "execute_result"]
    return dict(results[-1].data)


def test_the_notebook_runs(tmp_path: Path) -> None:
    """Each cell runs, and the views are rich: HTML where a notebook shows it, text elsewhere."""
    done = run(NOTEBOOK, tmp_path)
    assert "model.1.weight" in shown(done, "weight")["text/plain"]
    page = shown(done, 'open_checkpoint(f"{folder.name}/step-3")\nckpt')
    assert page["text/html"].startswith("<div")
    assert "model" in page["text/html"]
    assert "step-3" in page["text/plain"]
    assert "model" in shown(done, "ckpt.tree()")["text/plain"]
    assert shown(done, "8:12]")["text/plain"].startswith("array(")
    assert shown(done, "model[1].weight)")["text/plain"] == "True"
    assert shown(done, "report.ok")["text/plain"] == "True"
    assert shown(done, "sorted(part)")["text/plain"] == "['model.2.bias', 'model.2.weight']"
    outputs = [output for cell in done.cells for output in cell.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_the_notebook_is_stored_clean() -> None:
    """No outputs, no counts and no path of a machine are in the repository."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert str(ROOT) not in text
