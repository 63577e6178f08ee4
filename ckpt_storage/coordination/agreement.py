"""How ranks agree under bare `dcp.save`: messages that ride in DCP's plans (design note 3).

A message takes effect when it is unpickled: it enters the inbox of the thread that runs the
collective. So it arrives even when the planner drops the plan that carried it, as
`DefaultSavePlanner` does with `enable_plan_caching=True`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from ckpt_storage.commit.attempt import Grant
from ckpt_storage.errors import CheckpointError, InvalidInputError, RankMismatchError
from ckpt_storage.format.commit_record import HeadRef

from .failures import check_terms, spell_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What one rank tells the coordinator about the save it is in.

    `terms` maps the name of everything ranks must share to its value, as text. `nonce` is new for
    every save on every rank. `items` are those of the plan that it rides in; pickled together, they
    travel once.
    """

    nonce: str
    rank: int
    host: str
    terms: Mapping[str, str]
    items: Sequence[Any] = ()  # WriteItem

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive_hello, (self.nonce, self.rank, self.host, dict(self.terms), self.items))


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The coordinator's answer to the hello with the same nonce.

    `with_places` asks ranks to report where their items lie, for torch's own metadata.
    """

    nonce: str
    rank: int
    world_size: int
    grant: Grant
    with_places: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        grant = self.grant
        previous = astuple(grant.previous) if grant.previous else None
        fields = (grant.save_id, grant.last_slot, previous, grant.exclusive)
        return (
            _receive_granted,
            (self.nonce, self.rank, self.world_size, fields, self.with_places),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The coordinator's no to the hello with the same nonce; each rank raises `error`.

    An answer, not an exception in the planning step: with plan caching, planners note the plan as
    finished on the coordinator only, and every later save would fail.
    """

    nonce: str
    error: CheckpointError

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive_refused, (self.nonce, self.error))


@dataclass(slots=True)
class Inbox:
    """Messages that arrived in one thread: hellos by rank, answers by the nonce they answer.

    Copies of old messages may arrive too, when a planner copies its plans; their nonces differ.
    """

    hellos: dict[int, Hello] = field(default_factory=dict)
    answers: dict[str, Granted | Refused] = field(default_factory=dict)


_local = threading.local()


def inbox() -> Inbox:
    """Return the inbox of the calling thread."""
    found = getattr(_local, "inbox", None)
    if found is None:
        found = _local.inbox = Inbox()
    return found


def clear_inbox() -> None:
    """Forget what arrived in the calling thread; called before each save's first collective."""
    _local.inbox = Inbox()


def _receive_hello(
    nonce: str, rank: int, host: str, terms: dict[str, str], items: Sequence[Any]
) -> Hello:
    hello = Hello(nonce=nonce, rank=rank, host=host, terms=terms, items=items)
    inbox().hellos[rank] = hello
    return hello


def _receive_granted(
    nonce: str,
    rank: int,
    world_size: int,
    fields: tuple[Any, ...],
    with_places: bool,  # noqa: FBT001  # pickle's
) -> Granted:
    save_id, last_slot, previous, exclusive = fields
    grant = Grant(
        save_id=save_id,
        last_slot=last_slot,
        previous=HeadRef(slot=previous[0], save_id=previous[1]) if previous else None,
        exclusive=exclusive,
    )
    granted = Granted(
        nonce=nonce, rank=rank, world_size=world_size, grant=grant, with_places=with_places
    )
    inbox().answers[nonce] = granted
    return granted


def _receive_refused(nonce: str, error: CheckpointError) -> Refused:
    refused = Refused(nonce=nonce, error=error)
    inbox().answers[nonce] = refused
    return refused


def hellos_of_all(own: Hello, world_size: int) -> list[Hello]:
    """Return what every rank said of this save, by rank; the coordinator's `own` is not sent.

    Raises `InvalidInputError` naming the ranks of which nothing arrived.
    """
    hellos = {**inbox().hellos, own.rank: own}
    missing = sorted(set(range(world_size)) - set(hellos))
    if missing:
        raise InvalidInputError(
            f"Ranks {missing} of {world_size} sent no word of this save with their plans.",
            phase="plan",
            next_step="Give every rank a CheckpointStorageWriter, and use a planner that "
            "keeps SavePlan objects.",
        )
    return [hellos[rank] for rank in range(world_size)]


def grant_all(hellos: Sequence[Hello], grant: Grant, *, with_places: bool) -> list[Granted]:
    """Return the answers that let all ranks save."""
    return [
        Granted(
            nonce=hello.nonce,
            rank=rank,
            world_size=len(hellos),
            grant=grant,
            with_places=with_places,
        )
        for rank, hello in enumerate(hellos)
    ]


def refuse_all(hellos: Sequence[Hello], error: CheckpointError) -> list[Refused]:
    """Return the answers by which all ranks raise `error`."""
    return [Refused(nonce=hello.nonce, error=error) for hello in hellos]


def check_agreement(hellos: Sequence[Hello], *, phase: str) -> None:
    """Raise `RankMismatchError` listing value -> ranks unless all hellos have equal terms."""
    check_terms({hello.rank: hello.terms for hello in hellos}, phase=phase)


def check_alike(hellos: Sequence[Hello]) -> None:
    """Raise `RankMismatchError` if a name means other kinds, shapes or dtypes on other ranks.

    Of a value that is not sharded planners keep one rank's, which must stand for all.
    """
    first: dict[str, tuple[object, ...]] = {}
    for hello in hellos:
        for item in hello.items:
            kind = _kind_of(item)
            if first.setdefault(item.index.fqn, kind) != kind:
                _refuse_unlike(hellos, item.index.fqn)


def _kind_of(item: Any) -> tuple[object, ...]:  # noqa: ANN401  # a WriteItem
    data = item.tensor_data
    return (item.type.name,) if data is None else (item.type.name, data.size, data.properties.dtype)


def _refuse_unlike(hellos: Sequence[Hello], fqn: str) -> None:
    ranks_of: dict[str, list[int]] = {}
    for hello in hellos:
        for kind in {_kind_of(item) for item in hello.items if item.index.fqn == fqn}:
            text = "no tensor"
            if len(kind) > 1:
                how = "sharded " if kind[0] == "SHARD" else ""
                text = f"{how}{str(kind[2]).removeprefix('torch.')} {list(kind[1])}"  # type: ignore[call-overload]  # a size
            ranks_of.setdefault(text, []).append(hello.rank)
    listing = "; ".join(f"{text}: ranks {spell_ranks(ranks)}" for text, ranks in ranks_of.items())
    raise RankMismatchError(
        f"Ranks hold unlike values by the name {fqn}: {listing}. Nothing was written.",
        values=ranks_of,
        phase="plan",
        next_step="Give each rank's value a name of its own, or make it the same on all ranks.",
    )
