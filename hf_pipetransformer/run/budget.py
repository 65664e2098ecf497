"""`freeze_budget="time"`: a run in which layers freeze gets as many steps as fit the time of one in which none do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache as remembered
from itertools import accumulate
from typing import Any

from transformers import Trainer

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autocache.decision import CacheCosts
from hf_pipetransformer.autopipe.costs import Overheads, UnitCosts
from hf_pipetransformer.autopipe.planner import plan_transition
from hf_pipetransformer.autopipe.time_budget import MOST_TIMES, Forecast, Span, Storing, most_steps, spans_of
from hf_pipetransformer.freeze.outlook import outlook
from hf_pipetransformer.freeze.policies import FreezePolicy, make_clock
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.option_combinations import check_budget_options
from hf_pipetransformer.report.events import read_events
from hf_pipetransformer.run.cache import TrainingCache
from hf_pipetransformer.run.first_batches import TypicalBatches
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.run.step_overheads import optimizer_seconds
from hf_pipetransformer.units import attention_of


EVENT = "budget"
"""What the `profile` event is about that holds a budget."""


@dataclass(frozen=True)
class Budget:
    """How long a run is, and how long that is predicted to take.

    Args:
        num_steps: optimizer steps.
        steps_per_epoch: optimizer steps.
        planned_s: seconds of these steps, and of looking at the model before them.
        full_s: seconds of the epochs that were asked for with nothing frozen or stored.
    """

    num_steps: int
    steps_per_epoch: int
    planned_s: float
    full_s: float

    @property
    def num_epochs(self) -> Fraction:
        """Of the run: to the step, also in epochs of another length."""
        return Fraction(self.num_steps, self.steps_per_epoch)

    def counts(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `Trainer.set_initial_training_values` gives, for a run of this length.

        A run that goes on with batches of another size trains as many epochs.
        """
        _, updates, num_examples, _, total, steps_in_epoch, _ = values
        num_steps = self.num_steps
        if updates != self.steps_per_epoch:
            num_steps = math.ceil(self.num_epochs * updates)
        num_samples = num_examples * num_steps / updates
        return math.ceil(num_steps / updates), updates, num_examples, num_samples, total, steps_in_epoch, num_steps


@dataclass(frozen=True)
class Measured:
    """What a budget is planned from.

    Args:
        units: costs of the model's units.
        overheads: of a step.
        storing: of activations; None where nothing is stored.
        looking_seconds: that everything took which a run without a pipeline does not do.
    """

    units: UnitCosts
    overheads: Overheads
    storing: CacheCosts | None
    looking_seconds: float


def check_budget(args: PipeTransformerArguments, policy: FreezePolicy) -> None:
    """Refuse a policy of which nobody knows before the run when it freezes how much, and one that thaws.

    Raises:
        ValueError: names it, or an option that does not go with a planned length.
    """
    check_budget_options(args)
    if args.freeze_budget != "time" or args.layout_plan is not None:
        return
    if not policy.is_certain:
        raise ValueError(
            "freeze_budget='time' plans the length of a run before it begins, so it must be known then what freezes "
            f"and when: expected freeze_policy='fixed' or 'schedule', found {policy.describe()!r}."
        )
    if policy.may_thaw:
        raise ValueError(
            "freeze_budget='time' with a policy that thaws layers is not supported: let freeze_at take no fewer "
            f"layers later on, or use freeze_budget='epochs'. Found {policy.describe()!r}."
        )


def measure(
    trainer: Trainer, pipeline: Pipeline, cache: TrainingCache | None, typical: TypicalBatches, looking_seconds: float
) -> Measured:
    """On rank 0, which computes as the others do.

    Args:
        trainer: of the optimizer.
        pipeline: on the layout of the start.
        cache: of activations; None where nothing may be stored.
        typical: of the batches that the units were measured with.
        looking_seconds: see `Measured`.
    """
    args, layout, costs = trainer.args, pipeline.layout, pipeline.start_up.plans.costs
    samples = args.per_device_train_batch_size * layout.pipeline_size * args.gradient_accumulation_steps
    # Workers read while the others compute.
    reading = 0.0 if args.dataloader_num_workers else samples * typical.seconds_per_sample
    update = optimizer_seconds(trainer, pipeline.stage.trained_here().values())
    overheads = replace(costs.overheads, optimizer_per_parameter=update, per_step=reading)
    units = costs.units.scaled(typical.mean_over_given, typical.mean_over_given)
    sums = [0.0, *accumulate(units.forward)]
    prefix = [sums[attention_of(level)] for level in range(layout.num_layers + 1)]
    storing = None if cache is None else cache.planner.costs(prefix)
    return Measured(units, overheads, storing, looking_seconds)


