"""torchtitan's last step as Hugging Face files at a URL, by all ranks (pytorch/torchtitan#1625)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from fork_server import run_script
from s3_server import S3Server
from safetensors.torch import load
from test_integration_torchtitan import SUPPORT, titan_environment

JOB = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import titan_on_cpu
titan_on_cpu.stand_in_for_gpus()
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from ckpt_storage.integrations import torchtitan

dist.init_process_group("gloo")

class Manager(torchtitan.CheckpointStorageManager):
    storage_options = json.loads(sys.argv[3])

class Part:
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

class Adapter:
    hf_assets_path = None
    # As of a base model whose files hold more than this one.
    fqn_to_index_mapping = {"hf.weight": 1, "hf.absent": 2, "hf.bias": 3}
    def to_hf(self, state):
        return {f"hf.{name}": value for name, value in state.items()}
    def from_hf(self, state):
        return {name.removeprefix("hf."): value for name, value in state.items()}

def manager(fill, **config):
    model = torch.nn.Linear(64, 6)
    torch.nn.init.constant_(model.weight, fill)
    torch.nn.init.constant_(model.bias, fill)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    made = Manager(
        Manager.Config(enable=True, keep_latest_k=0, **config),
        dataloader=Part(), model_parts=[model], optimizers=Part(), lr_schedulers=Part(),
        states={"train_state": Part()}, sd_adapter=Adapter(),
    )
    return made, model

url = sys.argv[2]
made, _ = manager(3.0, folder=url, last_save_in_hf=True)
made.save(7, last_step=True)
made.close()
made, model = manager(
    0.0, folder=f"{url}-tuned", initial_load_path=f"{url}/step-7", initial_load_in_hf=True
)
made.load()
print("weights", {value.item() for value in model.weight.full_tensor().unique()}, flush=True)
made.close()
made, model = manager(0.0, folder=url)
print("resumed", made.load(), flush=True)
made.close()
dist.destroy_process_group()
"""


def test_the_last_step_is_exported_to_a_url(tmp_path: Path) -> None:
    """Two ranks write the weight files to S3 and nothing to a disk; they load from there again."""
    script = tmp_path / "job.py"
    script.write_text(JOB, encoding="utf-8")
    with S3Server() as server:
        server.create_bucket("bkt")
        code, output = run_script(
            *(script, str(SUPPORT), "s3://bkt/run", json.dumps(server.storage_options)),
            folder=tmp_path,
            environment=titan_environment(tmp_path),
            ranks=2,
        )
        assert code == 0, output
        found = server.dump("bkt")
    folder = "run/step-7/"
    index = json.loads(found[f"{folder}model.safetensors.index.json"])
    assert index["weight_map"].keys() == {"hf.weight", "hf.bias"}
    weights: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        weights |= load(found[f"{folder}{name}"])
    assert torch.equal(weights["hf.weight"], torch.full((6, 64), 3.0))
    assert torch.equal(weights["hf.bias"], torch.full((6,), 3.0))
    assert output.count("weights {3.0}") == 2
    # Weights alone are nothing to resume from.
    assert output.count("resumed False") == 2
    assert not list(tmp_path.glob("s3*"))
