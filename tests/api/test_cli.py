"""The command line called in this process: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cli_tools import STEPS, answer, call, make_run, state_at
from copy_cases import files_below, flip, save, saved_stock
from dcp_cases import same
from s3_server import S3Server
from safetensors.torch import load_file

from ckpt_storage import CheckpointInfo, InvalidInputError, delete
from ckpt_storage.cli import change, main
from ckpt_storage.cli.app import _COMMANDS

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest of a run of three checkpoints; not to be changed."""
    return make_run(tmp_path_factory.mktemp("cli") / "run") / "step-00001100"


def s3_options(server: S3Server, name: str = "storage") -> list[str]:
    client = {"endpoint_url": server.endpoint_url, "region_name": "us-east-1"}
    pairs = ("key=test", f"secret={SECRET}", f"client_kwargs={json.dumps(client)}")
    return [word for pair in pairs for word in (f"--{name}-option", pair)]


def refused(*arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
    result = call(*arguments, env=env)
    assert result.exit_code == 2, result.output
    return result.output


def test_windows_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before a module is missing that only other systems have."""
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "ckpt-storage runs on Linux and macOS. On Windows, use WSL."
    ]


def test_every_command_explains_itself() -> None:
    """The help names all commands and each has its own help with what all share."""
    overview = call("--help")
    assert overview.exit_code == 0
    for name in _COMMANDS:
        assert f"\n  {name} " in overview.stdout, name
        page = call(name, "-h")
        assert page.exit_code == 0, page.output
        assert "--debug" in page.stdout, name
        assert "--json" in page.stdout, name


def test_ls_lists_steps_in_order(last: Path, tmp_path: Path) -> None:
    """Numbers in names count as numbers; what is no checkpoint is not listed."""
    names = [f"step-{step:08d}" for step in STEPS]
    assert [one["name"] for one in answer("ls", last.parent)["checkpoints"]] == names
    head, *lines = call("ls", last.parent).stdout.splitlines()
    assert head.split() == ["name", "step", "created", "format", "save", "id"]
    assert [line.split()[0] for line in lines] == names
    # An empty root is no error.
    assert answer("ls", tmp_path)["checkpoints"] == []
    assert "No committed checkpoint" in call("ls", tmp_path).stderr


def test_show_tells_what_a_checkpoint_is_and_how_a_tensor_is_stored(last: Path) -> None:
    """Counts, bytes, ranks; with options also files and slots. Of a tensor type, shape, chunks."""
    body = answer("show", last, "--files", "--history")
    assert (body["tensor_count"], body["world_size"], body["step"]) == (3, 1, 1100)
    assert body["tensor_bytes"] == 12 * 4 + 4 * 4 + 2 * 2
    (shard,) = last.rglob("*.distcp")
    assert [file["size_bytes"] for file in body["files"]] == [shard.stat().st_size]
    assert [entry["type"] for entry in body["history"]] == ["commit"]
    text = call("show", last, "--files", "--history").stdout
    assert all(word in text for word in ("format", "commit"))
    assert "()" not in text, "nobody was fenced"
    body = answer("show", last, "model.w")["tensor"]
    assert (body["dtype"], body["shape"], body["size_bytes"]) == ("float32", [3, 4], 48)
    assert body["chunks"] == [{"offsets": [0, 0], "sizes": [3, 4], "rank": 0}]
    assert "float32" in call("show", last, "model.w").stdout
    assert answer("show", last, "step")["kind"] == "object"


def test_tree_lists_every_value(last: Path) -> None:
    """Names with types and sizes; brackets in a name are no markup."""
    body = answer("tree", last)
    tensors = {one["fqn"] for one in body["values"] if one["dtype"] is not None}
    assert tensors == {"model.w", "model.b[0]", "model.h"}
    assert all(word in call("tree", last).stdout for word in ("b[0]", "bfloat16"))
    assert "b[0]" not in call("tree", last, "--depth", "1").stdout


def test_cat_prints_elements_as_json(last: Path) -> None:
    """All of them, or those of a slice; what JSON lacks as text; objects too."""
    weight = state_at(1100)["model"]["w"].numpy()
    assert answer("cat", last, "model.w")["values"] == weight.tolist()
    assert answer("cat", last, "model.w", "--slice", "1:,::2")["values"] == weight[1:, ::2].tolist()
    assert answer("cat", last, "model.h")["values"] == [1.5, -2.5]
    assert answer("cat", last, "model.b[0]")["values"][1:3] == ["nan", "inf"]
    assert call("cat", last, "step").stdout == "1100\n"
    assert answer("cat", last, "step")["values"] == 1100


def test_stats_are_those_of_numpy(last: Path) -> None:
    """Of finite elements; the others are counted."""
    (one, other) = answer("stats", last, "model.w", "model.b[0]", "--bins", "4")["tensors"]
    weight = state_at(1100)["model"]["w"].numpy().astype(np.float64)
    assert (one["mean"], one["std"]) == pytest.approx((weight.mean(), weight.std()))
    assert one["histogram"]["counts"] == np.histogram(weight, bins=4)[0].tolist()
    assert (other["nan_count"], other["positive_inf_count"], other["count"]) == (1, 1, 4)
    assert "mean" in call("stats", last, "model.w").stdout


def test_verify_says_sound_or_what_is_damaged(last: Path, tmp_path: Path) -> None:
    """Exit code 0 or 1; file, rank, tensor and offset of the damage, and what to do."""
    target = tmp_path / "copy"
    assert answer("verify", last)["ok"] is True
    call("cp", last, target)
    (shard,) = target.rglob("*.distcp")
    at = shard.read_bytes().index(state_at(1100)["model"]["w"].numpy().tobytes())
    flip(shard, at + 5)
    body = answer("verify", target, code=1)
    (problem,) = body["problems"]
    assert (problem["fqn"], problem["rank"], problem["offset"]) == ("model.w", 0, at)
    assert problem["file"].endswith(".distcp")
    assert problem["next_step"]
    assert "model.w" in call("verify", target).stdout
    assert answer("verify", target, "--shallow")["ok"] is True


def test_diff_says_equal_or_what_differs(last: Path, tmp_path: Path) -> None:
    """Exit code 0 or 1, across formats too."""
    first, second = (last.parent / f"step-{step:08d}" for step in STEPS[:2])
    call("convert", first, tmp_path / "dcp", "--to", "dcp")
    assert answer("diff", first, tmp_path / "dcp")["is_equal"] is True
    changed = {one["fqn"]: one for one in answer("diff", first, second, code=1)["changed"]}
    assert changed["model.w"]["max_absolute"] == 100
    assert "model.b[0]" not in changed
    assert answer("diff", first, second, "--atol", "200", "--prefix", "model.")["is_equal"] is True
    assert "model.w" in call("diff", first, second).stdout


def test_cp_copies_and_a_second_time_finds_it(
    last: Path, tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Between storages of two kinds, each with options of its own; no secret is shown or logged."""
    caplog.set_level("DEBUG", "ckpt_storage")
    options = s3_options(server, "destination-storage")
    body = answer("cp", last, "s3://bkt/copy", *options)
    assert body["sent_bytes"] == body["total_bytes"] > 0
    again = answer("cp", last, "s3://bkt/copy", *options)
    assert again["was_there"] is True
    back = call("cp", "s3://bkt/copy", tmp_path / "back", *s3_options(server))
    assert back.exit_code == 0, back.output
    shards = {path: data for path, data in files_below(last).items() if path.endswith("distcp")}
    assert shards.items() <= files_below(tmp_path / "back").items()
    assert call("cp", last, tmp_path / "back").exit_code == 0
    for result in (back, call("cp", last, "s3://bkt/copy", *options)):
        assert SECRET not in result.output
    body = answer("cp", "s3://bkt/copy", "s3://bucket/copy", *s3_options(server))
    assert (body["copied_bytes"], body["sent_bytes"]) == (0, body["total_bytes"])
    assert SECRET not in caplog.text


def test_convert_writes_another_format(last: Path, tmp_path: Path) -> None:
    """What the format cannot hold is refused by name, or dropped when asked."""
    body = answer("convert", last, tmp_path / "a.pt", "--to", "torch_save")
    assert body["tensor_count"] == 3
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(loaded["model"]["w"], state_at(1100)["model"]["w"])
    # Without --to the format is that of this library.
    assert answer("convert", tmp_path / "a.pt", tmp_path / "own")["format"] == "ckpt_storage"
    assert "step" in refused("convert", last, tmp_path / "st", "--to", "safetensors")
    dropped = answer("convert", last, tmp_path / "st", "--to", "safetensors", "--drop-unsupported")
    assert "step" in dropped["dropped"]
    found = load_file(tmp_path / "st" / "model.safetensors")
    assert set(found) == {"model.w", "model.b[0]", "model.h"}


def test_consolidate_exports_the_model(tmp_path: Path) -> None:
    """With options for names and types; those that an error proposes can be pasted."""
    save(state_at(1), tmp_path / "src")
    out = tmp_path / "out"
    options = "--include model.* --exclude *0] --rename model.w=weight --dtype bfloat16"
    body = answer("consolidate", tmp_path / "src", out, *options.split(), "--max-file-bytes", "1GB")
    assert body["tensor_count"] == 2
    found = load_file(out / "model.safetensors")
    assert found["weight"].dtype == torch.bfloat16
    assert call("consolidate", tmp_path / "src", out).exit_code == 0
    save({"model": {"a b": torch.ones(2, dtype=torch.complex128)}}, tmp_path / "odd")
    told = refused("consolidate", tmp_path / "odd", tmp_path / "none")
    assert "Leave it out with --exclude 'model.a b', or" in told


def test_consolidate_waits_for_ranks_until_its_timeout(tmp_path: Path) -> None:
    """Where a job's variables are set and nobody else comes, it says so and what to do."""
    save({"w": torch.ones(3)}, tmp_path / "c")
    job = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    told = refused("consolidate", tmp_path / "c", "--meet-timeout", "1", env=job)
    for text in ("Waiting for 2 ranks", "did not meet within 1 s", "unset WORLD_SIZE"):
        assert text in told


def test_prune_shows_the_plan_and_deletes_with_yes(tmp_path: Path) -> None:
    """Without `--yes` nothing changes; with it what no policy keeps is gone."""
    root = make_run(tmp_path / "run")
    before = files_below(root)
    body = answer("prune", root, "--keep-latest", "1")
    assert body["is_dry_run"] is True
    assert [one["step"] for one in body["planned"]] == [900, 1000]
    assert all(one["reasons"] for one in body["kept"])
    shown = call("prune", root, "--keep-latest", "1", "--keep-newer-than", "0")
    assert "--yes does it" in shown.stdout
    assert "this machine's clock" in shown.stdout
    assert files_below(root) == before
    done = answer("prune", root, "--keep-latest", "1", "--keep-every", "900", "--yes")
    assert done["deleted"] == ["step-00001000"]
    names = [one["name"] for one in answer("ls", root)["checkpoints"]]
    assert names == ["step-00000900", "step-00001100"]
    (tmp_path / "other" / "checkpoint-900").mkdir(parents=True)
    template = ("--names", "checkpoint-{step}")
    assert call("prune", tmp_path / "other", "--keep-latest", "1", *template).exit_code == 0
    for wrong in ([], ["--keep-best", "loss"], ["--keep-best", "loss:min:0"]):
        refused("prune", root, *wrong)


def test_prune_keeps_the_closest(tmp_path: Path) -> None:
    """To multiples of a number of steps, and of a length of time."""
    root = make_run(tmp_path / "run")
    body = answer("prune", root, "--keep-closest-steps", "1000")
    assert [one["step"] for one in body["planned"]] == [900]
    body = answer("prune", root, "--keep-closest-time", "1d")
    reasons = [reason for one in body["kept"] for reason in one["reasons"]]
    assert any(reason.startswith("KeepClosest(every_s=86400): ") for reason in reasons)


def test_rm_shows_and_deletes_one_checkpoint_with_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--yes` it is gone, and its exports; a save that replaces it meanwhile stays."""
    root = make_run(tmp_path / "run")
    one, other = root / "step-00001000", root / "step-00000900"
    assert call("consolidate", one).exit_code == 0
    before = files_below(root)
    body = answer("rm", one)
    assert (body["is_dry_run"], body["is_deleted"], body["step"]) == (True, False, 1000)
    assert body["exports"] == ["hf"]
    assert "would be deleted; --yes does it" in call("rm", one).stdout
    assert files_below(root) == before
    assert answer("rm", one, "--yes")["is_deleted"] is True
    names = [info["name"] for info in answer("ls", root)["checkpoints"]]
    assert names == [other.name, "step-00001100"]
    assert {path.parts[0] for path in map(Path, files_below(one))} == {"commits"}
    assert "was deleted" in refused("rm", one, "--yes")

    def after_a_save(url: str, **options: Any) -> bool:
        save({"w": torch.ones(3)}, url, overwrite=True)
        return delete(url, **options)

    monkeypatch.setattr(change, "delete", after_a_save)
    shown = answer("rm", other)["save_id"]
    assert f"holds no save {shown}" in " ".join(refused("rm", other, "--yes").split())
    assert answer("show", other)["save_id"] != shown


def test_names_in_errors_stay_as_they_are(tmp_path: Path) -> None:
    """Only advice is put as it is typed here; what failed may be spelt like an option of Python."""
    told = refused("show", tmp_path / "overwrite=True" / "include=x")
    assert f"{tmp_path}/overwrite=True/include=x" in told


def test_doctor_reports_and_advises(tmp_path: Path) -> None:
    """Exit code 0 where checkpoints can be kept."""
    body = answer("doctor", tmp_path, "--size", "1MiB")
    assert body["ok"] is True
    assert {probe["name"] for probe in body["probes"]} >= {"write", "read", "exclusive create"}
    assert "upload" in call("doctor", tmp_path, "--size", "1MiB").stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["cat", "{last}", "model.v"], "did you mean"),
        (["stats", "{last}", "step"], "no tensor"),
        (["cat", "{last}", "model.w", "--slice", "0,0,0"], "shape"),
        (["cat", "{last}", "model.w", "--slice", "a"], "index"),
        (["cat", "{last}", "model.h", "--form", "npy"], "--form raw"),
        (["cp", "{last}", "{last}/x"], "inside"),
        (["ls", "s3//typo"], "neither a path nor a URL"),
        (["ls", "{tmp}", "--timeout", "soon"], "length of time"),
        (["frobnicate"], "--help"),
        (["consolidate", "{last}", "--rename", "x"], "OLD=NEW"),
        (["cat", "{last}", "model.w", "--slice", "9" * 5000], "index"),
        (["doctor", "{tmp}", "--size", "0"], "--size"),
        (["verify", "{last}", "--memory-limit", "²"], "--memory-limit"),
        (["convert", "{tmp}/two.pt", "{tmp}/x", "--to", "dcp"], "a.b"),
        (["prune", "{tmp}/nothing", "--keep-latest", "1"], "does not exist"),
        (["ls", "{last}"], "is a checkpoint itself"),
        (["ls", "{tmp}/stock"], "is a checkpoint itself"),
        (["cat", "{last}", "model.w", "--slice", "::0"], "has a step that is less than 1"),
        (["prune", "{last}", "--keep-latest", "1", "--yes"], "is a checkpoint itself"),
        (["convert", "{last}", "{tmp}/x", "--to", "safetensors"], "Pass --drop-unsupported"),
        (["show", "{tmp}/nothing"], "ckpt-storage ls ROOT"),
        (["rm", "{tmp}/stock", "--yes"], "another tool"),
        (["prune", "{tmp}/run", "--keep-latest", "1", "--yes"], "one of 1 is 'checkpoint-900'"),
    ],
)
def test_what_cannot_run_exits_with_two_and_one_line(
    arguments: list[str], hint: str, last: Path, tmp_path: Path
) -> None:
    """The line says what is wrong and what to do, never "unexpected"; nothing else is printed."""
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, tmp_path / "two.pt")
    (tmp_path / "run" / "checkpoint-900").mkdir(parents=True)
    saved_stock({"w": torch.ones(1)}, tmp_path / "stock")
    before = files_below(tmp_path)
    result = call(*(one.format(tmp=tmp_path, last=last) for one in arguments))
    assert result.exit_code == 2, result.output
    assert files_below(tmp_path) == before
    assert result.stdout == ""
    assert result.stderr.startswith("ckpt-storage: ")
    assert result.stderr.count("\n") == 1
    assert hint in result.stderr
    assert "unexpected" not in result.stderr
    assert "--debug" not in result.stderr


EVIL = "a\x1b]0;evil\x07\u202eb"


@pytest.mark.parametrize("option", [(), ("--debug",)])
def test_no_name_in_an_error_reaches_the_terminal_as_it_is(
    tmp_path: Path, option: tuple[str, ...]
) -> None:
    """Control characters of a damaged checkpoint's names are spelt out, in tracebacks too."""
    save({EVIL: torch.arange(4000)}, tmp_path / "c")
    (shard,) = (tmp_path / "c" / "saves").rglob("*.distcp")
    flip(shard, shard.stat().st_size // 2)
    result = call("cat", tmp_path / "c", EVIL, "--form", "raw", *option)
    assert result.exit_code == 1, result.output
    assert "evil" in result.stderr
    assert not set(result.output) & {"\x1b", "\x07", "\u202e"}


@pytest.mark.parametrize("command", ["cat", "show", "stats"])
def test_no_name_that_is_printed_reaches_the_terminal_as_it_is(
    tmp_path: Path, command: str
) -> None:
    """Control characters are spelt out where nothing is wrong, too."""
    save({EVIL: torch.arange(4)}, tmp_path / "c")
    result = call(command, tmp_path / "c", EVIL)
    assert result.exit_code == 0, result.output
    assert "evil" in result.output
    assert not set(result.output) & {"\x1b", "\x07", "\u202e"}


def test_ls_with_a_folder_that_may_not_be_read_exits_with_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be the newest checkpoint, so the list is not one to go by."""
    info = CheckpointInfo(url="s3://b/c", name="c", format="unreadable", problem="AccessDenied")
    monkeypatch.setattr("ckpt_storage.cli.look.list_checkpoints", lambda *_, **__: [info])
    assert "AccessDenied" in refused("ls", "s3://b")


def test_cp_of_a_damaged_export_exits_with_one(tmp_path: Path) -> None:
    """Its record has the checksum of each weight file."""
    save({"w": torch.ones(100)}, tmp_path / "c")
    export = tmp_path / "c" / "hf"
    assert call("consolidate", tmp_path / "c").exit_code == 0
    assert call("cp", export, tmp_path / "sound").exit_code == 0
    flip(export / "model.safetensors", -1)
    result = call("cp", export, tmp_path / "d")
    assert result.exit_code == 1
    assert "model.safetensors is damaged" in " ".join(result.output.split())


def test_options_come_from_a_file_and_the_command_line(
    tmp_path: Path, server: S3Server, last: Path
) -> None:
    """What is given on the command line counts more; a file that is no JSON is not quoted."""
    file = tmp_path / "options.json"
    nowhere = {"endpoint_url": "http://127.0.0.1:9"}
    file.write_text(json.dumps({"key": "k", "secret": SECRET, "client_kwargs": nowhere}))
    endpoint = f"client_kwargs.endpoint_url={server.endpoint_url}"
    names = ("--destination-storage-options-file", "--destination-storage-option")
    result = call("cp", last, "s3://bkt/x", names[0], file, names[1], endpoint)
    assert result.exit_code == 0, result.output
    file.write_text(f"not json {SECRET}")
    assert SECRET not in refused("ls", "s3://bkt/x", "--storage-options-file", file)


def test_options_are_of_the_type_that_file_systems_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and words are what they look like, but for what names or opens an account."""
    look = mock.Mock(side_effect=InvalidInputError("enough"))
    monkeypatch.setattr("ckpt_storage.cli.values.open_checkpoint", look)
    words = "config_kwargs.connect_timeout=5 passive=false retries=none password=1234"
    pairs = [*words.split(), "accessKey=true", "conn_str=0", "user=7", "project=12345"]
    call("cat", "memory://x", "y", *(f"--storage-option={pair}" for pair in pairs))
    meant = {
        "config_kwargs": {"connect_timeout": 5},
        "passive": False,
        "retries": None,
        "password": "1234",
        "accessKey": "true",
        "conn_str": "0",
        "user": "7",
        "project": "12345",
    }
    assert repr(dict(look.call_args.kwargs["storage_options"])) == repr(meant)


PASSWORDS = (
    "correcthorsebattery",
    "staple-4711-horse",
    "inner-of-json-4712",
    "89127634598",
    "file=eq-secret",
)


def test_secrets_are_never_printed(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in errors, not with --debug, not by a wrong option, not in JSON, nor of a file."""
    file, given = tmp_path / "options.json", s3_options(server)
    inner = {"config": {"passwd_file_line": PASSWORDS[1], "deep": [{"token": PASSWORDS[4]}]}}
    options = {"password": PASSWORDS[0], "client_kwargs": inner, "pin_password": int(PASSWORDS[3])}
    file.write_text(json.dumps({"key": "k", "secret": SECRET}))
    calls: list[list[Any]] = [
        ["ls", "s3://bkt/none", *given],
        ["show", "s3://bkt/none", *given, "--debug"],
        ["show", "s3://nobucket/none", *given, "--debug"],
        ["doctor", "s3://bkt/x", "--size", "1MiB", *given, "--json"],
        ["ls", "s3://bkt/x", "--storage-option", SECRET],
        ["ls", "s3://bkt/x", f"--storage-option=secret={SECRET}", SECRET],
        ["ls", "s3://bkt/x", "--storage-option", f"secret.inner={SECRET}", "--debug"],
        ["ls", "s3://bkt/x", "--storage-options-file", file, "--timeout", "2", "--debug"],
    ]
    for arguments in calls:
        result = call(*arguments)
        assert SECRET not in result.output + result.stderr, arguments
    file.write_text(json.dumps({**options, "endpoint_url": "http://minio:9000"}))
    json_value = f'client_kwargs={{"x": {{"aws_token": "{PASSWORDS[2]}"}}}}'
    for kind in (ZeroDivisionError, InvalidInputError):
        broken = mock.Mock(side_effect=kind(f"{PASSWORDS} at http://minio:9000"))
        monkeypatch.setattr("ckpt_storage.cli.look.open_checkpoint", broken)
        check_hidden(file, json_value)


def check_hidden(file: Path, json_value: str) -> None:
    """Fail if what `show` prints of an error shows a password, from the file or the JSON."""
    for words in (["--storage-options-file", file], [f"--storage-options-file={file}"]):
        for more in ([], ["--debug"]):
            result = call("show", "s3://b/x", *words, "--storage-option", json_value, *more)
            assert result.exit_code == 2
            assert ("Traceback" in result.stderr) == bool(more)
            assert result.stderr.count("\n") == 1 or more
            assert not [one for one in PASSWORDS if one in result.output + result.stderr]
            assert "minio:9000" in result.stderr


def test_cp_of_a_part_and_thin_leave_out_what_is_named(last: Path, tmp_path: Path) -> None:
    """Without --yes nothing is dropped; `ls` and `show` say what a checkpoint is a part of."""
    body = answer("cp", last, tmp_path / "weights" / last.name, "--exclude", "step")
    assert body["copied_bytes"] + body["sent_bytes"] == body["total_bytes"]
    (info,) = answer("ls", tmp_path / "weights")["checkpoints"]
    assert info["part"]["exclude"] == ["step"]
    assert "exclude step" in call("ls", tmp_path / "weights").stdout
    assert answer("show", tmp_path / "weights" / last.name)["part"] == info["part"]
    planned = answer("thin", last, "--drop", "model.b*")
    assert (planned["is_dry_run"], planned["dropped"]) == (True, ["model.b[0]"])
    assert "--yes does it" in call("thin", last, "--drop", "model.b*").stdout
    done = answer("thin", last, "--drop", "model.b*", "--yes")
    assert (done["is_dry_run"], done["dropped"]) == (False, ["model.b[0]"])
    assert "nothing to drop" in call("thin", last, "--drop", "model.b*").stdout
    assert "model.b[0]" not in {one["fqn"] for one in answer("tree", last)["values"]}
