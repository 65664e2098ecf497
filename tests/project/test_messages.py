"""A test looks for each message of the package by words that no other message has."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path


TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "hf_pipetransformer"
REGULAR = re.compile(r"\\[dswb]|[.*+?$^]|\[[^\]]*\]|\\")
"""Parts of a regular expression that are no words."""

PROTOCOL = ("AttributeError", "OSError", "AssertionError")
"""Errors that Python's own protocols ask for, or that show our own mistakes."""


def runs(texts: Iterable[str]) -> set[str]:
    """Return all runs of three words of some texts."""
    words = [re.findall(r"[\w-]+", text.lower()) for text in texts]
    return {" ".join(each[at : at + 3]) for each in words for at in range(len(each) - 2)}


def texts(node: ast.AST) -> Iterator[str]:
    return (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def messages(source: str) -> Iterator[tuple[str, set[str]]]:
    """Return what a file raises or warns of with a text that stands there: the call, and its runs of words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            told = node.exc.args if ast.unparse(node.exc.func) not in PROTOCOL else []
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warning", "warn"):
            told = node.args[:1]
        else:
            continue
        yield ast.unparse(node), runs(text for each in told for text in texts(each))


def untested(sources: Iterable[str], looked_for: set[str]) -> list[str]:
    """Return the messages with words of their own, none of which is among those that tests look for."""
    found = dict(each for source in sources for each in messages(source))
    times = Counter(run for each in found.values() for run in each)
    own = {call: {run for run in each if times[run] == 1} for call, each in found.items()}
    return [call for call, each in own.items() if each and not each & looked_for]


def test_every_message_is_looked_for_by_a_test() -> None:
    """If one is not, write a test with three words in a row that no other message has."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("*.py"))]
    looked_for = runs(REGULAR.sub(" ", text) for tree in trees for text in texts(tree))
    assert untested([path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")], looked_for) == []


def test_a_message_without_a_test_is_found() -> None:
    source = "raise ValueError(f'{x} has no such thing.')\nlog.warning('Nothing of that was found')\nraise error"
    assert untested([source], {"nothing of that"}) == ["raise ValueError(f'{x} has no such thing.')"]
