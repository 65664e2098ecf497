"""The test suites of torchgpipe and of `torch.distributed.pipeline.sync`, with the import changed to ours.

    python -m tests.pipe.run_pipe_suites --torch ../pytorch/test/distributed/pipeline/sync \
        --torchgpipe ../torchgpipe/tests --output benchmarks/pipe_suites.json

The folders are those of a checkout of PyTorch up to 2.3 and of torchgpipe. A suite is copied and the modules of its
imports are replaced; nothing else of a test changes. Names of theirs that we do not have stand for internals: a test
that uses one is not applicable, and so is one that patches an internal by its name. Their fixture that starts RPC,
which ours does not need, does nothing. The results say which revision was run: the commit, and a hash of the files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.pipe import pipe_suite_plugin as plugin


PLUGIN = "pipe_suite_plugin"
"""Its name in the processes that run a suite, which may be a package `tests` itself."""
OURS = "hf_pipetransformer.pipe"
THEIRS = {"torch": "torch.distributed.pipeline.sync", "torchgpipe": "torchgpipe"}
HELPERS = "torch.testing._internal."
SECONDS_A_FILE = 240

COUNTERPARTS = {
    "_clock_cycles": f"{PLUGIN}.clock_cycles",
    "checkpoint": f"{OURS}.recomputation.checkpointed",
    "clock_cycles": f"{PLUGIN}.clock_cycles",
    "current_skip_tracker": f"{OURS}.skip.current_exchange",
    "SkipTracker": f"{OURS}.skip.SkipExchange",
    "use_skip_tracker": f"{OURS}.skip.exchanging",
    "verify_module": f"{OURS}.stages.check_module",
}
"""Internals of theirs that we have under another name, with the same arguments."""

PORTALS = plugin.INTERNAL + "Portal"
PINS = "pins a shortcoming: gradients were wrong where a stage changes its input in place; here that is refused"
IN_PLACE = "a stage that changes its input in place is refused in the forward, not in the backward"
NODES = "looks for the names of their nodes in autograd's graph; here it is made by torch.utils.checkpoint"
NAMES = "parameters have the names of the Sequential: '0.weight', not 'partitions.0.0.weight'"
SHARED = "children on one device may share parameters"
SLOWER = "expects that of two layers of some 80 us one is the slower; which one is a matter of torch and machine"
UNNEEDED = "a forward that keeps nothing for its backward is not run again"
IN_BOTH = {
    "test_balance.py::test_balance_by_time_loop_resets_input": SLOWER,
    "test_checkpoint.py::test_detect_checkpointing_recomputing": UNNEEDED,
    "test_inplace.py::test_inplace_on_requires_grad": IN_PLACE,
    "test_inplace.py::test_inplace_on_not_requires_grad": PINS,
    "test_inplace.py::test_inplace_incorrect_grad": PINS,
    "skip/test_leak.py::test_delete_portal_tensor": PORTALS,
    "skip/test_stash_pop.py::test_stash": plugin.INTERNAL + "SkipTracker.tensors",
}
OF_THE_MODULE = {
    "test_checkpoint_mode": NODES,
    "test_checkpoint_eval": NODES,
    "test_partitions": NAMES,
    "test_named_children": NAMES,
}
DIFFERENT = {
    "torch": {
        **IN_BOTH,
        **{f"test_pipe.py::{test}": reason for test, reason in OF_THE_MODULE.items()},
        "test_pipe.py::test_pipe_without_rpc": "RPC is not needed here",
        "skip/test_leak.py::test_no_portal_without_pipe": PORTALS,
    },
    "torchgpipe": {
        **IN_BOTH,
        **{f"test_gpipe.py::{test}": reason for test, reason in OF_THE_MODULE.items()},
        "test_gpipe.py::test_recommend_auto_balance": "the message names a module of torchgpipe",
        "test_gpipe.py::test_verify_module_duplicate_parameters_in_distinct_children": SHARED,
        "test_balance.py::test_deprecated_torchgpipe_balancing": "about a module that torchgpipe had renamed",
        "test_deferred_batch_norm.py::test_input_requiring_grad": "the test itself does what today's torch refuses",
        "skip/test_leak.py::test_skip_leak": PORTALS,
        # Of the last release, as `test_no_portal_without_pipe` of PyTorch; by any name the plugin skips it.
        "skip/test_leak.py::test_no_portal_without_gpipe": PORTALS,
    },
}
"""Tests that cannot pass, or whose passing says nothing, and why; they run all the same."""


def swapped(test: str, theirs: str) -> str:
    """The text of a test with the modules changed that it imports from.

    Args:
        test: the text of a file.
        theirs: the module that is replaced, with all inside it.
    """
    lines = test.splitlines()
    imports = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: node.lineno, reverse=True):
        module = node.module or ""
        if module.startswith(HELPERS):
            new = [f"from {PLUGIN} import {', '.join(name.name for name in node.names)}"]
        elif f"{module}.".startswith(f"{theirs}."):
            inside = module.removeprefix(theirs)
            new = [import_of(name.name, inside) for name in node.names]
        else:
            continue
        lines[node.lineno - 1 : node.end_lineno] = new
    return "\n".join(lines) + "\n"


def import_of(name: str, inside: str) -> str:
    """The line that defines `name`, which was imported from the module `inside` of theirs."""
    if name in COUNTERPARTS:
        module, _, own = COUNTERPARTS[name].rpartition(".")
        return f"from {module} import {own} as {name}"
    module = f"{OURS}.skip" if inside.startswith(".skip") else OURS
    if isinstance(getattr(importlib.import_module(module), name, None), ModuleType | None):
        return f"import {PLUGIN}; {name} = {PLUGIN}.StandIn({name!r})"
    return f"from {module} import {name}"


def revision_of(folder: Path) -> dict[str, Any]:
    """Which revision of a suite is run: its commit, where the folder is of a git checkout, and what its files hold.

    Args:
        folder: the suite.
    """

    def git(*words: str) -> str | None:
        try:
            ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ran.stdout.strip() if ran.returncode == 0 else None

    digest, files = hashlib.sha256(), sorted(folder.rglob("*.py"))
    for file in files:
        name, text = file.relative_to(folder).as_posix().encode(), file.read_bytes()
        digest.update(b"%d %s %d " % (len(name), name, len(text)) + text)
    commit = git("rev-parse", "HEAD") if git("ls-files", "--", ".") else None
    if commit and git("status", "--porcelain", "--untracked-files=no", "--", "."):
        commit += ", with changes"
    return {"commit": commit, "sha256": digest.hexdigest(), "files": len(files)}


def prepare(source: Path, folder: Path, theirs: str) -> None:
    """Copy a suite and change its imports; no test of it needs RPC."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("test_*.py"):
        file.write_text(swapped(file.read_text(), theirs))
    conftest = folder / "conftest.py"
    # The hook has an argument that pytest 9 no longer knows.
    own = "globals().pop('pytest_ignore_collect', None)\n\n\n@pytest.fixture\ndef setup_rpc():\n    pass\n"
    conftest.write_text(f"{conftest.read_text()}\n\n{own}")
    (folder / "pytest.ini").write_text("[pytest]\n")


