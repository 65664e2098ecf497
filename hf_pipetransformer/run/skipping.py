"""Skipping weight gradients: when that is tried and decided, and what each step skips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Trainer

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autopipe.skip_plan import SKIPPED, MeasuredStep, is_enough, plan_skips, skipped_nothing
from hf_pipetransformer.controller import LayoutController
from hf_pipetransformer.freeze.skipping import (
    SkippableLayer,
    draw_skipped,
    skippable_layers,
    without_weight_gradients,
)
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.timing import MEASURED_STEPS, WARMUP_STEPS
from hf_pipetransformer.report.events import SkipPhase, announce, phase_at
from hf_pipetransformer.run.journal import Journal
from hf_pipetransformer.run.pipeline import Pipeline
from hf_pipetransformer.run.windows import units_per_step
from hf_pipetransformer.transition import Stage


TRIAL_STEPS = WARMUP_STEPS + MEASURED_STEPS
"""Steps that are measured before shares are chosen: every other one skips what may be skipped."""
LEAST_MEASURED = 3
"""Steps of either kind without which nothing is chosen."""

WAITING = SkipPhase(0, False, ())
"""Nothing is skipped, and nothing has been chosen."""


@dataclass
class Skips:
    """What the steps of a training skip.

    The run goes from phase to phase: it waits for the end of the warm-up and of other trials, tries, and then skips
    what rank 0 has chosen. Another layout begins anew.

    Args:
        trainer: tells the step.
        topology: the ranks.
        pipeline: whose stage skips.
        journal: for the events.
        controller: measures the steps.
        most: bound of the share that a stage skips; 0 skips nothing.
        first_step: nothing is tried before it.
        replayed: the phases of an earlier run, which are gone through again; None decides afresh.
    """

    trainer: Trainer
    topology: Topology
    pipeline: Pipeline
    journal: Journal
    controller: LayoutController
    most: float
    first_step: int
    replayed: Sequence[SkipPhase] | None
    _phases: list[SkipPhase] = field(default_factory=lambda: [WAITING], init=False)
    _layout: Layout | None = field(default=None, init=False)
    _measured: list[MeasuredStep] = field(default_factory=list, init=False)
    _seen: Stage | None = field(default=None, init=False)
    _layers: list[SkippableLayer] = field(default_factory=list, init=False)
    _skipped: list[torch.nn.Parameter] = field(default_factory=list, init=False)
    _share: float = field(default=0.0, init=False)
    _is_in_step: bool = field(default=False, init=False)

    def outlook(self, max_steps: int) -> str:
        """What is to come, in words."""
        from_step = self.first_step + TRIAL_STEPS
        if from_step >= max_steps:
            return (
                f"No weight gradient is skipped by plan: {TRIAL_STEPS} steps are measured from step "
                f"{self.first_step} on, in a run of {max_steps} (freeze_warmup)."
            )
        return (
            f"No layer freezes and nothing is stored; from step {from_step} of {max_steps} on each step skips up to "
            f"{self.most:.0%} of a stage's weight gradients. {TRIAL_STEPS} steps before that are measured, and half "
            "of them skip as much."
        )

    # ---- moments of a step ----

    def before_step(self) -> None:
        """A step comes: what it skips is known from here on. A collective call of all ranks."""
        step, self._is_in_step = self.trainer.state.global_step, True
        if self.replayed is not None:
            self._follow(phase_at(self.replayed, step), step)
        elif self.most:
            self._decide(step, self.pipeline.layout)
        shares = shares_at(self._phases, step)
        position = self.pipeline.stage.groups.position
        self._draw(step, shares[position] if shares else 0.0)

    def skipping(self) -> AbstractContextManager[None]:
        """The forwards and backwards of this step run inside."""
        return without_weight_gradients(self._skipped)

    def end_step(self) -> None:
        """The optimizer has stepped. A collective call while steps are measured."""
        was_in_step, self._is_in_step = self._is_in_step, False
        if not was_in_step or self.replayed is not None or not self._phases[-1].is_trial:
            return
        parts = self.pipeline.settings.meter.last_parts()
        self._measured.append(self.topology.gather({**parts, SKIPPED: self._share} if parts else {}))

    # ---- decisions ----

    def _follow(self, replayed: SkipPhase, step: int) -> None:
        """Go on to the phase of the earlier run, so that events and checkpoints tell what this run skips too."""
        self._layout, own = self.pipeline.layout, self._phases[-1]
        is_same_turn = not replayed.is_trial or (own.step - replayed.step) % 2 == 0
        if own[1:] != replayed[1:] or not is_same_turn:
            # A trial begins with a step that skips nothing: who resumes before one that skips enters it a step later.
            skips_now = replayed.is_trial and (step - replayed.step) % 2 == 1
            self._enter(SkipPhase(step, replayed.is_trial and not skips_now, replayed.shares))

    def _decide(self, step: int, layout: Layout) -> None:
        phase = self._phases[-1]
        if layout != self._layout:
            self._layout = layout
            if phase.is_trial or phase.shares:
                self._enter(SkipPhase(step, False, ()))
                phase = self._phases[-1]
        if phase.is_trial:
            self._end_trial(step, layout, (step - phase.step) / TRIAL_STEPS)
        elif not phase.shares and step >= self.first_step and not self.controller.is_trying:
            self.pipeline.settings.meter.reset()
            first = layout.first_active_stage
            self._enter(SkipPhase(step, True, (0.0,) * first + (self.most,) * (layout.num_stages - first)))

    def _end_trial(self, step: int, layout: Layout, num_trials: float) -> None:
        if num_trials < 1:
            return
        if skipped_nothing(self._measured, 2 * LEAST_MEASURED):
            reason = "in the trial no layer was skipped; only linear layers and convolutions that are trained can be"
            self._enter(SkipPhase(step, False, (0.0,) * layout.num_stages), {"reason": reason})
            return
        if not is_enough(self._measured, LEAST_MEASURED):
            if num_trials == int(num_trials):
                self.pipeline.settings.meter.reset()  # Some of the first trial was measured before a resumption.
            return
        args = self.trainer.args
        hop = self.pipeline.start_up.plans.costs.overheads.hop
        accumulation = args.gradient_accumulation_steps
        count = units_per_step(layout, args) // accumulation

        def choose() -> dict[str, Any]:
            plan = plan_skips(layout, self._measured, self.most, hop, count, accumulation)
            return {"shares": list(plan.shares), "event": plan.as_event()}

        chosen = self.topology.decide(choose, {"step": step, "layout": layout.as_event()})
        self._enter(SkipPhase(step, False, tuple(chosen["shares"])), chosen["event"])
        self.controller.expect(chosen["event"]["predicted_step_s"])

    def _enter(self, phase: SkipPhase, chosen: Mapping[str, Any] | None = None) -> None:
        self._phases.append(phase)
        self._measured.clear()
        what = "skip_trial" if phase.is_trial else "skip"
        self.journal.write("profile", what=what, **{"shares": list(phase.shares), **(chosen or {})})
        if chosen is None or self.topology.rank != 0:
            return
        if chosen.get("reason"):
            announce(f"Step {phase.step}: from now on no weight gradient is skipped by plan: {chosen['reason']}.")
            return
        shares = ", ".join(f"{share:.0%}" for share in phase.shares)
        stages = "of the weight gradients" if len(phase.shares) == 1 else "of the stages' weight gradients"
        before, after = chosen["unskipped_step_s"], chosen["predicted_step_s"]
        announce(
            f"Step {phase.step}: each step skips {shares} {stages}. A step without skipping takes {before * 1e3:.0f} "
            f"ms, now {after * 1e3:.0f} ms are predicted."
        )

    # ---- what is skipped ----

    def _draw(self, step: int, share: float) -> None:
        """What the coming step skips, alike on all replicas of the stage."""
        stage = self.pipeline.stage
        self._skipped, self._share = [], 0.0
        if not share:
            return
        if self._seen is not stage:
            own = {
                name: parameter
                for name, parameter in stage.store.held().items()
                if stage.store.is_active(name) and len(stage.owners[name]) == 1
            }
            self._seen, self._layers = stage, skippable_layers(stage.view.model, own)
        sizes = [layer.size for layer in self._layers]
        drawn = draw_skipped(sizes, share, f"{self.trainer.args.seed}|{step}|{stage.groups.position}")
        trained = sum(stage.store.is_active(name) for name in stage.store.held())
        if sum(len(self._layers[at].parameters) for at in drawn) == trained:
            drawn.pop()  # A loss has something to differentiate by.
        self._skipped = [parameter for at in drawn for parameter in self._layers[at].parameters]
        self._share = sum(sizes[at] for at in drawn) / sum(sizes) if drawn else 0.0

    # ---- resuming ----

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on with the same steps; rank 0's counts."""
        return {
            "phases": [[phase.step, phase.is_trial, list(phase.shares)] for phase in self._phases],
            "layout": None if self._layout is None else self._layout.as_event(),
            "measured": [list(map(dict, step)) for step in self._measured],
        }

    def restart(self) -> None:
        """The run goes on elsewhere or by another policy: what the events of the run that was saved tell is over."""
        self._enter(SkipPhase(self.trainer.state.global_step, False, ()))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, unless the run that was saved replayed what this one would not skip."""
        if self.replayed is None and not self.most:
            if any(shares for _, _, shares in state["phases"]):
                self.restart()
            return
        self._phases = [SkipPhase(step, is_trial, tuple(shares)) for step, is_trial, shares in state["phases"]]
        self._layout = None if state["layout"] is None else Layout.from_event(state["layout"])
        self._measured = list(state["measured"])


def shares_at(phases: Sequence[SkipPhase], step: int) -> tuple[float, ...]:
    """The shares that a step skips, by stage; empty for none."""
    phase = phase_at(phases, step)
    return () if phase.is_trial and (step - phase.step) % 2 == 0 else phase.shares
