"""What the pages point at exists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from scripts.bench.tables import written_table
from scripts.options_table import PAGE, TASKS, options_by_task


REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FILE = re.compile(r"`((?:scripts|tests|docs|benchmarks)/[\w./-]+\.\w+)`")
MOST_WORDS = 700
MOST_WORDS_BEFORE_A_TABLE = 150


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
    text = re.sub(r"<!--.*?-->", "", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    assert len(text.split()) <= MOST_WORDS
    before, _, table = text.partition("\n|")
    assert table and len(before.split()) <= MOST_WORDS_BEFORE_A_TABLE


def prose(text: str) -> list[str]:
    """Paragraphs of sentences: no code, no comments, no table; line breaks are blanks."""
    text = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [" ".join(each.split()) for each in re.split(r"\n\s*\n|\n- ", text)]
    return [each for each in found if not each.startswith("|") and len(each.split()) > 12]


def test_a_paragraph_stands_on_one_page_once() -> None:
    counts = Counter(each for page in PAGES for each in prose(page.read_text(encoding="utf-8")))
    assert [each for each, count in counts.items() if count > 1] == []


def test_a_paragraph_that_stands_twice_is_found() -> None:
    words = "A sentence of as many words as a paragraph needs to be more than a caption."
    code = f"```text\n{words}\n```"
    broken = words.replace(" many ", "\nmany ")
    assert prose(f"{words}\n\n{code}\n\n| {words} |\n\n- short\n- {broken}\n") == [words, words]


def test_the_options_are_those_of_the_fields() -> None:
    """If they are not, run `make tables`."""
    assert written_table(PAGE.read_text(encoding="utf-8"), "options") == options_by_task(), "run `make tables`"


@pytest.mark.parametrize("name", ["no_such_option", "elastic"])
def test_an_option_stands_once_under_one_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "Freeze layers", (*TASKS["Freeze layers"], name))
    with pytest.raises(ValueError, match=rf"under one of TASKS, once.*\['{name}'\]"):
        options_by_task()
