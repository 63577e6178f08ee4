"""Ray Train over our storage: a worker dies, Ray starts both again, they resume."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from integration_tools import EXAMPLES, finish, need

import ckpt_storage

need("ray")


@pytest.mark.timeout(400)
def test_workers_resume_after_one_died(tmp_path: Path) -> None:
    """The job ends at its last step, having gone on from the newest committed checkpoint."""
    url = str(tmp_path / "run")
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), url]
    code, output = finish(command, tmp_path, deadline_s=300.0)
    assert code == 0, output
    assert "Trained to step 8, resumed at step 3." in output
    infos = ckpt_storage.list_checkpoints(url)
    assert f"Ray points to {infos[-1].url}\n" in output
    assert [info.name for info in infos] == ["step-00000003", "step-00000006", "step-00000008"]
    assert ckpt_storage.verify(infos[-1].url).ok
