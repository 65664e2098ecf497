"""What TRL's SFTTrainer logs beside the loss, on two stages from the first step on; test_sft.py has all else of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl import SFTTrainer

from tests.distributed.scenarios import run
from tests.distributed.sft_worker import log_each_step
from tests.support import sft


pytestmark = pytest.mark.distributed


@pytest.mark.timeout(200)
def test_what_trl_logs_beside_the_loss_comes_from_the_first_step_on(tmp_path: Path) -> None:
    plain = sft.make_sft_trainer(SFTTrainer, tmp_path / "plain", max_steps=2, logging_steps=1, eval_steps=1)
    plain.train()
    found = run(log_each_step, tmp_path / "stages", 2, timeout=150)
    for entries in found:
        assert len(entries) == 4 and {"loss", "entropy", "num_tokens"} <= entries[0].keys()
        for own, expected in zip(entries, sft.logged(plain), strict=True):
            assert own == pytest.approx(expected, rel=1e-5)
