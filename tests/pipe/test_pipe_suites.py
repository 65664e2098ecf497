"""How `run_pipe_suites.py` changes the suites of others and sorts what they come to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.pipe import pipe_suite_plugin as plugin
from tests.pipe.run_pipe_suites import DIFFERENT, THEIRS, revision_of, sorted_out, swapped


SUITE = """import torch
from torchgpipe.skip import (
    Namespace,
    stash,
)
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe.worker import Task
from torchgpipe_balancing import blockpartition
from torch.testing._internal.common_utils import TEST_CUDA, run_tests
print("from torchgpipe.skip import pop")
"""
EXPECTED = """import torch
from hf_pipetransformer.pipe.skip import Namespace
from hf_pipetransformer.pipe.skip import stash
from hf_pipetransformer.pipe.skip import SkipExchange as SkipTracker
import pipe_suite_plugin; Task = pipe_suite_plugin.StandIn('Task')
from torchgpipe_balancing import blockpartition
from pipe_suite_plugin import TEST_CUDA, run_tests
print("from torchgpipe.skip import pop")
"""


def test_only_the_imports_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # as in the processes that run a suite
    assert swapped(SUITE, "torchgpipe") == EXPECTED
    exec(EXPECTED.replace("from torchgpipe_balancing import blockpartition", ""), {})


def test_an_internal_skips_the_test_that_uses_it() -> None:
    task = plugin.StandIn("Task")
    for use in (lambda: task(1), lambda: task.attribute):
        with pytest.raises(pytest.skip.Exception, match="internal: Task"):
            use()
    assert not isinstance(1, task._backward_cls)


@pytest.mark.parametrize("module", ["torchgpipe", "torch.distributed.pipeline.sync"])
def test_a_test_that_patches_an_internal_by_its_name_is_not_applicable(module: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        with pytest.raises(pytest.skip.Exception, match=rf"internal: {module}.skip.portal.Portal.__init__"):
            plugin.patch_or_skip(patch, f"{module}.skip.portal.Portal.__init__", lambda: None)
        plugin.patch_or_skip(patch, "os.sep", "?")
        plugin.patch_or_skip(patch, plugin, "INTERNAL", "!")
        assert (os.sep, plugin.INTERNAL) == ("?", "!")
    assert (os.sep, plugin.INTERNAL) == ("/", "internal: ")


def test_the_last_release_of_torchgpipe_has_a_listed_test_that_patches_an_internal() -> None:
    found = {"skip/test_leak.py::test_no_portal_without_gpipe[train]": ("failed", "no torchgpipe")}
    table = sorted_out(found, DIFFERENT["torchgpipe"])
    assert table["not applicable"] == {"skip/test_leak.py::test_no_portal_without_gpipe[train]": "internal: Portal"}


def test_a_suite_is_known_by_its_commit_and_by_its_files(tmp_path: Path) -> None:
    suite = tmp_path / "tests"
    (suite / "skip").mkdir(parents=True)
    (suite / "test_a.py").write_text("a = 1\n")
    (suite / "skip" / "test_b.py").write_text("b = 1\n")
    first = revision_of(suite)
    assert first["commit"] is None and first["files"] == 2
    (suite / "__pycache__").mkdir()
    (suite / "__pycache__" / "test_a.pyc").write_text("compiled")
    assert revision_of(suite) == first
    (suite / "skip" / "test_b.py").rename(suite / "test_b.py")
    assert revision_of(suite)["sha256"] != first["sha256"]
    git = ["git", "-C", str(suite), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "test_a.py", "test_b.py"], ["commit", "-q", "-m", "suite"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert revision_of(suite)["commit"] == head
    (suite / "test_a.py").write_text("a = 2\n")
    assert revision_of(suite)["commit"] == f"{head}, with changes"


def test_the_figures_say_of_which_revision_they_are() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "pipe_suites.json"
    results = json.loads(file.read_text())
    for theirs in THEIRS.values():
        assert results[theirs]["revision"], theirs
    # What was reported of another revision stands apart from what was measured.
    assert results["reported"]["torchgpipe"]["revision"] == "v0.0.7"
    assert results["reported"]["torchgpipe"]["counts"] != results["torchgpipe"]["counts"]


def test_no_warning_is_asked_for() -> None:
    with plugin.warns(None) as record:
        pass
    assert record == []
    with plugin.warns(UserWarning, match="here"):
        __import__("warnings").warn("here", UserWarning, stacklevel=1)


def test_each_outcome_has_its_category() -> None:
    found = {
        "a.py::test_right[1]": ("passed", ""),
        "a.py::test_wrong": ("failed", "1 == 2"),
        "a.py::test_gpu": ("skipped", "CUDA required"),
        "a.py::test_flaky": ("skipped", "flaky"),
        "a.py::test_batch": ("skipped", "internal: Batch"),
        "a.py::test_names[1]": ("passed", ""),
        "a.py::test_portal": ("failed", "no Portal"),
        "a.py::test_pinned": ("expected failure", ""),
    }
    reasons = {"a.py::test_names": "other names", "a.py::test_portal": "internal: Portal"}
    table = sorted_out(found, reasons)
    assert table.pop("counts") == {
        "passed": 1,
        "failed": 2,
        "needs CUDA": 1,
        "skipped by the suite": 1,
        "not applicable": 2,
        "differs by design": 1,
    }
    assert table == {
        "passed": ["a.py::test_right[1]"],
        "failed": {"a.py::test_pinned": "expected failure: ", "a.py::test_wrong": "failed: 1 == 2"},
        "needs CUDA": ["a.py::test_gpu"],
        "skipped by the suite": {"a.py::test_flaky": "flaky"},
        "not applicable": {"a.py::test_batch": "internal: Batch", "a.py::test_portal": "internal: Portal"},
        "differs by design": {"a.py::test_names[1]": "other names (passed)"},
    }
