"""The import order of the package: every module imports only what stands above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ckpt_storage"

LAYERS = (
    # Values: no I/O.
    "_version",
    "errors",
    "options",
    "progress",
    "costs",
    "layout",
    "ceilings",
    "checksums",
    "integrity",
    "regions",
    "tiling",
    "sharing",
    "tensorfile",
    "stockmeta",
    "documents",
    "slots",
    "info",
    "stepnames",
    "retention",
    "claims",
    "columns",
    "shardtable",
    "tensorlayout",
    "manifest",
    "shardspans",
    # Storage. A folder is one layer: its modules may import one another, in no circle.
    "store",
    "advice",
    "deadline",
    "stalling",
    "pacing",
    "workers",
    "doctor",
    "fetching",
    "relay",
    "sending",
    "filewriter",
    "copyparts",
    "partcopies",
    "filecopies",
    # Protocol, without torch.
    "slotlog",
    "stockfooter",
    "overlap",
    "settled",
    "commit",
    "publishing",
    "cleaning",
    "source",
    "sourcekeys",
    "shardspots",
    "readplan",
    "sharedreads",
    "foreign",
    "opening",
    "filemarks",
    "catalog",
    "rankreport",
    "coverage",
    "reporttable",
    "tiednames",
    "assemble",
    "agreement",
    "consolidation",
    "foreignfolder",
    "foreigncopy",
    "exportcopy",
    "copyattempt",
    "findings",
    "documentcheck",
    "shardcheck",
    "foreigncheck",
    "verification",
    "partcheck",
    "census",
    "pruneplan",
    "pruning",
    "board",
    "lifesigns",
    "reports",
    "waits",
    "siblings",
    "steps",
    "meeting",
    "watching",
    "operation",
    "coordination",
    "preemption",
    "earlycall",
    "cadence",
    "housekeeper",
    "upkeep",
    "restoring",
    # Engines, under DCP.
    "copying",
    "dcpborder",
    "localparts",
    "resolving",
    "devicecopies",
    "hostbytes",
    "torchload",
    "torchvalues",
    "markup",
    "indexing",
    "sharding",
    "facts",
    "nametree",
    "drawing",
    "views",
    "session",
    "arrays",
    "elementdiff",
    "lazytensor",
    "holdings",
    "statistics",
    "comparing",
    "checkpoint",
    "tensorsinks",
    "loads",
    "tiedmemory",
    "shards",
    "stockpickle",
    "stockwrite",
    "coordination_torch",
    "peers",
    "loadreads",
    "committing",
    "conversion",
    "converting",
    "saveattempt",
    "writer",
    "lazychunks",
    "reader",
    # Lifecycles and front doors.
    "frontdoor",
    "consolidating",
    "chaining",
    "planexchange",
    "saving",
    "loadplanner",
    "loading",
    "handle",
    "hostbuffers",
    "stagelayout",
    "stagewalk",
    "staging",
    "stagewire",
    "worker",
    "workerlink",
    "exits",
    "savetask",
    "saver",
    "stepsaving",
    "manager",
    "integrations",
    # Shipped for tests of this package and of others.
    "testing",
    "cli",
    "__main__",
)
"""The order, top first."""

MAY_IMPORT = {
    "torch": {
        "committing",
        "consolidating",
        "coordination_torch",
        "frontdoor",
        "hostbytes",
        "localparts",
        "resolving",
        "loading",
        "loads",
        "lazychunks",
        "loadplanner",
        "planexchange",
        "stockpickle",
        "peers",
        "cli",
        "conversion",
        "integrations",
        "dcpborder",
        "devicecopies",
        "manager",
        "stepsaving",
        "tensorsinks",
        "torchvalues",
        "reader",
        "saver",
        "saveattempt",
        "savetask",
        "saving",
        "shards",
        "hostbuffers",
        "stagelayout",
        "stagewalk",
        "stagewire",
        "staging",
        "workerlink",
        "stockwrite",
        "testing",
        "tiedmemory",
        "torchload",
        "writer",
    },
    "adlfs": {"store", "testing"},
    "fsspec": {"store", "testing"},
    "gcsfs": {"store", "testing"},
    "s3fs": {"store", "testing"},
}
"""Third-party packages that only the named layers may import, inside functions too."""

ROOT_NAMES = {"__version__"}
"""What a module may take from the package itself: no name that is loaded lazily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, spelt absolutely, and the line that imports it."""

    target: str
    line: int


def modules_of(package: Path) -> dict[str, Path]:
    """Map the dotted name inside `package` of every module to its file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts != ("__init__",):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> str | None:
    """Return the entry of `LAYERS` that `module`, a dotted name inside the package, is in."""
    first = module.partition(".")[0]
    return first if first in LAYERS else None


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """Yield every import of a file, at any depth, `import_module("constant")` among them."""
    anchor = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(target=alias.name, line=node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = anchor[: len(anchor) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(target=f"{source}.{alias.name}", line=node.lineno)
        elif isinstance(node, ast.Call) and node.args:
            function, first = ast.unparse(node.func), node.args[0]
            is_import = function in {"__import__", "import_module", "importlib.import_module"}
            if is_import and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(target=first.value, line=node.lineno)


def inner_imports(
    path: Path, package: Path, modules: Mapping[str, Path]
) -> Iterator[tuple[str, int]]:
    """Yield the modules of the package that a file imports; what is none, as it is spelt."""
    for item in imports_of(path, package):
        head, _, inside = item.target.partition(".")
        if head != package.name or inside in ROOT_NAMES:
            continue
        parts = inside.split(".")
        while parts and ".".join(parts) not in modules:
            parts.pop()
        yield ".".join(parts) or item.target, item.line


def order_violations(package: Path) -> list[str]:
    """Return one line for each import that goes up, and for each module without a place."""
    modules = modules_of(package)
    found = []
    for module, path in modules.items():
        layer = layer_of(module)
        if layer is None:
            found.append(
                f"{path.relative_to(package.parent)} has no place: add {module.partition('.')[0]!r}"
                " to LAYERS in tests/test_layers.py, below all that it imports."
            )
            continue
        for target, line in inner_imports(path, package, modules):
            where = f"{path.relative_to(package.parent)}:{line}"
            other = layer_of(target)
            if target not in modules:
                found.append(f"{where} imports {target}: import from the module that defines it.")
            elif other is not None and LAYERS.index(other) > LAYERS.index(layer):
                found.append(f"{where} ({layer}) imports {target}, which stands below it.")
    return found


def foreign_violations(package: Path) -> list[str]:
    """Return one line for each import of a package of `MAY_IMPORT` from a wrong layer."""
    found = []
    for module, path in modules_of(package).items():
        for item in imports_of(path, package):
            foreign = item.target.split(".")[0]
            allowed = MAY_IMPORT.get(foreign)
            if allowed is not None and layer_of(module) not in allowed:
                where = f"{path.relative_to(package.parent)}:{item.line}"
                found.append(f"{where} imports {foreign}; MAY_IMPORT allows {sorted(allowed)}.")
    return found


def circles(package: Path) -> list[str]:
    """Return the modules that take part in a circle of imports inside one layer."""
    modules = modules_of(package)
    edges = {
        module: {
            target
            for target, _ in inner_imports(path, package, modules)
            if target != module and layer_of(target) == layer_of(module)
        }
        for module, path in modules.items()
    }
    while free := [module for module, targets in edges.items() if not targets & edges.keys()]:
        for module in free:
            del edges[module]
    return sorted(edges)


def test_every_module_imports_only_upwards() -> None:
    """No module of the package imports one that stands below it in LAYERS."""
    assert order_violations(PACKAGE) == []


def test_torch_and_fsspec_enter_at_named_places_only() -> None:
    """The packages of MAY_IMPORT are imported by the layers named there and by no other."""
    assert foreign_violations(PACKAGE) == []


def test_modules_of_one_layer_import_in_no_circle() -> None:
    """Inside a folder, too, imports have an order."""
    assert circles(PACKAGE) == []


def test_layers_name_only_what_exists() -> None:
    """Every entry of LAYERS is a module or a folder of the package."""
    present = {layer_of(module) for module in modules_of(PACKAGE)}
    assert [layer for layer in LAYERS if layer not in present] == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("errors.py", "def f():\n    from .options import Timeouts\n", "stands below it"),
        ("store/local.py", "from ..commit import x\n", "stands below it"),
        ("store/__init__.py", "from .. import writer\n", "stands below it"),
        ("options.py", "import ckpt_storage.writer\n", "stands below it"),
        ("verification.py", "from . import verify\n", "module that defines it"),
        ("brand_new.py", "", "has no place: add 'brand_new' to LAYERS"),
    ],
)
def test_a_wrong_import_is_reported(tmp_path: Path, name: str, source: str, complaint: str) -> None:
    """An import that goes up is found wherever it stands and however it is spelt."""
    package = made_package(tmp_path, {name: source})
    assert any(complaint in line for line in order_violations(package))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\n",
        "def f():\n    import torch.nn as nn\n",
        "from torch import Tensor\n",
        "from importlib import import_module\nimport_module('torch')\n",
        "class C:\n    import fsspec\n",
    ],
)
def test_a_misplaced_third_party_import_is_reported(tmp_path: Path, source: str) -> None:
    """Imports of torch and fsspec are found in a module without them, at any depth and spelling."""
    assert foreign_violations(made_package(tmp_path, {"commit.py": source}))


