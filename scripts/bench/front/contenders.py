"""What is compared: settings of the tasks, and ways to train them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from hf_pipetransformer import PipeTransformerArguments

from ..study import DEFAULTS


FULL = "full fine-tuning, epochs: "
VIEWS, FRESH, VIEWS_EPOCHS = "views", "fresh augmentation", 10
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0}
LORA_RATE = 2e-3
STORED = {"freeze_policy": "fixed", "activation_cache": "on"}


@dataclass(frozen=True)
class TaskSettings:
    """What a task's runs have in common.

    Args:
        metric: of the scores, in percent, the one that is compared.
        num_training: samples.
        num_epochs: of the longest full fine-tuning.
        batch: samples of an optimizer step.
        num_layers: of the model.
        rate: learning rate of full fine-tuning.
    """

    metric: str
    num_training: int
    num_epochs: int
    batch: int
    num_layers: int
    rate: float


_SENTENCES, _QUESTIONS = TaskSettings("accuracy", 3_000, 4, 32, 6, 1e-4), TaskSettings("f1", 1_000, 4, 16, 6, 2e-4)
_CIFAR10, _DIGITS = (TaskSettings("accuracy", number, 5, 32, 12, 3e-4) for number in (2_000, 1_000))
SETTINGS = {
    "sst2": _SENTENCES, "sst2_no_dropout": _SENTENCES, "squad": _QUESTIONS, "squad_no_dropout": _QUESTIONS,
    "answers": _QUESTIONS, "answers_no_dropout": _QUESTIONS, "cifar10": _CIFAR10, "cifar10_augmented": _CIFAR10,
    "entailment": _SENTENCES, "digits": _DIGITS, "sst2_middle": replace(_SENTENCES, num_training=6_400),
    "squad_middle": replace(_QUESTIONS, num_training=3_200), "sst2_long": replace(_SENTENCES, num_training=20_000),
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """How to train.

    Args:
        num_epochs: planned from the start, the learning rate falls linearly over them.
        options: of freezing and the cache.
        num_top_layers: only they and the head are trained, by `requires_grad`; None for all.
        lora: options of LoRA on all linear layers, if any.
        rate_factor: times the task's learning rate.
    """

    num_epochs: float
    options: dict[str, Any] = field(default_factory=lambda: {"freeze_policy": "none", "activation_cache": "off"})
    num_top_layers: int | None = None
    lora: dict[str, Any] | None = None
    rate_factor: float = 1.0

    def rate(self, task: TaskSettings) -> float:
        """Learning rate."""
        return (task.rate if self.lora is None else LORA_RATE) * self.rate_factor


class Cell(NamedTuple):
    """What is run once a seed; a result hangs on its settings."""

    task: str
    contender: Contender
    settings: dict[str, Any]


def contenders(task: TaskSettings) -> dict[str, Contender]:
    """Return those that run, by name."""
    longest, half = task.num_epochs, math.ceil(task.num_epochs / 2)
    table = {f"{FULL}{epochs}": Contender(epochs) for epochs in (0.5, 1, 1.5, *range(2, longest + 1))}
    for name, share in (("1/3", 1 / 3), ("1/2", 1 / 2), ("2/3", 2 / 3)):
        options = {**STORED, "freeze_at": f"0:{round(share * task.num_layers)}"}
        table[f"first {name} frozen"] = Contender(longest, options)
        table[f"first {name} frozen, half of the epochs"] = Contender(half, options)
    middle = round(task.num_layers / 2)
    options = {**STORED, "freeze_at": f"0:{middle}"}
    table["first 1/2 frozen, half of the epochs, twice the rate"] = Contender(half, options, rate_factor=2)
    table["everything, half of the epochs, twice the rate"] = Contender(half, rate_factor=2)
    unfreezing = {**STORED, "freeze_at": f"0:{middle},{math.ceil(task.num_training / task.batch)}:0"}
    table["first 1/2 frozen for an epoch, then one of all"] = Contender(2, unfreezing)
    table["top 2/3 only, no cache"] = Contender(longest, num_top_layers=round(2 / 3 * task.num_layers))
    table["LoRA"] = Contender(longest, lora=LORA)
    table["LoRA, half of the epochs"] = Contender(half, lora=LORA)
    table["gradient_norm"] = Contender(longest, {"freeze_policy": "gradient_norm", "activation_cache": "on"})
    return table


def cells_of(group: str) -> dict[str, Cell]:
    """Return what there is to run for a task by contender, or for `views`.

    Those are stored views of augmented images, beside fresh augmentation and beside none.
    """

    if group != VIEWS:
        task = SETTINGS[group]
        return {name: Cell(group, each, settings_of(task, each)) for name, each in contenders(task).items()}

    def cell(task: str, options: dict[str, Any]) -> Cell:
        contender = Contender(VIEWS_EPOCHS, options)
        return Cell(task, contender, {**settings_of(SETTINGS[task], contender), "task": task})

    half = {"freeze_policy": "fixed", "freeze_at": f"0:{_CIFAR10.num_layers // 2}"}
    cached, augmented = {**half, "activation_cache": "on"}, "cifar10_augmented"
    found = {FRESH: (augmented, {**half, "activation_cache": "off"}), "no augmentation": ("cifar10", cached)}
    found |= {f"views: {count}": (augmented, {**cached, "activation_cache_views": count}) for count in (1, 2, 4, 8)}
    return {name: cell(*each) for name, each in found.items()}


def settings_of(task: TaskSettings, contender: Contender) -> dict[str, Any]:
    """Everything that a run's result hangs on but its seed, as JSON gives it back."""
    kind = "lora" if contender.lora else "top" if contender.num_top_layers else "full"
    settings = {"num_training": task.num_training, "batch": task.batch, "kind": kind, **asdict(contender)}
    del settings["rate_factor"]  # The rate has it.
    settings["rate"] = contender.rate(task)
    if contender.options["freeze_policy"] not in ("none", "fixed"):
        options = [option for option in fields(PipeTransformerArguments) if option.name.startswith("freeze_")]
        settings[DEFAULTS] = {o.name: o.default for o in options if o.name not in contender.options}
    return json.loads(json.dumps(settings))
