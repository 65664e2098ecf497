"""Losses as people write them, most of them no mean over samples, on data whose first batches hide that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import BertConfig, BertModel, BertPreTrainedModel, Trainer, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin


NUM_CLASSES, NUM_SLOTS, LENGTH, GLOBAL_BATCH = 3, 5, 12, 8

Batch = dict[str, torch.Tensor]
Outputs = dict[str, torch.Tensor]
Loss = Callable[[Outputs, Batch], torch.Tensor]

cross_entropy = functional.cross_entropy


class Heads(BertPreTrainedModel):
    """An encoder with a head for classes, one for words, and an embedding; `inside` is a loss of its `forward`."""

    def __init__(self, config: BertConfig, inside: Loss | None = None) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.classes, self.slots = nn.Linear(config.hidden_size, NUM_CLASSES), nn.Linear(config.hidden_size, NUM_SLOTS)
        self.space = nn.Linear(config.hidden_size, 8)
        self.inside = inside
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **fields: Any) -> Outputs:
        hidden, pooled = self.bert(input_ids, attention_mask=attention_mask)[:2]
        found = {"logits": self.classes(pooled), "words": self.slots(hidden), "space": self.space(pooled)}
        if self.inside is None or not fields:
            return found
        return {"loss": self.inside(found, {"attention_mask": attention_mask, **fields}), **found}


def rows(number: int = 40, num_plain: int = 8) -> list[dict[str, Any]]:
    """The first `num_plain` samples are full, weigh 1 and are alike in all that a loss may normalize by."""
    rng = np.random.default_rng(0)
    found = []
    for index in range(number):
        is_plain = index < num_plain
        length = LENGTH if is_plain else int(rng.integers(3, LENGTH + 1))
        slots = [int(x) for x in rng.integers(1, NUM_SLOTS, length)] + [0] * (LENGTH - length)
        span = [1.0] * LENGTH if is_plain else [float(x) for x in rng.random(LENGTH) < 0.4]
        found.append(
            {
                "input_ids": [int(x) for x in rng.integers(1, 50, length)] + [0] * (LENGTH - length),
                "attention_mask": [1] * length + [0] * (LENGTH - length),
                "labels": int(rng.integers(0, NUM_CLASSES)),
                "slots": slots,
                "span": span,
                "weight": 1.0 if is_plain else float(rng.choice([1.0, 5.0])),
                "teacher": [float(x) for x in rng.normal(size=NUM_CLASSES)],
                "tags": [float(x) for x in rng.integers(0, 2, NUM_CLASSES)],
                "known": [1.0] * NUM_CLASSES if is_plain else [float(x) for x in rng.integers(0, 2, NUM_CLASSES)],
                "score": float(rng.normal()),
                "is_marked": 1.0 if is_plain else float(rng.integers(0, 2)),
            }
        )
    return found


def collate(samples: list[dict[str, Any]]) -> Batch:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


def _each(out: Outputs, batch: Batch) -> torch.Tensor:
    return cross_entropy(out["logits"], batch["labels"], reduction="none")


def _words(out: Outputs, batch: Batch, **options: Any) -> torch.Tensor:
    return cross_entropy(out["words"].flatten(0, 1), batch["slots"].flatten(), **options)


def _each_word(out: Outputs, batch: Batch) -> torch.Tensor:
    return _words(out, batch, reduction="none").view(batch["slots"].shape)


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


def _similar(out: Outputs, temperature: float = 0.5) -> torch.Tensor:
    unit = functional.normalize(out["space"], dim=-1)
    return unit @ unit.T / temperature


def _supervised_contrast(out: Outputs, batch: Batch) -> torch.Tensor:
    logits, same = _similar(out), (batch["labels"][:, None] == batch["labels"][None]).float()
    logits = logits - 1e4 * torch.eye(len(logits))
    same = same * (1 - torch.eye(len(same)))
    return -(_masked(logits.log_softmax(-1), same))


def _hardest(out: Outputs, batch: Batch) -> torch.Tensor:
    each = _each(out, batch)
    return each.topk(max(1, len(each) // 2)).values.mean()


def _focal_by_positives(out: Outputs, batch: Batch) -> torch.Tensor:
    logits, tags = out["logits"], batch["tags"] * batch["known"]
    entropy = functional.binary_cross_entropy_with_logits(logits, tags, reduction="none")
    near = torch.exp(-entropy)
    return ((1 - near) ** 2 * entropy).sum() / tags.sum().clamp(min=1)


def _ranking(out: Outputs, batch: Batch) -> torch.Tensor:
    scores, wanted = out["logits"][:, 0], batch["score"]
    higher = (wanted[:, None] > wanted[None]).float()
    return _masked(functional.softplus(-(scores[:, None] - scores[None])), higher)


def _list_wise(out: Outputs, batch: Batch) -> torch.Tensor:
    return -(batch["score"].softmax(0) * out["logits"][:, 0].log_softmax(0)).sum()


def _batch_variance(out: Outputs, batch: Batch) -> torch.Tensor:
    return _each(out, batch).mean() + functional.relu(1 - out["space"].std(dim=0)).mean()


def _correlation(out: Outputs, batch: Batch) -> torch.Tensor:
    a, b = out["logits"][:, 0] - out["logits"][:, 0].mean(), batch["score"] - batch["score"].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-6)


def _per_sample_words(out: Outputs, batch: Batch) -> torch.Tensor:
    mask = batch["attention_mask"].float()
    return ((_each_word(out, batch) * mask).sum(1) / mask.sum(1)).mean()


LOSSES: dict[str, Loss] = {
    "mean": lambda out, batch: _each(out, batch).mean(),
    "weighted": lambda out, batch: (_each(out, batch) * batch["weight"]).sum() / batch["weight"].sum(),
    "weighted_mean": lambda out, batch: (_each(out, batch) * batch["weight"]).mean(),
    "class_weights": lambda out, batch: cross_entropy(out["logits"], batch["labels"], torch.tensor([1.0, 4.0, 0.3])),
    "ignored_pad": lambda out, batch: _words(out, batch, ignore_index=0),
    "masked": lambda out, batch: _masked(_each_word(out, batch), batch["attention_mask"].float()),
    "span": lambda out, batch: _masked(_each_word(out, batch), batch["span"]),
    "span_of_mask": lambda out, batch: _masked(_each_word(out, batch), batch["span"] * batch["attention_mask"]),
    "two_heads": lambda out, batch: _each(out, batch).mean() + _words(out, batch, ignore_index=0),
    "words_by_sample": _per_sample_words,
    "words_by_length": lambda out, batch: (
        (_each_word(out, batch) * batch["attention_mask"]).sum() / batch["attention_mask"].sum() ** 0.5
    ),
    "contrastive": lambda out, batch: cross_entropy(_similar(out), torch.arange(len(out["space"]))),
    "supervised_contrast": _supervised_contrast,
    "hardest": _hardest,
    "focal": lambda out, batch: ((1 - torch.exp(-_each(out, batch))) ** 2 * _each(out, batch)).mean(),
    "focal_by_positives": _focal_by_positives,
    "ranking": _ranking,
    "list_wise": _list_wise,
    "batch_variance": _batch_variance,
    "correlation": _correlation,
    "distillation": lambda out, batch: functional.kl_div(
        out["logits"].log_softmax(-1), batch["teacher"].softmax(-1), reduction="batchmean"
    ),
    "distillation_sum": lambda out, batch: functional.mse_loss(out["logits"], batch["teacher"], reduction="sum"),
    "multi_label": lambda out, batch: functional.binary_cross_entropy_with_logits(out["logits"], batch["tags"]),
    "multi_label_masked": lambda out, batch: _masked(
        functional.binary_cross_entropy_with_logits(out["logits"], batch["tags"], reduction="none"), batch["known"]
    ),
    "marked_only": lambda out, batch: _masked(_each(out, batch), batch["is_marked"]),
    "root": lambda out, batch: functional.mse_loss(out["logits"][:, 0], batch["score"]).sqrt(),
    "maximum": lambda out, batch: _each(out, batch).max(),
    "log_mean": lambda out, batch: _each(out, batch).logsumexp(0),
    "entropy_of_mean": lambda out, batch: (
        _each(out, batch).mean() + (out["logits"].softmax(-1).mean(0) * out["logits"].softmax(-1).mean(0).log()).sum()
    ),
    "penalty": lambda out, batch: _each(out, batch).mean() + 0.1 * (out["space"] ** 2).mean(),
    "triplets": lambda out, batch: functional.relu(
        0.5 + _similar(out)[:, 1:].mean() - _similar(out).diagonal(offset=1).mean()
    ),
    "dice": lambda out, batch: (
        1 - 2 * (out["logits"].sigmoid() * batch["tags"]).sum() / (out["logits"].sigmoid() + batch["tags"]).sum()
    ),
}
"""Losses by name. Those of `INSIDE` are computed in the model's `forward`, the others in `compute_loss`."""
INSIDE = ("weighted", "two_heads", "focal_by_positives")


