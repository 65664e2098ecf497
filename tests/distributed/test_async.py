"""Asynchronous 1F1B: each run gives the bits of one process that keeps every version of the weights.

A run in one process is told by a pipeline's who owned which parameter: that one must have run.
"""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.engine.weights.rows import casting_again
from tests.distributed.launches import (
    Launches,
    Layout,
    Outcome,
    Run,
    assert_trained_alike,
    launches_of,
    run_listed,
    slow_unless,
)
from tests.distributed.scenarios import noted, scenario
from tests.support.async_simulation import SimulatedStage, versions
from tests.support.models import build_model, collate, make_dataset
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


MODEL, GLOBAL_BATCH, NUM_EVALUATED = "bert_sequence", 8, 6
KINDS = ("pipeoptim", "vanilla", "stashing", "double_buffer", "spectrain", "xpipe")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim": "sgd"},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adamw": {"optim": "adamw_torch", "weight_decay": 0.1},
    "fused": {"optim": "adamw_torch_fused", "weight_decay": 0.1},
}


@dataclass(frozen=True)
class AsyncCase:
    """One training of twelve steps.

    Args:
        kind: of weights.
        optimizer: one of `OPTIMIZERS`.
        accumulation: batches of a step.
        num_microbatches: M.
        interval: steps between two drains.
        layouts: K and R.
        options: more of the pipeline's.
        trainers: more of Trainer's.
        num_samples: of the data set.
        asks: steps after which a callback asks for a checkpoint, for an evaluation, or reads the model.
        ends: other steps after which a window ends.
        resumes: the checkpoint from which the run whose name ends so goes on.
        draws: the collator draws random numbers for training batches.
    """

    kind: str = "pipeoptim"
    optimizer: str = "adamw"
    accumulation: int = 1
    num_microbatches: int = 1
    interval: int | None = None
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)
    options: dict[str, Any] = field(default_factory=dict)
    trainers: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 48
    asks: dict[int, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    resumes: str | None = None
    draws: bool = False

    @property
    def collator(self) -> Any:
        """Makes batches."""
        return drawing_collate if self.draws else collate

    @property
    def num_steps(self) -> int:
        """Of two epochs."""
        return 2 * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """The last one may be short."""
        return -(-self.num_samples // (GLOBAL_BATCH * self.accumulation))

    def windows(self) -> list[list[int]]:
        """Micro-batches of each step, by window."""
        every, first = self.interval or self.steps_per_epoch, self.steps_per_epoch
        size = self.accumulation * self.num_microbatches
        found, sizes = [], []
        for step in range(1, 2 * first + 1):
            amid = size // 2 if self.asks.get(step) == "read amid" else 0
            if amid:
                found.append([*sizes, amid])
                sizes = []
            sizes.append(size - amid)
            asked = step in self.asks and not amid
            if step % first == 0 or step % first % every == 0 or asked or step in self.ends:
                found.append(sizes)
                sizes = []
        return found


def drawing_collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Some tokens are others; not in an evaluation, which the comparison in one process leaves out.

    torch's generator is left alone: an evaluation's loader draws from it.
    """
    batch = collate(rows)
    if len(rows) == NUM_EVALUATED:
        return batch
    tokens = batch["input_ids"]
    is_other = torch.from_numpy(np.random.rand(*tokens.shape) < 0.3)
    return batch | {"input_ids": torch.where(is_other, random.randint(5, 12), tokens)}


def _cases() -> dict[str, AsyncCase]:
    cases = {}
    for kind in KINDS:
        for optimizer in OPTIMIZERS:
            for accumulation in (1, 2):
                # Two versions serve four stages from three micro-batches a step on.
                needs = 4 // accumulation if kind == "double_buffer" else 1
                cases[f"{kind}-{optimizer}-a{accumulation}"] = AsyncCase(
                    kind, optimizer, accumulation, needs, layouts=((2, 1), (4, 1))
                )
    return cases


CASES = {
    **_cases(),
    "drained": AsyncCase(interval=4, trainers={"logging_steps": 1}),
    "micro_batches": AsyncCase(num_microbatches=2, accumulation=2),
    "replicas": AsyncCase(layouts=((2, 2),)),
    "bf16": AsyncCase(trainers={"bf16": True}),
    "bf16-vanilla": AsyncCase("vanilla", "momentum", trainers={"bf16": True}, layouts=((2, 1), (4, 1))),
    "recomputed": AsyncCase("stashing", options={"pipeline_checkpoint": "always"}),
    "recomputed-layers": AsyncCase("stashing", options={"pipeline_checkpoint": "layers"}),
    "still": AsyncCase(trainers={"learning_rate": 0.0, "logging_steps": 1}, layouts=((2, 1), (4, 1), (2, 2))),
    "by-stage": AsyncCase(trainers={"max_grad_norm": 0.3}, layouts=((2, 1), (4, 1))),
    "by-last": AsyncCase(trainers={"max_grad_norm": 0.3}, options={"pipeline_clip": "last"}, layouts=((2, 1), (4, 1))),
    "asked": AsyncCase(
        asks={3: "save", 5: "evaluate", 8: "read", 10: "read early"},
        layouts=((2, 1), (4, 1)),
        resumes="checkpoint-3",
        draws=True,
    ),
    "saved": AsyncCase(
        "stashing",
        trainers={"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 5},
        ends=(4, 5, 8, 10),
        layouts=((2, 1), (4, 1)),
        resumes="checkpoint-4",
    ),
    "elastic": AsyncCase(
        options={"freeze_policy": "fixed", "freeze_at": "3:1,8:3", "pipeline_compression": "memory"},
        ends=(3, 8),
        layouts=((2, 1), (4, 1)),
    ),
    **{
        f"kept-cuts-{kind}-{optimizer}": AsyncCase(
            kind,
            optimizer,
            options={"freeze_policy": "fixed", "freeze_at": "3:1,8:2", "elastic": False},
            ends=(3, 8),
            layouts=((2, 1), (4, 1)),
        )
        for kind, optimizer in (("pipeoptim", "adamw"), ("stashing", "momentum"), ("pipeoptim", "sgd"))
    },
    "short": AsyncCase(accumulation=2, num_samples=41, layouts=((2, 1), (2, 2))),
    "accumulated": AsyncCase(accumulation=2, asks={1: "save", 2: "read amid"}, layouts=((2, 1), (4, 1))),
}


RESUMED, SIMULATED, PLAIN = "-resumed", "-simulated", "-plain"
"""Ends of names: of a run that goes on from a checkpoint, and of those in one process."""


def options_of(case: AsyncCase) -> dict[str, Any]:
    return {
        "batch": GLOBAL_BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "max_grad_norm": 0.0,
        "logging_steps": 4,  # Stages wait for each other to log.
        "seed": 7,
        **OPTIMIZERS[case.optimizer],
        **case.trainers,
    }


def data_of(case: AsyncCase) -> dict[str, Any]:
    return {
        "train_dataset": make_dataset(MODEL, case.num_samples),
        "eval_dataset": make_dataset(MODEL, NUM_EVALUATED, seed=1),
        "data_collator": case.collator,
    }


def train(name: str, layout: Layout | None, output: Path) -> End:
    if layout is None:
        return train_in_one_process(name, output)
    case = CASES[name.removesuffix(RESUMED)]
    args = our_arguments(
        output,
        layout[0],
        **options_of(case),
        pipeline_parallel_num_microbatches=case.num_microbatches,
        pipeline_schedule="async_1f1b",
        pipeline_weights=case.kind,
        pipeline_drain_interval=case.interval,
        **case.options,
    )
    torch.manual_seed(11)
    trainer = PipeTransformerTrainer(build_model(MODEL), args, **data_of(case))
    owners: dict[int, list[list[str]]] = {}
    trainer.add_callback(NotesOwners(trainer, owners))
    sums: list[float] = []
    trainer.add_callback(Asks(trainer, case.asks, sums))
    # The checkpoint is one of the whole run.
    whole = output.with_name(output.name.replace(RESUMED, ""))
    trainer.train(resume_from_checkpoint=str(whole / str(case.resumes)) if name.endswith(RESUMED) else None)
    return end_of(trainer, owners=owners, sums=sums)


class Asks(TrainerCallback):
    """Asks for what stages must come together for, where nobody knew of it before."""

    def __init__(self, trainer: PipeTransformerTrainer, asks: dict[int, str], sums: list[float]) -> None:
        self.trainer, self.asks, self.sums = trainer, asks, sums

    def _read(self, what: str, step: int) -> None:
        if self.asks.get(step) == what:
            with self.trainer.whole_model():
                self.sums.append(sum(float(p.detach().double().sum()) for p in self.trainer.model.parameters()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        what = self.asks.get(state.global_step)
        control.should_save |= what == "save"
        control.should_evaluate |= what == "evaluate"
        self._read("read", state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read("read amid", state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read("read early", state.global_step + 1)


class NotesOwners(TrainerCallback):
    """Which stage trains which parameters, from which step on."""

    def __init__(self, trainer: PipeTransformerTrainer, owners: dict[int, list[list[str]]]) -> None:
        self.trainer, self.owners = trainer, owners

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stage = self.trainer.pipeline_run.pipelined.pipeline.stage
        found: list[list[str]] = [[] for _ in range(stage.layout.pipeline_size)]
        for name, positions in stage.owners.items():
            if stage.store.is_active(name):
                found[positions[0]].append(name)
        if not self.owners or found != list(self.owners.values())[-1]:
            self.owners[state.global_step] = found


class History(SimulatedStage):
    """Of some parameters that a trainer steps with all others."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.parameters, self.optimizer = parameters, optimizer
        self.group_of = [
            next(g for g in optimizer.param_groups if any(p is q for q in g["params"])) for p in parameters
        ]
        self.history = []

    def note(self) -> None:
        """The optimizer has stepped; gradients are those that it used."""
        last, moments = self.history[-1], []
        for p, own in zip(self.parameters, last.moments, strict=True):
            m, v, count = own or (torch.zeros_like(p), torch.zeros_like(p), 0)
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            m, v = m.lerp(grad, 1 - 0.9), (v * 0.999).addcmul(grad, grad, value=1 - 0.999)
            moments.append((m, v, count + 1))
        self.history.append(self.snapshot(last.weights, [group["lr"] for group in self.group_of], moments))


class DelayedTrainer(Trainer):
    """Plain Trainer, each of whose batches sees explicitly delayed or predicted weights, stage by stage."""

    def __init__(self, case: AsyncCase, owners: dict[int, list[list[str]]], **named: Any) -> None:
        super().__init__(**named)
        self.case, self.owners = case, owners
        self.stages: list[History] = []
        self.left = self.case.windows()
        self.micro_batch = self.done = self.before = 0
        self.add_callback(NotesUpdates(self))

    def begin_window(self) -> None:
        if self.state.global_step in self.owners:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            named, by_stage = dict(self.model.named_parameters()), self.owners[self.state.global_step]
            for name, parameter in named.items():
                parameter.requires_grad_(any(name in names for names in by_stage))
            self.stages = [History([named[name] for name in names], optimizer) for names in by_stage]
        self.before += self.done
        self.micro_batch = self.done = 0
        self.totals: list[torch.Tensor] = []
        self.step_of = [step for step, size in enumerate(self.left.pop(0)) for _ in range(size)]
        for stage in self.stages:
            stage.begin()

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        if not self.stages or self.micro_batch == len(self.step_of):
            self.begin_window()
        inputs = self._prepare_inputs(inputs)
        count = self.case.num_microbatches
        parts = [{key: value.chunk(count)[i] for key, value in inputs.items()} for i in range(count)]
        total = torch.zeros(())
        for part in parts:
            total += self.run_micro_batch(model, part, num_items_in_batch)
        return total

    def run_micro_batch(self, model: Any, inputs: dict[str, Any], num_items: Any) -> torch.Tensor:
        factor = self.lr_scheduler.lr_lambdas[0]
        size = self.case.accumulation * self.case.num_microbatches
        seen = [
            versions(
                self.case.kind, k, len(self.stages), self.micro_batch, self.step_of, size, stage, self.before, factor
            )
            for k, stage in enumerate(self.stages)
        ]
        current = [stage.history[-1].weights for stage in self.stages]
        self.place([forward for forward, _ in seen])
        casts = casting_again(self.model.parameters()) if self.args.bf16 else nullcontext()
        with casts, self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        self.place([backward for _, backward in seen])
        (loss / size).backward()
        self.place(current)
        self.micro_batch += 1
        return loss.detach() / size

    def place(self, weights: list[list[torch.Tensor]]) -> None:
        for stage, values in zip(self.stages, weights, strict=True):
            for parameter, value in zip(stage.parameters, values, strict=True):
                parameter.data.copy_(value)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """By stage, or by the norm of all stages K - 1 steps ago; a stage's own where there is none in the window."""
        squares = [
            torch.stack([p.grad.norm().double() for p in stage.parameters if p.grad is not None]).square().sum()
            for stage in self.stages
        ]
        total = torch.stack(squares).sum()
        self.totals.append(total)
        is_last = self.case.options.get("pipeline_clip") == "last"
        for stage, own in zip(self.stages, squares, strict=True):
            delay = len(self.stages)
            norm = self.totals[-delay] if is_last and len(self.totals) >= delay else own
            clip_grads_with_norm_(stage.parameters, self.args.max_grad_norm, norm.sqrt().float())
        return total.sqrt().float()

    def note_update(self) -> None:
        self.done += 1
        for stage in self.stages:
            stage.note()


class NotesUpdates(TrainerCallback):
    def __init__(self, trainer: DelayedTrainer) -> None:
        self.trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.note_update()


def train_in_one_process(name: str, output: Path) -> End:
    """Train with plain Trainer, or as a pipeline did whose run's name precedes `SIMULATED`."""
    torch.manual_seed(11)
    if name.endswith(PLAIN):
        case = CASES[name.removesuffix(PLAIN)]
        trainer = Trainer(build_model(MODEL), plain_arguments(output, **options_of(case)), **data_of(case))
    else:
        told = name.removesuffix(SIMULATED)
        case = CASES[told.rpartition("-")[0]]
        by_step = json.loads(noted(output.parent, told, 0).read_text())["owners"]
        owners = {int(step): by_stage for step, by_stage in by_step.items()}
        args = plain_arguments(output, **options_of(case))
        trainer = DelayedTrainer(case, owners, model=build_model(MODEL), args=args, **data_of(case))
    trainer.train()
    return end_of(trainer)


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


# In every run of CI, on two processes.
QUICK = (
    *(f"{kind}-{optimizer}-a1" for kind, optimizer in zip(KINDS, ("adamw", "fused", "momentum") * 2, strict=True)),
    *("pipeoptim-sgd-a2", "drained", "by-stage", "by-last", "asked", "accumulated", "recomputed", "still"),
    *("saved", "elastic", "kept-cuts-stashing-momentum", "short"),
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


launches = launches_of(run_all)


def simulated(name: str, layout: tuple[int, int]) -> Run:
    """The run of a case in a pipeline, which is compared with its simulation."""
    return Run(name, layout, f"{Run(name, layout)}{SIMULATED}")


def runs() -> list[Any]:
    return [
        slow_unless(name in QUICK and k * r == 2, simulated(name, (k, r)))
        for name, case in CASES.items()
        for k, r in case.layouts
    ]


def of_two(name: str) -> Any:
    return pytest.mark.parametrize("run", [simulated(name, (2, 1))], ids=str)


@pytest.mark.parametrize("run", runs())
def test_weights_and_losses_are_those_of_one_process_with_explicit_delays(
    ours: Outcome, plain: Outcome, run: Run
) -> None:
    """Difference 0.0, but where replicas sum gradients."""
    if run.layout[1] > 1 or run.case == "elastic":  # Sums over replicas round differently.
        assert ours.values("loss") == pytest.approx(plain.values("loss"), rel=1e-5)
        return
    if run.case.startswith("bf16"):  # What passes between stages rounds in other places.
        assert ours.values("loss") == pytest.approx(plain.values("loss"), rel=2**-8)
        return
    assert_trained_alike(ours, plain, 0.0, ("loss", "learning_rate"))
    assert ours.values("grad_norm") == pytest.approx(plain.values("grad_norm"), rel=1e-5)


@pytest.mark.parametrize("run", [Run("still", (2, 1), f"still{PLAIN}")], ids=str)
def test_weights_that_stand_still_give_trainers_numbers(ours: Outcome, plain: Outcome) -> None:
    """Learning rate 0: whatever the delay, every forward sees the same weights."""
    assert len(ours.logged("loss")) == 12
    assert_trained_alike(ours, plain)


@pytest.mark.parametrize(
    ("run", "other"), [(simulated("pipeoptim-adamw-a1", (2, 1)), simulated("vanilla-fused-a1", (2, 1)))], ids=str
)
def test_delays_do_change_what_is_learned(ours: Outcome, launches: Launches, other: Run) -> None:
    """The cases would prove nothing if all kinds came to the same."""
    ends = ours.weights, launches.outcome(other).weights
    assert max(float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0]) > 1e-4


@of_two("pipeoptim-adamw-a1")
def test_the_log_shows_what_a_stage_predicted(ours: Outcome) -> None:
    lines = (ours.output / "pipetransformer_events.jsonl").read_text().splitlines()
    told = [event for event in map(json.loads, lines) if event.get("what") == "prediction"]
    assert told
    for event in told:
        (stage,) = event["stages"]  # The last stage predicts nothing.
        assert stage["stage"] == 0
        assert stage["s"] == 1
    assert 0 < stage["error"] < 1
    assert 0 < stage["error_unpredicted"] < 1


@pytest.mark.parametrize(
    ("run", "again"),
    [
        (simulated(name, (2, 1)), Run(f"{name}{RESUMED}", (2, 1), f"{Run(name, (2, 1))}{SIMULATED}"))
        for name in ("asked", "saved")
    ],
    ids=str,
)
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(
    ours: Outcome, launches: Launches, again: Run
) -> None:
    """One that everybody knew of before, and one that a callback asked for while forwards were in flight."""
    resumed = launches.outcome(again).weights
    assert all(torch.equal(resumed[key], weight) for key, weight in ours.weights.items())


@of_two("elastic")
def test_freed_ranks_become_replicas_between_two_windows(ours: Outcome) -> None:
    last = ours.events("transition")[-1]["to"]
    assert (last["num_frozen_layers"], last["num_stages"], last["num_replicas"]) == (3, 1, 2)


@of_two("asked")
def test_whoever_reads_the_model_finds_the_weights_of_one_step(ours: Outcome) -> None:
    sums = ours.ranks[0]["sums"]
    assert len(sums) == 2
    assert all(torch.tensor(sums).isfinite())
    assert (ours.output / "checkpoint-3" / "model.safetensors").exists()
