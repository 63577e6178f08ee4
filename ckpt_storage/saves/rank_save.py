"""The five steps of one rank in a save, between which the ranks exchange messages.

The steps are the same in a trainer and in its worker process. The caller sends their return
values: proposals and reports to the coordinator, its answers to the ranks.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.info import CheckpointInfo
from ckpt_storage.commit.report import RankReport
from ckpt_storage.coordination.rounds import ByRank
from ckpt_storage.observe.stats import OperationStats
from ckpt_storage.options import STOCK_ENTRY_LIMIT

from .groups import sizes_in_metadata
from .planning import (
    PLAN_CACHE,
    CachedPlan,
    LocalPlan,
    find_cached_plan,
    find_mismatch,
    metadata_to_cache,
    take_from_lowest,
)
from .replicas import Difference, ReplicaSample, find_differences
from .session import SaveSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A local plan, or the id of a plan that this rank keeps from an earlier save.

    `digest` is that of its sample of replicated values; `sample` is sent when it was asked for.
    """

    plan: SavePlan | None
    plan_id: str | None
    digest: bytes = b""
    sample: ReplicaSample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The coordinator's answer: a final plan, or the id of the cached plan; and the save's ticket.

    Without an id all ranks propose again, with what it `wants`.
    """

    plan_id: str | None
    wants: Literal["plans", "samples"] | None = None
    plan: SavePlan | None = None
    item_count: int = 0
    ticket: SaveTicket | None = None


class RankSave:
    """The steps of one save on one rank.

    `propose`, then on the coordinator `decide`, then `accept`; again from `propose` each time that
    `accept` returns None: once for the samples of replicated values that differ, once for the plans
    where cached plans cannot be used. Then `write`, and on the coordinator `commit`. With `packs`,
    values for other ranks are pickled bytes in arguments and results, which the caller does not
    unpickle.
    """

    def __init__(
        self, session: SaveSession, make_plan: Callable[[], LocalPlan], *, packs: bool = False
    ) -> None:
        self._session = session
        self._make_plan = make_plan
        self._packs = packs
        self._local: LocalPlan | None = None
        self._cached: CachedPlan | None = None
        self._sample: ReplicaSample | None = None
        self._sends_sample = False
        self._from_lowest: frozenset[str] = frozenset()
        self._metadata: Metadata | None = None
        self._plan: SavePlan | None = None
        self._ticket: SaveTicket | None = None

    def propose(self) -> Any:  # noqa: ANN401  # a `Proposal`, packed or not
        """Return this rank's plan, or the id of the cached plan of an equal state."""
        if self._local is None:
            self._local = self._make_plan()
            self._cached = find_cached_plan(PLAN_CACHE, self._local.structure)
            if self._session.world_size > 1:
                self._sample = self._local.sample()
        plan, plan_id = None, None
        if self._cached is None:
            plan = self._local.plan()
        else:
            plan_id = self._cached.plan_id
        sample = self._sample
        return self._pack(
            Proposal(
                plan=plan,
                plan_id=plan_id,
                digest=b"" if sample is None else sample.digest,
                sample=sample if self._sends_sample else None,
            )
        )

    def decide(self, proposals: Sequence[Any]) -> Any:  # noqa: ANN401  # of `Answer`, packed or not
        """Plan for all ranks and begin the save on the storage; coordinator only.

        Returns one answer for all ranks, or `ByRank`. Raises why the save is refused.
        """
        assert self._local is not None  # noqa: S101  # it has proposed
        session, cached = self._session, self._cached
        opened: list[Proposal] = [_unpacked(proposal) for proposal in proposals]
        differences = list[Difference]()
        if len({proposal.digest for proposal in opened}) > 1:
            samples = [proposal.sample for proposal in opened if proposal.sample is not None]
            if len(samples) < len(opened):
                return self._pack(Answer(plan_id=None, wants="samples"))
            differences = find_differences(samples, session.global_ranks)
        differing = frozenset(difference.name for difference in differences)
        plan_ids = {proposal.plan_id for proposal in opened}
        if plan_ids == {None}:
            plans = [proposal.plan for proposal in opened if proposal.plan is not None]
            del opened
            mismatch = find_mismatch([plan.items for plan in plans], session.global_ranks)
            if mismatch is not None:
                raise mismatch
            session.settle(differences)
            self._from_lowest |= differing
            plans = take_from_lowest(plans, self._from_lowest)
            plans, self._metadata = self._local.planner.create_global_plan(plans)
            item_count = sum(len(plan.items) for plan in plans)
            ticket = session.begin(len(plans), item_count, sizes_in_metadata(self._metadata))
            plan_id = os.urandom(16).hex()
            answers = (
                Answer(plan_id=plan_id, plan=plan, item_count=item_count, ticket=ticket)
                for plan in plans
            )
            return ByRank([self._pack(answer) for answer in answers])
        if cached is None or plan_ids != {cached.plan_id} or not self._may_reuse(cached, differing):
            return self._pack(Answer(plan_id=None, wants="plans"))
        session.settle(differences)
        self._metadata, self._from_lowest = cached.metadata, cached.from_lowest
        assert self._metadata is not None  # noqa: S101  # `_may_reuse` checked this
        sizes = sizes_in_metadata(self._metadata)
        ticket = session.begin(len(opened), cached.item_count, sizes)
        return self._pack(
            Answer(plan_id=cached.plan_id, item_count=cached.item_count, ticket=ticket)
        )

    def _may_reuse(self, cached: CachedPlan, differing: AbstractSet[str]) -> bool:
        """Return whether the cached plan stores and publishes all that this save does.

        `differing` are the names of values that differ between ranks.
        """
        # A name that differed once will differ again; then no plan needs to be sent.
        self._from_lowest = cached.from_lowest
        count = cached.item_count
        has_chunks = count <= STOCK_ENTRY_LIMIT
        return (
            cached.metadata is not None
            and differing <= cached.from_lowest
            and (has_chunks or not self._session.options.is_stock_wanted(count))
        )

    def accept(self, answer: object) -> str | None:
        """Take the coordinator's answer; return the save id, None if the ranks propose again."""
        opened: Answer = _unpacked(answer)
        local, cached = self._local, self._cached
        assert local is not None  # noqa: S101  # it has proposed
        if opened.wants == "samples":
            self._sends_sample = True
            return None
        if opened.plan_id is None or opened.ticket is None:
            self._cached = None
            return None
        if opened.plan is None:
            assert cached is not None  # noqa: S101  # it proposed its id
            self._plan = cached.plan
        else:
            self._plan = local.planner.finish_plan(opened.plan)
            if local.structure is not None:
                PLAN_CACHE.append(
                    CachedPlan(
                        plan_id=opened.plan_id,
                        plan=self._plan,
                        structure=local.structure,
                        item_count=opened.item_count,
                        metadata=metadata_to_cache(self._metadata, opened.item_count),
                        from_lowest=self._from_lowest,
                    )
                )
        self._ticket = opened.ticket
        return opened.ticket.save_id

    def write(self) -> Any:  # noqa: ANN401  # a `RankReport`, packed or not
        """Write this rank's files and return its report; durable on return."""
        local, plan, ticket = self._local, self._plan, self._ticket
        assert local is not None and plan is not None and ticket is not None  # noqa: S101, PT018  # it has accepted
        return self._pack(self._session.write(ticket, plan, local.items, local.ties))

    def commit(self, reports: Sequence[Any], stats: OperationStats) -> CheckpointInfo:
        """Commit the save; coordinator only. Raises as `SaveSession.finish`."""
        assert self._metadata is not None  # noqa: S101  # it has decided
        opened: list[RankReport | None] = [_unpacked(report) for report in reports]
        return self._session.finish(self._metadata, opened, stats)

    def close(self) -> None:
        """Do nothing: the steps run in the caller's process."""

    def _pack(self, value: object) -> Any:  # noqa: ANN401  # bytes or the value
        return pickle.dumps(value) if self._packs else value


def _unpacked(value: object) -> Any:  # noqa: ANN401  # of any kind
    return pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301  # our own ranks
