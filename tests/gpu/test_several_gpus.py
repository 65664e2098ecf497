"""The GPU check (`make gpu-check`): NCCL, two GPUs, every precision: exact enough, and no deadlock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.test_behaviour import run


# float32 sums in another order on a GPU; half precisions round every product.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
ENVIRONMENT = {"ACCELERATE_USE_CPU": "false"}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two GPUs with NCCL, found {torch.cuda.device_count()}"
    ),
]


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
@pytest.mark.parametrize("model", ["bert_sequence", "bert_masked", "vit"])
@pytest.mark.parametrize(("num_stages", "schedule"), [("2", "1f1b"), ("2", "gpipe"), ("1", "1f1b")])
def test_losses_on_gpus_are_those_of_trainer(
    tmp_path: Path, precision: str, model: str, num_stages: str, schedule: str
):
    options = ["--precision", precision, "--num_stages", num_stages, "--schedule", schedule]
    plain = run(tmp_path, "plain", model, 1, *options, environment={**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "0"})
    ours = run(tmp_path, "ours", model, 2, *options, environment=ENVIRONMENT)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=TOLERANCES[precision])
