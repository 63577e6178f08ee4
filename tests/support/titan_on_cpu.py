"""Runs a torchtitan job on CPUs: `titan_on_cpu.py URL STEPS MODE [EXCLUDED...]` under torchrun.

torchtitan is written for GPUs, Triton and PyTorch nightlies. This puts in their place the little
that its trainer asks of them, and dense attention for FlexAttention, which has no backward pass on
CPUs; model, FSDP, optimizer, data, trainer and checkpointer stay torchtitan's own. The job is that
of examples/torchtitan_job.py.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # these find out, before there is a stand-in, that Triton is missing
import torch._inductor.compile_fx
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_job.py"


class _Anything(types.ModuleType):
    """A module that has every name, each a decorator or a constant that nobody runs."""

    __path__: list[str] = []  # noqa: RUF012  # the protocol of packages

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _identity


def _identity(*args: Any, **_kwargs: Any) -> Any:
    return args[0] if args and callable(args[0]) else _identity


def stand_in_for_gpus() -> None:
    """Make torchtitan take the CPU for its device."""
    if importlib.util.find_spec("triton") is None:
        for name in ("triton", "triton.language", "triton.language.extra"):
            module = _Anything(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
    torch._utils._get_available_device_type = lambda: "cpu"  # noqa: SLF001
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.empty_cache = lambda: None
    cpu.get_device_name = lambda _device=None: "CPU"
    cpu.get_device_properties = lambda _device=None: types.SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda _device=None: {}
    cpu.reset_peak_memory_stats = lambda _device=None: None
    # Of nightlies.
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
    plain = FSDPModule.set_gradient_divide_factor

    def divide(self: FSDPModule, factor: float) -> None:
        # Gloo cannot scale while it reduces.
        self.set_force_sum_reduction_for_comms(enable=True)
        plain(self, factor)

    FSDPModule.set_gradient_divide_factor = divide  # type: ignore[method-assign]


def use_dense_attention() -> None:
    """Put causal dense attention in the place of FlexAttention."""
    from torchtitan.models.common.attention import FlexAttention  # noqa: PLC0415  # after the above

    def attend(query: Any, key: Any, value: Any, **_kwargs: Any) -> tuple[torch.Tensor, Any]:
        dense = torch.nn.functional.scaled_dot_product_attention
        return dense(query, key, value, is_causal=True, enable_gqa=True), None

    FlexAttention.compiled_flex_attn = staticmethod(attend)


def write_assets(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415  # beside torchtitan

    words = {chr(number): number for number in range(256)} | {"<unk>": 256}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text").mkdir()
    lines = [json.dumps({"text": f"one two three {number} " * 9}) for number in range(200)]
    (folder / "text" / "text.json").write_text("\n".join(lines), encoding="utf-8")


def main(url: str, steps: int, mode: str, *excluded: str) -> None:
    """Run the example's job, made small."""
    spec = importlib.util.spec_from_file_location("torchtitan_job", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with tempfile.TemporaryDirectory() as folder:
        write_assets(Path(folder))
        job = example.config(url, steps)
        job.hf_assets_path = folder
        job.dataloader.dataset_path = f"{folder}/text"
        job.dump_folder = folder
        job.training.disable_cuda_graphs = True
        job.training.seq_len = 64
        job.training.local_batch_size = 2
        job.validator.enable = False
        job.parallelism.spmd_backend = "partial_dtensor"
        job.checkpoint.async_mode = mode
        job.checkpoint.exclude_from_loading = list(excluded)
        example.main(job)


if __name__ == "__main__":
    stand_in_for_gpus()
    use_dense_attention()
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
