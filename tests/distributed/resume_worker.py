"""Train with checkpoints, go on from them, and note what both runs end with; and try what must be refused.

One launch may run several of these, in this order, and each rank writes JSON files with its number:

    strangers         on one process: checkpoints that a run on two must refuse
    refuse            on two processes, after `strangers`
    elsewhere         on one, then two, then four processes: each goes on from the one before
    nodes             on several nodes
    die               on two processes: a run, and the same again, killed in the middle
    go_on             on two processes, after `die`
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cli import main as main_of_cli
from hf_pipetransformer.schedules.layout import Layout
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario
from tests.support.models import NUM_LAYERS, build_model, collate, make_dataset
from tests.support.settled_policy import Settled
from tests.support.trainings import our_arguments, plain_arguments


# 37 samples make 5 batches of 8 an epoch, the last one of 5 samples.
NUM_SAMPLES = 37
GLOBAL_BATCH = 8

ADAMW: dict[str, Any] = {"optim": "adamw_torch", "weight_decay": 0.05}
SGD: dict[str, Any] = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.02}
COSINE: dict[str, Any] = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
BY_LENGTH: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}


@dataclass(frozen=True)
class Case:
    """One run, resumed at several steps.

    Args:
        layout: K stages x R replicas at the start.
        model: a key of `tests.support.models.MODELS`.
        resume_at: the steps whose checkpoints are resumed.
        options: changes to the arguments.
        dropout: of every dropout module.
        draws: the collator adds noise from all three random number generators.
        plan: optimizer step to (K, F), replayed.
        streams: the training set has neither length nor indices.
        watches_weights: the policy is `Settled`, which remembers, and decides by changes of weights.
    """

    layout: tuple[int, int]
    model: str
    resume_at: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.1
    draws: bool = False
    plan: dict[int, tuple[int, int]] | None = None
    streams: bool = False
    watches_weights: bool = False


_TWO: dict[str, Any] = {"gradient_accumulation_steps": 2}
_NORMS: dict[str, Any] = {"freeze_policy": "gradient_norm", "freeze_interval": "4", "elastic": False}
_PLATEAU: dict[str, Any] = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "mode": "max"},
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
}
_MEMORY: dict[str, Any] = {"freeze_policy": "fixed", "freeze_at": "3:1,8:3", "pipeline_compression": "memory"}
_SHRINKING = {0: (4, 0), 3: (2, 1), 9: (1, 2)}

CASES: dict[str, Case] = {
    # 5 steps an epoch; 3 with two batches each.
    "1x1-adamw-linear-accumulation": Case((1, 1), "bert_sequence", (4,), ADAMW | _TWO),
    "1x1-sgd-cosine-drawing-collator": Case((1, 1), "vit", (5, 7), SGD | COSINE, draws=True),
    "1x1-by-length": Case((1, 1), "bert_token", (3, 5), ADAMW | BY_LENGTH),
    "1x1-norms-mid-interval": Case((1, 1), "bert_sequence", (6,), ADAMW | _NORMS),
    "1x1-stream": Case((1, 1), "bert_sequence", (3,), ADAMW, streams=True),
    "2x1-stream": Case((2, 1), "bert_sequence", (3,), ADAMW, streams=True),
    "1x1-plateau": Case((1, 1), "bert_sequence", (6,), ADAMW | _PLATEAU),
    "2x1-adamw-linear-accumulation": Case((2, 1), "bert_sequence", (4,), ADAMW | _TWO),
    "2x1-tied-sgd-cosine": Case((2, 1), "bert_masked", (5, 7), SGD | COSINE),
    "2x1-norms-mid-interval": Case((2, 1), "vit", (6,), ADAMW | _NORMS, draws=True),
    # By sizes K stays 2 at F=1 and is halved at F=3: what fits is what fitted at the start of the run.
    "2x1-memory": Case((2, 1), "bert_sequence", (6,), ADAMW | _MEMORY),
    # It is calm at 4, for the first time, and at 8; weights have changed since 4.
    "2x1-weights-mid-interval": Case(
        (2, 1),
        "bert_sequence",
        (6,),
        ADAMW | {"freeze_interval": "4", "elastic": False},
        watches_weights=True,
    ),
    "1x2-adamw-cosine-accumulation": Case((1, 2), "vit", (4,), ADAMW | COSINE | _TWO, draws=True),
    "1x2-by-length": Case((1, 2), "bert_token", (3, 5), ADAMW | BY_LENGTH),
    "2x2-adamw-linear-accumulation": Case((2, 2), "bert_sequence", (4,), ADAMW | _TWO),
    # Resumed between two transitions, and right before the step that begins with the second.
    "4-2-1-accumulation": Case((4, 1), "vit", (5, 9), ADAMW | _TWO, draws=True, plan=_SHRINKING),
    # Resumed in the middle of an epoch, right before a transition.
    "4-2-1-mid-epoch": Case((4, 1), "vit", (3, 9), ADAMW, plan=_SHRINKING),
    "4-2-1-mid-epoch-drawing": Case((4, 1), "vit", (3, 9), ADAMW, draws=True, plan=_SHRINKING),
}


def all_of(layout: tuple[int, int]) -> dict[str, Case]:
    """Every model, optimizer, schedule, accumulation and policy under one layout."""
    return {
        f"{layout[0]}x{layout[1]}-{model}-{optim}-{schedule}-{accumulation}-{policy}": Case(
            layout,
            model,
            (4, 5),
            (ADAMW if optim == "adamw" else SGD)
            | (COSINE if schedule == "cosine" else {})
            | {"gradient_accumulation_steps": accumulation, "freeze_policy": policy, "freeze_interval": "3"}
            | {"elastic": False},
            draws=model == "vit",
        )
        for model in ("bert_sequence", "bert_masked", "vit")
        for optim in ("adamw", "sgd")
        for schedule in ("linear", "cosine")
        for accumulation in (1, 2)
        for policy in ("none", "gradient_norm")
    }


# For `make test-all`.
PRODUCT: dict[tuple[int, int], dict[str, Case]] = {
    layout: all_of(layout) for layout in ((1, 1), (2, 1), (1, 2), (2, 2))
} | {
    (4, 1): {
        f"4-2-1-{model}-{accumulation}": Case(
            (4, 1),
            model,
            (3, 8, 9, 10),
            ADAMW | {"gradient_accumulation_steps": accumulation},
            plan=_SHRINKING,
        )
        for model in ("bert_masked", "vit")
        for accumulation in (1, 2)
    }
}

_FALLING: dict[str, Any] = {"freeze_policy": "fixed", "freeze_at": "2:3,6:0,9:1", "pipeline_compression": "memory"}
_UNFROZEN = {0: (2, 0), 2: (1, 3), 6: (2, 0), 9: (2, 1)}
# Resumed while three layers are frozen, right before the step that begins with their unfreeze, and after it. With K >
# 1 cuts are replayed: those that are planned hang on measured times.
UNFREEZING: dict[tuple[int, int], dict[str, Case]] = {
    (1, 1): {"1x1-unfreezing": Case((1, 1), "bert_sequence", (4, 6, 8), ADAMW | COSINE | _FALLING)},
    (2, 1): {
        "2-1-2-tied-unfreezing": Case((2, 1), "bert_masked", (4, 6, 8), ADAMW | COSINE, plan=_UNFROZEN),
        "2-1-2-unfreezing": Case((2, 1), "vit", (4, 6, 8), ADAMW, plan=_UNFROZEN),
    },
}


def layout_of(num_stages: int, num_frozen: int, num_microbatches: int = 2) -> Layout:
    blocks = 2 * NUM_LAYERS + 2
    return Layout(
        num_layers=NUM_LAYERS,
        num_frozen_layers=num_frozen,
        num_stages=num_stages,
        num_replicas=WORLD_SIZE // num_stages,
        boundaries=tuple(blocks * stage // num_stages for stage in range(num_stages + 1)),
        num_microbatches=num_microbatches,
        schedule="1f1b",
    )


def write_plan(path: Path, plan: dict[int, tuple[int, int]]) -> None:
    """An events file that holds the plan, the same on every rank."""
    lines = []
    for step, (num_stages, num_frozen) in plan.items():
        layout = layout_of(num_stages, num_frozen).as_event()
        event = {"event": "transition", "to": layout} if step else {"event": "run", "layout": layout}
        lines.append(json.dumps({"step": step, **event}))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{RANK}")
    unfinished.write_text("".join(f"{line}\n" for line in lines))
    unfinished.rename(path)


def drawing_collate(rows: Any) -> dict[str, torch.Tensor]:
    """Augmentation as scripts write it: noise from whatever generator is at hand."""
    batch = collate(rows)
    pixels = batch["pixel_values"]
    noise = torch.rand(pixels.shape) * random.random() * float(np.random.rand())
    return batch | {"pixel_values": pixels + noise}


class Record(TrainerCallback):
    """Asks for checkpoints, and notes the random number generators after the last step."""

    def __init__(self, save_at: tuple[int, ...] = (), stop_at: int | None = None) -> None:
        self.save_at = save_at
        self.stop_at = stop_at
        self.steps = 0
        self.random = ""

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.steps += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        control.should_save = state.global_step in self.save_at
        self.random = digest_of(
            [torch.get_rng_state(), str(random.getstate()), str(np.random.get_state()[1].tolist())]
        )

    def on_save(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if state.global_step == self.stop_at:
            os.kill(os.getpid(), signal.SIGKILL)


def digest_of(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(str(value).encode())
    return found.hexdigest()[:16]


def arguments(output: Path, num_stages: int, **changes: Any) -> PipeTransformerArguments:
    options = {
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "max_steps": 12,
        "logging_steps": 3,
        "logging_first_step": True,
        "seed": 7,
        # Checkpoints are asked for by the callback.
        "save_strategy": "steps",
        "save_steps": 1000,
        "freeze_warmup": 0,
        "freeze_min_active_layers": 1,
        # Whether it pays is decided on measured times.
        "activation_cache": "off",
        "pipeline_parallel_num_microbatches": 2,
    }
    return our_arguments(output, num_stages, batch=GLOBAL_BATCH, **(options | changes))


def make_trainer(
    case: Case, output: Path, record: Record, seed: int, kind: type[PipeTransformerTrainer] = PipeTransformerTrainer
) -> PipeTransformerTrainer:
    model = build_model(case.model, seed=seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = case.dropout
    # Nothing that the run depends on may come from the process as it happens to be.
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    training = make_dataset(case.model, NUM_SAMPLES)
    return kind(
        model=model,
        args=arguments(output, case.layout[0], **case.options),
        train_dataset=training.to_iterable_dataset() if case.streams else training,
        eval_dataset=make_dataset(case.model, 8, seed=1),
        data_collator=drawing_collate if case.draws else collate,
        callbacks=[record],
        policy=Settled() if case.watches_weights else None,
    )


def end_of(trainer: PipeTransformerTrainer, record: Record) -> dict[str, Any]:
    """What a run ended with, on this rank."""
    name_of = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    optimizer = trainer.optimizer.optimizer
    history = [
        {
            key: value
            for key, value in entry.items()
            if not key.startswith(("pipeline_", "frozen_", "cached_", "eval_"))
            and not key.startswith(("samples_", "tokens_", "memory_", "bubble_"))  # As long as it took.
        }
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    lines = Path(trainer.args.output_dir, "pipetransformer_events.jsonl").read_text().splitlines()
    return {
        "weights": {name: digest_of([p.data]) for name, p in trainer.model.named_parameters()},
        "optimizer": {
            name_of[id(parameter)]: digest_of([item for pair in sorted(state.items()) for item in pair])
            for parameter, state in optimizer.state.items()
        },
        "groups": [{key: str(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups],
        "scheduler": json.dumps(trainer.lr_scheduler.state_dict(), sort_keys=True),
        "random": record.random,
        "history": history,
        "layout": trainer.layout.as_event(),
        "steps": record.steps,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "events": [json.loads(line) for line in lines],
        "num_transitions": trainer.pipeline_run.context.seeds.num_transitions,
    }


def equal(folder: Path, names: list[str]) -> None:
    products = [*PRODUCT.values(), *UNFREEZING.values()]
    cases = {**CASES, **{name: case for product in products for name, case in product.items()}}
    for name in names:
        run_case(cases[name], folder, name)


def run_case(case: Case, folder: Path, name: str) -> None:
    if case.plan is not None:
        path = folder / name / "plan.jsonl"
        write_plan(path, case.plan)
        case = replace(case, options=case.options | {"layout_plan": str(path)})
    record = Record(case.resume_at)
    trainer = make_trainer(case, folder / name / "whole", record, seed=0)
    trainer.train()
    trainer.topology.barrier()
    outcome = {"case": asdict(case), "whole": end_of(trainer, record), "resumed": {}}
    for step in case.resume_at:
        record = Record()
        trainer = make_trainer(case, folder / name / f"from-{step}", record, seed=step)
        trainer.train(resume_from_checkpoint=str(folder / name / "whole" / f"checkpoint-{step}"))
        trainer.topology.barrier()
        outcome["resumed"][step] = end_of(trainer, record)
    (folder / f"{name}.rank{RANK}.json").write_text(json.dumps(outcome))


# ---- refusals ----

SAVED = Case((2, 1), "bert_sequence", (2, 4), ADAMW | {"max_steps": 6})


PLAIN = Case((1, 1), "bert_sequence", (3, 4), ADAMW | {"max_steps": 6}, dropout=0.0)


def plain_trainer(output: Path, seed: int) -> Trainer:
    """Plain Trainer with the settings of `PLAIN`, a checkpoint after every step."""
    ours = arguments(output, 1, **PLAIN.options)
    names = ("per_device_train_batch_size", "learning_rate", "weight_decay", "max_steps", "seed", "optim")
    kept = {name: getattr(ours, name) for name in names}
    args = plain_arguments(output, save_strategy="steps", save_steps=1, **kept)
    model = build_model(PLAIN.model, seed=seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trainer = Trainer(
        model=model, args=args, train_dataset=make_dataset(PLAIN.model, NUM_SAMPLES), data_collator=collate
    )
    trainer.model_accepts_loss_kwargs = False  # transformers#47688
    return trainer


def save_end(trainer: Trainer, path: Path) -> None:
    save_file({name: p.detach().clone() for name, p in trainer.model.named_parameters()}, path)


def strangers(folder: Path) -> None:
    """A run of plain Trainer that a pipeline goes on with, one the other way round, and one that saves no state."""
    trainer = plain_trainer(folder / "plain", seed=0)
    trainer.train()
    save_end(trainer, folder / "plain.safetensors")
    trainer = make_trainer(PLAIN, folder / "from-plain", Record(), seed=3)
    trainer.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-3"))
    save_end(trainer, folder / "from-plain.safetensors")

    make_trainer(PLAIN, folder / "to-plain", Record((3,)), seed=0).train()
    exported = folder / "exported" / "checkpoint-3"
    main_of_cli(["export-checkpoint", str(folder / "to-plain" / "checkpoint-3"), str(exported)])
    trainer = plain_trainer(folder / "exported", seed=3)
    trainer.train(resume_from_checkpoint=str(exported))
    save_end(trainer, folder / "to-plain.safetensors")

    alone = replace(SAVED, layout=(1, 1))
    model_only = replace(alone, options=alone.options | {"save_only_model": True})
    make_trainer(model_only, folder / "model-only", Record((2,)), seed=0).train()


def changed(name: str, change: Callable[[Path], None], of: str = "saved") -> Callable[[Path], Path]:
    """A copy of the checkpoint with something wrong in it."""

    def make(folder: Path) -> Path:
        copy = folder / name / "checkpoint-4"
        if RANK == 0:
            shutil.copytree(folder / of / "checkpoint-4", copy)
            change(copy)
        torch.distributed.barrier()
        return copy

    return make


def without(name: str) -> Callable[[Path], None]:
    return lambda copy: (copy / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda copy: (copy / name).write_bytes((copy / name).read_bytes()[:-40])


def of_version(version: int) -> Callable[[Path], None]:
    def change(copy: Path) -> None:
        path = copy / "pipetransformer" / "state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))

    return change


def another_plan(folder: Path) -> str:
    path = folder / "another-plan.jsonl"
    write_plan(path, {0: (2, 1)})
    torch.distributed.barrier()
    return str(path)


def five_labels() -> PreTrainedModel:
    model = build_model("bert_sequence")
    model.classifier = nn.Linear(model.config.hidden_size, 5)
    return model


def frozen_embeddings() -> PreTrainedModel:
    model = build_model("bert_sequence")
    model.bert.embeddings.requires_grad_(False)
    return model


class StubbornScheduler(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler whose state no JSON holds."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, lambda step: 1.0)
        self.memory = object()


class StubbornTrainer(PipeTransformerTrainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = StubbornScheduler(self.optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler


class OtherOptimizerTrainer(PipeTransformerTrainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        return torch.optim.Adamax, {"lr": args.learning_rate}


# Name of the attempt to what is different in it: `options`, `model`, `data`, `trainer`, `plan`, or the `folder`.
ATTEMPTS: dict[str, dict[str, Any]] = {
    "other_optim": {"options": {"optim": "sgd", "optim_args": None}},
    "other_optimizer_class": {"trainer": OtherOptimizerTrainer},
    "other_head": {"model": five_labels},
    "other_freezing": {"model": frozen_embeddings},
    "other_number_of_samples": {"data": lambda: make_dataset("bert_sequence", NUM_SAMPLES - 1)},
    "other_data": {"data": lambda: make_dataset("bert_sequence", NUM_SAMPLES, seed=1)},
    "other_plan": {"plan": another_plan},
    "cut_plain": {"folder": changed("cut-plain", cut("optimizer.pt"), of="plain")},
    "plain_other_optim": {
        "folder": lambda folder: folder / "plain" / "checkpoint-4",
        "options": {"optim": "sgd", "optim_args": None},
    },
    "plain_other_freezing": {"folder": lambda folder: folder / "plain" / "checkpoint-4", "model": frozen_embeddings},
    "model_only": {"folder": lambda folder: folder / "model-only" / "checkpoint-2"},
    "no_folder": {"folder": lambda folder: folder / "checkpoint-77"},
    "nothing_to_resume": {"folder": lambda folder: True},
    "no_state": {"folder": changed("no-state", without("pipetransformer/state.json"))},
    "no_random_file": {"folder": changed("no-random", without("pipetransformer/random-rank-1.safetensors"))},
    "no_weights": {"folder": changed("no-weights", without("model.safetensors"))},
    "cut_trainer_state": {"folder": changed("cut-state", cut("trainer_state.json"))},
    "cut_optimizer": {"folder": changed("cut-optimizer", cut("pipetransformer/optimizer-stage-1.safetensors"))},
    "other_version": {"folder": changed("other-version", of_version(99))},
    "differs_between_ranks": {"folder": lambda folder: folder / f"checkpoint-{RANK}"},
    "unsavable_scheduler": {"trainer": StubbornTrainer, "folder": lambda folder: None},
}


def refuse(folder: Path) -> None:
    record = Record(SAVED.resume_at)
    trainer = make_trainer(SAVED, folder / "saved", record, seed=0)
    trainer.train()
    trainer.topology.barrier()
    (folder / f"saved.rank{RANK}.json").write_text(json.dumps(end_of(trainer, record)))
    found = {name: attempt(folder, name, change) for name, change in ATTEMPTS.items()}
    (folder / f"refusals.rank{RANK}.json").write_text(json.dumps(found))
    skip_incomplete(folder)


def attempt(folder: Path, name: str, change: dict[str, Any]) -> dict[str, Any]:
    torch.distributed.barrier()
    options = dict(change.get("options", {}))
    if "plan" in change:
        options["layout_plan"] = change["plan"](folder)
    where = change.get("folder", lambda folder: folder / "saved" / "checkpoint-4")(folder)
    record = Record()
    case = replace(SAVED, options=SAVED.options | options)
    num_stages = options.pop("pipeline_parallel_size", case.layout[0])
    case = replace(case, layout=(num_stages, WORLD_SIZE // num_stages), options=case.options | options)
    case.options.pop("pipeline_parallel_size", None)
    try:
        trainer = make_trainer(
            case, folder / "attempts" / name, record, 3, change.get("trainer", PipeTransformerTrainer)
        )
        if "model" in change:
            trainer.model = change["model"]()
        if "data" in change:
            trainer.train_dataset = change["data"]()
        trainer.train(resume_from_checkpoint=where if where in (None, True) else str(where))
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "steps": record.steps}
    return {"kind": None, "text": "", "steps": record.steps}


def skip_incomplete(folder: Path) -> None:
    """The newest checkpoints of a run are incomplete or damaged: `True` means the newest sound one."""
    if RANK == 0:
        for step in (5, 6):
            shutil.copytree(folder / "saved" / "checkpoint-4", folder / "saved" / f"checkpoint-{step}")
        (folder / "saved" / "checkpoint-6" / "pipetransformer" / "state.json").unlink()
        weights = folder / "saved" / "checkpoint-5" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    torch.distributed.barrier()
    record = Record((6,))
    trainer = make_trainer(SAVED, folder / "saved", record, seed=3)
    ends = []
    # The second time from the end of the first, which has nothing left to do; at last once more by the same object.
    for where in (True, True, str(folder / "saved" / "checkpoint-4")):
        record.steps = 0
        trainer.train(resume_from_checkpoint=where)
        trainer.topology.barrier()
        ends.append(end_of(trainer, record))
    (folder / f"skipped.rank{RANK}.json").write_text(json.dumps(ends))


# ---- on other processes ----


class Noting(Dataset):
    """Notes which samples are read in batches, as by a loader."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.read.extend(indices)
        return [self.samples[index] for index in indices]


