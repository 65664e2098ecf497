"""One process that trains a tiny model with the pipeline or, alone, with plain Trainer, and writes its losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import Trainer, set_seed

from hf_pipetransformer import PipeTransformerMixin, PipeTransformerTrainer
from tests.distributed.scenarios import scenario
from tests.support.models import QA_LENGTH, build_model, collate, make_dataset, make_rows
from tests.support.trainings import losses_of, our_arguments, plain_arguments


NUM_SAMPLES = 53
METRICS = ("eval_loss", "eval_count", "eval_sharpness")


def pad_to_the_longest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`collate` without the fixed length that it gives question answering."""
    batch = collate(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    assert longest <= QA_LENGTH
    return {key: value[:, :longest] if value.dim() == 2 else value for key, value in batch.items()}


class EveryThird(PipeTransformerTrainer):
    """A trainer whose user evaluates on a part of the data set only."""

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return SequentialSampler(range(3))


class Taught:
    """A user's `compute_loss`: in training a teacher looks at the images too."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss
        if self.model.training:
            wanted = 30 * inputs["pixel_values"].mean(dim=(-2, -1))
            loss = loss + torch.nn.functional.mse_loss(outputs.logits, wanted)
        return (loss, outputs) if return_outputs else loss


class TaughtTrainer(Taught, Trainer):
    pass


class TaughtPipeTransformerTrainer(Taught, PipeTransformerTrainer):
    pass


class SharpTrainer(TaughtTrainer):
    """A trainer of somebody else's: another loss, and predictions that are sharper than the model's."""

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, None if logits is None else 3 * logits, labels


class SharpPipelineTrainer(PipeTransformerMixin, SharpTrainer):
    pass


@scenario
def losses(folder: Path, kind: str, model: str, num_stages: str = "2", change: str = "") -> dict[str, Any]:
    """Losses and metrics of the trainer of one `kind`, `plain` or `ours`.

    Changes: `pad_to_the_longest`; `predict_first`, without labels before training; `evaluate_three`, with a sampler of
    three samples; `taught`, a loss that reads the images; `sharp`, somebody else's trainer.
    """
    set_seed(0)
    common: dict[str, Any] = {
        "max_steps": 20, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "seed": 1,
        "gradient_accumulation_steps": 2 if change == "predict_first" else 1,
    }  # fmt: skip
    data: dict[str, Any] = {
        "train_dataset": make_dataset(model, NUM_SAMPLES),
        "eval_dataset": make_dataset(model, 10, seed=1),
        "data_collator": pad_to_the_longest if change == "pad_to_the_longest" else collate,
        "compute_metrics": lambda prediction: {
            "count": len(prediction.label_ids),
            "sharpness": float(abs(prediction.predictions).mean()),
        },
    }
    built = build_model(model)
    if kind == "plain":
        arguments = plain_arguments(folder, **common)
        plain_class = SharpTrainer if change == "sharp" else TaughtTrainer if change == "taught" else Trainer
        trainer = plain_class(built, arguments, **data)
        trainer.model_accepts_loss_kwargs = model == "vit"
    else:
        args = our_arguments(folder, num_stages, pipeline_parallel_num_microbatches="2", **common)
        trainer_class = EveryThird if change == "evaluate_three" else PipeTransformerTrainer
        trainer_class = TaughtPipeTransformerTrainer if change == "taught" else trainer_class
        trainer = (SharpPipelineTrainer if change == "sharp" else trainer_class)(built, args, **data)
    if change == "predict_first":
        rows = make_rows(model, 5)
        trainer.predict([{key: value for key, value in row.items() if key != "labels"} for row in rows])
    trainer.train()
    return {
        "losses": losses_of(trainer),
        "evaluated": trainer.evaluate()["eval_count"] if change == "evaluate_three" else None,
        "metrics": {name: value for name, value in trainer.evaluate().items() if name in METRICS}
        if change == "sharp"
        else None,
    }
