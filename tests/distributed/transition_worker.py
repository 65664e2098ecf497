"""Run a list of cases whose layout changes, in one launch, and write down all that the laws speak of.

References are two, each in a folder of its own: `single`, the same trainer on one process, and `plain`,
transformers.Trainer with a callback that freezes by hand.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.freeze.policy import FreezePolicy
from tests.distributed.equality_worker import digest
from tests.distributed.scenarios import RANK, WORLD_SIZE, Lines, run_case, scenario
from tests.distributed.transition_cases import GLOBAL_BATCH, GLOBAL_EVAL_BATCH, NUM_EVAL_SAMPLES, TransitionCase
from tests.distributed.transition_observer import Observer, encoder_parts, observe
from tests.support.models import MODELS, build_model, collate, make_rows
from tests.support.trainings import our_arguments, plain_arguments, weights_of


MODEL_SEED = 11
EVAL_SEED = 1
DROPOUT = 0.3


class Never(FreezePolicy):
    """A user's policy that freezes nothing, ever."""

    def target_num_frozen(self, signal):
        return 0.0


class OneByOne(FreezePolicy):
    """A user's policy: one more layer at each decision."""

    name = "one by one"

    def target_num_frozen(self, signal):
        return signal.num_frozen + 1


POLICIES = {"never": Never, "one_by_one": OneByOne}


class LoggedRows(Dataset):
    """Rows, with a line in a file of this process for each that is read: epoch and index.

    They hear of epochs as data sets that draw other samples in each.
    """

    def __init__(self, rows: list[dict[str, Any]], path: Path) -> None:
        self.rows = rows
        self.path = path
        self.epoch = -1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Path(f"{self.path}.{os.getpid()}").open("a") as file:
            file.write(f"{self.epoch} {index}\n")
        return self.rows[index]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class StreamedRows(IterableDataset):
    """Rows one after the other, without length or index."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class Average(TrainerCallback):
    """A user's moving average of the weights, which it reads after every step."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            value = parameter.detach()
            self.average[name] = value.clone() if name not in self.average else self.average[name].lerp(value, 0.2)


def users_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer and a schedule as users build them: over the whole model, biases without decay."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def pad_to_longest(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch whose length its samples decide, also for question answering."""
    batch = collate(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    return {name: value[:, :longest] if value.dim() > 1 else value for name, value in batch.items()}


class CountingLinear(nn.Linear):
    """A layer whose buffers change in every forward of training: one that is saved, one that is not."""

    def forward(self, x):
        if self.training:
            self.saved.mul_(0.9).add_(0.1)
            self.unsaved.add_(0.3)
        return super().forward(x)


def add_buffers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name.endswith(("layer.0.attention.self.query", "layer.2.intermediate.dense", "layer.3.output.dense")):
            module.__class__ = CountingLinear
            module.register_buffer("saved", torch.zeros(3))
            module.register_buffer("unsaved", torch.zeros(()), persistent=False)


class FreezeByHand(TrainerCallback):
    """What freezing and unfreezing mean, written down without the library: for plain Trainer."""

    def __init__(self, table: dict[int, int]) -> None:
        self.table = table
        self.frozen: list[nn.Module] = []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        if state.global_step not in self.table:
            return
        embeddings, layers = encoder_parts(model)
        num_frozen, inner = self.table[state.global_step], getattr(optimizer, "optimizer", optimizer)
        blocks = [embeddings, *layers[:num_frozen]] if num_frozen else []
        for module in self.frozen:
            if module not in blocks:
                del module.train
                module.train()
                # Its state went when it froze.
                module.requires_grad_(True)
        self.frozen = blocks
        for module in blocks:
            module.eval()
            module.train = lambda mode=True, module=module: module  # Trainer puts all in training mode every step.
            for parameter in module.parameters():
                # The optimizer passes over what has no gradient.
                parameter.requires_grad_(False)
                parameter.grad = None
                inner.state.pop(parameter, None)


class NormTrainer(Trainer):
    """Plain Trainer that writes the gradient norm of every layer and the head down before it clips."""

    norms: list[list[float]]

    def _clip_grad_norm(self, model):
        _, layers = encoder_parts(model)
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        embeddings, _ = encoder_parts(model)
        head = [p for p in model.parameters() if p not in inside and p not in set(embeddings.parameters())]
        self.norms.append([norm_of(list(part.parameters())) for part in layers] + [norm_of(head)])
        return super()._clip_grad_norm(model)


def norm_of(parameters: list[nn.Parameter]) -> float:
    return sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None) ** 0.5


def model_of(case: TransitionCase) -> nn.Module:
    model = build_model(case.model, MODEL_SEED)
    embeddings, layers = encoder_parts(model)
    frozen = {"freeze_prefix": [embeddings, layers[0]], "freeze_middle": [layers[2]]}
    for change in case.changes:
        for module in frozen.get(change, []):
            module.requires_grad_(False)
    if "buffers" in case.changes:
        add_buffers(model)
    if "dropout" in case.changes:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = DROPOUT
            elif hasattr(module, "dropout_prob"):
                module.dropout_prob = DROPOUT
    return model


