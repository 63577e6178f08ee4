"""How ranks agree under bare `dcp.save`: messages that ride in DCP's plans (decision 3).

A message takes effect when it is unpickled: it enters the inbox of the thread that runs the
collective. So it arrives even when the planner drops the plan that carried it, as
`DefaultSavePlanner` does with `enable_plan_caching=True`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage.coordination.failures import check_terms
from ckpt_storage.coordination.plans import Hello, inbox
from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.saves.planning import unlike
from ckpt_storage.saves.session import Granted, SaveSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The coordinator's answer to the hello with the same nonce: its leave, or why there is none.

    A refusal is no exception in the planning step: with plan caching, planners note the plan as
    finished on the coordinator only, and every later save would fail.
    """

    nonce: str
    leave: Granted | CheckpointError

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive, (self.nonce, self.leave))


def _receive(nonce: str, leave: Granted | CheckpointError) -> Answer:
    answer = inbox().answers[nonce] = Answer(nonce=nonce, leave=leave)
    return answer


def hello_of(rank: int, terms: Mapping[str, str], plan: SavePlan) -> Hello:
    """Return what a rank says with its plan; forgets what arrived of earlier saves."""
    inbox(anew=True)
    return Hello(nonce=os.urandom(16).hex(), rank=rank, terms=terms, items=plan.items)


def answers_to(
    own: Hello, plans: Sequence[SavePlan], session: SaveSession, group_size: int | None
) -> list[SavePlan]:
    """Return the plans with an answer for each rank; coordinator only.

    Checks that all ranks agree, and begins the save. `group_size` is what the number of ranks has
    to be, if that is known. Raises `InvalidInputError` if a rank has no writer of ours.
    """
    hellos = _hellos_of_all(own, len(plans))
    # The items of all ranks are many: nobody keeps them.
    inbox().hellos.clear()
    leave: Granted | CheckpointError
    try:
        if group_size not in {None, len(plans)}:
            raise InvalidInputError(
                f"The save runs on {len(plans)} ranks; the writer's process_group has "
                f"{group_size}.",
                phase="plan",
                next_step="Pass the same process_group to dcp.save and to the writer.",
            )
        check_terms({hello.rank: hello.terms for hello in hellos}, phase="plan")
        refusal = unlike([hello.items for hello in hellos])
        # Plans that a planner dropped count as 0.
        item_count = sum(len(plan.items) for plan in plans)
        leave = refusal or session.begin(len(plans), item_count)
    except CheckpointError as error:
        leave = error
    answers = [Answer(nonce=hello.nonce, leave=leave) for hello in hellos]
    inbox().answers[own.nonce] = answers[own.rank]
    return [replace(plan, storage_data=answer) for plan, answer in zip(plans, answers, strict=True)]


def _hellos_of_all(own: Hello, world_size: int) -> list[Hello]:
    """Return what every rank said of this save, by rank; the coordinator's `own` is not sent."""
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


def leave_for(hello: Hello) -> Granted:
    """Return the coordinator's leave. Raises what it refused the save for."""
    answer = inbox().answers.get(hello.nonce)
    if not isinstance(answer, Answer):
        raise InvalidInputError(
            f"Rank {hello.rank} got no save id for this save; it writes nothing.",
            rank=hello.rank,
            phase="write",
            next_step="Use a planner that keeps SavePlan objects, or turn plan caching off "
            "(enable_plan_caching=False).",
        )
    if not isinstance(answer.leave, Granted):
        raise answer.leave
    return answer.leave
