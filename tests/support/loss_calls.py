"""Losses by the way in which they call the model: trainers for them, with and without a pipeline."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin
from tests.support.models import collate, make_rows


BATCH = 8

LossOf = Callable[[Any, Any, dict[str, torch.Tensor]], torch.Tensor]


class Own(Trainer):
    loss_of: LossOf
    calls = turns = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_kwargs: Any) -> Any:
        self.calls += 1
        loss = self.loss_of(self, model, inputs)
        return (loss, {"logits": torch.zeros(len(inputs["labels"]), 3)}) if return_outputs else loss


class Piped(PipeTransformerMixin, Own):
    pass


class Stepping(Own):
    """Reads the loss of each step, in a class before the mixin."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.steps_seen = [*getattr(self, "steps_seen", []), loss.item()]
        return loss


class PipedStepping(Stepping, Piped):
    pass


def _predicted(trainer: Any, model: Any, inputs: Any, loss_only: bool, *_: Any, **_kwargs: Any) -> Any:
    """A `prediction_step` that calls no other."""
    batch = dict(inputs)
    with torch.no_grad():
        loss, outputs = trainer.compute_loss(model, batch, return_outputs=True)
    return loss.mean().detach(), None if loss_only else outputs["logits"], batch["labels"]


class Predicting(Own):
    prediction_step = _predicted


class PipedPredicting(Piped):
    """Ahead of the mixin in the MRO."""

    prediction_step = _predicted


def mixed(_trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows of a batch are mixed by random numbers of three generators, before the model and behind it."""
    order, share = torch.randperm(len(batch["labels"])), random.random()
    mask = batch["attention_mask"] * batch["attention_mask"][order]
    logits = model(input_ids=batch["input_ids"][order], attention_mask=mask).logits
    noise = float(np.random.rand()) + torch.rand(())
    each = functional.cross_entropy(logits, batch["labels"][order], reduction="none")
    return each.mean() * (share + noise) + each.max()


def counting(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weighted by the number of the call."""
    return functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"]) * trainer.calls


def talking(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Talks to other processes, of which there are none for it."""
    accelerator = trainer.accelerator
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    accelerator.wait_for_everyone()
    told = accelerator.gather(loss.detach()).numel() * accelerator.reduce(loss.detach(), "sum")
    return loss * told * trainer.args.world_size * accelerator.num_processes


def remembering(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Counts behind the model what the next call reads in front of it, and reads the model's configuration."""
    ids = (batch["input_ids"] + trainer.turns) % model.config.vocab_size
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
    trainer.turns += 1 + int(logits[0, 0] > 1e9)
    return functional.cross_entropy(logits, batch["labels"])


class Meter:
    """A mean as many training scripts have it."""

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


def keeping(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Keeps behind the model, in objects of several kinds, what the next call reads in front of it."""
    if trainer.calls == 1:
        trainer.meter, trainer.meters, trainer.labels_seen = Meter(), defaultdict(Meter), set()
        trainer.table, trainer.args.share = np.zeros(3), 1.0
    kept = trainer.meter.total + trainer.meters["norm"].count + len(trainer.labels_seen) + trainer.table.sum()
    kept += trainer.args.share + float(trainer.model.center.sum())
    logits = model(**_inputs(batch)).logits
    loss = functional.cross_entropy(logits, batch["labels"]) * float(kept)
    trainer.meter.update(loss.item())
    trainer.meters["norm"].update(logits.norm().item())
    trainer.labels_seen.add(int(logits.argmax()))
    trainer.table[int(batch["labels"][0])] += 1
    trainer.args.share *= 0.5
    trainer.model.center.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
    return loss


def stopping(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Ends the training behind the model."""
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    trainer.control.should_training_stop = trainer.calls == 3
    return loss


def logging(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logs before the model is called, which every rank sees, and behind it, which only the last stage does."""
    trainer.log({"rows": float(len(batch["labels"]))})
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    trainer.log({"entropy": loss.item()})
    return loss


def of_whole_model(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    with trainer.whole_model():
        return loss


def of_what_is_generated(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    trainer.generate(batch["input_ids"], max_new_tokens=1)
    return loss


def of_an_evaluation(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    trainer.evaluate(make_rows("bert_sequence", BATCH))
    return loss


def of_a_part(trainer: Any, _model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    own = trainer.accelerator.unwrap_model(trainer.model)
    pooled = own.bert(batch["input_ids"], attention_mask=batch["attention_mask"])[1]
    return functional.cross_entropy(own.classifier(pooled), batch["labels"]) + pooled.square().mean()


def twice(_trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    first, second = (model(**_inputs(each)).logits for each in (batch, {**batch, "input_ids": batch["input_ids"] % 7}))
    return functional.cross_entropy(first, batch["labels"]) + (first - second).square().max()


def with_layers(_trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    outputs = model(**_inputs(batch), output_hidden_states=True)
    return functional.cross_entropy(outputs.logits, batch["labels"]) + outputs.hidden_states[1].square().mean()


def without_model(trainer: Any, _model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return trainer.model.classifier.weight.square().sum() * len(batch)


def with_gradient(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    own = trainer.accelerator.unwrap_model(trainer.model)
    embeds = own.bert.embeddings.word_embeddings.weight.detach().clone().requires_grad_()[batch["input_ids"]]
    return functional.cross_entropy(model(inputs_embeds=embeds).logits, batch["labels"])


def of_embeddings(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    own = trainer.accelerator.unwrap_model(trainer.model)
    size = own.bert.embeddings(batch["input_ids"]).square().mean()
    return functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"]) + size


def with_decay(trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    return loss + sum(p.square().sum() for p in trainer.model.parameters()).to(loss.dtype)


def penalized(_trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """With a penalty of what is trained, chosen by whether it asks for gradients."""
    loss = functional.cross_entropy(model(**_inputs(batch)).logits, batch["labels"])
    trained = [each for each in model.parameters() if each.requires_grad]
    return loss + 1e-3 * torch.stack([each.norm() for each in trained]).norm()


def doubled(_trainer: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    both = {name: torch.cat([value, value]) for name, value in _inputs(batch).items()}
    return functional.cross_entropy(model(**both).logits, torch.cat([batch["labels"]] * 2))


def _inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def made(
    loss: LossOf,
    folder: Path,
    world_size: int = 1,
    num_rows: int = 5 * BATCH,
    kinds: tuple[type, type] = (Own, Piped),
    **options: Any,
) -> Any:
    """A trainer with a loss; plain without `options`."""
    set_seed(3)
    config = BertConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    common: dict[str, Any] = {
        "output_dir": str(folder), "report_to": "none", "use_cpu": True, "logging_steps": 1, "max_steps": 4,
        "per_device_train_batch_size": BATCH // world_size, "learning_rate": 1e-2, "optim": "sgd",
        "disable_tqdm": True, "save_strategy": "no", "label_names": ["labels"],
    }  # fmt: skip
    kind: Any = kinds[bool(options)]
    args = PipeTransformerArguments(**common, **options) if options else TrainingArguments(**common)
    rows = make_rows("bert_sequence", num_rows)
    model = BertForSequenceClassification(config)
    model.register_buffer("center", torch.zeros(3), persistent=False)
    trainer: Any = kind(model, args, train_dataset=rows, data_collator=collate)
    kind.loss_of = staticmethod(loss)
    trainer.calls = 0
    return trainer


def logged(trainer: Any) -> list[float]:
    set_seed(4)  # Another trainer may have drawn since this one was made.
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [value for entry in entries for value in (entry["loss"], entry["grad_norm"])]