def test_a_circle_inside_a_folder_is_reported(tmp_path: Path) -> None:
    """Two modules of store/ that import each other are both named."""
    package = made_package(
        tmp_path,
        {"store/remote.py": "from .retry import x\n", "store/retry.py": "from . import remote\n"},
    )
    assert circles(package) == ["store.remote", "store.retry"]


def test_imports_that_follow_the_order_are_accepted(tmp_path: Path) -> None:
    """Upward, sibling and version imports are no violation, nor is torch in the writer."""
    package = made_package(
        tmp_path,
        {
            "commit.py": "from . import __version__, layout\nfrom .store.base import Store\n",
            "store/local.py": "import fsspec\nfrom ..errors import E\nfrom . import base\n",
            "writer.py": "import torch\nfrom .hostbytes import x\nfrom .commit import y\n",
        },
    )
    assert order_violations(package) == []
    assert foreign_violations(package) == []
    assert circles(package) == []


def made_package(folder: Path, sources: Mapping[str, str]) -> Path:
    """Write a package with one empty module per layer, then `sources` over it."""
    package = folder / "ckpt_storage"
    empty = [f"{layer}.py" for layer in LAYERS if layer not in {"store", "testing"}]
    inside = ["store/__init__.py", "store/base.py", "testing/__init__.py"]
    for name in ["__init__.py", *empty, *inside, *sources]:
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sources.get(name, ""), encoding="utf-8")
    return package
