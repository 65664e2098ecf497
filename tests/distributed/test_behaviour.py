"""What the layout must not change, beside the product of cases of `test_equality`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import launch


WORKER = Path(__file__).with_name("loss_worker.py")
SECONDS = 150

pytestmark = pytest.mark.distributed


def run(
    folder: Path,
    kind: str,
    model: str,
    num_processes: int,
    *options: str,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One run of the worker."""
    output = folder / kind
    output.mkdir()
    arguments = [kind, model, output, "--world_size", str(num_processes), *options]
    launch(WORKER, arguments, num_processes, timeout=SECONDS, env=environment)
    return json.loads((output / "result.json").read_text())


def test_replicas_pad_alike_where_the_loss_sees_padding(tmp_path: Path):
    """BERT's answers are a softmax over positions, padding included (field of question answering)."""
    plain = run(tmp_path, "plain", "bert_question", 1, "--pad_to_the_longest")
    ours = run(tmp_path, "ours", "bert_question", 2, "--pad_to_the_longest", "--num_stages", "1")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_predicting_without_labels_first_changes_no_training(tmp_path: Path):
    plain = run(tmp_path, "plain", "vit", 1, "--predict_first")
    ours = run(tmp_path, "ours", "vit", 2, "--predict_first")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_loss_that_reads_the_images_in_training_gets_them_on_the_last_stage(tmp_path: Path):
    plain = run(tmp_path, "plain", "vit", 1, "--taught")
    ours = run(tmp_path, "ours", "vit", 2, "--taught")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_trainer_of_somebody_else_gets_a_pipeline(tmp_path: Path):
    """Its loss and its predictions stay: the numbers are those of that trainer alone."""
    plain = run(tmp_path, "plain", "vit", 1, "--sharp")
    ours = run(tmp_path, "ours", "vit", 2, "--sharp")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert plain["metrics"]["eval_sharpness"] > 0
    assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)


def test_a_users_evaluation_sampler_decides_how_many_samples_count(tmp_path: Path):
    ours = run(tmp_path, "ours", "vit", 2, "--evaluate_three", "--num_stages", "1")
    assert ours["evaluated"] == 3
