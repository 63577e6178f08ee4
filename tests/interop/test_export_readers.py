"""Libraries that read an export folder get new weights or an error, whatever cut the export.

The oracles are other programs' readers. A tensor's value is the number of the save it is of.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fault_tools import Faulty, each_fault
from integration_tools import need
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader

import ckpt_storage
from ckpt_storage.errors import CheckpointError
from ckpt_storage.testing.faults import Action, SimulatedCrash

need("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

INDEX = "model.safetensors.index.json"
ONE, MANY = "5GB", 4096
CHANGES = ".*(put|delete|upload|folder).*"
ACTIONS: dict[Action, str] = {
    "crash_before": CHANGES,
    "crash_after": CHANGES,
    "error": CHANGES,
    "lost_answer": CHANGES,
}
TRANSITIONS = {
    "first to one": (None, ONE),
    "first to many": (None, MANY),
    "one to one": (ONE, ONE),
    "one to many": (ONE, MANY),
    "many to one": (MANY, ONE),
    "many to many": (MANY, MANY),
}

Weights = Mapping[str, torch.Tensor]
Reader = Callable[[Path], Weights]


def config() -> Any:
    from transformers import LlamaConfig  # noqa: PLC0415  # seconds that a collection need not take

    return LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


def fresh_model() -> Any:
    from transformers import LlamaForCausalLM  # noqa: PLC0415  # as above

    return LlamaForCausalLM(config())


def by_transformers(folder: Path) -> Weights:
    from transformers import LlamaForCausalLM  # noqa: PLC0415  # as above

    library: Any = LlamaForCausalLM
    model, info = library.from_pretrained(folder, output_loading_info=True)
    missing = info["missing_keys"]
    return {name: one for name, one in model.state_dict().items() if name not in missing}


def by_glob(folder: Path) -> Weights:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, one in safetensors.torch.load_file(path).items():
            # A second value of one name would hide the first.
            weights[f"{name} again" if name in weights else name] = one
    return weights


def by_vllm(folder: Path) -> Weights:
    """Return what vLLM reads: the files that it lists, of which the index, if any, names which."""
    paths, index = sorted(folder.glob("*.safetensors")), folder / INDEX
    if index.exists():
        named = {*json.loads(index.read_text())["weight_map"].values()}
        paths = [path for path in paths if path.name in named]
    loaded = [safetensors.torch.load_file(path) for path in paths]
    return {name: one for some in loaded for name, one in some.items()}


def by_torch(folder: Path) -> Weights:
    weights = {name: torch.zeros_like(one) for name, one in fresh_model().state_dict().items()}
    dcp.load(weights, storage_reader=HuggingFaceStorageReader(str(folder)))
    return weights


def by_hub(folder: Path) -> Weights:
    model = fresh_model()
    huggingface_hub.load_torch_model(model, folder, strict=True)
    return dict(model.state_dict())


READERS: dict[str, Reader] = {
    "transformers": by_transformers,
    "glob": by_glob,
    "torch": by_torch,
    "vllm": by_vllm,
    "hub": by_hub,
}


class Folder:
    """Exports of two saves to one folder; what readers get of it is asked once for each content."""

    def __init__(self, root: Path, faulty: Faulty) -> None:
        self.output, self._root, self._faulty = root / "out", root, faulty
        self._outcomes: dict[object, dict[str, str]] = {}
        self.names = fresh_model().state_dict().keys()
        for version in (1, 2):
            state = {
                name: torch.full_like(one, float(version))
                for name, one in fresh_model().state_dict().items()
            }
            ckpt_storage.save({"model": state}, root / f"v{version}", sync_files=False)

    def begin(self, before: object) -> None:
        """Make the folder with the export of the first save, if any, and a configuration."""
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir()
        config().save_pretrained(self.output)
        self._faulty.play()
        if before is not None:
            self.export(1, before)

    def export(self, version: int, size: Any) -> None:
        ckpt_storage.consolidate(self._root / f"v{version}", self.output, max_file_bytes=size)

    def outcomes(self) -> dict[str, str]:
        """Return for each reader the saves of whose weights it gets, or "error"."""
        files = {path.name: path.read_bytes() for path in self.output.glob("model*")}
        files |= {path.name: path.read_bytes() for path in self.output.glob("*.safetensors")}
        key = frozenset(files.items())
        if key not in self._outcomes:
            self._outcomes[key] = {name: self._outcome(read) for name, read in READERS.items()}
        return self._outcomes[key]

    def _outcome(self, read: Reader) -> str:
        try:
            weights = read(self.output)
        except (Exception, CheckpointException):  # noqa: BLE001  # whatever a library raises is loud
            return "error"
        if not weights:
            return "error"
        lacking = "" if weights.keys() == self.names else "a part of "
        return lacking + "+".join(
            sorted({str(int(v)) for one in weights.values() for v in {*one.flatten().tolist()}})
        )

    def is_published(self) -> bool:
        """Return whether the index names the second save."""
        index = self.output / INDEX
        newest = ckpt_storage.open_checkpoint(self._root / "v2").save_id
        found = json.loads(index.read_bytes())["metadata"] if index.exists() else {}
        return found.get("save_id") == newest


@pytest.fixture
def folder(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """Two saves of one model; stores of the export play what is asked for."""
    faulty = Faulty((memory_path / "out").as_uri())
    monkeypatch.setattr("ckpt_storage.export.output.open_store", faulty)
    yield Folder(memory_path, faulty)
    faulty.close()


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_an_export_cut_anywhere_gives_new_weights_or_an_error(
    folder: Folder, transition: str
) -> None:
    """No reader gets a mixture, nor old weights once the call returned or the index names new."""
    before, after = TRANSITIONS[transition]
    faulty, wrong = folder._faulty, list[str]()  # noqa: SLF001  # of this module
    folder.begin(before)
    faulty.play()
    folder.export(2, after)
    calls = faulty.script.calls
    assert set(folder.outcomes().values()) == {"2"}
    for at, rule in each_fault(calls, ACTIONS, retryable=False, kind="permission"):
        folder.begin(before)
        faulty.play(rule)
        has_returned = False
        with contextlib.suppress(SimulatedCrash, CheckpointError):
            folder.export(2, after)
            has_returned = True
        allowed = {"2"} if has_returned else {"2", "error"}
        if not has_returned and not folder.is_published():
            allowed |= {"1"}
        wrong += [
            f"{at}: {reader} gets {outcome}"
            for reader, outcome in folder.outcomes().items()
            if outcome not in allowed
        ]
        faulty.play()
        folder.export(2, after)
        assert set(folder.outcomes().values()) == {"2"}, at
        assert ckpt_storage.verify(folder.output).ok, at
    assert not wrong, "\n".join(wrong)


def test_weight_files_that_the_index_does_not_name_are_reported(folder: Folder) -> None:
    """`verify` names each: some libraries would load it."""
    folder.begin(MANY)
    assert ckpt_storage.verify(folder.output).ok
    for name in ("model.safetensors", "stray.safetensors"):
        safetensors.torch.save_file({"x": torch.ones(1)}, folder.output / name)
    report = ckpt_storage.verify(folder.output)
    assert {one.file for one in report.problems} == {"model.safetensors", "stray.safetensors"}
