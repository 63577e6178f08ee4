"""How all ranks open one and the same checkpoint, whoever wrote it, and notice when it changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_storage.commit.slotlog import read_slot
from ckpt_storage.errors import CheckpointNotFoundError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id
from ckpt_storage.source.filemarks import FileMarks, open_newest, open_source
from ckpt_storage.source.foreign import SafetensorsSource, StockSource
from ckpt_storage.source.model import CommittedSource, Source, read_manifest

from .output import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the coordinator opened: a commit record of ours and its slot, or neither.

    `state` stands for the content of what has no save id (JSON). Where the storage does not tell
    when files were written it is another one each time, and nothing of an earlier run is kept.
    """

    record: bytes = b""
    slot: int = 0
    state: object = None


class Opening:
    """The source of one output on one rank; `site` tells where it lies."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._marks: FileMarks | None = None

    def find(self, slot: int | None = None) -> tuple[Source, Found]:
        """Open the newest checkpoint, or the commit in a slot, be it the head or not any more."""
        site = self._site
        if slot is not None:
            record = read_slot(site.source, slot)
            if record is None or record.type != "commit":
                raise CheckpointNotFoundError(
                    f"{site.setting.source.url} has no commit in slot {slot}.",
                    path=site.setting.source.url,
                    phase="plan",
                    next_step="Consolidate what is there now.",
                )
            return self._of_record(record), Found(record=record.encode(), slot=slot)
        source, marks = open_newest(site.source, deadline=site.deadline, options=site.options)
        if isinstance(source, CommittedSource):
            return source, Found(record=source.record.encode(), slot=source.record.slot)
        assert marks is not None  # noqa: S101  # another writer's
        # An output may lie below the source, and be another one by now.
        own = {*source_files(source), STOCK_METADATA, INDEX_NAME}
        self._marks = replace(marks, of={path: m for path, m in marks.of.items() if path in own})
        state: object = sorted(self._marks.of.items())
        if any(time_s is None for _, time_s in self._marks.of.values()):
            state = new_write_id()
        return source, Found(state=state)

    def open(self, found: Found) -> Source:
        """Open what the coordinator found."""
        site = self._site
        if not found.record:
            return open_source(site.source, deadline=site.deadline, options=site.options)
        return self._of_record(SlotRecord.decode(found.record, slot=found.slot))

    def _of_record(self, record: SlotRecord) -> Source:
        site = self._site
        manifest = read_manifest(site.source, record)
        return CommittedSource(site.source, record, manifest, site.deadline, site.options)

    def check_unchanged(self) -> None:
        """Raise if another writer touched its files since they were opened; coordinator only."""
        if self._marks is not None:
            self._marks.check(self._site.source)


def source_files(source: Source) -> list[str]:
    """Return the paths of the files that hold the values, sorted."""
    if isinstance(source, CommittedSource):
        return sorted(reference.path for reference, _ in source.manifest.files)
    if isinstance(source, StockSource):
        return sorted({item.relative_path for item in source.metadata.items.values()})
    if isinstance(source, SafetensorsSource):
        return sorted({place.path for place in source.held.values()})
    return []
