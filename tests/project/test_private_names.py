"""What the package uses of transformers, accelerate, torch and datasets without a promise: all of it is listed, and is
there with the parameters it is used with. The next release of one of them fails here first, with a list."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import accelerate
import datasets
import pytest
import torch
import transformers
from transformers import LlamaConfig

import hf_pipetransformer
from hf_pipetransformer import PipeTransformerMixin, PipeTransformerTrainer
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.splitters.base import CACHE_NAME
from tests.support.decoders import make_decoder
from tests.support.private_names import (
    ATTRIBUTES,
    CALLED,
    GIVEN_BY_GENERATE,
    GIVEN_BY_NAME,
    OF_TENSORS,
    OVERRIDDEN,
    PATCHED,
    REPLACED,
    TAKEN_APART,
)


SOURCES = Path(__file__).resolve().parents[2] / "hf_pipetransformer"
BASES = {
    "Trainer": transformers.Trainer,
    "CallbackHandler": transformers.trainer_callback.CallbackHandler,
    "TrainingArguments": transformers.TrainingArguments,
}
GPT2 = "transformers.models.gpt2.modeling_gpt2"
LIBRARIES = ("accelerate", "datasets", "peft", "transformers", "trl")
HOLDERS = (
    *(transformers.Trainer, transformers.PreTrainedConfig, transformers.PreTrainedModel),
    *(accelerate.Accelerator, datasets.Dataset, datasets.IterableDataset),
)
"""Classes whose methods are called by keywords."""
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.rglob("*.py"))}


def resolve(where: str) -> Any:
    """The object at `module:Name.name`, or the module."""
    module, _, names = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def parameters(function: Any) -> list[str]:
    """The parameters of a function, or the fields of a dataclass, with their defaults."""
    found = inspect.signature(function).parameters.values()
    return [each.name if each.default is each.empty else f"{each.name}={each.default!r}" for each in found]


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
    given = {name for listed in GIVEN_BY_NAME.values() for name in names_of(entries(listed))}
    assert sorted(given - words) == []


def test_the_list_of_patches_names_the_files_that_patch():
    """A patch that is listed with a file in `trainer_compat` is in that file, under its name."""
    listed = re.findall(r"^- (.+?) \(`([\w/]+\.py)`\):", trainer_compat.__doc__ or "", re.MULTILINE)
    places = [(last_name(name), file) for names, file in listed for name in re.findall(r"`([\w.]+)`", names)]
    assert len(places) >= 4
    assert [place for place in places if place[0] not in (SOURCES / place[1]).read_text(encoding="utf-8")] == []


def test_planted_uses_are_found():
    source = "from torch._C import x\nfrom a import _b\nc._d\ngetattr(e, '_f')\nc.__dict__\n"
    source += "from hf_pipetransformer import _g"
    assert sorted(private_uses(ast.parse(source))) == ["_C", "_b", "_d", "_f"]


def is_as_listed(found: str, expected: str) -> bool:
    """True if the parameters are those listed, by the names of either release."""
    return re.fullmatch(re.sub(r"(\w+)\\\|(\w+)", r"(?:\1|\2)", re.escape(expected)), found) is not None


def used_in(words: Iterable[str]) -> str:
    """The files of the package that have one of some words."""
    pattern = re.compile(rf"\b({'|'.join(words)})\b")
    found = [path for path in TREES if pattern.search(path.read_text(encoding="utf-8"))]
    return ", ".join(str(path.relative_to(SOURCES)) for path in found)


def without_default(parameter: str) -> str:
    return parameter.partition("=")[0]


def entries(listed: str) -> list[str]:
    """The parameters in a listing, each with its default."""
    return re.split(r", (?=[\w|]+(?:[=,]|$))", listed)


def names_of(listed: Iterable[str]) -> set[str]:
    """The names of parameters, in both releases."""
    return {name for each in listed for name in without_default(each).split("|")}


def change(where: str, found: list[str], expected: str) -> Iterator[str]:
    """What is found instead of the parameters that are listed for a place, if it is something else."""
    if not is_as_listed(", ".join(found), expected):
        gone = [each for each in entries(expected) if not any(is_as_listed(one, each) for one in found)]
        files = used_in(names_of(gone) or [last_name(where)])
        yield f"{where}: found ({', '.join(found)}), expected ({expected}); used in {files}"


def changes() -> Iterator[str]:
    """What the installed libraries have that is not as listed."""
    overridden = {
        f"transformers{'.trainer_callback' * where.startswith('CallbackHandler')}:{where}": expected
        for where, expected in OVERRIDDEN.items()
    }
    for where, expected in {**CALLED, **PATCHED, **TAKEN_APART, **GIVEN_BY_NAME, **overridden}.items():
        try:
            found = parameters(resolve(where)) if expected is not None else []
        except (ImportError, AttributeError):
            if where not in REPLACED:
                yield f"{where} is gone; used in {used_in([last_name(where)])}"
            continue
        if where in GIVEN_BY_NAME:
            found = [each for each in found if without_default(each) in names_of(entries(str(expected)))]
        elif where in overridden:  # Another test compares the defaults with those of ours.
            found = [without_default(each) for each in found]
        yield from change(where, found, expected or "")
    for where, kind in ATTRIBUTES.items():
        module, _, name = where.partition(":")
        if not re.search(rf"\b{name}\b", inspect.getsource(resolve(f"{module}:{kind}"))):
            yield f"{where} is no longer set by {kind}; used in {used_in([name])}"
    for name in OF_TENSORS:
        if not hasattr(torch.zeros(1), name):
            yield f"Tensor.{name} is gone; used in {used_in([name])}"


def test_the_installed_libraries_have_what_is_used():
    assert list(changes()) == []


@pytest.mark.parametrize("name", ["_prepare_inputs", "_get_output_dir"])
def test_a_release_that_changes_a_private_method_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(transformers.Trainer, name, lambda self, something_else: None)
    assert [text for text in changes() if name in text and "something_else" in text]
    monkeypatch.delattr(transformers.Trainer, name)
    assert [text for text in changes() if name in text and "is gone" in text]


# ---- names that are passed ----


def foreign_calls(tree: ast.Module) -> Iterator[tuple[Any, list[str]]]:
    """What a module imports from another library and calls by keywords, with these."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
            known |= {
                name: importlib.import_module(alias.name if alias.asname else name) for name, alias in found.items()
            }
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith((SOURCES.name, "__future__")):
            known |= {alias.asname or alias.name: resolve(f"{node.module}:{alias.name}") for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(keyword.arg for keyword in node.keywords):
            root, *path = ast.unparse(node.func).split(".")
            if root in known and all(name.isidentifier() for name in path):
                called: Any = known[root]
                for name in path:
                    called = getattr(called, name)
                yield called, [keyword.arg for keyword in node.keywords if keyword.arg]


def unknown_keywords(called: Any, names: list[str]) -> list[str]:
    """Keywords that something has no parameter for, as far as it tells; configurations take any."""
    if isinstance(called, type) and issubclass(called, transformers.PreTrainedConfig):
        return []
    try:
        found = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return []  # A builtin.
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    return [] if takes_any else [name for name in names if name not in found]


def test_every_keyword_that_is_given_to_another_library_is_a_parameter_there():
    calls = [call for tree in TREES.values() for call in foreign_calls(tree)]
    assert len(calls) > 100
    assert [(called, unknown) for called, names in calls if (unknown := unknown_keywords(called, names))] == []


def methods_called(tree: ast.Module) -> Iterator[str]:
    """Names of methods that a module calls with keywords of a class of another library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
            for holder in HOLDERS if not hasattr(torch.nn.Module, name) else ():
                method = getattr(holder, name, None)
                if (inspect.isfunction(method) or inspect.ismethod(method)) and given & {
                    *inspect.signature(method).parameters
                }:
                    yield name


def test_what_is_called_by_keywords_is_listed_with_them():
    listed = {last_name(where) for table in (CALLED, OVERRIDDEN, TAKEN_APART, GIVEN_BY_NAME) for where in table}
    functions = {
        called.__name__
        for tree in TREES.values()
        for called, _ in foreign_calls(tree)
        if str(called.__module__).startswith(LIBRARIES)
    }
    methods = {name for tree in TREES.values() for name in methods_called(tree)}
    assert len(functions) > 3 and len(methods) > 3
    assert sorted((functions | methods) - listed) == []


def test_a_keyword_that_a_release_has_renamed_is_noticed():
    source = (
        "from transformers.modeling_outputs import CausalLMOutputWithPast as Output\nimport torch.distributed as d\n"
    )
    source += "Output(logits=1, keys_and_values=2)\nd.broadcast(1, src=2, team=3)"
    calls = list(foreign_calls(ast.parse(source)))
    assert [unknown_keywords(*call) for call in calls] == [["keys_and_values"], ["team"]]


def test_an_override_has_the_defaults_of_what_it_hides():
    """A call without an argument means the same to both."""
    own = {**vars(PipeTransformerMixin), **vars(PipeTransformerTrainer)}
    for where in OVERRIDDEN:
        kind, _, name = where.partition(".")
        if kind == "Trainer" and name in own and name != "__init__":
            expected = inspect.signature(getattr(transformers.Trainer, name)).parameters
            found = inspect.signature(own[name]).parameters
            same = {key: value.default for key, value in found.items() if key in expected}
            assert same == {key: expected[key].default for key in same}, where


def test_generate_gives_to_a_forward_what_the_stages_know():
    model, given = make_decoder("llama"), set[str]()
    model.register_forward_pre_hook(lambda _module, _args, inputs: given.update(inputs), with_kwargs=True)
    words = torch.tensor([[5, 6, 7], [0, 5, 6]])
    model.generate(words, attention_mask=(words > 0).long(), max_new_tokens=2, pad_token_id=0)
    known = {name for names in GIVEN_BY_GENERATE for name in names.split("|")}
    assert given <= known and all(given & {*names.split("|")} for names in GIVEN_BY_GENERATE)


def test_what_trainer_leaves_out_of_predictions_is_what_models_call_their_cache():
    assert getattr(LlamaConfig, "keys_to_ignore_at_inference", [CACHE_NAME]) == [CACHE_NAME]
    assert f'"keys_to_ignore_at_inference", ["{CACHE_NAME}"]' in inspect.getsource(
        transformers.Trainer.prediction_step
    )


@pytest.mark.parametrize(
    ("where", "changed", "user"),
    [
        # As transformers 5.24 renamed what models call their KV cache, and others of the kind.
        (f"{GPT2}:GPT2Block.forward", lambda self, hidden_states, memory=None, **kwargs: None, "splitters/base.py"),
        ("transformers:LlamaForCausalLM.forward", lambda self, input_ids=None, **kwargs: None, "splitters/base.py"),
        ("transformers.modeling_outputs:CausalLMOutputWithPast", make_dataclass("Output", ["logits"]), "splitters"),
        ("transformers:Trainer.compute_loss", lambda self, model, inputs, return_outputs=False: None, "training/"),
        # Another default alone.
        ("transformers:PreTrainedModel.get_encoder", lambda self, modality="text": None, "splitters/adapters.py"),
        ("transformers:TrainingArguments", lambda dataloader_in_order=False: None, "options/refusals.py"),
    ],
)
def test_a_release_that_changes_a_name_or_a_default_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: str, changed: Any, user: str
):
    name = last_name(where)
    monkeypatch.setattr(resolve(where[: -len(name) - 1]), name, changed)
    (text,) = [text for text in changes() if text.startswith(where)]
    assert "found (" in text and "expected (" in text and user in text.partition("; used in ")[2]


# ---- releases ----


@pytest.mark.parametrize(
    ("package", "found", "is_said"),
    [
        ("transformers", "5.23.0", False),
        ("transformers", "5.24.1", False),
        ("transformers", "5.25.0.dev0", True),
        ("transformers", "6.0.0", True),
        ("transformers", "5.22", True),
        ("torch", "2.13.0+cpu", False),
        ("torch", "2.14.1", True),
        ("torch", "2.11.0+cu129", True),
    ],
)
def test_a_release_that_was_not_tested_is_said_at_the_import(package: str, found: str, is_said: bool):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        hf_pipetransformer._warn_of_untested(package, found)
    texts = [str(each.message) for each in heard]
    assert [f"{package} {found} is installed" in text for text in texts] == [True] * is_said
    words = {
        "transformers": ("tested with 5.23 to 5.24 only; others may fail", "'transformers>=5.23,<5.25'"),
        "torch": ("tested with 2.13 only; others may fail", "'torch>=2.13,<2.14'"),
    }[package]
    assert all(each in text for text in texts for each in words)


@pytest.mark.parametrize("package", hf_pipetransformer.TESTED)
def test_pip_may_install_the_releases_that_are_tested(package: str):
    (first, last), text = hf_pipetransformer.TESTED[package], (SOURCES.parent / "pyproject.toml").read_text()
    assert f'"{package}>={first[0]}.{first[1]}.0,<{last[0]}.{last[1] + 1}"' in text


@pytest.mark.parametrize("minor", [12, 13])
def test_later_pythons_read_the_sources(minor: int, tmp_path: Path):
    """Syntax and its warnings alone: the classifiers of pyproject.toml name what the tests run with."""
    found = [*Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"), shutil.which(f"python3.{minor}")]
    python = next((str(path) for path in found if path and subprocess.run([path, "-c", ""]).returncode == 0), None)
    if python is None:
        pytest.skip(f"Python 3.{minor} is not here")
    command = [python, "-W", "error", "-m", "compileall", "-q", "-f", str(SOURCES), str(SOURCES.parent / "scripts")]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
