"""Choose the test files that a change is near to, by who imports whom.

    python -m tests.changed [--since main]      prints the files, one a line

What changed are the files that differ from the merge base with a branch, committed or not. A test file is near to one
of them if it, or a helper of tests that it imports or starts by name, is that file or imports it. A module that no
test imports is tested by those of the modules that import it. Whatever else leads there is left to `make test`: the
imports of the trainer lead to every module, so that any change would choose nearly every test.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath


REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("hf_pipetransformer", "scripts", "examples", "tests")
RULES_OF_THE_HOUSE = "tests/project/"
"""The tests of what is no Python: pages, tables, settings."""

Graph = Mapping[str, Collection[str]]
"""Files, as paths from the repository, that each file needs."""


def read_sources(root: Path) -> dict[str, str]:
    """Return the text of every Python file by its path."""
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which files each file imports, or names: workers are started by their file's or module's name."""
    contents = {path: _imports_and_texts(text, path) for path, text in sources.items()}
    files = {_module_of(path): path for path in sources}
    # A name that a package's `__init__` imports is looked up where it is written.
    homes = {
        (_module_of(path), name): home
        for path, (imports, _) in contents.items()
        if path.endswith("/__init__.py")
        for home, name in imports
        if name
    }

    def find(module: str, name: str | None) -> Iterator[str]:
        while name and (module, name) in homes and homes[module, name] != module:
            module = homes[module, name]
        parts = module.split(".")
        # Importing a module runs the `__init__` of every package around it.
        parents = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        yield from (files[part] for part in [*parents, f"{module}.{name}"] if part in files)

    graph = {}
    for path, (imports, texts) in contents.items():
        found = {file for module, name in imports for file in find(module, name)}
        for text in texts:
            found.update(find(text, None) if text in files else _files_named(text, path, sources))
        if _is_test_file(path):
            found |= {f"{folder}/conftest.py" for folder in PurePosixPath(path).parents} & sources.keys()
        graph[path] = found - {path}
    return graph


def nearest(changed: Collection[str], graph: Graph) -> list[str]:
    """Return the test files that are nearest to each of the changed files; one that is gone is needed by nobody."""
    importers: dict[str, set[str]] = {}
    for path, needed in graph.items():
        for other in needed:
            importers.setdefault(other, set()).add(path)
    chosen = {path for file in changed for path in _nearest(file, importers) if path in graph}
    if any(not path.endswith(".py") for path in changed):
        chosen |= {path for path in graph if path.startswith(RULES_OF_THE_HOUSE) and _is_test_file(path)}
    return sorted(chosen)


def _nearest(file: str, importers: Graph) -> set[str]:
    reached: set[str] = set()
    news = {file}
    while news:
        reached |= news
        tests, found = {path for path in reached if _is_of_tests(path)}, reached
        # From helper to helper as far as it goes.
        while found:
            found = {path for other in found for path in importers.get(other, ()) if _is_of_tests(path)} - tests
            tests |= found
        if files := {path for path in tests if _is_test_file(path)}:
            return files
        news = {path for other in news for path in importers.get(other, ())} - reached
    return set()


def changed_files(root: Path, branch: str) -> set[str]:
    """Return the paths that differ from the merge base with `branch`, untracked files included."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout

    base = git("merge-base", branch, "HEAD").strip()
    listed = git("diff", "--name-only", "-z", "--no-renames", base)
    listed += git("ls-files", "--others", "--exclude-standard", "-z")
    return {path for path in listed.split("\0") if path}


def _is_of_tests(path: str) -> bool:
    return path.startswith("tests/")


def _is_test_file(path: str) -> bool:
    return _is_of_tests(path) and PurePosixPath(path).name.startswith("test_")


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports_and_texts(source: str, path: str) -> tuple[set[tuple[str, str | None]], set[str]]:
    """The module of each import, inside functions too, with the name taken from it; and texts that may name a file."""
    package = PurePosixPath(path).parent.parts
    imports: set[tuple[str, str | None]] = set()
    texts = set()
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            imports.update((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *filter(None, [node.module])])
            imports.update((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            texts.add(node.value.partition(":")[0])
    return imports, texts


def _files_named(text: str, path: str, sources: Mapping[str, str]) -> set[str]:
    """Files that a text in a file may name: from the repository, beside it, or anywhere. Nobody starts a test file."""
    if not text.endswith(".py") or PurePosixPath(text).name.startswith("test_"):
        return set()
    beside = f"{PurePosixPath(path).parent}/{text}"
    if text in sources or beside in sources:
        return {text, beside} & sources.keys()
    return {other for other in sources if other.endswith(f"/{text}")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Choose the test files that a change is near to.")
    parser.add_argument("--since", default="main", help="the branch that the change will be merged into")
    since = parser.parse_args().since
    try:
        changes = changed_files(REPOSITORY, since)
    except subprocess.CalledProcessError:
        parser.error(f"git finds no commit common to HEAD and {since!r}: name another branch, as origin/main")
    print(*nearest(changes, import_graph(read_sources(REPOSITORY))), sep="\n")