def plan_budget(
    measured: Measured,
    args: PipeTransformerArguments,
    pipeline: Pipeline,
    policy: FreezePolicy,
    cache: TrainingCache | None,
    steps_per_epoch: int,
    num_steps: int,
) -> tuple[Budget, dict[str, Any]]:
    """The longest run that fits the time of `num_steps` steps with nothing frozen; no shorter than those.

    Returns:
        The budget, and what it follows from as JSON values.
    """
    layout, plans = pipeline.layout, pipeline.start_up.plans
    rules = plans.inputs(layout, args.per_device_train_batch_size, {}).rules
    samples, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps

    @remembered
    def plan(current: Layout, num_frozen: int, cache_level: int) -> Layout:
        costs = (measured.units, measured.overheads, rules, plans.topology.world_size, samples, accumulation)
        return plan_transition(current, num_frozen, *costs, cache_level).layout

    storing = None
    if measured.storing is not None and cache is not None:
        planner = cache.planner
        storing = Storing(measured.storing, planner.mode, planner.fits_share, planner.num_views)
    costs = (measured.units, measured.overheads, samples, accumulation, steps_per_epoch)
    forecast = Forecast(layout, *costs, plan, storing)

    def spans(steps: int) -> list[Span]:
        clock = make_clock(args.freeze_interval, args.freeze_warmup, steps_per_epoch, steps)
        frozen = layout.num_frozen_layers
        coming = outlook(policy, clock, layout.num_layers, frozen, args.freeze_min_active_layers)
        return spans_of(coming, frozen, steps)

    def seconds_of(steps: int) -> float:
        return measured.looking_seconds + forecast.seconds(spans(steps))

    full, most = forecast.full_seconds(num_steps), MOST_TIMES * num_steps
    chosen = most_steps(seconds_of, full, num_steps, most)
    budget = Budget(chosen, steps_per_epoch, seconds_of(chosen), full)
    because = {
        "asked_steps": num_steps,
        "is_at_bound": chosen == most > num_steps,
        "spans": [asdict(span) for span in spans(chosen)],
        "looking_s": measured.looking_seconds,
        "overheads": asdict(measured.overheads),
        "storing": None if measured.storing is None else asdict(measured.storing),
    }
    return budget, because


def in_words(budget: Budget, because: Mapping[str, Any], num_layers: int) -> str:
    """What was planned, in a line."""
    asked, spans = because["asked_steps"], because["spans"]
    full = f"{asked / budget.steps_per_epoch:.3g} epochs of full training are predicted to take {budget.full_s:.3g} s"
    step, parts = 0, []
    for span in spans:
        parts.append((step, span["num_frozen"]))
        step += span["num_steps"]
    shown = ", ".join(
        f"{frozen} of {num_layers} layers frozen from step {step} on" for step, frozen in parts if frozen
    )
    fits = f"{float(budget.num_epochs):.3g} epochs ({budget.num_steps} steps)"
    if budget.num_steps == asked:
        why = "take no less" if budget.planned_s > budget.full_s else "are all that fits"
        return f"Budget: time. {full}; with {shown or 'no layer frozen'} they {why}, and the run stays as long."
    bound = f", as many as a run of {asked} may become," if because["is_at_bound"] else ""
    return f"Budget: time. {full}; with {shown or 'no layer frozen'} {fits}{bound} fit, in {budget.planned_s:.3g} s."


def saved_budget(saved: Mapping[str, Any] | None, where: str) -> Budget:
    """That of an earlier run: a length that hangs on measured times is not planned anew.

    Args:
        saved: `asdict` of it.
        where: a checkpoint or events file.

    Raises:
        ValueError: the earlier run had none.
    """
    if saved is None:
        raise ValueError(
            f"freeze_budget='time': {where!r} is of a run with freeze_budget='epochs', whose length was not planned. "
            "Set freeze_budget='epochs', or start a new run."
        )
    return Budget(**saved)


def planned_before(path: str) -> Budget:
    """That of the last run in an events file that began anew; raises as `saved_budget`."""
    budget = None
    for event in read_events(path):
        if event["event"] == "run" and event["step"] == 0:
            budget = None
        elif event["event"] == "profile" and event["what"] == EVENT:
            budget = event["budget"]
    return saved_budget(budget, path)
