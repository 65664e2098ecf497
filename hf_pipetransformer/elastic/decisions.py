"""Decisions that rank 0 takes for all ranks: layers to freeze or unfreeze, the next layout, and what is stored.

Called through `Topology.decide`, so on rank 0 alone; nothing here communicates with other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any

from hf_pipetransformer.cache.planner import CachePlanner
from hf_pipetransformer.freeze.policies import describe_outlook, outlook
from hf_pipetransformer.freeze.policy import (
    PREDICTED_SECONDS,
    Decision,
    DecisionClock,
    FreezePolicy,
    FreezeSignal,
    decide,
)
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.planning.costs import active_seconds
from hf_pipetransformer.planning.forecast import prefix_seconds, seconds_left
from hf_pipetransformer.planning.microbatches import Report, calibrate
from hf_pipetransformer.planning.planner import Plan, PlanInputs, plan_transition
from hf_pipetransformer.planning.storing import ComputeTimes, Pass, why_not_over_nodes
from hf_pipetransformer.report import announce, logger
from hf_pipetransformer.schedules.layout import Layout


Write = Callable[..., None]
"""Function that writes an event, from its kind and its fields."""

NUM_FRUITLESS_DECISIONS = 2
"""Number of decisions in a row without a change that triggers a warning, besides those at which the policy only
observes."""
NEVER = -1
"""Stands for the step of the next decision if there is none."""


@dataclass
class Decisions:
    """Asks the freeze policy, and plans the layout that follows.

    Args:
        num_frozen: layers frozen at the start.
        blocks_of_parameter: name of each parameter that the user trains to the blocks that use it.
        cache: decides at each change of the frozen layers which activations are stored; None without a cache.
        num_frozen_by_user: layers that the script froze, which are never unfrozen.
    """

    policy: FreezePolicy
    clock: DecisionClock
    args: PipeTransformerArguments
    inputs: PlanInputs
    num_frozen: InitVar[int]
    world_size: int
    blocks_of_parameter: Mapping[str, tuple[int, ...]]
    write: Write
    cache: CachePlanner | None
    num_frozen_by_user: int = 0

    def __post_init__(self, num_frozen: int) -> None:
        self.known_microbatches = dict(self.inputs.rules.known_microbatches)
        """Number of micro-batches M that trials found best, by K and V."""
        self._num_wanted = float(num_frozen)
        self._num_frozen_at_start = num_frozen
        self._num_fruitless = 0
        self._calibrated = (self.inputs.blocks, self.inputs.overheads)

    def outlook(self, layout: Layout, steps_per_epoch: int) -> str:
        """Describe what may freeze and when, and whether stored activations can be read."""
        num_layers, num_frozen, clock = layout.num_layers, layout.num_frozen_layers, self.clock
        policy, kept = self.policy, self.args.freeze_min_active_layers
        coming = outlook(policy, clock, num_layers, num_frozen, kept, self.num_frozen_by_user)
        writing = steps_per_epoch if self.cache is None else self.cache.writing_steps
        return describe_outlook(policy, coming, num_layers, num_frozen, clock.max_steps, writing)

    def first_step(self, step: int) -> int:
        """Return the first optimizer step before which a training that begins at `step` asks the policy."""
        if self.policy.is_overdue(step, self._num_frozen_at_start, self.num_frozen_by_user):
            return step
        return self.next_step(step)

    def next_step(self, step: int) -> int:
        """Return the first optimizer step from `step` on before which the policy is asked; `NEVER` if none."""
        steps = range(step, self.clock.max_steps)
        return next((later for later in steps if self.policy.is_due(later, self.clock)), NEVER)

    def freeze(
        self,
        step: int,
        layout: Layout,
        reports: Sequence[Report],
        measured: Mapping[str, tuple[float, ...]],
        learning_rate: float = 0.0,
    ) -> dict[str, Any]:
        """Ask the policy before optimizer step number `step`.

        Args:
            reports: step timings by rank under `layout`, `latest` with them; empty if a rank did not measure.
            measured: fields of `FreezeSignal` that the policy needs from the ranks.

        Returns:
            JSON values: `next_step` of the next decision; `change`, None or the next layout and why; and `has_cache`,
            False if activations cannot be stored, which measuring for the decision may have revealed.
        """
        num_layers, num_frozen = layout.num_layers, layout.num_frozen_layers
        found = dict(measured)
        if PREDICTED_SECONDS in self.policy.needs:
            self._calibrate(layout, reports)
            found[PREDICTED_SECONDS] = self._predicted_seconds(layout, step)
        signal = FreezeSignal(
            step,
            self.clock.max_steps,
            num_layers,
            num_frozen,
            self._num_wanted,
            **found,
            learning_rate=learning_rate,
            num_frozen_by_user=self.num_frozen_by_user,
        )
        decision = decide(self.policy, signal, self.args.freeze_min_active_layers)
        self._num_wanted = decision.num_wanted
        change = None
        if decision.freezes or decision.unfreezes:
            self._calibrate(layout, reports)
            plan = self._plan(decision.num_frozen, layout, step)
            totals = [report["latest"] for report in reports if report]
            change = _as_change(plan, self.policy.explain(signal), max(totals, default=None))
            self._report(decision, self._frozen_in_use(layout, plan.layout))
        else:
            self._report(decision, [])
        has_cache = self.cache is not None and self.cache.mode != "off"
        return {"next_step": self.next_step(step + 1), "change": change, "has_cache": has_cache}

    def adapt_to_cache(self, step: int, layout: Layout) -> dict[str, Any] | None:
        """Return the change to a layout that starts or stops storing activations; None if nothing changes."""
        plan = self._plan(layout.num_frozen_layers, layout, step)
        if plan.layout.cache_level == layout.cache_level:
            return None
        reason = "frozen from the start" if plan.layout.cache_level else "nothing is stored any more"
        return _as_change(plan, reason, None)

    def _calibrate(self, layout: Layout, reports: Sequence[Report]) -> None:
        if any(reports):
            measured = layout, reports, self.args.gradient_accumulation_steps
            self._calibrated = calibrate(self.inputs.blocks, self.inputs.overheads, *measured)

    def _predicted_seconds(self, layout: Layout, step: int) -> tuple[float, ...]:
        kept = self.args.freeze_min_active_layers if self.policy.keeps_minimum else 0
        costs, overheads = self._calibrated
        samples, accumulation = self.inputs.samples_per_device, self.args.gradient_accumulation_steps
        found = [0.0] * (layout.num_layers + 1)
        for num_frozen in range(layout.num_frozen_layers, max(layout.num_layers - kept, layout.num_frozen_layers) + 1):
            level, passes = self._foreseen(num_frozen, layout, step)
            # Without new frozen layers the run keeps its layout, so that one is costed as it is.
            is_new = num_frozen > layout.num_frozen_layers
            planned = self._plan_with(num_frozen, layout, level).layout if is_new else layout
            if self._spans_nodes(planned):
                passes = (Pass(self.clock.max_steps - step),)
            found[num_frozen] = seconds_left(planned, passes, costs, overheads, samples, accumulation)
        return tuple(found)

    def _foreseen(self, num_frozen: int, layout: Layout, step: int) -> tuple[int, tuple[Pass, ...]]:
        """Return the layers that would be stored with `num_frozen` frozen, and the steps to come."""
        now, last = layout.cache_level, self.clock.max_steps
        if self.cache is None:
            return 0, (Pass(last - step),)
        present = self._computing(layout.num_frozen_layers, layout.pipeline_size)
        if num_frozen == layout.num_frozen_layers:
            return now, self.cache.going_on(present, now, step, last, layout.fresh_share)
        coming = self._computing(num_frozen, self._stages_if_stored(num_frozen, layout))
        return self.cache.predict(coming, num_frozen, now, step, last, present)

    def _plan(self, num_frozen: int, layout: Layout, step: int) -> Plan:
        if self.cache is not None and self._may_span_nodes(layout):
            # What shorter pipelines could store counts in the choice of K; those over nodes decide on no store.
            level, _ = self.cache.predict(*self._cache_inputs(num_frozen, layout, step))
            plan = self._plan_with(num_frozen, layout, level)
            if self._spans_nodes(plan.layout):
                if layout.cache_level:
                    why = why_not_over_nodes(plan.layout.pipeline_size, self.inputs.overheads.node_size)
                    self.write("cache", what="off", reason=f"{why}.")
                    announce(f"Step {step}: the activation cache is off: {why}.")
                return plan
        level, share = self._cached(num_frozen, layout, step)
        plan = self._plan_with(num_frozen, layout, level)
        return replace(plan, layout=replace(plan.layout, fresh_share=share))

    def _spans_nodes(self, layout: Layout) -> bool:
        return self.inputs.overheads.spans_nodes(layout.pipeline_size)

    def _may_span_nodes(self, layout: Layout) -> bool:
        """Return True if the layout that follows may span nodes, also if layers unfreeze."""
        return self.inputs.overheads.spans_nodes(max(layout.pipeline_size, self.inputs.rules.initial_size))

    def _plan_with(self, num_frozen: int, layout: Layout, cache_level: int) -> Plan:
        costs, overheads = self._calibrated
        rules = replace(self.inputs.rules, known_microbatches=self.known_microbatches)
        inputs = replace(self.inputs, blocks=costs, overheads=overheads, rules=rules)
        return plan_transition(layout, num_frozen, inputs, cache_level)

    def _cached(self, num_frozen: int, layout: Layout, step: int) -> tuple[int, float]:
        """Return the layers whose output is stored from now on, and the share of samples to draw again per epoch."""
        if self.cache is None:
            return 0, 0.0
        decision = self.cache.decide(*self._cache_inputs(num_frozen, layout, step))
        return decision.level if decision.use else 0, decision.fresh_share

    def _cache_inputs(self, num_frozen: int, layout: Layout, step: int) -> tuple[ComputeTimes, int, int, int, int]:
        """Return the arguments of `CachePlanner.decide`."""
        until = self.policy.frozen_until(step, self.clock.max_steps, self.num_frozen_by_user)
        computing = self._computing(num_frozen, self._stages_if_stored(num_frozen, layout))
        return computing, num_frozen, layout.cache_level, step, until

    def _computing(self, num_frozen: int, pipeline_size: int) -> ComputeTimes:
        costs, _ = self._calibrated
        return ComputeTimes(prefix_seconds(costs, num_frozen), active_seconds(costs, num_frozen), pipeline_size)

    def _stages_if_stored(self, num_frozen: int, layout: Layout) -> int:
        """Return the stages of the layout that follows if the output of all frozen layers is stored."""
        return self._plan_with(num_frozen, layout, num_frozen).layout.pipeline_size

    def _frozen_in_use(self, old: Layout, new: Layout) -> list[str]:
        """Return the parameters that freeze with the prefix although blocks above it use them too."""
        return [
            name
            for name, blocks in self.blocks_of_parameter.items()
            if old.first_active_block <= blocks[0] < new.first_active_block <= blocks[-1]
        ]

    def _report(self, decision: Decision, frozen_in_use: list[str]) -> None:
        self.write("freeze", policy=self.policy.describe(), shared=frozen_in_use, **decision.as_event())
        if frozen_in_use:
            logger.warning(
                f"Frozen with the first layers although layers above use them too: {', '.join(frozen_in_use)}."
            )
        if decision.freezes or decision.unfreezes:
            self._num_fruitless = 0
            return
        self._num_fruitless += 1
        signal, frozen = decision.signal, f"{decision.num_frozen} of {decision.signal.num_layers} layers"
        why = self.policy.explain(signal)
        if decision.is_held_back and self.policy.keeps_minimum:
            why = f"freeze_min_active_layers={self.args.freeze_min_active_layers} keeps the others active; {why}"
        announce(f"Step {signal.step}: nothing newly frozen, {frozen} are ({why}).")
        is_full = decision.num_frozen >= signal.num_layers - self.args.freeze_min_active_layers
        most = NUM_FRUITLESS_DECISIONS + self.policy.num_watched
        if self._num_fruitless == most and not is_full:
            gain = "gets no faster" if decision.num_frozen else "gains nothing over plain training"
            logger.warning(
                f"{most} freeze decisions in a row froze nothing (policy "
                f"{self.policy.describe()}, {frozen} frozen). If that goes on, the run {gain}: consider "
                "freeze_policy='schedule'."
            )

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to continue with the same decisions."""
        return {
            "num_wanted": self._num_wanted,
            "num_fruitless": self._num_fruitless,
            "policy": dict(self.policy.state()),
        }

    def load_state(self, state: Mapping[str, Any], is_same_policy: bool) -> None:
        """Continue from `state`; another policy ignores it."""
        if not is_same_policy:
            return
        self._num_wanted = float(state["num_wanted"])
        self._num_fruitless = int(state["num_fruitless"])
        self.policy.load_state(state["policy"])


def _as_change(plan: Plan, reason: str, measured: float | None) -> dict[str, Any]:
    return {
        "layout": plan.layout.as_event(),
        "reason": reason,
        "predicted": plan.prediction.seconds,
        "alternatives": {str(pipeline_size): seconds for pipeline_size, seconds in plan.alternatives.items()},
        "measured": measured,
    }
