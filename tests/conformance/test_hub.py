"""`push_to_hub` uploads what plain Trainer uploads, from one rank."""

from __future__ import annotations

from functools import partial

import pytest

from tests.conformance.hub_worker import push_all
from tests.conformance.runs import TOLERANCE
from tests.distributed.launches import Outcome, Run, launches_of
from tests.support.comparison import far_tensors
from tests.support.models import has_zero_gradient


UPLOADS = {"every_save": 4, "checkpoint": 7, "end": 1}

# What the pipeline writes of its own, beside the files of Trainer.
OWN_FILES = {"pipetransformer_events.jsonl", "model_card.json"}

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

launches = launches_of(push_all, strict=())


@pytest.mark.parametrize("run", [Run(strategy, (2, 1)) for strategy in UPLOADS], ids=str)
def test_uploads_are_trainers(ours: Outcome, plain: Outcome, run: Run):
    expected = plain.ranks[0]["uploads"]
    assert len(expected) == UPLOADS[run.case]
    found = [
        {**upload, "files": [name for name in upload["files"] if name not in OWN_FILES]}
        for upload in ours.ranks[0]["uploads"]
    ]
    assert found == expected
    assert ours.ranks[1]["uploads"] == []
    assert ours.ranks[0]["pushes"] == plain.ranks[0]["pushes"]
    assert far_tensors(ours.tensors, plain.tensors, TOLERANCE, partial(has_zero_gradient, "vit")) == {}
