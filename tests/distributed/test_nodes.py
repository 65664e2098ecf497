"""Several nodes: two launch groups of two processes, K from 2 on each node to 1, as one process trains."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import resume_worker, transition_worker
from tests.distributed.launcher import launch_nodes
from tests.distributed.launches import assert_trained_alike
from tests.distributed.scenarios import WORKER, arguments_of, start
from tests.distributed.transition_cases import NODES, WORLD_SIZE
from tests.distributed.transition_runs import REFERENCES, read_outcome
from tests.support.models import has_zero_gradient


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_two_nodes_train_as_one_process(tmp_path: Path):
    cases, references = tmp_path / "cases.json", tmp_path / "references.json"
    cases.write_text(json.dumps([NODES.as_json()]))
    references.write_text(json.dumps([NODES.reference.as_json()]))
    arguments = arguments_of(transition_worker.run_all, tmp_path, {"listed": str(cases), "kinds": ["pipeline"]})
    there = launch_nodes(WORKER, arguments, 2, WORLD_SIZE // 2, timeout=150)
    options = {"listed": str(references), "kinds": REFERENCES}
    alone = start(transition_worker.run_all, tmp_path, options=options, timeout=100)
    ours = read_outcome(tmp_path, NODES, WORLD_SIZE, there.output)
    # It begins with a node's two stages.
    lengths = [entry["places"][0] for entry in ours.ranks[0]["steps"]]
    assert lengths[0] == 2 and lengths[-1] == 1
    layouts = [[entry["layout"] for entry in rank["steps"]] for rank in ours.ranks]
    assert layouts == [layouts[0]] * WORLD_SIZE
    for kind in ("single", "plain"):
        one = read_outcome(tmp_path / kind, NODES.reference, 1, alone.output)
        assert_trained_alike(ours, one, NODES.tolerance, ignored=partial(has_zero_gradient, NODES.model))


@pytest.mark.slow
def test_output_folders_that_nodes_do_not_share_are_noticed_at_the_start(tmp_path: Path):
    launch_nodes(WORKER, arguments_of(resume_worker.run_all, tmp_path, {"acts": ["nodes"]}), 2, 1, timeout=150)
    for rank in range(2):
        found = json.loads((tmp_path / f"nodes.rank{rank}.json").read_text())
        assert re.search(
            r"output_dir is \S+node0 on rank 0 .* another folder, \S+node1, on rank 1", found["own"]["text"]
        )
        assert found["own"]["steps"] == 0
        assert found["shared"] == {"text": "", "steps": 1}
    assert not list(tmp_path.rglob(".pipetransformer-*"))
