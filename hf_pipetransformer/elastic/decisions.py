"""Decisions that rank 0 takes for all ranks: layers to freeze or unfreeze, the next layout, and what is stored.

Called through `Topology.decide`, so on rank 0 alone; nothing here communicates with other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.freeze.policies import describe_outlook, outlook
from hf_pipetransformer.freeze.policy import Decision, DecisionClock, FreezePolicy, FreezeSignal, decide
from hf_pipetransformer.planning.blocks import active_seconds
from hf_pipetransformer.planning.costs import with_launches
from hf_pipetransformer.planning.microbatches import Report, calibrate
from hf_pipetransformer.planning.search import search
from hf_pipetransformer.planning.storing import why_not_over_nodes
from hf_pipetransformer.report import announce, logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.pricing import CachePlanner
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.planning.layouts import Choice, PlanInputs
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
    num_frozen: int
    blocks_of_parameter: Mapping[str, tuple[int, ...]]
    write: Write
    cache: CachePlanner | None
    num_frozen_by_user: int = 0

    def __post_init__(self) -> None:
        self._target_num_frozen = float(self.num_frozen)
        self._num_fruitless = 0
        self._calibrated = self.inputs
        """Inputs with the costs of the latest measured steps."""

    def outlook(self, layout: Layout, steps_per_epoch: int) -> str:
        """Describe what may freeze and when, and whether stored activations can be read."""
        num_layers, num_frozen, clock = layout.num_layers, layout.num_frozen_layers, self.clock
        policy, kept = self.policy, self.args.freeze_min_active_layers
        coming = outlook(policy, clock, num_layers, num_frozen, kept, self.num_frozen_by_user)
        return describe_outlook(policy, coming, num_layers, num_frozen, clock.max_steps, steps_per_epoch)

    def first_step(self, step: int) -> int:
        """Return the first optimizer step before which a training that begins at `step` asks the policy."""
        if self.policy.is_overdue(step, self.num_frozen, self.num_frozen_by_user):
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
        gradient_norms: tuple[float, ...],
        learning_rate: float = 0.0,
    ) -> dict[str, Any]:
        """Ask the policy before optimizer step number `step`.

        Args:
            reports: step timings by rank under `layout`, `latest` with them; empty if a rank did not measure.
            gradient_norms: see `FreezeSignal`; empty if the policy does not need them.

        Returns:
            JSON values: `next_step` of the next decision; `change`, None or the next layout and why; and `has_cache`,
            False if activations cannot be stored, which measuring for the decision may have revealed.
        """
        signal = FreezeSignal(
            step,
            self.clock.max_steps,
            layout.num_layers,
            layout.num_frozen_layers,
            self._target_num_frozen,
            gradient_norms,
            learning_rate=learning_rate,
            num_frozen_by_user=self.num_frozen_by_user,
        )
        decision = decide(self.policy, signal, self.args.freeze_min_active_layers)
        self._target_num_frozen = decision.target_num_frozen
        change, in_use = None, list[str]()
        if decision.freezes or decision.unfreezes:
            # Without a measured step (soon after another change) the costs of the last calibration hold.
            if any(reports):
                measured = layout, reports, self.args.gradient_accumulation_steps
                blocks, overheads = calibrate(self.inputs.blocks, self.inputs.overheads, *measured)
                self._calibrated = replace(self.inputs, blocks=blocks, overheads=overheads)
            choice = self._search(decision.num_frozen, layout, step)
            totals = [report["latest"] for report in reports if report]
            change = _as_change(choice, self.policy.explain(signal), max(totals, default=None))
            in_use = self._frozen_in_use(layout, choice.layout)
        self._report(decision, in_use)
        has_cache = self.cache is not None and self.cache.mode != "off"
        return {"next_step": self.next_step(step + 1), "change": change, "has_cache": has_cache}

    def adapt_to_cache(self, step: int, layout: Layout) -> dict[str, Any] | None:
        """Return the change to a layout that starts or stops storing activations; None if nothing changes."""
        choice = self._search(layout.num_frozen_layers, layout, step)
        if choice.layout.cache_level == layout.cache_level:
            return None
        reason = "frozen from the start" if choice.layout.cache_level else "nothing is stored any more"
        return _as_change(choice, reason, None)

    def _search(self, num_frozen: int, layout: Layout, step: int) -> Choice:
        """Search for the layout that follows and what it stores, with the latest measurements, and log the latter."""
        inputs = self._calibrated
        costs, overheads = inputs.blocks, inputs.overheads
        # What is stored is of use until layers unfreeze.
        until = self.policy.frozen_until(step, self.clock.max_steps, self.num_frozen_by_user)
        # A policy of the user may have said a step that is over.
        left = max(0, until - step)
        if self.cache is None:
            return search(layout, num_frozen, left, inputs)
        present = active_seconds(costs, layout.num_frozen_layers), layout.pipeline_size
        storing = self.cache.storing(layout.cache_level, *present)
        choice = search(layout, num_frozen, left, inputs, storing)
        if overheads.spans_nodes(choice.layout.pipeline_size):
            if layout.cache_level:
                why = why_not_over_nodes(choice.layout.pipeline_size, overheads.node_size)
                self.write("cache", what="off", reason=f"{why}.")
                announce(f"Step {step}: the activation cache is off: {why}.")
            return choice
        would = None
        if storing.keeps_dropout(num_frozen) and not self.cache.has_said_dropout:
            # For the line that says what activation_cache='on' would save: nothing is stored, but the time of it is
            # compared.
            would = search(layout, num_frozen, left, inputs, replace(storing, dropout_from=math.inf))
        blocks = with_launches(costs, choice.layout, inputs.samples_per_device)
        self.cache.report(step, choice, left, storing, blocks, would)
        return choice

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
        # Where all that may freeze is frozen, decisions without a change are as they should be.
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
            "num_wanted": self._target_num_frozen,
            "num_fruitless": self._num_fruitless,
            "policy": dict(self.policy.state()),
        }

    def load_state(self, state: Mapping[str, Any], is_same_policy: bool) -> None:
        """Continue from `state`; another policy ignores it."""
        if not is_same_policy:
            return
        self._target_num_frozen = float(state["num_wanted"])
        self._num_fruitless = int(state["num_fruitless"])
        self.policy.load_state(state["policy"])


def _as_change(choice: Choice, reason: str, measured: float | None) -> dict[str, Any]:
    return {
        "layout": choice.layout.as_event(),
        "reason": reason,
        "predicted": choice.alternatives[choice.layout.pipeline_size],
        "alternatives": {str(pipeline_size): seconds for pipeline_size, seconds in choice.alternatives.items()},
        "measured": measured,
    }
