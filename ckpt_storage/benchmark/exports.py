"""Hugging Face exports, alone and chained to a save.

Knows consolidation, the floor and torch's own. Called by `scenarios` on every rank.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckpt_storage.consolidating import consolidate
from ckpt_storage.consolidation.options import ConsolidateOptions
from ckpt_storage.options import DEFAULT_MEMORY_LIMIT_BYTES, PageCache
from ckpt_storage.saving import save

from .bench import Bench, our_name, put_own
from .compare import Comparison, Contender
from .peers import Peer, has_safetensors
from .workload import State, state_bytes


def _through(bench: Bench, state: State, source: str, output: str) -> None:
    """Read this rank's own bytes piece by piece and write them again."""
    del state
    bench.plain.through(f"{source}/{bench.rank}", f"{output}/{bench.rank}")


def measure_export(bench: Bench) -> Comparison:
    """Measure the Hugging Face export of a checkpoint to the storage that it lies on."""
    state = bench.state(filled=True)
    save(state, bench.root.join("export").target, **bench.options())
    put_own(bench, state, "export-floor-in")
    dist.barrier()
    contenders = [
        Contender(
            name=bench.floor("read, write"),
            run=functools.partial(_through, bench, state, "export-floor-in", "export-floor"),
            after=functools.partial(bench.clear, "export-floor"),
        ),
        *(
            Contender(
                name=our_name(how),
                run=functools.partial(_consolidate, bench, page_cache),
                after=functools.partial(bench.clear, "export-hf"),
            )
            for how, page_cache in _page_caches(bench)
        ),
    ]
    contenders += _torch_exports(bench, state)
    peers = _loading_peers(bench)
    for number, peer in enumerate(peers):
        peer.save(state, bench.root.join(f"export-{number}"))
        contenders.append(
            Contender(
                name=f"{peer.name}: load, write",
                run=functools.partial(
                    _load_and_write, bench, state, peer, f"export-{number}", "export-peer"
                ),
                after=functools.partial(bench.clear, "export-peer"),
            )
        )
    found = bench.compare("export", state_bytes(state), contenders)
    folders = ("export", "export-floor-in", "export-torch")
    for folder in (*folders, *(f"export-{number}" for number in range(len(peers)))):
        bench.clear(folder)
    return found


def _page_caches(bench: Bench) -> list[tuple[str, PageCache]]:
    """Return how our exports are made, and called: local ones also so that none stays cached."""
    found: list[tuple[str, PageCache]] = [("", "keep")]
    return [*found, ("export dropped", "drop")] if bench.root.is_local else found


def _consolidate(bench: Bench, page_cache: PageCache) -> None:
    options = bench.options()
    limit_bytes = options.pop("memory_limit_bytes") or DEFAULT_MEMORY_LIMIT_BYTES
    consolidate(
        bench.root.join("export").target,
        bench.root.join("export-hf").target,
        memory_limit_bytes=limit_bytes,
        page_cache=page_cache,
        output_storage_options=bench.root.storage_options,
        **options,
    )


def _loading_peers(bench: Bench) -> list[Peer]:
    """Return the peers that export by a load: where none of them has an export of its own."""
    return bench.peers if has_safetensors() and not bench.root.is_local else []


def _load_and_write(bench: Bench, state: State, peer: Peer, source: str, output: str) -> None:
    """Export as one does without an export: load whole tensors, write them as safetensors.

    Every rank takes its share of the tensors, so none holds the model. All ranks.
    """
    from safetensors.torch import save as serialised  # noqa: PLC0415  # an optional package

    count, rank = dist.get_world_size(), bench.rank
    files = {
        name: f"model-{at % count + 1:05}-of-{count:05}.safetensors"
        for at, name in enumerate(sorted(state))
    }
    own = f"model-{rank + 1:05}-of-{count:05}.safetensors"
    whole = {
        name: torch.empty(tuple(state[name].shape), dtype=state[name].dtype)
        for name, file in files.items()
        if file == own
    }
    if whole:
        peer.load_alone(whole, bench.root.join(source))
        peer.write_file(bench.root.join(output), own, serialised(whole))
    if rank == 0:
        index = {"metadata": {"total_size": state_bytes(state)}, "weight_map": files}
        document = json.dumps(index).encode()
        peer.write_file(bench.root.join(output), "model.safetensors.index.json", document)


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
            name=bench.floor("write, read, write"),
            run=floor,
            after=functools.partial(clear, "chain-floor", "chain-floor-out"),
        ),
        *(
            Contender(
                name=our_name(how),
                run=functools.partial(
                    save,
                    state,
                    bench.root.join("chain").target,
                    consolidate=ConsolidateOptions(page_cache=page_cache),
                    **bench.options(),
                ),
                after=functools.partial(clear, "chain"),
            )
            for how, page_cache in _page_caches(bench)
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
    for peer in _loading_peers(bench):

        def by_load(peer: Peer = peer) -> None:
            peer.save(state, bench.root.join("chain-peer"))
            _load_and_write(bench, state, peer, "chain-peer", "chain-peer-hf")

        contenders.append(
            Contender(
                name=f"{peer.name}: save, load, write",
                run=by_load,
                after=functools.partial(clear, "chain-peer", "chain-peer-hf"),
            )
        )
    return bench.compare("save and export", state_bytes(state), contenders)