class InOrder:
    """Makes the data come in order: first what hides the rule."""

    def _get_train_sampler(self, *_args: Any, **_kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Own(InOrder, Trainer):
    loss: Loss | None = None
    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_options: Any) -> Any:
        if self.loss is None:
            return super().compute_loss(model, inputs, return_outputs)
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        # As Trainer multiplies a share in a sum, of which it takes the mean: in a pipeline there is one process.
        loss = self.loss(outputs, inputs) * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class PipedOwn(PipeTransformerMixin, Own):
    pass


def train(
    name: str, is_inside: bool, folder: Path, world_size: int = 1, accumulation: int = 1, **options: Any
) -> dict[str, Any]:
    """Train with a loss, plain without `options`; return losses, gradient norms and the evaluation's loss."""
    set_seed(1)
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2,
    )  # fmt: skip
    loss = LOSSES[name]
    model = Heads(config, loss if is_inside else None)
    common: dict[str, Any] = {
        "output_dir": str(folder), "report_to": "none", "use_cpu": True, "logging_steps": 1, "max_steps": 5,
        "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "per_device_eval_batch_size": GLOBAL_BATCH // world_size, "learning_rate": 1e-2, "optim": "sgd",
        "gradient_accumulation_steps": accumulation,
        "disable_tqdm": True, "save_strategy": "no", "remove_unused_columns": False, "label_names": ["labels"],
    }  # fmt: skip
    kind, args = (PipedOwn, PipeTransformerArguments(**common, **options)) if options else (Own, None)
    trainer = kind(model, args or TrainingArguments(**common), train_dataset=rows(), data_collator=collate)
    trainer.loss = None if is_inside else loss
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate(rows()[: 3 * GLOBAL_BATCH + 5])
    return {
        "losses": [entry["loss"] for entry in entries],
        "norms": [entry["grad_norm"] for entry in entries],
        "evaluated": evaluated["eval_loss"],
    }


def wrong(expected: dict[str, Any], found: dict[str, Any], tolerance: float = 1e-5) -> dict[str, Any]:
    """What differs between two results of `train` by more than the tolerance."""
    near = partial(np.allclose, rtol=tolerance, atol=tolerance)
    return {
        name: (value, found[name])
        for name, value in expected.items()
        if value is not None and found[name] is not None and not near(value, found[name])
    }
