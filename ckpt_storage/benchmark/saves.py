"""Saves of a whole model, in the foreground and in the background.

Knows our savers, the floor and the peers. Called by `scenarios` on every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt_storage.saver import AsyncSaver
from ckpt_storage.saving import save
from ckpt_storage.store import Location

from .bench import Bench, our_name, put_own
from .compare import Comparison, Contender
from .peers import Peer
from .workload import state_bytes


def measure_save(bench: Bench) -> Comparison:
    """Measure a durable save of the whole state."""
    state = bench.state(filled=True)

    def contender(name: str, run: Callable[[Location], object]) -> Contender:
        folder = f"save-{name.replace(', ', '-').replace(' ', '-')}"
        return Contender(
            name=name,
            run=functools.partial(run, bench.root.join(folder)),
            after=functools.partial(bench.clear, folder),
        )

    floor = Contender(
        name=bench.floor(bench.plain.put_name),
        run=functools.partial(put_own, bench, state, "save-floor"),
        after=functools.partial(bench.clear, "save-floor"),
    )
    ours = contender(our_name(), lambda folder: save(state, folder.target, **bench.options()))
    peers = [contender(peer.name, functools.partial(peer.save, state)) for peer in bench.peers]
    return bench.compare("save", state_bytes(state), [floor, ours, *peers])


def measure_stall(bench: Bench) -> Comparison:
    """Measure how long a background save holds the trainer up; its rest is not in the time."""
    state = bench.state(filled=True)
    warm = [torch.empty_like(tensor.to_local()).fill_(0) for tensor in state.values()]
    waits: dict[str, Callable[[], object]] = {}

    def begin(name: str, start: Callable[[Location], Callable[[], object]]) -> None:
        waits[name] = start(bench.root.join("stall"))

    def ended(name: str) -> None:
        waits.pop(name)()
        bench.clear("stall")

    def contender(name: str, start: Callable[[Location], Callable[[], object]]) -> Contender:
        return Contender(
            name=name,
            run=functools.partial(begin, name, start),
            after=functools.partial(ended, name),
        )

    def copy() -> None:
        torch._foreach_copy_(warm, [tensor.to_local() for tensor in state.values()])

    def torch_async(
        peer: Peer, kind: AsyncCheckpointerType
    ) -> Callable[[Location], Callable[[], object]]:
        def start(folder: Location) -> Callable[[], object]:
            return dcp.async_save(  # type: ignore[union-attr]  # no stager, so a future
                dict(state),
                storage_writer=peer.writer(folder.target),
                async_checkpointer_type=kind,
            ).result

        return start

    options = bench.options()
    with (
        AsyncSaver(mode="thread") as threads,
        AsyncSaver(mode="process", name="processes") as processes,
    ):
        contenders = [
            Contender(name="floor: one memcpy", run=copy),
            contender(
                our_name("thread"),
                lambda folder: threads.save(state, folder.target, **options).result,
            ),
            contender(
                our_name("process"),
                lambda folder: processes.save(state, folder.target, **options).result,
            ),
        ]
        for peer in bench.peers[:1]:
            contenders += [
                contender(f"{peer.name}, thread", torch_async(peer, AsyncCheckpointerType.THREAD)),
                contender(
                    f"{peer.name}, process", torch_async(peer, AsyncCheckpointerType.PROCESS)
                ),
            ]
        return bench.compare("trainer blocked by a background save", state_bytes(state), contenders)