# One layer frozen before and one after the checkpoint that is resumed; one process, then two, then four.
MOVED = Case(
    (1, 1),
    "bert_sequence",
    (4, 8),
    ADAMW | {"freeze_policy": "fixed", "freeze_at": "3:1,7:2", "elastic": False},
    dropout=0.0,
)
# The same on one process and from there on two: stages of the second run read the first one's weights at step 4.
WATCHED = Case(
    (1, 1),
    "bert_sequence",
    (6,),
    ADAMW | {"freeze_interval": "4", "elastic": False},
    dropout=0.0,
    watches_weights=True,
)
MOVED_TO = {1: (1, 1), 2: (2, 1), 4: (2, 2)}
# Then, on four processes, two stages a rank, and from there on longer pipelines with the stages in a V.
CHUNKED: dict[str, Case] = {
    "interleaved": replace(MOVED, layout=(2, 2), options=MOVED.options | {"pipeline_schedule": "interleaved_1f1b"}),
    "in-a-v": replace(MOVED, layout=(4, 1), options=MOVED.options | {"pipeline_schedule": "zb_v"}),
}
# To the end of the second epoch, in batches of half the size.
SMALLER: dict[str, Any] = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "per_device_train_batch_size": GLOBAL_BATCH // 2 // WORLD_SIZE,
}


