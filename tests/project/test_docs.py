"""What the pages point at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.bench.tables import written_table
from scripts.options_table import PAGE, TASKS, options_by_task


REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`((?:scripts|tests|docs|benchmarks)/[\w./-]+\.\w+)`")
MOST_WORDS = 900


def missing(page: Path) -> list[str]:
    """Links, and files of the repository, that a page names and that are not there."""
    text = page.read_text(encoding="utf-8")
    links = [name for name in LINK.findall(text) if "://" not in name and not (page.parent / name).exists()]
    return links + [name for name in FILE.findall(text) if not (REPOSITORY / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_exists(page: Path) -> None:
    assert missing(page) == []


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[one](no_such.md) and `scripts/none.py`, [two](https://example.org), [three](page.md#part)")
    assert missing(page) == ["no_such.md", "scripts/none.py"]


def test_readme_is_a_first_screen() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(re.sub(r"<!--.*?-->", "", text).split()) <= MOST_WORDS


def test_the_options_are_those_of_the_fields() -> None:
    """If they are not, run `make tables`."""
    assert written_table(PAGE.read_text(encoding="utf-8"), "options") == options_by_task(), "run `make tables`"


@pytest.mark.parametrize("name", ["no_such_option", "elastic"])
def test_an_option_stands_once_under_one_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "Freeze layers", (*TASKS["Freeze layers"], name))
    with pytest.raises(ValueError, match=rf"under one of TASKS, once.*\['{name}'\]"):
        options_by_task()
