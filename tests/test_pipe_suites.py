"""How `scripts/run_pipe_suites.py` changes the suites of others and sorts what they come to."""

from __future__ import annotations

import pipe_suite_plugin as plugin
import pytest
from run_pipe_suites import sorted_out, swapped


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
from hf_pipetransformer.pipe.skip.exchange import SkipExchange as SkipTracker
import pipe_suite_plugin; Task = pipe_suite_plugin.StandIn('Task')
from torchgpipe_balancing import blockpartition
from pipe_suite_plugin import TEST_CUDA, run_tests
print("from torchgpipe.skip import pop")
"""


def test_only_the_imports_change() -> None:
    assert swapped(SUITE, "torchgpipe") == EXPECTED
    exec(EXPECTED.replace("from torchgpipe_balancing import blockpartition", ""), {})


def test_an_internal_skips_the_test_that_uses_it() -> None:
    task = plugin.StandIn("Task")
    for use in (lambda: task(1), lambda: task.attribute):
        with pytest.raises(pytest.skip.Exception, match="internal: Task"):
            use()
    assert not isinstance(1, task._backward_cls)


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
