"""What an untrusted storage cannot do: have anything written, deleted or made outside the target.

`docs/guarantees.md`, section "Untrusted storage", lists the places where names enter.
"""

from __future__ import annotations

import json
import logging
import shutil
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import copy_cases as cases
import fsspec
import pytest
import torch
from cli_tools import call
from hostile_names import KINDS, PLAIN, UNSAFE, UNSENDABLE, bucket_of, tree
from s3_server import S3Server
from safetensors.torch import save as weights_of

import ckpt_storage
from ckpt_storage import (
    CheckpointManager,
    FormatError,
    InvalidInputError,
    UnsafeContentError,
    consolidate,
    convert,
    copy,
    delete,
)
from ckpt_storage.integrations.file_entries import write_files
from ckpt_storage.store import Location, open_store

NAMELESS = [name for name in UNSAFE if "//" in f"/{name}"]
"""Of a folder without a name; for fsspec that is the folder above."""

NAMES = [("memory", name) for name in (*UNSAFE, *UNSENDABLE)]
NAMES += [("s3", name) for name in UNSAFE[::3]]
NAMES += [("generic", name) for name in UNSAFE[::2] if name not in NAMELESS]
WEIGHTS = {"model.safetensors": weights_of({"w": torch.ones(2)})}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with files that nobody may touch; targets lie two levels below it."""
    (tmp_path / "deep").mkdir()
    for name in ("x", "b", "deep/x"):
        (tmp_path / name).write_bytes(b"precious")
    return tmp_path


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_copy_refuses_a_bucket_with_a_name_that_leads_out(
    outside: Path, server: S3Server, kind: str, name: str
) -> None:
    """The error names object, place and next step; nothing is written anywhere."""
    before = tree(outside)
    with (
        bucket_of(kind, {**WEIGHTS, name: b"evil"}, server) as (url, options),
        pytest.raises(UnsafeContentError) as caught,
    ):
        copy(url, outside / "deep" / "dst", storage_options=options)
    assert tree(outside) == before
    shown = repr(name)[1:-1].partition("/")[0]
    assert shown in str(caught.value)
    assert url in str(caught.value)
    assert "Rename or delete" in str(caught.value)


@pytest.mark.parametrize("name", NAMELESS)
def test_what_fsspec_cannot_name_is_not_copied(outside: Path, server: S3Server, name: str) -> None:
    """Clients of fsspec do not show what lies in a folder without a name."""
    with bucket_of("generic", {**WEIGHTS, name: b"evil"}, server) as (url, options):
        copy(url, outside / "deep" / "dst", storage_options=options)
    assert set(tree(outside / "deep")) == {"x", "dst", "dst/model.safetensors"}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_takes_a_name_that_stays_below_as_it_is(
    outside: Path, server: S3Server, kind: str, name: str
) -> None:
    """It is neither decoded nor expanded nor normalised."""
    with bucket_of(kind, {**WEIGHTS, name: b"good"}, server) as (url, options):
        copy(url, outside / "deep" / "dst", storage_options=options)
    copied = {key: data for key, data in tree(outside / "deep" / "dst").items() if data is not None}
    assert copied == {**WEIGHTS, name: b"good"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_beside_unsafe_names_is_read_and_they_are_reported(
    server: S3Server, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Listings pass over them with a warning that names one, escaped for terminals."""
    caplog.set_level(logging.WARNING, "ckpt_storage")
    with (
        bucket_of(kind, {**WEIGHTS, "../x": b"", "e\x7f": b""}, server) as (url, options),
        ckpt_storage.open_checkpoint(url, storage_options=options) as opened,
    ):
        assert list(opened) == ["w"]
        assert ckpt_storage.verify(url, storage_options=options).ok
    assert "skipped" in caplog.text
    assert "\x7f" not in caplog.text


