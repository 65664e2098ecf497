"""What the package uses of transformers, accelerate, torch and datasets without a promise: all of it is listed, and is
there with the parameters it is used with. The next release of one of them fails here first, with a list."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_pipetransformer import trainer_compat
from tests.private_names import ATTRIBUTES, CALLED, OF_TENSORS, OVERRIDDEN, PATCHED


SOURCES = Path(__file__).resolve().parents[2] / "hf_pipetransformer"
BASES = {
    "Trainer": transformers.Trainer,
    "CallbackHandler": transformers.trainer_callback.CallbackHandler,
    "TrainingArguments": transformers.TrainingArguments,
}
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}


def resolve(where: str) -> Any:
    """The object at `module:Name.name`."""
    module, _, names = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def parameters(function: Any) -> str:
    return ", ".join(inspect.signature(function).parameters)


def last_name(where: str) -> str:
    return re.split(r"[.:]", where)[-1]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def made_here(trees: list[ast.Module]) -> set[str]:
    """Every name that the package itself gives to something."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Private names that a module reads of an object or imports from another library; also by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hf_pipetransformer"):
            yield from (part for part in (node.module or "").split(".") if is_private(part))
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield str(name.value)


def overridden_methods() -> set[str]:
    """`Base.method` for every method in the rooms of the trainer and the arguments that hides one of transformers."""
    found = set()
    for path, tree in TREES.items():
        if path.parent.name not in ("trainer", "training") and path.name != "arguments.py":
            continue
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            bases = {ast.unparse(base) for base in kind.bases}
            # In the trainer room whatever is not said to be something else stands before Trainer.
            base = next((name for name in BASES if name in bases), "Trainer" if path.parent.name == "trainer" else "")
            if not base:
                continue
            methods = {node.name for node in kind.body if isinstance(node, ast.FunctionDef)} - {"__post_init__"}
            found |= {f"{base}.{name}" for name in methods if name in vars(BASES[base])}
    return found


LISTED = {name for where in (*CALLED, *ATTRIBUTES, *OVERRIDDEN) for name in re.split(r"[.:]", where)} | set(OF_TENSORS)


def test_every_private_name_of_another_library_is_listed():
    own = made_here(list(TREES.values()))
    used = {(name, path.parent.name) for path, tree in TREES.items() for name in private_uses(tree)}
    # A name of Trainer's that the trainer room sets too is not its own for that.
    of_trainer = set(re.findall(r"\bself\.(_[a-z]\w*)", inspect.getsource(transformers.trainer)))
    foreign = {name for name, room in used if name not in own or (room == "trainer" and name in of_trainer)}
    assert sorted(foreign - LISTED) == []


def test_every_override_is_listed_and_nothing_else():
    assert overridden_methods() == set(OVERRIDDEN)


def test_nothing_is_listed_that_is_no_longer_used():
    words = {word for path in TREES for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert (
        sorted(last_name(where) for where in (*CALLED, *ATTRIBUTES, *PATCHED) if last_name(where) not in words) == []
    )
    assert sorted(set(OF_TENSORS) - words) == []


def test_the_list_of_patches_names_the_files_that_patch():
    """A patch that is listed with a file in `trainer_compat` is in that file, under its name."""
    listed = re.findall(r"^- (.+?) \(`([\w/]+\.py)`\):", trainer_compat.__doc__ or "", re.MULTILINE)
    places = [(last_name(name), file) for names, file in listed for name in re.findall(r"`([\w.]+)`", names)]
    assert len(places) >= 5
    assert [place for place in places if place[0] not in (SOURCES / place[1]).read_text(encoding="utf-8")] == []


def test_planted_uses_are_found():
    source = "from torch._C import x\nfrom a import _b\nc._d\ngetattr(e, '_f')\nc.__dict__\n"
    source += "from hf_pipetransformer import _g"
    assert sorted(private_uses(ast.parse(source))) == ["_C", "_b", "_d", "_f"]


def changes() -> Iterator[str]:
    """What the installed libraries have that is not as listed."""
    functions = {**CALLED, **PATCHED, **{f"transformers.trainer:{k}": v for k, v in OVERRIDDEN.items()}}
    for where, expected in functions.items():
        where = where.replace("transformers.trainer:TrainingArguments", "transformers:TrainingArguments")
        where = where.replace("transformers.trainer:CallbackHandler", "transformers.trainer_callback:CallbackHandler")
        try:
            found = resolve(where)
        except (ImportError, AttributeError):
            yield f"{where} is gone"
            continue
        if expected is not None and parameters(found) != expected:
            yield f"{where}({parameters(found)}): expected ({expected})"
    for where, kind in ATTRIBUTES.items():
        module, _, name = where.partition(":")
        if not re.search(rf"\b{name}\b", inspect.getsource(resolve(f"{module}:{kind}"))):
            yield f"{where} is no longer set by {kind}"
    for name in OF_TENSORS:
        if not hasattr(torch.zeros(1), name):
            yield f"Tensor.{name} is gone"


def test_the_installed_libraries_have_what_is_used():
    assert list(changes()) == []


@pytest.mark.parametrize("name", ["_prepare_inputs", "_get_output_dir"])
def test_a_release_that_changes_a_private_method_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(transformers.Trainer, name, lambda self, something_else: None)
    assert [text for text in changes() if name in text and "something_else" in text]
    monkeypatch.delattr(transformers.Trainer, name)
    assert [text for text in changes() if name in text and "is gone" in text]
