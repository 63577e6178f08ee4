"""Many small tensors, where planning and bookkeeping are all there is.

Knows our plug-ins and front doors, torch's planner and the peers. Called by `scenarios`. Of DCP's
calls it is also told how long they are inside the plug-in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage.loading import load
from ckpt_storage.reader import CheckpointStorageReader
from ckpt_storage.saving import save
from ckpt_storage.writer import CheckpointStorageWriter

from .bench import PLANNER, Bench, get_own, our_name, put_own
from .compare import Comparison, Contender
from .peers import NullReader, NullWriter, stock_metadata
from .workload import State, check_same, small_state, state_bytes, zeroed

_NOTHING = "torch's planner and exchange"
"""DCP's calls with a plug-in that moves nothing: the planner, and plans sent as torch does it."""


def _save_steps(state: State) -> Callable[[], object]:
    """Return what runs the steps of torch's planner, with no plan sent anywhere; all ranks."""
    is_coordinator = dist.get_rank() == 0

    def planned() -> tuple[dcp.DefaultSavePlanner, SavePlan]:
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=is_coordinator)
        return planner, planner.create_local_plan()

    plans: list[SavePlan] = [SavePlan([])] * dist.get_world_size()
    dist.all_gather_object(plans, planned()[1])

    def run() -> None:
        planner, plan = planned()
        if is_coordinator:
            # The same items that this rank would be sent, so that each run plans anew.
            plan = planner.create_global_plan([plan, *plans[1:]])[0][0]
        planner.finish_plan(plan)

    return run


def _load_steps(state: State, metadata: Metadata) -> Callable[[], object]:
    """Return what runs the steps of torch's planner, with no plan sent anywhere."""

    def run() -> None:
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(dict(state), metadata, dist.get_rank() == 0)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        planner.finish_plan(plan)

    return run


def measure_small_save(bench: Bench) -> Comparison:
    """Measure a save of many small tensors; ratios are without the steps of torch's planner."""
    state = small_state(bench.settings.small_count, filled=True)

    def clear() -> None:
        bench.clear("small")

    at = bench.root.join("small")
    floor = bench.floor(bench.plain.put_name)
    clock = bench.meter.plugins

    def by_dcp() -> None:
        writer = CheckpointStorageWriter(at.target, **bench.options())
        dcp.save(dict(state), storage_writer=clock.of(writer))

    contenders = [
        Contender(name=PLANNER, run=_save_steps(state)),
        Contender(name=_NOTHING, run=lambda: dcp.save(dict(state), storage_writer=NullWriter())),
        Contender(
            name=floor,
            run=functools.partial(put_own, bench, state, "small"),
            after=clear,
        ),
        Contender(name=our_name("dcp.save"), run=by_dcp, after=clear),
        Contender(
            name=our_name("save"),
            run=functools.partial(save, state, at.target, **bench.options()),
            after=clear,
        ),
        *(
            Contender(
                name=peer.name, run=functools.partial(peer.save, state, at, clock), after=clear
            )
            for peer in bench.peers
        ),
    ]
    return bench.compare(
        f"save of {len(state)} small tensors",
        state_bytes(state),
        contenders,
        floor=floor,
        deducted=PLANNER,
        whole=frozenset({our_name("save")}),
        idle=frozenset({PLANNER, _NOTHING}),
    )


def measure_small_load(bench: Bench) -> Comparison:
    """Measure a load of many small tensors; ratios are without the steps of torch's planner."""
    state = small_state(bench.settings.small_count, filled=True)
    target = small_state(bench.settings.small_count, filled=False)
    at = bench.root.join("small-ours")
    options = bench.options()
    save(state, at.target, **options)
    put_own(bench, state, "small-floor")
    peers = bench.peers
    for number, peer in enumerate(peers):
        peer.save(state, bench.root.join(f"small-{number}"))
    dist.barrier()
    metadata = stock_metadata(CheckpointStorageReader(at.target, **options).read_metadata())

    clock = bench.meter.plugins

    def checked(name: str) -> None:
        check_same(target, state, name)
        zeroed(target)

    def contender(name: str, run: Callable[[], object]) -> Contender:
        return Contender(name=name, run=run, after=functools.partial(checked, name))

    def by_dcp() -> None:
        reader = CheckpointStorageReader(at.target, **bench.options())
        dcp.load(dict(target), storage_reader=clock.of(reader))

    floor = bench.floor("read into place")
    contenders = [
        Contender(name=PLANNER, run=_load_steps(target, metadata)),
        Contender(
            name=_NOTHING,
            run=lambda: dcp.load(dict(target), storage_reader=NullReader(metadata)),
        ),
        contender(floor, functools.partial(get_own, bench, target, "small-floor")),
        contender(our_name("dcp.load"), by_dcp),
        contender(our_name("load"), functools.partial(load, target, at.target, **options)),
        *(
            contender(
                peer.name,
                functools.partial(peer.load, target, bench.root.join(f"small-{number}"), clock),
            )
            for number, peer in enumerate(peers)
        ),
    ]
    found = bench.compare(
        f"load of {len(state)} small tensors",
        state_bytes(state),
        contenders,
        floor=floor,
        deducted=PLANNER,
        whole=frozenset({our_name("load")}),
        idle=frozenset({PLANNER, _NOTHING}),
    )
    for folder in ("small-ours", "small-floor", *(f"small-{n}" for n in range(len(peers)))):
        bench.clear(folder)
    return found