@pytest.mark.parametrize("kind", ["memory", "s3"])
@pytest.mark.parametrize("folder", ["..", ".", "", "a\n", "a\\b"])
def test_an_export_folder_with_an_unsafe_name_is_not_copied(
    outside: Path, server: S3Server, kind: str, folder: str
) -> None:
    """The checkpoint is; what would lie above the target is not."""
    cases.save(cases.state_of(1), outside / "src")
    consolidate(outside / "src")
    objects = {
        path.replace("hf/", f"{folder}/", 1) if path.startswith("hf/") else path: data
        for path, data in cases.files_below(outside / "src").items()
    }
    before = tree(outside)
    with bucket_of(kind, objects, server) as (url, options):
        copy(url, outside / "deep" / "dst", storage_options=options)
    assert ckpt_storage.verify(outside / "deep" / "dst").ok
    after = tree(outside)
    assert {path for path in after if not path.startswith("deep/dst")} == before.keys()
    assert all(after[path] == data for path, data in before.items())
    top = {path.name for path in (outside / "deep" / "dst").iterdir()}
    assert top == {"commits", "saves", ".metadata"}


@pytest.mark.parametrize(
    "name", [".Metadata", "COMMITS/00000001.json", "Saves/x", "Model.safetensors.INDEX.json"]
)
def test_a_copy_to_a_disk_refuses_a_second_spelling_of_a_name_of_its_own(
    outside: Path, server: S3Server, name: str
) -> None:
    """Where letter case does not count it would be the file that makes a checkpoint of the rest."""
    with (
        bucket_of("s3", {**WEIGHTS, name: b"evil"}, server) as (url, options),
        pytest.raises(InvalidInputError, match="letter case"),
    ):
        copy(url, outside / "deep" / "dst", storage_options=options)
    assert not (outside / "deep" / "dst").exists()


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["y" * 256], "more than 255 bytes"),
        (["a/" + "ü" * 128 + "/b"], "more than 255 bytes"),
        (["a", "a/b"], "both a file and a folder"),
        (["model.safetensors/x"], "both a file and a folder"),
    ],
)
def test_a_copy_to_a_disk_refuses_names_that_no_folder_can_hold(
    outside: Path, server: S3Server, names: list[str], told: str
) -> None:
    """Before a checkpoint that is to be replaced is touched."""
    target = outside / "deep" / "dst"
    cases.saved_stock(cases.state_of(1), target)
    before = tree(outside)
    with (
        bucket_of("s3", {**WEIGHTS, **dict.fromkeys(names, b"1")}, server) as (url, options),
        pytest.raises(InvalidInputError, match=told),
    ):
        copy(url, target, storage_options=options, overwrite=True)
    assert tree(outside) == before


