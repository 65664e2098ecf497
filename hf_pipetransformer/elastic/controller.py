"""Watches a training run on every rank and says before each optimizer step whether the layout changes.

Rank 0 decides, the others hear of it and check that they stand where rank 0 stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.elastic.decisions import Decisions, Write
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.freeze.policy import ACTIVATION_SIMILARITY, GRADIENT_NORMS, WEIGHT_CHANGES
from hf_pipetransformer.freeze.signals import (
    GradientNormMonitor,
    LayerProbe,
    SimilarityMonitor,
    WeightMonitor,
    relative_changes,
)
from hf_pipetransformer.planning.microbatches import MicrobatchTrial, fitting_candidates
from hf_pipetransformer.report import announce
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import block_of


WEIGHTS, ACTIVATIONS, SAMPLES = "weights", "activations", "samples"
"""What `LayoutController.tensors` holds: a key begins with one of them."""


@dataclass(frozen=True)
class Change:
    """What to do before the next step, the same on every rank.

    Args:
        layout: the next layout.
        moves: False if only the number of micro-batches changes.
        reason: in a few words.
        predicted: seconds that a step is expected to take.
        alternatives: the same for every K that was considered.
        measured: median seconds of a step under the layout so far, if there were enough.
    """

    layout: Layout
    moves: bool
    reason: str = "replayed"
    predicted: float | None = None
    alternatives: dict[str, float] | None = None
    measured: float | None = None


class LayoutController:
    """Gathers what decisions are taken from, has rank 0 take them, and tries numbers of micro-batches.

    Args:
        decisions: what rank 0 decides with.
        topology: the ranks.
        stage: this rank's stage at the start.
        write: writes an event.
        meter: measures the steps.
        probe: says what the layers give, for policies that ask.
        replay: optimizer step to the layout from then on, of an earlier run; None decides afresh.
        learning_rate: gives that of the step that comes, see `FreezeSignal`.
    """

    def __init__(
        self,
        decisions: Decisions,
        topology: Topology,
        stage: Stage,
        write: Write,
        meter: StepMeter,
        probe: LayerProbe,
        replay: Mapping[int, Layout] | None,
        learning_rate: Callable[[], float] = float,
    ) -> None:
        self.decisions = decisions
        self.topology = topology
        self.write = write
        self.meter = meter
        self.probe = probe
        self.replay = replay
        self.learning_rate = learning_rate
        # Nobody asks what has been measured since the last decision of a run that takes none.
        num_layers, needs = stage.layout.num_layers, decisions.policy.needs if replay is None else ()
        self._norms = GradientNormMonitor(num_layers, meter.device) if GRADIENT_NORMS in needs else None
        units = stage.view.structure.units_of_parameter
        places = {name: block_of(used_by[0]) - 1 for name, used_by in units.items() if used_by[0]}
        self._weights = WeightMonitor(places) if WEIGHT_CHANGES in needs else None
        self._similarity = SimilarityMonitor() if ACTIVATION_SIMILARITY in needs else None
        self._recall: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self._predicted: float | None = None
        self._known_microbatches = dict(decisions.inputs.rules.known_microbatches)
        self._trial: MicrobatchTrial | None = None
        self._next_decision: int | None = None
        self._is_first = True
        self._begin_layout(stage.layout)

    # ---- moments of a step ----

    def decides_before(self, step: int) -> bool:
        """Whether rank 0 asks the policy before optimizer step number `step`. At first a collective call."""
        if self.replay is not None:
            return False
        if self._next_decision is None:
            self._next_decision = int(self.topology.decide(lambda: self.decisions.next_step(step)))
        return step == self._next_decision

    def coming_decisions(self) -> list[int]:
        """Steps before which the layout may change, as far as it is known."""
        if self.replay is not None:
            return list(self.replay)
        return [] if self._next_decision is None else [self._next_decision]

    def change_before(self, step: int, stage: Stage) -> Change | None:
        """What changes before optimizer step number `step`. A collective call whenever something may change."""
        layout = stage.layout
        if self.replay is not None:
            return self._replayed(self.replay[max(start for start in self.replay if start <= step)], layout)
        is_first, self._is_first = self._is_first, False
        change = self._decide(step, stage) if self.decides_before(step) else None
        if change is None and is_first:
            change = self._begin_with_cache(step, layout)
        if change is not None:
            return change
        self._report_measurement(layout)
        return self._try_microbatches(layout)

    def change_without_cache(self, step: int, stage: Stage) -> Change | None:
        """What changes before step number `step` if activations that the layout has stored cannot be; then collective.

        Asked once the change before it is made: what the policy measures from has not begun, so it may move.
        """
        layout = stage.layout
        if self.replay is not None or not layout.cache_level or self._has_cache:
            return None
        return self._adapt_to_cache(step, layout)

    def begin_step(self, stage: Stage) -> None:
        """An optimizer step begins. At first a collective call."""
        if self.replay is None:
            self._take_up_measurements()
            if self._weights is not None and not self._weights.has_begun:
                self._weights.begin(stage.trained_here())
            if self._similarity is not None and not self._similarity.has_begun:
                self._similarity.compare(self.probe.outputs(stage))
        self.meter.begin_step()

    def watch_gradients(self, squares: torch.Tensor) -> None:
        """Squared gradient norms of this step's layers and head, see `GradientNormMonitor.record`."""
        if self._norms is not None:
            self._norms.record(squares)

    def end_step(self) -> None:
        """An optimizer step is done."""
        if self.meter.end_step() and self._trial is not None:
            self._trial.record(self.meter.last_seconds, max(1, self.meter.num_tokens))

    # ---- freezing ----

    def _decide(self, step: int, stage: Stage) -> Change | None:
        layout = stage.layout
        # Steps of a trial ran with several M: they say nothing of one layout.
        reports = self.topology.gather({} if self._trial is not None else self.meter.medians())
        measured = self._measured(stage)
        answer = self.topology.decide(
            lambda: self.decisions.freeze(
                step, layout, reports, measured, self._known_microbatches, self.learning_rate()
            ),
            {"step": step, "layout": layout.as_event()},
        )
        self._next_decision = answer["next_step"]
        if self.decisions.cache is not None and not answer["has_cache"]:
            self.decisions.cache.mode = "off"
        if answer["change"] is None:
            return None
        self._predicted = answer["change"]["predicted"]
        return self._begun(answer["change"])

    def _measured(self, stage: Stage) -> dict[str, tuple[float, ...]]:
        """What the policy asked for, since the last decision. A collective call."""
        found = {}
        self._take_up_measurements()
        if self._norms is not None:
            found[GRADIENT_NORMS] = self._norms.means()
            self._norms.reset()
        if self._weights is not None:
            report = self._weights.report(stage.trained_here(), stage.layout.num_layers)
            reports = self.topology.gather(report if self._weights.has_begun else None)
            # Replicas hold the same bits: those of the first pipeline tell all.
            own = [report for report in reports[: stage.layout.pipeline_size] if report is not None]
            found[WEIGHT_CHANGES] = relative_changes(own) if own else ()
            self._weights.forget()
        if self._similarity is not None:
            found[ACTIVATION_SIMILARITY] = self._similarity.compare(self.probe.outputs(stage))
        return found

    def _begin_with_cache(self, step: int, layout: Layout) -> Change | None:
        """Layers may be frozen from the start, and their activations stored from the first step on."""
        if self.decisions.cache is None or not layout.num_frozen_layers or layout.cache_level:
            return None
        return self._adapt_to_cache(step, layout)

    def _adapt_to_cache(self, step: int, layout: Layout) -> Change | None:
        known = self._known_microbatches
        change = self.topology.decide(lambda: self.decisions.adapt_to_cache(step, layout, known))
        return None if change is None else self._begun(change)

    @property
    def _has_cache(self) -> bool:
        """Whether activations can be stored; every rank knows, unless rank 0 has said so by a layout without them."""
        cache = self.decisions.cache
        return cache is not None and cache.mode != "off"

    def _begun(self, change: dict[str, Any]) -> Change:
        assert self._weights is None or not self._weights.has_begun, "weights leave that changes are measured from"
        return Change(**{**change, "layout": self._begin_layout(Layout.from_event(change["layout"]))}, moves=True)

    def _begin_layout(self, layout: Layout) -> Layout:
        """Measure afresh; `layout` itself, or with the first number of micro-batches to try."""
        # A step that brings stored activations to a new level tells little of the steps that read them.
        cache, inputs = self.decisions.cache, self.decisions.inputs
        self.meter.reset(skip=cache.writing_steps if cache and layout.cache_level else 0)
        asks = self.replay is None and inputs.measures_microbatches and layout.pipeline_size > 1
        self._trial = None
        if asks and layout.shape not in self._known_microbatches:
            samples, bytes_ = inputs.samples_per_device, inputs.rules.device_bytes
            tried = self.topology.decide(lambda: fitting_candidates(layout, inputs.units, samples, bytes_))
            self._trial = MicrobatchTrial(tried)
            return replace(layout, num_microbatches=self._trial.current())
        return layout

    # ---- measurements ----

    def _report_measurement(self, layout: Layout) -> None:
        """Set the measured step time of a layout beside the predicted one, once it is known."""
        if self._trial is not None:
            self._predicted = None  # It was for another M than the one that will be chosen.
        if not self.meter.is_done or self._predicted is None:
            return
        reports = self.topology.gather(self.meter.medians())
        measured = max((report["total"] for report in reports if report), default=None)
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
        trial, known = self._trial, self._known_microbatches
        if trial is not None and trial.is_done:
            known[layout.shape] = int(self.topology.decide(trial.best))
            self._report_trial(trial, known[layout.shape], layout)
            self._trial = None
            self.meter.reset()
        if self._trial is not None:
            count = self._trial.current()
        elif self.decisions.args.num_microbatches is None:
            count = known.get(layout.shape, layout.num_microbatches)
        else:
            count = layout.num_microbatches
        if count == layout.num_microbatches:
            return None
        return Change(replace(layout, num_microbatches=count), moves=False)

    def _report_trial(self, trial: MicrobatchTrial, chosen: int, layout: Layout) -> None:
        seconds = {str(count): value for count, value in trial.as_event().items()}
        self.write(
            "profile",
            what="microbatches",
            pipeline_size=layout.pipeline_size,
            num_chunks=layout.num_chunks,
            num_layers=layout.num_layers,
            num_replicas=layout.num_replicas,
            samples_per_pipeline=self.decisions.inputs.samples_per_device * layout.pipeline_size,
            schedule=layout.schedule,
            seconds_per_token=seconds,
            num_microbatches=chosen,
        )
        if self.topology.rank == 0:
            tried = ", ".join(f"M={count}: {value * 1e6:.1f}" for count, value in trial.as_event().items())
            announce(f"K={layout.pipeline_size}: M={chosen} micro-batches from now on; microseconds a token: {tried}.")

    # ---- replay ----

    def _replayed(self, new: Layout, layout: Layout) -> Change | None:
        if not self._has_cache:
            new = replace(new, cache_level=0, fresh_share=0.0)
        if new == layout:
            return None
        moves = replace(new, num_microbatches=layout.num_microbatches) != layout
        if moves:
            self.meter.reset()
        return Change(new, moves)

    # ---- resuming ----

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to take the same decisions; rank 0's counts.

        Raises:
            ValueError: the state of the policy is none for JSON.
        """
        state = {
            **self.decisions.state(),
            "gradient_norms": None if self._norms is None else self._norms.state(),
            "known_microbatches": [[*shape, m] for shape, m in self._known_microbatches.items()],
        }
        return dict(plain(state, "What decides on layouts"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """What this rank's weights, and on rank 0 the activations of some samples, were at the last decision.

        For a checkpoint. A run that goes on with batches of another size would look at other samples.

        Empty unless the policy asks for them.
        """
        found = {}
        if self._weights is not None:
            found = {f"{WEIGHTS}|{name}": value for name, value in self._weights.state().items()}
        if self._similarity is not None and self.topology.rank == 0:
            found |= {f"{ACTIVATIONS}|{layer}": value for layer, value in self._similarity.state().items()}
            found |= {f"{SAMPLES}|{name}": value for name, value in self.probe.tensors().items()}
        return found

    def load_state(
        self,
        state: Mapping[str, Any],
        recall: Callable[[], Mapping[str, torch.Tensor]],
        is_elsewhere: bool,
        is_same_policy: bool,
    ) -> None:
        """Go on from `state`, under the same layout or elsewhere, where measured times say nothing.

        Args:
            recall: reads the `tensors` of all ranks, as far as this one needs them. It is called when the layout of
                the first step is in force: a transition before it takes weights to other ranks.
            is_same_policy: the policy's class is that of the run that was saved; another one begins anew.
        """
        self.decisions.load_state(state, is_same_policy)
        if self._norms is not None and state["gradient_norms"] is not None:
            self._norms.load_state(state["gradient_norms"])
        if self._weights is not None or self._similarity is not None:
            self._recall = recall
        if is_elsewhere:
            return
        # The run that was saved decided on its cache; one that is switched on since then needs no decision on times.
        cache = self.decisions.cache
        self._is_first = cache is not None and cache.mode == "on"
        self._known_microbatches.update({(k, v): m for k, v, m in state["known_microbatches"]})

    def _take_up_measurements(self) -> None:
        """What is measured from, of the run that is gone on with. A collective call, once."""
        if self._recall is None:
            return
        recall, self._recall = self._recall, None
        parts: dict[str, dict[str, torch.Tensor]] = {WEIGHTS: {}, ACTIVATIONS: {}, SAMPLES: {}}
        for key, value in self.topology.together(recall).items():
            kind, _, name = key.partition("|")
            parts[kind][name] = value
        if self._weights is not None and parts[WEIGHTS]:
            self._weights.load_state(parts[WEIGHTS])
        if self._similarity is not None:
            self._similarity.load_state(parts[ACTIVATIONS])
            self.probe.set_tensors(parts[SAMPLES])
