"""Models of a script's own, with a splitter: two stages that freeze and become two replicas follow one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launcher import launch
from tests.test_own_models import MODELS


WORKER = Path(__file__).with_name("own_model_worker.py")

pytestmark = pytest.mark.distributed


def test_stages_of_models_of_ones_own_follow_one_process(tmp_path: Path) -> None:
    for num_processes in (1, 2):
        launch(WORKER, [tmp_path], num_processes=num_processes, timeout=120)
    for name in MODELS:
        alone, split = (json.loads((tmp_path / f"{name}-{size}.json").read_text()) for size in (1, 2))
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert len(alone["losses"]) == 8
        assert (split["layout"]["num_frozen_layers"], split["layout"]["num_replicas"]) == (3, 2)
    for name in ("wav2vec2", "openai_gpt", "longformer", "clip"):
        alone, split = (json.loads((tmp_path / f"{name}-{size}.json").read_text()) for size in (1, 2))
        assert split["losses"] == pytest.approx(alone["losses"], rel=1e-5), name
        assert len(alone["losses"]) == 3 and split["layout"]["num_stages"] == 2
    events = (tmp_path / "Flat-2" / "pipetransformer_events.jsonl").read_text()
    assert '"num_stages": 2' in events
