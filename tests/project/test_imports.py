"""Who may know whom: imports only run downwards, and the planning rooms stay pure.

The floors are those of CONTRIBUTING.md. A room is a folder or a file directly inside the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


PACKAGE = "hf_pipetransformer"
SOURCES = Path(__file__).resolve().parents[2] / PACKAGE

# From top to bottom: a room knows the rooms below it.
FLOORS = [
    {"__main__", "sentence_transformers", "trl"},
    {"cli"},
    {"trainer"},
    {"training"},
    {"elastic"},
    {"cache", "state"},
    {"runtime"},
    {"startup"},
    {"engine", "freeze", "compat"},
    {"data", "options", "splitters", "pipe"},
    {"comm", "planning", "report"},
    {"schedules"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Pure planning: no process group, no file, no clock.
PURE = ["planning", "schedules", "freeze"]
IMPURE_MODULES = (
    "torch.distributed",
    "accelerate",
    "time",
    "datetime",
    "io",
    "os",
    "pathlib",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
)
IMPURE_CALLS = {
    *("open", "read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink"),
    *("perf_counter", "monotonic", "time_ns", "sleep"),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package with its dotted name inside the package; `""` is the package itself."""
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        yield name, ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names of everything a module imports, also inside functions; `a.b` for `from a import b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *filter(None, module.split("."))]
                anchor = here[: len(here) - node.level + is_package]
                base = ".".join([*anchor, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def without_types(tree: ast.Module) -> ast.Module:
    """Return a module without what it imports for annotations alone."""
    for_types = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return ast.Module([node for node in tree.body if node not in for_types], [])


def room_of(module: str) -> str:
    """Return the first part of a module's dotted name."""
    return module.split(".")[0]


def inner_imports(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """Rooms of the package that a module imports."""
    names = (name for name in imported(tree, module, is_package) if name.split(".")[0] == PACKAGE)
    return {room_of(name.split(".", 1)[1]) for name in names if "." in name}


def offence(room: str, target: str) -> str | None:
    """Why `room` may not import `target`, or None."""
    if room == target:
        return None
    if target not in FLOOR_OF:
        return f"{target} has no floor: add it to FLOORS"
    if FLOOR_OF[target] > FLOOR_OF[room]:
        return None
    if FLOOR_OF[target] == FLOOR_OF[room]:
        return f"{room} and {target} are different rooms on one floor"
    return f"{target} is above {room}"


def impurities(tree: ast.Module, module: str, is_package: bool) -> set[str]:
    """What a module uses that a pure one may not."""
    found = set()
    for name in imported(tree, module, is_package):
        found.update(bad for bad in IMPURE_MODULES if name == bad or name.startswith(f"{bad}."))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.add("torch.distributed")
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in IMPURE_CALLS:
                found.add(f"{called}()")
    return found


MODULES = list(modules())


def is_package(name: str) -> bool:
    return (SOURCES / Path(*name.split(".")) / "__init__.py").is_file()


def test_the_package_is_found():
    assert {"", "schedules.layout", "trainer.mixin"} <= {name for name, _ in MODULES}


@pytest.mark.parametrize(("name", "tree"), [pytest.param(*module, id=module[0] or PACKAGE) for module in MODULES])
def test_imports_only_run_downwards(name, tree):
    targets = inner_imports(tree, name, is_package(name))
    if not name:
        # The package itself shows its public names, from whatever room.
        return
    room = room_of(name)
    assert room in FLOOR_OF, f"{room} has no floor: add it to FLOORS"
    assert [reason for target in sorted(targets) if (reason := offence(room, target))] == []


def test_nothing_imports_the_trainer_except_the_package_itself():
    guilty = [name for name, tree in MODULES if "trainer" in inner_imports(tree, name, is_package(name))]
    assert [
        name for name in guilty if name and name.split(".")[0] not in ("trainer", "sentence_transformers", "trl")
    ] == []


@pytest.mark.parametrize(("name", "tree"), [pytest.param(*module, id=module[0] or PACKAGE) for module in MODULES])
def test_nothing_imports_through_the_package_itself(name, tree):
    """`from hf_pipetransformer import X` inside the package would hide which room is meant, and go in circles."""
    public = {"PipeTransformerArguments", "PipeTransformerTrainer"}
    assert not public & inner_imports(tree, name, is_package(name)) or not name


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        pytest.param(name, tree, id=name)
        for name, tree in MODULES
        if any(name == pure or name.startswith(f"{pure}.") for pure in PURE)
    ],
)
def test_planning_rooms_are_pure(name, tree):
    assert impurities(tree, name, is_package(name)) == set()


# The checks above must be able to fail.
@pytest.mark.parametrize(
    ("module", "package", "source", "expected"),
    [
        ("engine.engine", False, "from ..trainer.mixin import PipeTransformerTrainer", {"trainer"}),
        ("engine.engine", False, "from .. import trainer, report", {"trainer", "report"}),
        ("schedules", True, "from ..comm.topology import Topology", {"comm"}),
        ("schedules", True, "from .actions import Op", {"schedules"}),
        ("report.events", False, "def f():\n    from hf_pipetransformer import cli", {"cli"}),
        ("report.events", False, "import hf_pipetransformer.comm.topology as t", {"comm"}),
        ("", True, "from .trainer.mixin import PipeTransformerTrainer", {"trainer"}),
        ("report.events", False, "import torch\nfrom json import loads", set()),
    ],
)
def test_planted_imports_are_found(module, package, source, expected):
    assert inner_imports(ast.parse(source), module, package) == expected


@pytest.mark.parametrize(
    ("room", "target", "reason"),
    [
        ("engine", "trainer", "above"),
        ("data", "splitters", "one floor"),
        ("schedules", "engine", "above"),
        ("report", "comm", "one floor"),
        ("splitters", "startup", "above"),
        ("startup", "elastic", "above"),
        ("planning", "cache", "above"),
        ("trainer", "utilities", "no floor"),
    ],
)
def test_planted_offences_are_refused(room, target, reason):
    assert reason in offence(room, target)


@pytest.mark.parametrize(
    ("room", "target"),
    [("trainer", "schedules"), ("engine", "comm"), ("report", "schedules"), ("cache", "planning"), ("data", "data")],
)
def test_lawful_imports_are_allowed(room, target):
    assert offence(room, target) is None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.distributed as dist", {"torch.distributed"}),
        ("from torch import distributed", {"torch.distributed"}),
        ("from torch.distributed import P2POp", {"torch.distributed"}),
        ("import torch\ntorch.distributed.barrier()", {"torch.distributed"}),
        ("import time\ntime.perf_counter()", {"time", "perf_counter()"}),
        ("from datetime import datetime", {"datetime"}),
        ("open('plan.json')", {"open()"}),
        ("def f(path):\n    return path.read_text()", {"read_text()"}),
        ("import torch\nfrom math import ceil\nopened = torch.ones(1)", set()),
    ],
)
def test_planted_impurities_are_found(source, expected):
    assert impurities(ast.parse(source), "planning.partition", False) == expected


# The rooms and files that know Trainer itself; the others know a run as `runtime.context.RunView`.
DOOR = {"trainer", "training", "cli", "trl", "compat"}


def uses_of_trainer(tree: ast.AST) -> set[str]:
    """Imports of Trainer or of its module, and reads of an attribute `trainer`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            is_module = node.module == "transformers.trainer"
            found |= {alias.name for alias in node.names if alias.name == "Trainer" or is_module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name == "transformers.trainer"}
        elif isinstance(node, ast.Attribute) and node.attr == "trainer":
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize(("name", "tree"), [each for each in MODULES if each[0].partition(".")[0] not in DOOR])
def test_trainer_is_known_at_the_door_alone(name: str, tree: ast.Module) -> None:
    # A plan compares with Trainer's own data parallelism: an option of that name, and not a trainer.
    found = uses_of_trainer(tree) - {"plan.trainer"}
    assert not found, f"{name} knows Trainer: {sorted(found)}; ask `RunView` for what it needs of a run"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from transformers import Trainer", {"Trainer"}),
        ("from transformers.trainer import TRAINER_STATE_NAME", {"TRAINER_STATE_NAME"}),
        ("import transformers.trainer as stock", {"transformers.trainer"}),
        ("def f(self): return self.context.trainer.state", {"self.context.trainer"}),
        ("from transformers import TrainerState\nstate = run.state", set()),
    ],
)
def test_planted_uses_of_trainer_are_found(source: str, expected: set[str]) -> None:
    assert uses_of_trainer(ast.parse(source)) == expected


LONGEST_CHAIN = 15
MOST_FILES = 200


def test_import_chains_stay_short() -> None:
    """A newcomer who follows imports from the trainer down reads no more files in a row than this.

    What is imported for annotations alone is not followed: the floors above count it too.
    """
    names = {f"{PACKAGE}.{name}" if name else PACKAGE for name, _ in MODULES}
    direct = {}
    for name, tree in MODULES:
        found = set()
        for target in imported(without_types(tree), name, is_package(name)):
            module = target if target in names else target.rpartition(".")[0]
            found |= {module} & names
        direct[f"{PACKAGE}.{name}" if name else PACKAGE] = found

    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(other) for other in sorted(direct[module] - {module})), key=len, default=()))

    # The package's own imports are for type checkers alone.
    direct[PACKAGE] = set()
    longest = max(map(chain, direct), key=len)
    assert len(longest) <= LONGEST_CHAIN, f"longer than {LONGEST_CHAIN}: {' -> '.join(longest)}"
    assert len(MODULES) <= MOST_FILES, "join files, or raise MOST_FILES here and in CONTRIBUTING.md"
