"""What a run on one process takes of the package, how large each room may be, and words that say little."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


SOURCES = Path(__file__).resolve().parents[2] / "hf_pipetransformer"

BUDGETS = {
    "cache": 3920,
    "cli": 650,
    "comm": 950,
    "compat": 390,
    "data": 1520,
    "elastic": 550,
    "engine": 1740,
    "freeze": 330,
    "options": 540,
    "pipe": 1070,
    "planning": 1190,
    "report": 1260,
    "runtime": 1755,
    "schedules": 770,
    "splitters": 1130,
    "startup": 2240,
    "state": 1310,
    "the package itself": 80,
    "trainer": 360,
    "training": 3385,
}
"""Statements that a room may have, docstrings left out. Who raises a number says why in the commit."""

BESIDE = {"cli", "elastic", "engine", "pipe", "startup"}
"""Rooms of which a run on one process that stores what its script froze takes nothing."""
LITTLE = {
    "planning": {"course", "storing"},
    "report": {"console", "events", "failure", "files", "origin"},
    "runtime": {"context", "optimizer_state"},
    "schedules": {"abilities", "json_values", "layout", "placement"},
}
"""Modules that it takes of rooms which are for pipelines otherwise."""
RUN = """
import json, sys, tempfile
import torch
from transformers import ViTConfig, ViTForImageClassification
from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer

sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
model = ViTForImageClassification(ViTConfig(image_size=32, patch_size=16, num_labels=2, **sizes))
model.vit.requires_grad_(False)
rows = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 2} for i in range(8)]
with tempfile.TemporaryDirectory() as folder:
    args = PipeTransformerArguments(
        folder, num_train_epochs=4, per_device_train_batch_size=4, use_cpu=True, activation_cache="on"
    )
    trainer = PipeTransformerTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    assert any(event.get("hits") for event in map(json.loads, open(trainer.events.path)))
print(json.dumps([name for name in sys.modules if name.startswith("hf_pipetransformer.")]))
"""


TOOLS = {
    *("cli", "pipe", "report.card", "report.charts", "report.drawing", "report.page", "report.recorded"),
    *("startup.estimate", "startup.plan_words", "startup.run_plan", "training.plan_only"),
}
"""Modules and rooms that stand beside the core: asked for by name when one is wanted."""
KINDS = {
    *("engine.token_program", "engine.weights.directions", "engine.weights.rates", "engine.weights.rows"),
    *("engine.weights.stage", "runtime.window", "training.asynchronous"),
}
"""Modules of schedules with weights or tokens of their own: imported when a run has one, or generates tokens."""


WORDS = {"own": 18.5, "each": 34.0, "found": 20.0, "parts?": 22.0}
"""Words that may stand for anything, and how often per 1,000 lines they may come: say what the thing is instead."""


def num_statements(path: Path) -> int:
    """Count the statements of a module without docstrings: joined lines and dropped comments gain nothing."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    texts = [each for each in statements if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)]
    return len(statements) - len([each for each in texts if isinstance(each.value.value, str)])


def statements_by_room() -> Counter[str]:
    found = Counter[str]()
    for path in SOURCES.rglob("*.py"):
        room, *rest = path.relative_to(SOURCES).parts
        found[room if rest else "the package itself"] += num_statements(path)
    return found


def test_rooms_keep_to_their_budgets() -> None:
    found = statements_by_room()
    assert found.keys() == BUDGETS.keys()
    above = {room: f"{count}, at most {BUDGETS[room]}" for room, count in found.items() if count > BUDGETS[room]}
    assert above == {}, "take something out of these rooms, or raise their budgets and say why"


def test_no_budget_is_far_from_what_is_there() -> None:
    """A room that became smaller gives its budget back."""
    found = statements_by_room()
    assert {room: found[room] for room, most in BUDGETS.items() if most - found[room] > 25} == {}


@pytest.mark.parametrize("word", WORDS)
def test_words_that_may_stand_for_anything_become_no_more(word: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    assert 1000 * len(re.findall(rf"\b{word}\b", text)) / text.count("\n") <= WORDS[word]


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Modules of the package, without its name, that a run imports which stores a frozen tower on one process."""
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[2] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.timeout(150)
def test_a_run_on_one_process_takes_nothing_of_a_pipeline(imported: set[str]) -> None:
    rooms = {name.partition(".")[0] for name in imported}
    assert {"cache", "training", "trainer"} <= rooms
    assert rooms & BESIDE == set()


@pytest.mark.parametrize("room", LITTLE)
def test_it_takes_little_of_other_rooms(room: str, imported: set[str]) -> None:
    modules = {name.partition(".")[2] for name in imported if name.startswith(f"{room}.")}
    assert modules <= LITTLE[room]


def imported_at_once(module: str) -> set[str]:
    """Modules of the package that are imported with one: what functions import when they are called is left out."""
    found, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        path = SOURCES.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in found or not path.is_file():
            continue
        found.add(name)
        todo += [inner.partition(".")[2] for inner in _imports_at_once(ast.parse(path.read_text(encoding="utf-8")))]
    return found


def _imports_at_once(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith("hf_pipetransformer")
        ):
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_a_pipeline_takes_none_of_the_tools() -> None:
    taken = imported_at_once("training.pipeline_session")
    assert {"engine.engine", "training.start", "startup.planner"} <= taken
    assert {name for name in taken if name in TOOLS or name.partition(".")[0] in TOOLS} == set()


def test_a_pipeline_takes_nothing_of_schedules_with_weights_or_tokens_of_their_own() -> None:
    known = {".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in SOURCES.rglob("*.py")}
    assert known >= KINDS
    assert imported_at_once("training.pipeline_session") & KINDS == set()
    assert imported_at_once("training.asynchronous") >= KINDS - {"engine.token_program"}


def test_planted_imports_are_followed() -> None:
    assert "report.charts" not in imported_at_once("report.page"), "it is asked for when charts are drawn"
    assert {"report.drawing", "report.files"} <= imported_at_once("report.page")
