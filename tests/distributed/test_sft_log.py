"""What TRL's SFTTrainer logs beside the loss, on two stages from the first step on; test_sft.py has all else of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl import SFTTrainer

from hf_pipetransformer.trl import SFTPipelineTrainer
from tests.distributed.scenarios import WORLD_SIZE, run, scenario
from tests.support.sft import logged, make_sft_trainer


pytestmark = pytest.mark.distributed


@scenario
def log_each_step(folder: Path) -> list[dict[str, float]]:
    """Return the log of two steps on two stages, with an evaluation behind each."""
    options = {"max_steps": 2, "logging_steps": 1, "eval_steps": 1, "pipeline_parallel_size": WORLD_SIZE}
    batches = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 8 // WORLD_SIZE)
    trainer = make_sft_trainer(SFTPipelineTrainer, folder, **options, **batches)
    trainer.train()
    return logged(trainer)


@pytest.mark.timeout(200)
def test_what_trl_logs_beside_the_loss_comes_from_the_first_step_on(tmp_path: Path) -> None:
    plain = make_sft_trainer(SFTTrainer, tmp_path / "plain", max_steps=2, logging_steps=1, eval_steps=1)
    plain.train()
    found = run(log_each_step, tmp_path / "stages", 2, timeout=150)
    for entries in found:
        assert len(entries) == 4 and {"loss", "entropy", "num_tokens"} <= entries[0].keys()
        for own, expected in zip(entries, logged(plain), strict=True):
            assert own == pytest.approx(expected, rel=1e-5)
