"""`push_to_hub` uploads what plain Trainer uploads, from one rank."""

from __future__ import annotations

import pytest

from tests.conformance.hub_worker import push_all
from tests.conformance.runs import TOLERANCE, Run, cases_of
from tests.distributed.launches import Launches
from tests.support.comparison import tensor_difference
from tests.support.models import has_zero_gradient


RUNS = [Run(strategy, {"strategy": strategy}, (2, 1)) for strategy in ("every_save", "checkpoint", "end")]

# What the pipeline writes of its own, beside the files of Trainer.
OWN_FILES = {"pipetransformer_events.jsonl", "model_card.json"}

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(push_all, tmp_path_factory.mktemp("hub"), cases_of([*RUNS, *(run.reference for run in RUNS)]))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_uploads_are_trainers(launches: Launches, run: Run):
    ours, plain = launches.outcome(run.layout, run.name), launches.outcome(None, run.name)
    expected = plain.ranks[0]["uploads"]
    assert len(expected) == {"every_save": 4, "checkpoint": 7, "end": 1}[run.name]
    found = [
        {**upload, "files": [name for name in upload["files"] if name not in OWN_FILES]}
        for upload in ours.ranks[0]["uploads"]
    ]
    assert found == expected
    assert ours.ranks[1]["uploads"] == []
    assert ours.ranks[0]["pushes"] == plain.ranks[0]["pushes"]
    assert ours.tensors.keys() == plain.tensors.keys()
    far = {
        name: difference
        for name, theirs in plain.tensors.items()
        if not has_zero_gradient("vit", name)
        and (difference := tensor_difference(ours.tensors[name], theirs)) > TOLERANCE
    }
    assert far == {}
