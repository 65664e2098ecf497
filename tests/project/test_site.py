"""The site builds strictly and without a network; the functions and figures that its pages name exist."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_pipetransformer.cache.records import RecordFormat
from scripts.bench.tables import written_table
from scripts.check_site import faults


REPOSITORY = Path(__file__).resolve().parents[2]
PAPERS = REPOSITORY / "docs" / "papers.md"
RECIPES = REPOSITORY / "docs" / "recipes"
SYSTEMS = ["PipeTransformer", "TeraPipe", "PipeOptim", "GPipe, torchgpipe and Pipe"]
NAMED = re.compile(r"`([\w/]+\.py)`(?:: ((?:`[^`]+`(?:, )?)+))?")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what the site is made of, which a test may change."""
    pytest.importorskip("zensical", reason="needs the extra docs")
    for folder in ("docs", "scripts"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    return tmp_path


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(sources: Path) -> None:
    found = built(sources)
    assert found.returncode == 0, found.stdout + found.stderr
    site = sources / "build" / "site"
    assert len([*site.rglob("*.html")]) > len([*REPOSITORY.glob("docs/**/*.md")])  # and one for what is not found
    assert faults(site) == []
    # The search ranks an entry with that title first.
    entries = {each["location"]: each["title"] for each in json.loads((site / "search.json").read_text())["items"]}
    assert "freeze_layers" in entries["options.html#freeze_layers"]


def test_a_link_between_pages_that_leads_nowhere_fails_the_build(sources: Path) -> None:
    page = sources / "docs" / "report.md"
    page.write_text(page.read_text() + "\n[one](no_such.md)\n[two](options.md#no-such-option)\n")
    found = built(sources)
    assert found.returncode != 0
    assert "page does not exist" in found.stderr and "anchor does not exist" in found.stderr


def test_what_the_strict_build_does_not_see_is_found(sources: Path) -> None:
    text = '# Lost\n\n![picture](none.png) [file](../LICENSE) <script src="https://example.org/a.js"></script>\n'
    (sources / "docs" / "lost.md").write_text(text)
    assert built(sources).returncode == 0
    assert faults(sources / "build" / "site") == [
        "lost.html: none.png is not there",
        "lost.html: ../LICENSE is not there",
        "lost.html: loads https://example.org/a.js",
        "lost.html: not listed in mkdocs.yml",
    ]


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
    sizes = [RecordFormat(768, dtype).record_bytes(197) for dtype in (torch.float32, torch.bfloat16)]
    assert all(f"{size:,} " in text for size in sizes)
    expected = [
        f"| {rows} | " + " | ".join(f"{1_281_167 * size * rows / 1e9:,.0f} GB" for size in sizes) + " |"
        for rows in (1, 2, 4)
    ]
    assert table == expected
