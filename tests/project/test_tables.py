"""Tables and figures of README.md and docs/ are those of the files in benchmarks/."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from scripts.bench import tables


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the pages and the results, which a test may change."""
    for folder in ("docs", "benchmarks"):
        shutil.copytree(tables.REPOSITORY / folder, tmp_path / folder)
    shutil.copy(tables.REPOSITORY / "README.md", tmp_path)
    monkeypatch.setattr(tables, "REPOSITORY", tmp_path)
    tables.content.cache_clear()
    yield tmp_path
    tables.content.cache_clear()


def test_pages_say_what_was_measured() -> None:
    assert tables.faults() == [], "run `make tables`"


def test_another_result_is_found_and_written(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = elsewhere / "benchmarks" / "async.json"
    results = json.loads(path.read_text())
    results["vit, K=2, mini-batch 8"]["faster than the best synchronous"]["pipeoptim"]["median"] = 1.94
    path.write_text(json.dumps(results))
    of_sentence = (
        "docs/pipeline.md: it should say 'ran 1.3 to 1.9 times as fast as with the best synchronous schedule'"
    )
    assert tables.faults() == ["docs/benchmarks.md: async.json", of_sentence]
    monkeypatch.setattr("sys.argv", ["tables"])
    with pytest.raises(SystemExit, match=r"1\.3 to 1\.9 times as fast"):
        tables.main()
    assert "| 1.94 [1.36, 1.65] |" in (elsewhere / "docs" / "benchmarks.md").read_text()
    assert tables.faults() == [of_sentence]


def test_what_a_file_no_longer_has_is_an_error(elsewhere: Path) -> None:
    path = elsewhere / "benchmarks" / "zb_h1.json"
    path.write_text(path.read_text().replace('"zb_h1 over 1f1b"', '"another name"'))
    with pytest.raises(UndefinedError, match="zb_h1 over 1f1b"):
        tables.faults()


def test_a_table_without_a_place_is_named(elsewhere: Path) -> None:
    page = elsewhere / "docs" / "pipe.md"
    page.write_text(page.read_text().replace("table: pipe.json, memory -->", "-->"))
    assert tables.faults() == ["on no page: pipe.json, memory"]
