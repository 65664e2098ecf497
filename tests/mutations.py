"""Change the code in one small place, many times over all rooms, and see whether the nearest tests fail.

    python -m tests.mutations [--count 40] [--seed 0] [--output FILE]

Each change is of one operator, condition or index. What is not caught is printed with its place: either no test looks
there, or both ways do the same. The share that is caught tells what a refactoring has kept of the tests' sharpness.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.changed import REPOSITORY, import_graph, nearest, read_sources


PACKAGE = "hf_pipetransformer"
MOST_FILES = 6
"""Nearest test files that are run, those of the room's own folder first."""
MOST_SECONDS = 600
"""A change that makes a test wait for ever is caught."""

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """Text in a file that another takes the place of."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]


def mutations_of(path: str, source: str) -> Iterator[Mutation]:
    """Yield every change of one operator, condition or index of a module."""
    lines = source.splitlines(keepends=True)
    starts = list(accumulate(map(len, lines), initial=0))

    def place(line: int, column: int) -> int:
        # Columns count bytes.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    tree = ast.parse(source)
    hints = {id(inner) for node in ast.walk(tree) for hint in _hints(node) for inner in ast.walk(hint)}
    for node in ast.walk(tree):
        if id(node) in hints or not isinstance(node, ast.expr):
            continue
        for old, new in _changes(node):
            assert node.end_lineno is not None and node.end_col_offset is not None
            start = place(node.lineno, node.col_offset)
            segment = source[start : place(node.end_lineno, node.end_col_offset)]
            if segment.count(old) != 1 or "\n" in segment:
                continue
            begin = start + segment.index(old)
            yield Mutation(path, node.lineno, begin, begin + len(old), old, new)


def _changes(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield pairs of a text in the source of an expression and what stands there instead."""
    found: list[ast.AST] = []
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        found = list(node.ops)
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        found = [node.op]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not ", ""
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in (0, 1):
        yield f"[{node.slice.value}]", f"[{1 - node.slice.value}]"
    for each in found:
        if type(each) in _OPERATORS:
            old, new = _OPERATORS[type(each)]
            yield f" {old} ", f" {new} "


def _hints(node: ast.AST) -> Iterator[ast.AST]:
    """Yield annotations, which do nothing."""
    for name in ("annotation", "returns"):
        if isinstance(hint := getattr(node, name, None), ast.AST):
            yield hint


def draw(sources: dict[str, str], count: int, seed: int) -> list[Mutation]:
    """Draw changes, as many of each room."""
    rooms: dict[str, list[Mutation]] = {}
    for path, source in sorted(sources.items()):
        parts = path.split("/")
        if parts[0] == PACKAGE and len(parts) > 2:
            rooms.setdefault(parts[1], []).extend(mutations_of(path, source))
    drawer = random.Random(seed)
    for found in rooms.values():
        drawer.shuffle(found)
    rounds = [[found[i] for found in rooms.values() if i < len(found)] for i in range(count)]
    return [mutation for each in rounds for mutation in each][:count]


def tests_near(path: str, graph: dict[str, set[str]]) -> list[str]:
    """Return the test files to run for a change in a file."""
    room = path.split("/")[1]
    near = nearest([path], graph)
    # What starts several processes takes minutes and is seldom nearer.
    return sorted(near, key=lambda each: (f"/{room}/" not in each, "/distributed/" in each))[:MOST_FILES]


def is_caught(root: Path, mutation: Mutation, tests: list[str]) -> bool:
    """Return True if one of the tests fails with a change in a copy of the repository."""
    file = root / mutation.path
    source = file.read_text(encoding="utf-8")
    file.write_text(mutation.applied(source), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    options: dict[str, Any] = {"cwd": root, "env": _environment(root), "timeout": MOST_SECONDS, "capture_output": True}
    try:
        done = subprocess.run([*command, *tests], check=False, **options)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(source, encoding="utf-8")


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant changes, and count those that the nearest tests catch.")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file for what was found")
    options = parser.parse_args()
    sources = read_sources(REPOSITORY)
    graph = {path: set(needed) for path, needed in import_graph(sources).items()}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "dist", "__pycache__", ".*_cache")
        shutil.copytree(REPOSITORY, root, ignore=left_out)
        for mutation in draw(sources, options.count, options.seed):
            caught = is_caught(root, mutation, tests_near(mutation.path, graph))
            found.append({**asdict(mutation), "caught": caught})
            text = sources[mutation.path].splitlines()[mutation.line - 1].strip()
            print(f"{'caught' if caught else 'NOT CAUGHT'}  {mutation.path}:{mutation.line}: {text}", flush=True)
            print(f"            {mutation.old.strip()} -> {mutation.new.strip() or 'nothing'}", flush=True)
    print(f"{sum(each['caught'] for each in found)} of {len(found)} caught")
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
