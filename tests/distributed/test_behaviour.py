"""What the layout must not change, beside the product of cases of `test_equality`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.loss_worker import losses
from tests.distributed.scenarios import run


SECONDS = 150

pytestmark = pytest.mark.distributed


def result(folder: Path, kind: str, model: str, change: str, **options: Any) -> dict[str, Any]:
    """One run, plain on one process or ours on two."""
    options = {"kind": kind, "model": model, "change": change, **options}
    found: dict[str, Any] = run(losses, folder / kind, 1 if kind == "plain" else 2, options, timeout=SECONDS)[0]
    return found


def test_replicas_pad_alike_where_the_loss_sees_padding(tmp_path: Path):
    """BERT's answers are a softmax over positions, padding included (field of question answering)."""
    plain = result(tmp_path, "plain", "bert_question", "pad_to_the_longest")
    ours = result(tmp_path, "ours", "bert_question", "pad_to_the_longest", num_stages="1")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_predicting_without_labels_first_changes_no_training(tmp_path: Path):
    plain = result(tmp_path, "plain", "vit", "predict_first")
    ours = result(tmp_path, "ours", "vit", "predict_first")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_loss_that_reads_the_images_in_training_gets_them_on_the_last_stage(tmp_path: Path):
    plain = result(tmp_path, "plain", "vit", "taught")
    ours = result(tmp_path, "ours", "vit", "taught")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_trainer_of_somebody_else_gets_a_pipeline(tmp_path: Path):
    """Its loss and its predictions stay: the numbers are those of that trainer alone."""
    plain = result(tmp_path, "plain", "vit", "sharp")
    ours = result(tmp_path, "ours", "vit", "sharp")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert plain["metrics"]["eval_sharpness"] > 0
    assert ours["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)


def test_a_users_evaluation_sampler_decides_how_many_samples_count(tmp_path: Path):
    ours = result(tmp_path, "ours", "vit", "evaluate_three", num_stages="1")
    assert ours["evaluated"] == 3
