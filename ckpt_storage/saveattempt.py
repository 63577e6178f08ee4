"""One save attempt on one rank: what it was granted, what it writes, how it is committed.

Knows the order of a rank's work, what is told before its turn and which deadline governs what;
knows no call of DCP and no state of a thread. Called by `writer`, which holds one for each save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from . import agreement, integrity, layout
from .agreement import Granted, Refused
from .commit import Grant
from .committing import Prepared, commit_prepared, prepare_commit
from .deadline import Deadline
from .documents import FileRef
from .errors import InvalidInputError
from .headstart import EarlyWord, HeadStart, Opened, Place, is_told_early
from .manifest import RankManifest
from .rankreport import RankReport
from .savesettings import SaveSettings
from .shards import ShardJob, write_shards
from .slots import SlotRecord
from .store import Location
from .store.base import Store
from .workers import bounded

__all__ = ["SaveAttempt"]


class SaveAttempt:
    """One save as this rank sees it; belongs to one thread.

    `answer` is what the coordinator said, once it is known; `item_count`, `candidates` and
    `settled_ties` are what a front door knows besides.
    """

    def __init__(
        self,
        settings: SaveSettings,
        location: Location,
        checkpoint_id: str | os.PathLike[str] | None,
        *,
        is_coordinator: bool,
        rank: int,
        replaces: frozenset[str],
    ) -> None:
        """Begin it at `location`, which `checkpoint_id` has led to; `replaces` as for `Place`."""
        self.location = location
        self.is_coordinator = is_coordinator
        self.rank = rank
        self.nonce = os.urandom(16).hex()
        self.answer: Granted | Refused | None = None
        self.item_count = 0
        self.candidates: Sequence[str] = ()
        self.settled_ties: Mapping[str, str] = {}
        self._settings = settings
        self._opened = Opened(partial(settings.open, location, checkpoint_id))
        self._write_deadline: Deadline | None = None
        place = Place(
            url=location.url,
            rank=rank,
            open=self._opened,
            scope=(settings.commit_base or location).scope,
            overwrite=settings.overwrite,
            replaces=replaces,
        )
        self.head_start = HeadStart(place)

    def granted(self) -> Granted:
        """Return the coordinator's leave. Raises what it refused the save for."""
        answer = self.answer or agreement.inbox().answers.get(self.nonce)
        if answer is None:
            raise InvalidInputError(
                f"Rank {self.rank} got no save id for this save; it writes nothing.",
                rank=self.rank,
                phase="write",
                next_step="Use a planner that keeps SavePlan objects, or turn plan caching off "
                "(enable_plan_caching=False).",
            )
        self.answer = answer
        if isinstance(answer, Refused):
            raise answer.error
        return answer

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        *,
        deadline: Deadline,
        word: EarlyWord | None,
    ) -> list[WriteResult]:
        """Write this rank's shard file and rank manifest; durable on return.

        What is returned, `word` tells before, where that spares a wait. Raises as `write_data`.
        """
        granted = self.granted()
        self._write_deadline = deadline
        store = bounded(self._opened(), deadline)
        results: list[WriteResult] = []
        if word is not None and granted.grant.is_promised and not self.is_coordinator:
            self.head_start.await_coordinator(word)

        def record(manifest: RankManifest) -> list[Callable[[], object]]:
            document = integrity.seal(manifest.to_body())
            path = layout.rank_manifest_path(manifest.save_id, self.rank)
            results.append(self._result(granted, manifest, path, document))
            calls: list[Callable[[], object]] = [lambda: store.write(path, document)]
            if word is not None and is_told_early(store.capabilities):
                calls.append(partial(word.told, results))
            return calls

        with deadline.governs(f"Writing to {store.url}", rank=self.rank):
            write_shards(
                store,
                plan,
                planner,
                ShardJob(
                    save_id=granted.grant.save_id,
                    rank=self.rank,
                    world_size=granted.world_size,
                    options=self._settings.transfer_options(store.capabilities),
                    deadline=deadline,
                    progress=self._settings.progress,
                    with_bar=self.is_coordinator,
                    claim=self.head_start.claim,
                ),
                record=record,
            )
        return results

    def prepare(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put down the save's documents, for the `commit` to come; coordinator only."""
        granted = self.granted()
        deadline = self._write_deadline or Deadline.of(self._settings.timeouts, "write")
        self.head_start.prepared = self._prepared(
            bounded(self._opened(), deadline),
            self._grant(granted),
            granted.world_size,
            metadata,
            results,
        )

    def commit(
        self,
        metadata: Metadata,
        results: list[list[WriteResult]],
        *,
        user: Mapping[str, Any],
        deadline: Deadline,
    ) -> SlotRecord:
        """Check that the save is complete, commit it, publish `.metadata`; coordinator only.

        `results[i]` is what rank i's `write` returned. Raises as `finish`.
        """
        granted = self.granted()
        with deadline.governs(f"Committing to {self.location.url}", rank=self.rank):
            store = bounded(self._opened(), deadline)
            grant = self._grant(granted)
            prepared = self.head_start.prepared or self._prepared(
                store, grant, granted.world_size, metadata, results
            )
            return commit_prepared(
                store,
                grant,
                prepared,
                user=user,
                deadline=deadline,
                retry=self._settings.retry,
            )

    def _grant(self, granted: Granted) -> Grant:
        # What all ranks were answered may only have been promised.
        return self.head_start.grant or granted.grant

    def _prepared(
        self,
        store: Store,
        grant: Grant,
        world_size: int,
        metadata: Metadata,
        results: list[list[WriteResult]],
    ) -> Prepared:
        return prepare_commit(
            store,
            grant,
            world_size=world_size,
            metadata=metadata,
            results=results,
            storage_meta=StorageMeta(checkpoint_id=self.location.url),
            settled_ties=self.settled_ties,
        )

    def _result(
        self, granted: Granted, manifest: RankManifest, path: str, document: bytes
    ) -> WriteResult:
        ref = FileRef(path=path, size_bytes=len(document), crc32c=integrity.crc32c_of(document))
        report = RankReport.of(
            manifest,
            ref,
            document,
            with_places=granted.with_places,
            candidates=self.candidates,
        )
        return WriteResult(
            index=MetadataIndex(f"ckpt_storage.rank.{self.rank}"),
            size_in_bytes=sum(file.size_bytes for file in manifest.files),
            storage_data=report,
        )