def outcomes(folder: Path) -> dict[str, tuple[str, str]]:
    """Run each file of a suite in a process of its own.

    Returns:
        Test to its outcome and the reason for that.
    """
    found: dict[str, tuple[str, str]] = {}
    own = Path(__file__).resolve().parent
    written = folder / "outcomes.jsonl"
    paths = os.pathsep.join([str(own), str(own.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, plugin.OUTCOMES: str(written)}
    options = ["-q", "-p", PLUGIN, "-p", "no:cacheprovider", "--timeout", "60"]
    for file in sorted(folder.rglob("test_*.py")):
        written.write_text("")
        command = [sys.executable, "-m", "pytest", *options, str(file.relative_to(folder))]
        try:
            subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS_A_FILE)
        except subprocess.TimeoutExpired:
            found[str(file.relative_to(folder))] = ("failed", f"took more than {SECONDS_A_FILE} s")
        for line in written.read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["test"], (entry["outcome"], entry["reason"]))
    return found


def sorted_out(found: Mapping[str, tuple[str, str]], different: Mapping[str, str]) -> dict[str, Any]:
    """Category to its tests: names where one reason holds for all, name to reason otherwise."""
    table: dict[str, Any] = {"counts": {}, "passed": [], "failed": {}, "needs CUDA": [], "skipped by the suite": {}}
    table |= {"not applicable": {}, "differs by design": {}}
    for test, (outcome, reason) in sorted(found.items()):
        listed = different.get(test.split("[")[0])
        internal = listed if listed and listed.startswith(plugin.INTERNAL) else reason
        if internal.startswith(plugin.INTERNAL) and outcome != "passed":
            table["not applicable"][test] = internal
        elif listed:
            table["differs by design"][test] = f"{listed} ({outcome})"
        elif outcome == "passed":
            table["passed"].append(test)
        elif outcome == "skipped" and any(word in reason.lower() for word in ("cuda", "gpu")):
            table["needs CUDA"].append(test)
        elif outcome == "skipped":
            table["skipped by the suite"][test] = reason
        else:
            table["failed"][test] = f"{outcome}: {reason}"
    table["counts"] = {category: len(tests) for category, tests in table.items() if category != "counts"}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", type=Path, help="test/distributed/pipeline/sync of a checkout of PyTorch")
    parser.add_argument("--torchgpipe", type=Path, help="tests of a checkout of torchgpipe")
    parser.add_argument("--output", type=Path, required=True, help="JSON of the results; a suite not run stays in it")
    options = parser.parse_args()
    import pytest
    import torch

    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    results |= {
        "date": date.today().isoformat(), "cores": os.cpu_count(), "processor": platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "pytest": pytest.__version__,
    }  # fmt: skip
    for name, theirs in THEIRS.items():
        if getattr(options, name) is None:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "tests"
            prepare(getattr(options, name), folder, theirs)
            revision = revision_of(getattr(options, name))
            results[theirs] = {"revision": revision, **sorted_out(outcomes(folder), DIFFERENT[name])}
        print(f"{theirs}: {json.dumps(results[theirs]['counts'])}", flush=True)
        for test, reason in results[theirs]["failed"].items():
            print(f"  {test}: {reason}")
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
