"""A plugin of pytest: what `run_pipe_suites.py` needs inside the runs that it starts."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from hf_pipetransformer.pipe import flow as clock


OUTCOMES = "PIPE_SUITE_OUTCOMES"
"""The environment variable that names the file of outcomes, one JSON a line."""
INTERNAL = "internal: "
THEIR_MODULES = ("torchgpipe.", "torch.distributed.pipeline.sync.")

# In place of torch's own test helpers, which need a package besides torch.
TEST_CUDA = torch.cuda.is_available()
TEST_MULTIGPU = torch.cuda.device_count() > 1


def run_tests() -> None:
    """Named by the suite for files that run as scripts; here pytest runs them."""


def clock_cycles(num_micro_batches: int, num_stages: int) -> list[list[tuple[int, int]]]:
    """Ours, in their form."""
    return [list(pairs) for pairs in clock.clock_cycles(num_micro_batches, num_stages)]


class _NodeOfNoGraph:
    """In place of a class of autograd's nodes that no graph of ours has."""


class StandIn:
    """In place of an internal of the tested package that has no counterpart here: a test that uses it is skipped."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **options: object) -> NoReturn:
        pytest.skip(INTERNAL + self.name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "_backward_cls":
            return _NodeOfNoGraph
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        pytest.skip(INTERNAL + self.name)


_warns = pytest.warns


def warns(expected: Any = Warning, *args: Any, **options: Any) -> Any:
    """`pytest.warns`; with None it records all warnings and expects none, as it did before pytest 8."""
    if expected is None:
        return warnings.catch_warnings(record=True, action="always")
    return _warns(expected, *args, **options)


_patch = pytest.MonkeyPatch.setattr


def patch_or_skip(patch: pytest.MonkeyPatch, target: Any, *args: Any, **options: Any) -> None:
    """`monkeypatch.setattr`; a test that names an internal of the tested package in a string is skipped."""
    if isinstance(target, str) and target.startswith(THEIR_MODULES):
        pytest.skip(INTERNAL + target)
    _patch(patch, target, *args, **options)


def pytest_configure() -> None:
    pytest.warns = warns  # type: ignore[assignment]
    pytest.MonkeyPatch.setattr = patch_or_skip  # type: ignore[method-assign,assignment]


def _write(test: str, outcome: str, reason: str) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr or "").strip().split("\n\n")[0]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", _reason(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what a test came to. Of two lines the first counts: the teardown of a skipped test may fail."""
    if report.when == "call" or not report.passed:
        expected = hasattr(report, "wasxfail") and report.skipped
        _write(report.nodeid, "expected failure" if expected else report.outcome, _reason(report))
