"""Hugging Face exports, alone and chained to a save.

Knows consolidation, the floor and torch's own. Called by `scenarios` on every rank.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt_storage.consolidating import consolidate
from ckpt_storage.saving import save

from .bench import Bench, our_name, put_own
from .compare import Comparison, Contender
from .workload import State, state_bytes


def _through(bench: Bench, state: State, source: str, output: str) -> None:
    """Read this rank's own bytes piece by piece and write them again."""
    del state
    bench.plain.through(f"{source}/{bench.rank}", f"{output}/{bench.rank}")


def measure_export(bench: Bench) -> Comparison:
    """Measure the Hugging Face export of a checkpoint to the storage that it lies on."""
    state = bench.state(filled=True)
    save(state, bench.root.join("export").target, **bench.options(bench.settings.engines[0]))
    put_own(bench, state, "export-floor-in")
    dist.barrier()
    contenders = [
        Contender(
            name="floor: read, write",
            run=functools.partial(_through, bench, state, "export-floor-in", "export-floor"),
            after=functools.partial(bench.clear, "export-floor"),
        ),
        Contender(
            name="ckpt_storage",
            run=lambda: consolidate(
                bench.root.join("export").target,
                bench.root.join("export-hf").target,
                storage_options=bench.root.storage_options,
                output_storage_options=bench.root.storage_options,
            ),
            after=functools.partial(bench.clear, "export-hf"),
        ),
    ]
    contenders += _torch_exports(bench, state)
    found = bench.compare("export", state_bytes(state), contenders)
    for folder in ("export", "export-floor-in", "export-torch"):
        bench.clear(folder)
    return found


def _torch_exports(bench: Bench, state: State) -> list[Contender]:
    """Return torch's own consolidation where it can run: on local files."""
    if not (bench.settings.peers and bench.root.is_local):
        return []
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (  # noqa: PLC0415  # its only place
        consolidate_safetensors_files_on_every_rank,
    )

    source = bench.root.join("export-torch").target
    writer = dcp.HuggingFaceStorageWriter(source, save_distributed=True)
    dcp.save(dict(state), storage_writer=writer)
    output = bench.root.join("export-torch-hf").target

    def run() -> None:
        Path(output).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        consolidate_safetensors_files_on_every_rank(
            source, output, dict.fromkeys(state, 1), num_threads=1
        )

    return [
        Contender(
            name="torch, every rank",
            run=run,
            after=functools.partial(bench.clear, "export-torch-hf"),
        )
    ]


def measure_save_export(bench: Bench) -> Comparison:
    """Measure a save and, chained to it, its Hugging Face export."""
    state = bench.state(filled=True)

    def floor() -> None:
        put_own(bench, state, "chain-floor")
        _through(bench, state, "chain-floor", "chain-floor-out")

    def clear(*folders: str) -> None:
        for folder in folders:
            bench.clear(folder)

    contenders = [
        Contender(
            name="floor: write, read, write",
            run=floor,
            after=functools.partial(clear, "chain-floor", "chain-floor-out"),
        ),
        *(
            Contender(
                name=our_name(engine),
                run=functools.partial(
                    save,
                    state,
                    bench.root.join("chain").target,
                    consolidate=True,
                    **bench.options(engine),
                ),
                after=functools.partial(clear, "chain"),
            )
            for engine in bench.settings.engines
        ),
    ]
    if bench.settings.peers and bench.root.is_local:
        target = bench.root.join("chain-torch").target

        def torch_way() -> None:
            writer = dcp.HuggingFaceStorageWriter(
                target,
                save_distributed=True,
                enable_consolidation=True,
                fqn_to_index_mapping=dict.fromkeys(state, 1),
            )
            dcp.save(dict(state), storage_writer=writer)

        contenders.append(
            Contender(
                name="torch safetensors",
                run=torch_way,
                after=functools.partial(clear, "chain-torch"),
            )
        )
    return bench.compare("save and export", state_bytes(state), contenders)