def test_slots_beside_files_of_others_are_not_copied(outside: Path) -> None:
    """They belong to the place that they lie in: a tombstone, say, dooms saves of that place."""
    source, target = outside / "src", outside / "deep" / "dst"
    cases.save(cases.state_of(1), source)
    delete(source)
    cases.saved_stock(cases.state_of(2), source)
    assert (source / "commits").exists()
    copy(source, target)
    assert not (target / "commits").exists()
    assert cases.load_stock(cases.state_of(2), target)["nested"]["step"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_says_which_object_and_what_to_do(
    outside: Path, server: S3Server, kind: str
) -> None:
    """Exit code 2, one message, and nothing on the disk."""
    file = outside / "options.json"
    with bucket_of(kind, {**WEIGHTS, "../x": b"evil"}, server) as (url, options):
        file.write_text(json.dumps(options))
        before = tree(outside)
        result = call("cp", url, outside / "deep" / "dst", "--storage-options-file", file)
    assert result.exit_code == 2, result.output
    assert tree(outside) == before


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_mirror_copies_steps_alone(outside: Path, server: S3Server, kind: str) -> None:
    """Folders of other names, whatever they hold, make nothing above the mirror."""
    with CheckpointManager(outside / "made") as manager:
        manager.save(1, cases.state_of(1), sync_files=False)
    step = cases.files_below(outside / "made")
    evil = {f"../{path}": data for path, data in step.items()}
    evil |= {f"step-00000002/../../{path}": data for path, data in step.items()}
    shutil.rmtree(outside / "made")
    before = tree(outside)
    with bucket_of(kind, {**step, **evil}, server) as (url, options):
        mirror = outside / "deep" / "mirror"
        with CheckpointManager(
            url, storage_options=options, mirror=mirror, mirror_storage_options={}
        ) as manager:
            assert manager.wait_mirrored(60)
    assert [path.name for path in mirror.iterdir()] == ["step-00000001"]
    after = tree(outside)
    assert {path for path in after if not path.startswith("deep/mirror")} == before.keys()


def test_no_record_of_a_zip_file_is_written_under_its_name(outside: Path) -> None:
    """Records of a torch.save file are looked up by name; none is extracted."""
    file = outside / "deep" / "a.pt"
    torch.save({"w": torch.ones(3)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        for name in ("../../x", "/abs", "a/../../x", "archive/../data.pkl"):
            archive.writestr(name, b"evil")
    before = tree(outside)
    convert(file, outside / "deep" / "dst", to="safetensors")
    after = tree(outside)
    assert {path for path in after if not path.startswith("deep/dst")} == before.keys()
    assert all(after[path] == data for path, data in before.items())


def test_no_member_of_a_tar_file_is_written_under_its_name(outside: Path) -> None:
    """Old releases of torch saved tar files; they are refused."""
    file = outside / "deep" / "a.pt"
    with tarfile.open(file, "w") as archive:
        for name in ("../../x", "/abs", "a/../../x", "storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name))
    before = tree(outside)
    with pytest.raises(FormatError, match=r"no file of torch\.save"):
        convert(file, outside / "deep" / "dst", to="safetensors", unsafe_pickle=True)
    assert tree(outside) == before


@pytest.mark.parametrize("name", [*UNSAFE, *UNSENDABLE[:2]])
def test_no_file_that_an_integration_writes_lies_elsewhere(outside: Path, name: str) -> None:
    """Names of files in a checkpoint of the Trainer or of Accelerate."""
    before = tree(outside)
    with pytest.raises(UnsafeContentError):
        write_files(outside / "deep", {name: torch.zeros(1, dtype=torch.uint8)})
    assert tree(outside) == before


@pytest.mark.parametrize("name", UNSAFE)
def test_the_name_of_a_tensor_never_becomes_a_path(outside: Path, name: str) -> None:
    """Headers of safetensors name tensors; files of an export are numbered."""
    source, target = outside / "src", outside / "deep" / "dst"
    source.mkdir()
    (source / "model.safetensors").write_bytes(weights_of({name: torch.ones(2)}))
    consolidate(source, target)
    made = {path for path in tree(target) if not path.startswith(".ckpt-storage")}
    assert made == {"model.safetensors", "model.safetensors.index.json"}


class TestLinks:
    """Symbolic links of a local folder: read through, never written or deleted through."""

    @pytest.fixture
    def linked(self, outside: Path) -> Path:
        (outside / "elsewhere").mkdir()
        return outside / "elsewhere"

    @pytest.mark.parametrize("name", ["commits", "saves"])
    def test_nothing_is_written_through_a_link_to_a_folder(
        self, outside: Path, linked: Path, name: str
    ) -> None:
        """A target with a folder that leads elsewhere is refused."""
        source, target = outside / "src", outside / "deep" / "dst"
        cases.save(cases.state_of(1), source)
        target.mkdir()
        (target / name).symlink_to(linked)
        with pytest.raises(UnsafeContentError, match="symbolic link"):
            copy(source, target)
        assert tree(linked) == {}

    @pytest.mark.parametrize("name", ["sub", ".ckpt-storage"])
    def test_a_copy_of_files_makes_nothing_behind_a_link(
        self, outside: Path, linked: Path, name: str
    ) -> None:
        """Neither content nor the records of what is done."""
        source, target = outside / "src", outside / "deep" / "dst"
        cases.saved_stock(cases.state_of(1), source)
        (source / "sub").mkdir()
        (source / "sub" / "notes").write_bytes(b"1")
        target.mkdir()
        (target / name).symlink_to(linked)
        with pytest.raises(UnsafeContentError, match="symbolic link"):
            copy(source, target)
        assert tree(linked) == {}

    def test_a_link_that_bears_a_name_of_the_copy_is_replaced(
        self, outside: Path, linked: Path
    ) -> None:
        """Not the file that it leads to."""
        source, target = outside / "src", outside / "deep" / "dst"
        cases.make("unindexed", {"w": torch.ones(2)}, source)
        target.mkdir()
        (linked / "bait").write_bytes(b"precious")
        (target / "0.safetensors").symlink_to(linked / "bait")
        copy(source, target, overwrite=True)
        assert (linked / "bait").read_bytes() == b"precious"
        assert not (target / "0.safetensors").is_symlink()

    @pytest.mark.parametrize("name", ["commits", "saves", "hf"])
    def test_a_deletion_stops_at_a_link(self, outside: Path, name: str) -> None:
        """Another checkpoint that a folder of this one leads to keeps every byte."""
        victim, evil = outside / "victim", outside / "deep" / "evil"
        cases.save(cases.state_of(1), victim)
        consolidate(victim)
        shutil.copytree(victim, evil)
        shutil.rmtree(evil / name)
        (evil / name).symlink_to(victim / name)
        before = tree(victim)
        refused = pytest.raises(UnsafeContentError, match="symbolic link")
        with nullcontext() if name == "hf" else refused:
            delete(evil)
        assert tree(victim) == before

    def test_a_link_within_the_folder_is_followed(self, outside: Path) -> None:
        """It leads nowhere else."""
        root = outside / "deep" / "dst"
        (root / "disk").mkdir(parents=True)
        (root / "saves").symlink_to("disk")
        cases.save(cases.state_of(1), root)
        assert ckpt_storage.verify(root).ok

    def test_the_root_itself_may_be_a_link(self, outside: Path, linked: Path) -> None:
        """As scratch folders often are."""
        (outside / "link").symlink_to(linked)
        cases.save(cases.state_of(1), outside / "link")
        cases.save(cases.state_of(2), outside / "link", overwrite=True)
        assert ckpt_storage.verify(linked).ok
        delete(outside / "link")
        assert not (outside / "link").exists()


@pytest.mark.parametrize("name", [*UNSAFE, *UNSENDABLE])
def test_no_child_of_a_location_lies_elsewhere(tmp_path: Path, name: str) -> None:
    """Names of folders, which listings show, become parts of paths and URLs."""
    for root in (tmp_path, "s3://bkt/run", "memory://run", "rawbucket://bkt/run"):
        with pytest.raises(UnsafeContentError):
            Location.of(root).child(name)


@pytest.mark.parametrize("name", ["a?b", "a#b"])
def test_no_child_of_a_url_is_cut(name: str) -> None:
    """Clients take what is behind these for a query or a fragment: they would open "a"."""
    with pytest.raises(InvalidInputError, match="query or fragment"):
        Location.of("sftp://host/run").child(name)


def test_the_names_of_an_untrusted_root_reach_no_other_key(server: S3Server) -> None:
    """A deletion of a folder hits the objects with that prefix as they are spelt."""
    with bucket_of("s3", {"saves/../../victim": b"evil"}, server) as (url, options):
        server.put("bkt", "victim", b"precious")
        store = open_store(url, storage_options=options)
        store.delete_folder("saves")
        store.close()
    assert server.dump("bkt") == {"victim": b"precious"}


def test_a_listing_of_memory_is_as_it_was(server: S3Server) -> None:
    """Markers of folders, which consoles make, are no objects and no warning."""
    with bucket_of("memory", {"": b"", "a/": b"", "a/b": b"1"}, server) as (url, _):
        store = open_store(url)
        assert [one.path for one in store.list("")] == ["a/", "a/b"]
        assert [one.path for one in store.list("", recursive=False)] == ["a/"]
    assert fsspec.filesystem("memory").store == {}
