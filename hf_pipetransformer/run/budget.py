"""`freeze_budget="time"`: a run in which layers freeze gets as many steps as fit the time of one in which none do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autopipe.time_budget import MOST_TIMES, Span, most_steps
from hf_pipetransformer.freeze.policies import FreezePolicy
from hf_pipetransformer.json_values import entries, entry, number, whole_number
from hf_pipetransformer.option_combinations import check_budget_options
from hf_pipetransformer.report.events import read_events
from hf_pipetransformer.run.cache import TrainingCache
from hf_pipetransformer.run.expectation import Measured, coming_spans, make_forecast
from hf_pipetransformer.run.pipeline import Pipeline


EVENT = "budget"
"""What the `profile` event is about that holds a budget."""

MOST_SECONDS = 1e12
"""No run is planned to take longer."""


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
    layout = pipeline.layout
    forecast = make_forecast(measured, args, pipeline, cache, steps_per_epoch)

    def spans(steps: int) -> list[Span]:
        return coming_spans(policy, args, layout, steps_per_epoch, steps)

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
        ValueError: the earlier run had none, or one that cannot be.
    """
    if saved is None:
        raise ValueError(
            f"freeze_budget='time': {where!r} is of a run with freeze_budget='epochs', whose length was not planned. "
            "Set freeze_budget='epochs', or start a new run."
        )
    try:
        found = dict(entries(saved, EVENT))
        num_steps, per_epoch = (whole_number(entry(found, key), key, 1) for key in ("num_steps", "steps_per_epoch"))
        planned, full = (number(entry(found, key), key, 0, MOST_SECONDS) for key in ("planned_s", "full_s"))
    except ValueError as error:
        raise ValueError(f"{where!r} holds a budget that cannot be: {error}. Start a new run.") from error
    return Budget(num_steps, per_epoch, planned, full)


def planned_before(path: str) -> Budget:
    """That of the last run in an events file that began anew; raises as `saved_budget`."""
    budget = None
    for event in read_events(path):
        if event["event"] == "run" and event["step"] == 0:
            budget = None
        elif event["event"] == "profile" and event.get("what") == EVENT:
            budget = event.get("budget")
    return saved_budget(budget, path)
