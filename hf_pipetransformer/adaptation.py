"""The decisions of a run: when to ask the freeze policy, which layout follows, which number of micro-batches is best.

Rank 0 decides, the control group tells the others, and every rank checks that it stands where rank 0 stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autocache.planner import CachePlanner
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autopipe.calibration import calibrate
from hf_pipetransformer.autopipe.costs import UnitCosts, rank_bytes
from hf_pipetransformer.autopipe.inputs import PlanInputs
from hf_pipetransformer.autopipe.microbatches import MicrobatchTrial, candidates
from hf_pipetransformer.autopipe.planner import MEMORY_RESERVE, Plan, plan_transition
from hf_pipetransformer.errors import PipelineError
from hf_pipetransformer.freeze.monitor import GradientNormMonitor
from hf_pipetransformer.freeze.policies import Decision, DecisionClock, FreezePolicy, FreezeSignal, decide
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.timing import StepMeter
from hf_pipetransformer.report.events import announce, logger
from hf_pipetransformer.units import attention_of


Write = Callable[..., None]
"""Writes an event: its kind and its fields."""

NUM_FRUITLESS_DECISIONS = 2


@dataclass(frozen=True)
class Change:
    """What to do before the next step.

    Args:
        layout: the next layout.
        moves: False if only the number of micro-batches changes.
        plan: why; None if the change was replayed.
        measured: median seconds of a step under the layout so far, if there were enough.
        reason: in a few words.
    """

    layout: Layout
    moves: bool
    plan: Plan | None = None
    measured: float | None = None
    reason: str = "replayed"


class Adaptation:
    """Watches a training run and says before each optimizer step whether the layout changes.

    Args:
        policy: the freeze policy.
        clock: when it is asked.
        args: the options.
        costs: for planning.
        topology: the ranks.
        layout: at the start.
        units_of_parameter: name of each parameter to the units that use it.
        write: writes an event.
        meter: measures the steps.
        replay: optimizer step to the layout from then on, of an earlier run; None decides afresh.
        cache: asked at each freeze how far up activations are stored; None without a cache.
    """

    def __init__(
        self,
        policy: FreezePolicy,
        clock: DecisionClock,
        args: PipeTransformerArguments,
        costs: PlanInputs,
        topology: Topology,
        layout: Layout,
        units_of_parameter: Mapping[str, tuple[int, ...]],
        write: Write,
        meter: StepMeter,
        replay: Mapping[int, Layout] | None,
        cache: CachePlanner | None = None,
    ) -> None:
        self.policy = policy
        self.clock = clock
        self.args = args
        self.costs = costs
        self.topology = topology
        self.units_of_parameter = units_of_parameter
        self.write = write
        self.replay = replay
        self.cache = cache
        self.monitor = GradientNormMonitor(layout.num_layers, args.device) if policy.needs_gradient_norms else None
        self.level = float(layout.num_frozen_layers)
        self.meter = meter
        self._num_fruitless = 0
        self._predicted: float | None = None
        self._known_microbatches = dict(costs.rules.known_microbatches)
        self._trial: MicrobatchTrial | None = None
        self._unfit: frozenset[int] = frozenset()
        self._calibrated = (costs.units, costs.overheads)
        self._is_first = True
        self._begin_layout(layout)

    def decides_before(self, step: int) -> bool:
        """Whether the policy is asked before optimizer step number `step`; the same on every rank."""
        return self.replay is None and self.policy.is_due(step, self.clock)

    def next_change(self, step: int, max_steps: int, layout: Layout) -> Change | None:
        """What changes before optimizer step number `step`. A collective call whenever something may change."""
        if self.replay is not None:
            return self._replayed(step, layout)
        is_first, self._is_first = self._is_first, False
        if self.decides_before(step):
            change = self._decide(step, max_steps, layout)
            if change is not None:
                return change
        if is_first and self.cache is not None and layout.num_frozen_layers and not layout.cache_level:
            change = self._begin_with_cache(step, max_steps, layout)
            if change is not None:
                return change
        self._report_measurement(layout)
        return self._try_microbatches(layout)

    def end_step(self) -> None:
        """An optimizer step is done."""
        if self.meter.end_step() and self._trial is not None:
            self._trial.record(self.meter.last_seconds, max(1, self.meter.num_tokens))

    def _begin_layout(self, layout: Layout) -> Layout:
        """Measure afresh; `layout` itself, or with the first number of micro-batches to try."""
        # A step that brings stored activations to a new level tells little of the steps that read them.
        self.meter.reset(skip=self.cache.steps_per_epoch if self.cache and layout.cache_level else 0)
        asks = self.replay is None and self.costs.measures_microbatches and layout.pipeline_size > 1
        self._trial = None
        if asks and layout.pipeline_size not in self._known_microbatches:
            self._trial = MicrobatchTrial(self.topology.broadcast(self._fitting_candidates(layout)))
            return replace(layout, num_microbatches=self._trial.current())
        return layout

    def _fitting_candidates(self, layout: Layout) -> list[int]:
        """The M to try: fewer micro-batches hold more activations, so some may not fit."""
        samples = self.costs.samples_per_device * layout.pipeline_size
        budget = self.costs.rules.device_bytes * (1 - MEMORY_RESERVE)
        tried = candidates(layout.pipeline_size, samples)
        fitting = [
            count
            for count in tried
            if max(rank_bytes(replace(layout, num_microbatches=count), self.costs.units, samples)) <= budget
        ]
        return fitting or tried[:1]

    # ---- freezing ----

    def _decide(self, step: int, max_steps: int, layout: Layout) -> Change | None:
        norms = () if self.monitor is None else self.monitor.means()
        signal = FreezeSignal(step, max_steps, layout.num_layers, layout.num_frozen_layers, self.level, norms)
        decision = decide(self.policy, signal, self.args.freeze_min_active_layers)
        # Steps of a trial ran with several M: they say nothing of one layout.
        reports = self.topology.gather({} if self._trial is not None else self.meter.medians())
        plan = self._plan(decision.num_frozen, layout, reports, step, max_steps) if decision.freezes else None
        proposal = {
            "step": step,
            "layout": layout.as_event(),
            "level": decision.level,
            "num_frozen": decision.num_frozen,
            "next": None if plan is None else plan.layout.as_event(),
            "predicted": None if plan is None else plan.prediction.seconds,
        }
        answer = self.topology.broadcast(proposal)
        self._check_same_place(proposal, answer)
        decision = replace(decision, level=answer["level"], num_frozen=answer["num_frozen"])
        self.level = decision.level
        if self.monitor is not None:
            self.monitor.reset()
        new = None if answer["next"] is None else Layout.from_event(answer["next"])
        self._report_decision(decision, [] if new is None else self._frozen_in_use(layout, new))
        if new is None:
            return None
        measured = _slowest(reports)
        self._predicted = answer["predicted"]
        new = self._begin_layout(new)
        return Change(new, True, plan, measured, self.policy.explain(signal))

    def _begin_with_cache(self, step: int, max_steps: int, layout: Layout) -> Change | None:
        """Layers are frozen from the start: their activations may be stored from the first step on."""
        plan = self._plan(layout.num_frozen_layers, layout, [], step, max_steps)
        answer = Layout.from_event(self.topology.broadcast(plan.layout.as_event()))
        if not answer.cache_level:
            return None
        return Change(self._begin_layout(answer), True, plan, None, "frozen from the start")

    def _cache_level(self, num_frozen: int, layout: Layout, costs: UnitCosts, step: int, max_steps: int) -> int:
        """Layers whose output is stored from now on, by rank 0, whose plan counts."""
        if self.cache is None or self.topology.rank != 0:
            return 0
        sums = [0.0, *accumulate(costs.forward)]
        prefix = [sums[attention_of(level)] for level in range(num_frozen + 1)]
        decision = self.cache.decide(prefix, num_frozen, layout.cache_level, step, max_steps)
        return decision.level if decision.use else 0

    def _plan(self, num_frozen: int, layout: Layout, reports: list[Any], step: int, max_steps: int) -> Plan:
        if any(reports):
            self._calibrated = calibrate(self.costs.units, self.costs.overheads, layout, reports)
        costs, overheads = self._calibrated
        rules = replace(self.costs.rules, known_microbatches=self._known_microbatches, unfit=self._unfit)
        return plan_transition(
            layout,
            num_frozen,
            costs,
            overheads,
            rules,
            self.topology.world_size,
            self.costs.samples_per_device,
            self.args.gradient_accumulation_steps,
            self._cache_level(num_frozen, layout, costs, step, max_steps),
        )

    def _check_same_place(self, own: dict[str, Any], first: dict[str, Any]) -> None:
        for key in ("step", "layout"):
            if own[key] != first[key]:
                raise PipelineError(
                    f"Rank {self.topology.rank} is at {key} {own[key]} while rank 0 is at {first[key]}: the ranks "
                    "have lost step with each other, so the run cannot go on."
                )

    def _frozen_in_use(self, old: Layout, new: Layout) -> list[str]:
        """Parameters that freeze with the prefix although units above it use them too."""
        return [
            name
            for name, units in self.units_of_parameter.items()
            if old.first_active_unit <= units[0] < new.first_active_unit <= units[-1]
        ]

    def _report_decision(self, decision: Decision, frozen_in_use: list[str]) -> None:
        self.write("freeze", policy=self.policy.describe(), shared=frozen_in_use, **decision.as_event())
        if frozen_in_use and self.topology.rank == 0:
            logger.warning(
                f"Frozen with the first layers although layers above use them too: {', '.join(frozen_in_use)}."
            )
        if decision.freezes:
            self._num_fruitless = 0
            return
        self._num_fruitless += 1
        if self.topology.rank == 0:
            signal = decision.signal
            announce(
                f"Step {signal.step}: nothing newly frozen, {decision.num_frozen} of {signal.num_layers} layers are "
                f"({self.policy.explain(signal)})."
            )
        is_full = decision.num_frozen >= decision.signal.num_layers - self.args.freeze_min_active_layers
        if self._num_fruitless == NUM_FRUITLESS_DECISIONS and not is_full and self.topology.rank == 0:
            logger.warning(
                f"{NUM_FRUITLESS_DECISIONS} freeze decisions in a row froze nothing (policy "
                f"{self.policy.describe()}, {decision.num_frozen} of {decision.signal.num_layers} layers frozen). "
                "If that goes on, the run gains nothing over plain training: consider freeze_policy='schedule'."
            )

    # ---- measurements ----

    def _report_measurement(self, layout: Layout) -> None:
        """Set the measured step time of a layout beside the predicted one, once it is known."""
        if self._trial is not None:
            self._predicted = None  # It was for another M than the one that will be chosen.
        if not self.meter.is_done or self._predicted is None:
            return
        measured = _slowest(self.topology.gather(self.meter.medians()))
        predicted, self._predicted = self._predicted, None
        self.write(
            "profile",
            what="step",
            layout=layout.as_event(),
            predicted_step_s=predicted,
            measured_step_s=measured,
            parts=self.meter.medians(),
        )
        if self.topology.rank == 0 and measured is not None:
            announce(f"Measured {measured * 1e3:.0f} ms a step under {layout}, predicted {predicted * 1e3:.0f} ms.")

    # ---- micro-batches ----

    def _try_microbatches(self, layout: Layout) -> Change | None:
        if self._trial is None:
            return self._known_microbatches_change(layout)
        trial, count = self._trial, self._trial.current()
        if trial.is_done:
            count = int(self.topology.broadcast(trial.best()))
            self._known_microbatches[layout.pipeline_size] = count
            self._trial = None
            self.meter.reset()
        if trial.is_done:
            self._report_trial(trial, count, layout)
        if count == layout.num_microbatches:
            return None
        return Change(replace(layout, num_microbatches=count), False)

    def _known_microbatches_change(self, layout: Layout) -> Change | None:
        """To the M that an earlier trial found best for this length, if another one is in force."""
        count = self._known_microbatches.get(layout.pipeline_size, layout.num_microbatches)
        if self.args.num_microbatches is not None or count == layout.num_microbatches:
            return None
        return Change(replace(layout, num_microbatches=count), False)

    def _report_trial(self, trial: MicrobatchTrial, chosen: int, layout: Layout) -> None:
        seconds = {str(count): value for count, value in trial.as_event().items()}
        self.write(
            "profile",
            what="microbatches",
            num_stages=layout.pipeline_size,
            num_layers=layout.num_layers,
            num_replicas=layout.num_replicas,
            samples_per_pipeline=self.costs.samples_per_device * layout.pipeline_size,
            schedule=layout.schedule,
            seconds_per_token=seconds,
            num_microbatches=chosen,
        )
        if self.topology.rank == 0:
            tried = ", ".join(f"M={count}: {value * 1e6:.1f}" for count, value in trial.as_event().items())
            announce(f"K={layout.pipeline_size}: M={chosen} micro-batches from now on; microseconds a token: {tried}.")

    # ---- replay ----

    def _replayed(self, step: int, layout: Layout) -> Change | None:
        assert self.replay is not None
        new = self.replay.get(step)
        if new is None or new == layout:
            return None
        moves = replace(new, num_microbatches=layout.num_microbatches) != layout
        if moves:
            self.meter.reset()
        return Change(new, moves)

    # ---- resuming ----

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to take the same decisions."""
        return {
            "level": self.level,
            "num_fruitless": self._num_fruitless,
            "gradient_norms": None if self.monitor is None else self.monitor.state(),
            "known_microbatches": {str(k): m for k, m in self._known_microbatches.items()},
            "unfit": sorted(self._unfit),
        }

    def load_state(self, state: Mapping[str, Any], is_elsewhere: bool = False) -> None:
        """Go on from `state`, under the same layout or elsewhere, where what was measured then says nothing."""
        self.level = float(state["level"])
        self._num_fruitless = int(state["num_fruitless"])
        if self.monitor is not None and state["gradient_norms"] is not None:
            self.monitor.load_state(state["gradient_norms"])
        if is_elsewhere:
            return
        self._is_first = False  # The run that was saved decided on its cache.
        self._unfit = frozenset(state["unfit"])
        self._known_microbatches.update({int(k): int(m) for k, m in state["known_microbatches"].items()})


def _slowest(reports: list[Any]) -> float | None:
    """Median seconds of a step on the slowest rank."""
    totals = [report["total"] for report in reports if report]
    return max(totals) if totals else None
