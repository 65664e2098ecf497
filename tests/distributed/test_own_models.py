"""Models of a script's own, with a splitter: two stages that freeze and become two replicas follow one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.own_model_worker import train_all
from tests.distributed.scenarios import run
from tests.splitters.test_own_models import MODELS


pytestmark = pytest.mark.distributed


def test_stages_of_models_of_ones_own_follow_one_process(tmp_path: Path) -> None:
    alone_on, split_on = (run(train_all, tmp_path, size, timeout=120)[0] for size in (1, 2))
    for name in MODELS:
        alone, split = alone_on[name], split_on[name]
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert len(alone["losses"]) == 8
        assert (split["layout"]["num_frozen_layers"], split["layout"]["num_replicas"]) == (3, 2)
    for name in ("wav2vec2", "openai_gpt", "longformer", "clip"):
        alone, split = alone_on[name], split_on[name]
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert len(alone["losses"]) == 3 and split["layout"]["num_stages"] == 2
    events = (tmp_path / "Flat-2" / "pipetransformer_events.jsonl").read_text()
    assert '"num_stages": 2' in events
