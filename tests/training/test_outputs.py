"""Outputs that replicas cannot join are known before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.compat.trainer_compat import has_plain_loss
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.trainer.overrides import PipelineAccelerator
from hf_pipetransformer.training.evaluation import shape_without_rows
from tests.distributed.refusal_worker import with_prototypes
from tests.support.models import build_model, collate, make_dataset


def ones(*_: Any) -> dict[str, float]:
    return {}


@pytest.mark.parametrize(
    ("changes", "ignored", "has_rows"),
    [
        ({}, None, False),
        ({"compute_metrics": None}, None, True),
        ({}, ["prototypes"], True),
        # What code of the script's makes of them shows in the evaluation.
        ({"preprocess_logits_for_metrics": lambda logits, _: logits[0].mean()}, None, True),
        ({"model": build_model("bert_sequence")}, None, True),
    ],
)
def test_an_output_without_a_row_for_each_sample_is_found(
    tmp_path: Path, changes: dict[str, Any], ignored: list[str] | None, has_rows: bool
) -> None:
    rows = make_dataset("bert_sequence", 5)
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none", eval_strategy="epoch")
    given = {"model": with_prototypes(), "compute_metrics": ones, "eval_dataset": rows, **changes}
    trainer = Trainer(args=args, data_collator=collate, **given)
    trainer.accelerator = PipelineAccelerator(trainer.accelerator)
    found = shape_without_rows(trainer, trainer.model, ignored, SampleBatch(collate([rows[i] for i in range(5)])))
    assert (found is None) == has_rows
    if not changes and not ignored:
        assert found == str(tuple(trainer.model.classifier.weight.shape))


class WithLoss(Trainer):
    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


@pytest.mark.parametrize(
    ("kind", "changes", "is_plain"),
    [
        (Trainer, {}, True),
        (Trainer, {"compute_loss_func": lambda outputs, labels, **_: outputs["logits"].mean()}, False),
        (WithLoss, {}, False),
    ],
)
def test_a_loss_is_the_models_if_nobody_else_computes_one(
    tmp_path: Path, kind: type[Trainer], changes: dict[str, Any], is_plain: bool
) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True, report_to="none")
    assert has_plain_loss(kind(build_model("bert_sequence"), args, **changes)) == is_plain
    args.label_smoothing_factor = 0.1
    assert not has_plain_loss(kind(build_model("bert_sequence"), args, **changes))
