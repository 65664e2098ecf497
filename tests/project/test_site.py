"""The site builds strictly and without a network; the functions and figures that its pages name exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_pipetransformer.cache.records import RecordFormat
from scripts.bench.tables import written_table


REPOSITORY = Path(__file__).resolve().parents[2]
PAPERS = REPOSITORY / "docs" / "papers.md"
RECIPES = REPOSITORY / "docs" / "recipes"
SYSTEMS = ["PipeTransformer", "TeraPipe", "PipeOptim", "GPipe, torchgpipe and Pipe"]
NAMED = re.compile(r"`([\w/]+\.py)`(?:: ((?:`[^`]+`(?:, )?)+))?")
LOADED = re.compile(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*"')


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra docs")
    found = built(tmp_path)
    assert found.returncode == 0, found.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > len([*REPOSITORY.glob("docs/**/*.md")])  # and one for what is not found
    for page in pages:
        assert LOADED.findall(page.read_text(encoding="utf-8")) == [], page.name


# ---- the map of the papers


def named(text: str) -> list[tuple[str, str | None]]:
    """Return the files that a page names, each alone and with each of the names after it: `file.py`: `f`, `g`."""
    found: list[tuple[str, str | None]] = []
    for file, names in NAMED.findall(text):
        found += [(file, None), *((file, name) for name in re.findall(r"`(.+?)`", names))]
    return found


def names_of(path: Path) -> set[str]:
    """Return functions, classes and constants of a file, and the methods of its classes with the class before."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def missing(text: str) -> list[str]:
    found = []
    for file, name in named(text):
        root = REPOSITORY if file.startswith(("scripts/", "tests/")) else REPOSITORY / "hf_pipetransformer"
        if not (root / file).is_file() or (name and name not in names_of(root / file)):
            found.append(f"{file}: {name}" if name else file)
    return found


def test_every_function_that_the_map_of_the_papers_names_exists() -> None:
    text = PAPERS.read_text(encoding="utf-8")
    assert missing(text) == []
    sections = {section.partition("\n")[0]: named(section) for section in text.split("\n## ")[1:]}
    assert set(SYSTEMS) <= set(sections)
    assert all(len(found) > 10 for title, found in sections.items() if title in SYSTEMS)


def test_a_function_that_is_gone_is_found() -> None:
    row = "| Eq. 1 | `freeze/policies.py`: `GradientNorm.smallest`, `GradientNorm.gone`; `none.py`: `f` | as `text` |"
    assert missing(row) == ["freeze/policies.py: GradientNorm.gone", "none.py", "none.py: f"]


# ---- figures of the recipes


def test_the_disk_that_imagenet_takes_is_that_of_its_records() -> None:
    text = (RECIPES / "imagenet.md").read_text(encoding="utf-8")
    table = written_table(text, "records").splitlines()[2:]
    sizes = [RecordFormat(768, dtype, {}, {}).record_bytes(197) for dtype in (torch.float32, torch.bfloat16)]
    assert all(f"{size:,} " in text for size in sizes)
    expected = [
        f"| {slots}{' (no augmentation)' if slots == 1 else ''} | "
        + " | ".join(f"{1_281_167 * size * slots / 1e9:,.0f} GB" for size in sizes)
        + " |"
        for slots in (1, 2, 4)
    ]
    assert table == expected
