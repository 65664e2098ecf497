"""`make test-changed` runs the test files that are near to a change, those too that start what changed by its name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.changed import REPOSITORY, changed_files, import_graph, nearest, read_sources


SOURCES = {
    "lib/__init__.py": "from lib.room.wide import Wide",
    "lib/room/__init__.py": "",
    "lib/room/wide.py": "from lib.room import deep",
    "lib/room/deep.py": "from .deepest import x",
    "lib/room/deepest.py": "",
    "tests/__init__.py": "",
    "tests/helper.py": "import lib.room.deep",
    "tests/worker.py": "from tests.helper import y",
    "tests/test_wide.py": "from lib import Wide",
    "tests/test_launch.py": "Path(__file__).with_name('worker.py')",
    "tests/test_module.py": "run(['-m', 'tests.worker'])",
    "tests/room/conftest.py": "import lib.room.wide",
    "tests/room/test_in_room.py": "",
    "tests/project/test_pages.py": "",
    "tests/lists.py": "NIGHTLY = ['test_wide.py']",
}


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("tests/test_wide.py", ["test_wide.py"]),
        ("tests/helper.py", ["test_launch.py", "test_module.py"]),
        # Through the package's `__init__`, and for those beside a conftest.py.
        ("lib/room/wide.py", ["room/test_in_room.py", "test_wide.py"]),
        ("lib/room/deep.py", ["test_launch.py", "test_module.py"]),
        # No test imports it: those of who does.
        ("lib/room/deepest.py", ["test_launch.py", "test_module.py"]),
        ("tests/room/conftest.py", ["room/test_in_room.py"]),
        ("docs/page.md", ["project/test_pages.py"]),
        ("tests/lists.py", []),
        ("lib/gone.py", []),
    ],
)
def test_the_nearest_tests_are_chosen(changed: str, chosen: list[str]):
    assert nearest([changed], import_graph(SOURCES)) == [f"tests/{name}" for name in chosen]


def test_of_several_changes_each_has_its_tests():
    assert nearest(["tests/test_wide.py", "tests/worker.py"], import_graph(SOURCES)) == [
        *("tests/test_launch.py", "tests/test_module.py", "tests/test_wide.py")
    ]


@pytest.mark.slow  # It reads every file.
def test_every_module_of_the_package_is_near_to_some_test():
    graph = import_graph(read_sources(REPOSITORY))
    modules = [path for path in graph if path.startswith("hf_pipetransformer/") and not path.endswith("__main__.py")]
    assert [path for path in modules if not nearest([path], graph)] == []


def test_what_differs_from_the_merge_base_has_changed(tmp_path: Path):
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)

    def write(name: str) -> None:
        (tmp_path / name).write_text(name)

    git("init", "--initial-branch", "main")
    for name in ("kept.py", "edited.py", "removed.py", ".gitignore"):
        write(name)
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "change")
    write("committed.py")
    git("add", ".")
    git("commit", "-m", "second")
    git("checkout", "main")
    write("of_others.py")
    git("add", ".")
    git("commit", "-m", "third")
    git("checkout", "change")
    (tmp_path / "edited.py").write_text("otherwise")
    (tmp_path / "removed.py").unlink()
    write("ä new.py")
    assert changed_files(tmp_path, "main") == {"committed.py", "edited.py", "removed.py", "ä new.py"}
