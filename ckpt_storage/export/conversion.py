"""One conversion on one rank: its source and values. A class for each target derives from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, get_args

from ckpt_storage import errors
from ckpt_storage.format import names
from ckpt_storage.source.file_versions import changed_rather_than_damaged, listed
from ckpt_storage.source.model import Source, value_keys
from ckpt_storage.transfer.objects import is_there

from . import layout
from .layout import Files, Shards
from .options import Selection, digest
from .output import Export, ExportSpec, SourceVersion, WriteSummary, place_within
from .plan import Fixed, Segment, Stored, elements_of
from .select import Selected, select

TargetFormat = Literal["ckpt_storage", "dcp", "dcp_safetensors", "safetensors", "torch_save"]
"""ours; stock DCP; torch's sharded safetensors; one Hugging Face export; a file of torch.save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What `convert` did; both URLs are without credentials.

    source_format, format: of what was read and of what was written. save_id: of the checkpoint
    of ours that was written, else None. kept_count: files that an earlier call, which died, had
    completed, and that are sound. total_bytes counts tensors only. dropped: FQNs that the target
    cannot hold, omitted as `unsupported` allows; excluded: those that a selection omitted.
    """

    source_url: str
    source_format: str
    url: str
    format: TargetFormat
    save_id: str | None
    kept_count: int
    tensor_count: int
    blob_count: int
    total_bytes: int
    dropped: Sequence[str]
    excluded: Sequence[str]
    seconds: float


FORMATS: tuple[TargetFormat, ...] = get_args(TargetFormat)

UNPICKLED = frozenset({"torch_save", "torch_checkpointing"})
"""Source formats whose values are unpickled when the source is opened, if they are no tensors."""

_LAYOUT = 2
"""Changed with the layout of files, so that files of an older release are not resumed."""

_KEYS_AT_ONCE = 4096
"""For stock DCP the head of each item is read: some kilobytes each."""


def onto_itself(url: str) -> errors.InvalidInputError:
    """Return the error that the target is the source."""
    what = f"{url} would be converted onto itself, or into its own files."
    return errors.InvalidInputError(what, next_step="Give another place for the result.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSpec(ExportSpec):
    """The options of a conversion; both URLs are the caller's, and may be those of files."""

    source_file: str
    source_url: str
    target_file: str
    target_url: str
    to: TargetFormat
    include: Selection | None
    exclude: Selection | None
    drops: bool
    max_file_bytes: int
    unsafe_pickle: bool

    def terms(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, for `Operation.meet`."""
        own = ("to", "max_file_bytes", "include", "exclude")
        options = {name: digest(getattr(self, name)) for name in own}
        return {**ExportSpec.terms(self), "the file": self.target_url, **options}


class Conversion(Export[ConvertReport]):
    """One conversion on one rank; each target adds its files and how they are published."""

    spec: ConvertSpec
    shards: Shards
    new_id: str | None = None

    def find(self) -> SourceVersion:
        """Open a checkpoint, or a file, of which nothing is missing."""
        spec, version = self.spec, super().find()
        self._check_elsewhere()
        self._unpack()
        if self.source.format == spec.to:
            what = f"{spec.source_url} is of the format {spec.to} already."
            raise errors.InvalidInputError(what, next_step="Use ckpt_storage.copy to copy it.")
        chosen = self.chosen
        with changed_rather_than_damaged(self.check_unchanged):
            # If something of the source is missing, the target is not changed.
            keys = iter(value_keys(chosen.tensors, chosen.blobs))
            while part := list(islice(keys, _KEYS_AT_ONCE)):
                self.source.places(part)
        return version

    def open(self, version: SourceVersion) -> None:
        """Open a checkpoint, or a file."""
        super().open(version)
        self._unpack()

    def read_source(self) -> Source:
        """Open a file, or the newest checkpoint, also one in the layout of torch_checkpointing."""
        if file := self.spec.source_file:
            from .torchfile import open_torch_file  # noqa: PLC0415  # imports torch

            unsafe_pickle = self.spec.unsafe_pickle
            return open_torch_file(self.context.source, file, unsafe_pickle=unsafe_pickle)
        source: Source | None = None
        missing: list[errors.CheckpointNotFoundError] = []
        try:
            source = super().read_source()
        except errors.CheckpointNotFoundError as error:
            missing.append(error)
        if source is None or source.format == "safetensors":
            source = self._open_rank_files(source) or source
        if source is None:
            raise missing.pop()
        return source

    def _open_rank_files(self, weights: Source | None) -> Source | None:
        """Open a checkpoint in the layout of torch_checkpointing; None if there is none.

        In that layout, too, items may be `weights`, safetensors, beside others.
        """
        from .rankfiles import has_items, is_rank_layout, open_rank_files  # noqa: PLC0415  # torch

        store, is_sought = self.context.source, weights is None
        if weights is not None and weights.versions.is_listed:
            is_sought = is_there(store, "metadata.pkl")
        files = [entry.path for entry in listed(store)] if is_sought else []
        # A `metadata.pkl` of another program may lie beside weights.
        if not (is_rank_layout(files) if weights is None else has_items(files)):
            return None
        return open_rank_files(store, unsafe_pickle=self.spec.unsafe_pickle)

    def _unpack(self) -> None:
        """Read the files of torch_checkpointing that a checkpoint of ours holds."""
        source, is_of_files = self.source, not self.source.blobs
        is_of_files &= all(fqn.startswith(names.FILES_PREFIX) for fqn in source.tensors)
        if source.save_id is None or not is_of_files:
            return
        from .rankfiles import is_rank_layout, open_rank_files  # noqa: PLC0415  # imports torch
        from .stored_files import open_stored_files  # noqa: PLC0415  # as above

        if is_rank_layout([fqn.removeprefix(names.FILES_PREFIX) for fqn in source.tensors]):
            self.context.read_from(open_stored_files(self.spec, source))
            self.source = open_rank_files(
                self.context.source, unsafe_pickle=self.spec.unsafe_pickle
            )
            self.source.save_id = source.save_id

    def _check_elsewhere(self) -> None:
        """Refuse a target that would replace files of the source."""
        context, name = self.context, self.spec.target_file
        # No folder of another format gets a file with the name of a torch file.
        if self.spec.source_file or (name and not is_there(context.target, name)):
            return
        within = place_within(context.source, context.target)
        if within is None:
            return
        places = self.source.places(value_keys(self.source.tensors, self.source.blobs))
        own = {names.STOCK_METADATA, names.INDEX_NAME, *self.source.paths}
        own |= {place.path for place in places}
        path = f"{within}/{name}".strip("/")
        if not path or any(f"{name}/".startswith(f"{path}/") for name in own):
            raise onto_itself(self.spec.source_url)

    @cached_property
    def chosen(self) -> Selected:
        """The values to convert."""
        spec = self.spec
        return select(self.source, spec.include, spec.exclude, to=spec.to, drops=spec.drops)

    def content(self) -> object:
        """Return values that identify the content and its layout."""
        spec, state = self.spec, self.version.state if self.save_id is None else self.save_id
        return [_LAYOUT, spec.source_url, state, spec.to, spec.max_file_bytes]

    def stored_blobs(self) -> list[Stored]:
        """Return the segments of the objects, as they are stored."""
        places = self.source.places([(fqn, None) for fqn in self.chosen.blobs])
        return [Stored(fqn=place.fqn, size_bytes=place.size_bytes) for place in places]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors to convert."""
        return sum(elements_of(*item).size_bytes for item in self.chosen.tensors.items())

    def shards_of(self, block_bytes: int | None = None) -> Files:
        """Return DCP's files with all values, the objects as `torch.save` writes them."""
        blobs: Mapping[str, Segment]
        if self.source.format in UNPICKLED:
            source: Any = self.source
            blobs = {fqn: Fixed(source.pickled(fqn)) for fqn in self.chosen.blobs}
        else:
            blobs = {blob.fqn: blob for blob in self.stored_blobs()}
        tensors, most_bytes = self.chosen.tensors, self.spec.max_file_bytes
        files, self.shards = layout.lay_out_shards(tensors, blobs, most_bytes, block_bytes)
        return files

    def report(self, made: WriteSummary, seconds: float) -> ConvertReport:
        """Return the report of the conversion."""
        spec, chosen = self.spec, self.chosen
        return ConvertReport(
            source_url=spec.source_url,
            source_format=self.source.format,
            url=spec.target_url,
            format=spec.to,
            save_id=self.new_id,
            kept_count=len(made.kept),
            tensor_count=len(chosen.tensors),
            blob_count=len(chosen.blobs),
            total_bytes=self.tensor_bytes,
            dropped=tuple(sorted(chosen.dropped)),
            excluded=tuple(sorted(chosen.excluded)),
            seconds=seconds,
        )