def elsewhere(folder: Path) -> None:
    """The run on one process from its beginning; on two from its step 4; on four from step 8 of those two, twice."""
    case, record = replace(MOVED, layout=MOVED_TO[WORLD_SIZE]), Record(MOVED.resume_at)
    came_from = {1: None, 2: folder / "moved-1" / "checkpoint-4", 4: folder / "moved-2" / "checkpoint-8"}[WORLD_SIZE]
    found = {"end": go_elsewhere(case, folder / f"moved-{WORLD_SIZE}", record, came_from)}
    if WORLD_SIZE < 4:
        watched = replace(WATCHED, layout=MOVED_TO[WORLD_SIZE])
        from_one = None if WORLD_SIZE == 1 else folder / "watched-1" / "checkpoint-6"
        found["watched"] = go_elsewhere(watched, folder / f"watched-{WORLD_SIZE}", Record(WATCHED.resume_at), from_one)
    if WORLD_SIZE == 2:
        smaller = replace(case, options=case.options | SMALLER | {"freeze_policy": "none", "freeze_at": None})
        found["smaller"] = go_elsewhere(smaller, folder / "smaller", Record((9,)), came_from)
        found["again"] = go_elsewhere(smaller, folder / "again", Record(), folder / "smaller" / "checkpoint-9")
    for name, chunked in CHUNKED.items() if WORLD_SIZE == 4 else ():
        found[name] = go_elsewhere(chunked, folder / name, Record((10,)), came_from)
        came_from = folder / name / "checkpoint-10"
    if WORLD_SIZE == 2:
        trainer = make_trainer(replace(PLAIN, layout=(2, 1)), folder / "plain-on-two", Record((4,)), seed=3)
        trainer.train(resume_from_checkpoint=str(folder / "plain" / "checkpoint-3"))
        if RANK == 0:
            save_end(trainer, folder / "plain-on-two.safetensors")
    (folder / f"elsewhere-{WORLD_SIZE}.rank{RANK}.json").write_text(json.dumps(found))