def arguments_of(case: TransitionCase, output: Path, kind: str) -> TrainingArguments:
    options: dict[str, Any] = {
        "batch": GLOBAL_BATCH,
        "per_device_eval_batch_size": GLOBAL_EVAL_BATCH // WORLD_SIZE,
        "gradient_accumulation_steps": case.accumulation,
        "num_train_epochs": case.epochs,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 5,
        "seed": 7,
        **case.options,
    }
    if kind == "plain":
        return plain_arguments(output, **options)
    # Whether a cache pays hangs on the clock: it is on or off.
    options["activation_cache"] = "off"
    if kind == "single":
        if case.freeze_at:
            options |= {"freeze_policy": "fixed", "freeze_at": case.freeze_at}
        else:
            # No decision comes so late; a run that never freezes is left to Trainer.
            options |= {"freeze_policy": "schedule", "freeze_warmup": 0.999}
        return our_arguments(output, "auto", **options)
    options["pipeline_schedule"] = case.schedule
    if case.cached:
        options |= {"activation_cache": "on", "activation_cache_dir": str(output.with_name(f"{case.name}-cache"))}
    if case.plan:
        plan = output.with_suffix(f".plan{RANK}")
        plan.write_text(case.plan_lines())
        options["layout_plan"] = str(plan.rename(output.with_suffix(".plan")))
    if case.follows:
        options["layout_plan"] = str(output.with_name(f"{case.follows}-output") / "pipetransformer_events.jsonl")
    return our_arguments(output, "auto", **options | case.pipeline_options)


def trainer_of(case: TransitionCase, output: Path, kind: str, observer: Observer) -> Trainer:
    rows, model = make_rows(case.model, case.num_samples), model_of(case)
    train = LoggedRows(rows, output.with_name(f"{case.name}.drawn.rank{RANK}"))
    parts: dict[str, Any] = {
        "model": model,
        "args": arguments_of(case, output, kind),
        "train_dataset": StreamedRows(rows) if "stream" in case.changes else train,
        "eval_dataset": make_rows(case.model, NUM_EVAL_SAMPLES, EVAL_SEED),
        "data_collator": pad_to_longest if "pad_to_longest" in case.changes else collate,
    }
    if "optimizer" in case.changes:
        parts["optimizers"] = users_optimizer(model)
    callbacks: list[TrainerCallback] = [Average()] if "average" in case.changes else []
    if kind == "plain":
        trainer: Trainer = NormTrainer(**parts, callbacks=[FreezeByHand(case.frozen_at), *callbacks])
        trainer.norms = []
        if not MODELS[case.model].loss_uses_num_items:
            # Else Trainer takes the loss for one that honours `num_items_in_batch` and counts accumulation twice.
            trainer.model_accepts_loss_kwargs = False
        return trainer
    policy = POLICIES[case.policy]() if case.policy and kind == "pipeline" else None
    return observe(PipeTransformerTrainer, observer)(**parts, policy=policy, callbacks=[observer, *callbacks])


def run(case: TransitionCase, output: Path, kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    set_seed(0)
    torch._dynamo.utils.counters.clear()
    warnings = Lines(logging.WARNING)
    logger = logging.getLogger("hf_pipetransformer")
    logger.addHandler(warnings)
    observer = Observer(case)
    trainer = trainer_of(case, output, kind, observer)
    flags = {name: p.requires_grad for name, p in trainer.model.named_parameters()}
    trained = trainer.train()
    loader_workers = len(multiprocessing.active_children())
    weights = weights_of(trainer)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Average):
            weights |= {f"weights.average of {name}": value for name, value in callback.average.items()}
    values = {
        "log_history": trainer.state.log_history,
        "global_step": trainer.state.global_step,
        "best_global_step": trainer.state.best_global_step,
        "training_loss": trained.training_loss,
        "metrics": trainer.evaluate(),
        "weights": digest(weights),
        "buffers": {name: value.tolist() for name, value in trainer.model.named_buffers() if "saved" in name},
        "norms": getattr(trainer, "norms", []),
        "warnings": warnings.lines,
        "loader_workers": loader_workers,
        "num_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "graph_breaks": list(torch._dynamo.utils.counters["graph_break"]),
        **dataclasses.asdict(observer.record),
    }
    if kind != "plain":
        values["flags"] = [flags, {name: p.requires_grad for name, p in trainer.model.named_parameters()}]
    logger.removeHandler(warnings)
    return values, weights


@scenario
def run_all(folder: Path, listed: str, kinds: Sequence[str]) -> None:
    """Run a list of cases with each of the trainers `pipeline`, `single`, `plain`, the last two in their folders."""
    for fields in json.loads(Path(listed).read_text()):
        case = TransitionCase(**fields)
        for kind in kinds:
            where = folder if kind == "pipeline" else folder / kind
            where.mkdir(exist_ok=True)
            run_case(where, case.name, partial(run, case, where / f"{case.name}-output", kind))
