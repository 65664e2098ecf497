"""Changes that are planted in the code to see whether its tests catch them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import mutations
from tests.changed import REPOSITORY, import_graph, read_sources


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", {"x = a <= b"}),
        ("x = a == b and c", {"x = a != b and c", "x = a == b or c"}),
        ("x = not a", {"x = a"}),
        ("x = a[0] + b", {"x = a[1] + b", "x = a[0] - b"}),
        ("é = 1; x = a is None", {"é = 1; x = a is not None"}),
        ("def f(x: int | None = None) -> int | None: return x", set()),
        ("x = a[2:] @ b", set()),
    ],
)
def test_one_operator_condition_or_index_changes(source: str, changed: set[str]) -> None:
    assert {each.applied(source) for each in mutations.mutations_of("m.py", source)} == changed


def test_all_rooms_are_drawn_from() -> None:
    sources = read_sources(REPOSITORY)
    drawn = mutations.draw(sources, 40, seed=0)
    rooms = Counter(each.path.split("/")[1] for each in drawn)
    folders = {
        path.split("/")[1] for path in sources if path.startswith("hf_pipetransformer/") and path.count("/") > 1
    }
    assert rooms.keys() == folders and set(rooms.values()) <= {40 // len(folders), 40 // len(folders) + 1}
    graph = {path: set(needed) for path, needed in import_graph(sources).items()}
    assert all(mutations.tests_near(each.path, graph) for each in drawn)


@pytest.mark.timeout(120)
def test_what_a_test_sees_is_caught(tmp_path: Path) -> None:
    (tmp_path / "kept.py").write_text("def is_less(a, b):\n    return a < b\n")
    (tmp_path / "test_code.py").write_text("from kept import is_less\n\n\ndef test():\n    assert is_less(1, 2)\n")
    (change,) = mutations.mutations_of("kept.py", (tmp_path / "kept.py").read_text())
    assert not mutations.is_caught(tmp_path, change, ["test_code.py"])
    (tmp_path / "test_code.py").write_text("from kept import is_less\n\n\ndef test():\n    assert not is_less(2, 2)\n")
    assert mutations.is_caught(tmp_path, change, ["test_code.py"])
    assert (tmp_path / "kept.py").read_text() == "def is_less(a, b):\n    return a < b\n"