def go_elsewhere(case: Case, output: Path, record: Record, came_from: Path | None) -> dict[str, Any]:
    trainer = make_trainer(case, output, record, seed=0 if came_from is None else 3)
    data = trainer.train_dataset = Noting(trainer.train_dataset.with_format(None))
    record.on_train_begin = lambda *_args, **_kwargs: data.read.clear()
    trainer.train(resume_from_checkpoint=None if came_from is None else str(came_from))
    save_end(trainer, output / f"weights.rank{RANK}.safetensors")
    return end_of(trainer, record) | {"read": data.read}


# ---- a run that dies ----


def nodes(folder: Path) -> None:
    """On several nodes: with an output folder of each node's own, and with one for all."""
    found = {}
    for name, where in (("own", f"node{os.environ['GROUP_RANK']}"), ("shared", "all")):
        record = Record()
        case = Case((1, WORLD_SIZE), "bert_sequence", (), ADAMW | {"max_steps": 1})
        try:
            make_trainer(case, folder / where, record, seed=0).train()
            found[name] = {"text": "", "steps": record.steps}
        except ValueError as error:
            found[name] = {"text": str(error), "steps": record.steps}
    (folder / f"nodes.rank{RANK}.json").write_text(json.dumps(found))


KILLED = Case((2, 1), "vit", (3, 7), ADAMW | _TWO | {"save_total_limit": 1})


def die(folder: Path) -> None:
    run_case(replace(KILLED, resume_at=()), folder, "undisturbed")
    make_trainer(KILLED, folder / "killed", Record((3, 7), stop_at=7), seed=0).train()


def go_on(folder: Path) -> None:
    record = Record()
    # Python, numpy and torch begin as they did in the run that died, and must not stay so.
    trainer = make_trainer(KILLED, folder / "killed", record, seed=0)
    trainer.train(resume_from_checkpoint=True)
    (folder / f"went-on.rank{RANK}.json").write_text(json.dumps(end_of(trainer, record)))


ACTS = {act.__name__: act for act in (strangers, refuse, elsewhere, nodes, die, go_on)}


@scenario
def run_all(folder: Path, names: Sequence[str] = (), acts: Sequence[str] = ()) -> None:
    """Run cases, and then `ACTS`."""
    equal(folder, list(names))
    for act in acts:
        ACTS[act](folder)
