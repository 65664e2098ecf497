"""The GPU check (`make gpu-check`): NCCL, two GPUs, every precision: exact enough, and no deadlock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.launcher import launch


WORKER = Path(__file__).with_name("gpu_worker.py")

# float32 sums in another order on a GPU; half precisions round every product.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two GPUs with NCCL, found {torch.cuda.device_count()}"
    ),
]


def losses(folder: Path, kind: str, num_processes: int, *options: str) -> list[float]:
    folder.mkdir()
    environment = {"ACCELERATE_USE_CPU": "false", "PIPETRANSFORMER_ALLOW_FP16": "1"}
    if num_processes == 1:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    launch(WORKER, [kind, *options, str(folder)], num_processes, timeout=240, env=environment)
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("precision", sorted(TOLERANCES))
@pytest.mark.parametrize("model", ["bert_sequence", "bert_masked", "vit"])
@pytest.mark.parametrize(("num_stages", "schedule"), [("2", "1f1b"), ("2", "gpipe"), ("1", "1f1b")])
def test_losses_on_gpus_are_those_of_trainer(
    tmp_path: Path, precision: str, model: str, num_stages: str, schedule: str
) -> None:
    expected = losses(tmp_path / "plain", "plain", 1, model, precision, num_stages, schedule)
    found = losses(tmp_path / "ours", "ours", 2, model, precision, num_stages, schedule)
    assert found == pytest.approx(expected, rel=TOLERANCES[precision])
