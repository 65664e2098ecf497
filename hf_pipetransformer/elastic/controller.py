"""Monitor of training on every rank that decides before each optimizer step whether the layout changes.

Rank 0 decides; the other ranks receive its decision and check that they are at the same step and layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hf_pipetransformer.comm.transfers import plain
from hf_pipetransformer.freeze.policy import GRADIENT_NORMS, GradientNormMonitor
from hf_pipetransformer.planning.forecast import likely_cause
from hf_pipetransformer.planning.microbatches import MicrobatchTrial, fitting_candidates
from hf_pipetransformer.report import announce, duration
from hf_pipetransformer.schedules.layout import Layout


if TYPE_CHECKING:
    from hf_pipetransformer.elastic.decisions import Decisions
    from hf_pipetransformer.runtime.context import Context
    from hf_pipetransformer.runtime.stage import Stage


MOST_DRIFT = 1.5
"""A step that takes longer than this times its prediction is logged with the likely cause."""


@dataclass(frozen=True)
class Change:
    """Change to make before the next optimizer step, the same on every rank.

    Args:
        moves: False if only the number of micro-batches changes.
        predicted: expected seconds of a step.
        alternatives: predicted seconds of a step for every pipeline size K that was considered.
        measured: median seconds of the latest steps under the old layout, if any came after the warm-up.
    """

    layout: Layout
    moves: bool
    reason: str = "replayed"
    predicted: float | None = None
    alternatives: dict[str, float] | None = None
    measured: float | None = None


class LayoutController:
    """Gathers measurements for rank 0's decisions, and tries numbers of micro-batches.

    Args:
        replay: layouts of an earlier run by the optimizer step from which they applied; None to decide.
    """

    def __init__(
        self,
        context: Context,
        decisions: Decisions,
        stage: Stage,
        replay: Mapping[int, Layout] | None,
    ) -> None:
        self.context = context
        self.topology = context.topology
        self.decisions = decisions
        self.meter = stage.settings.meter
        self.replay = replay
        # A replayed run takes no decisions, so it measures nothing.
        measures = replay is None and GRADIENT_NORMS in decisions.policy.needs
        self.norms = GradientNormMonitor(stage.layout.num_layers, stage.settings.device) if measures else None
        self._predicted = decisions.inputs.predict(stage.layout).seconds if replay is None else None
        self.last_squares: torch.Tensor | None = None
        """`GradientNorms.squares` of the last step, on the device; None before the first."""
        self._trial: MicrobatchTrial | None = None
        self._next_decision: int | None = None
        self._is_first = True
        self._begin_layout(stage.layout)

    # ---- moments of a step ----

    def decides_before(self, step: int) -> bool:
        """Return True if rank 0 asks the policy before this step; collective when that step is not known yet."""
        if self.replay is not None:
            return False
        # Rank 0 alone asks: the policy may keep state, which is that of rank 0.
        if self._next_decision is None:
            self._next_decision = int(self.topology.decide(lambda: self.decisions.first_step(step)))
        return step == self._next_decision

    def coming_decisions(self) -> list[int]:
        """Return the steps before which the layout may change, as far as they are known."""
        if self.replay is not None:
            return list(self.replay)
        return [] if self._next_decision is None else [self._next_decision]

    def change_before(self, step: int, stage: Stage) -> Change | None:
        """Return the change before optimizer step number `step`. Collective whenever something may change."""
        layout = stage.layout
        if self.replay is not None:
            # The latest change at or before this step: a run that resumes begins between two changes.
            return self._replayed(self.replay[max(start for start in self.replay if start <= step)], layout)
        # What is frozen at the start comes with no decision of the policy: if it is stored is asked once, before the
        # first step.
        is_first, self._is_first = self._is_first, False
        change = self._decide(step, stage) if self.decides_before(step) else None
        may_begin_cache = is_first and self.decisions.cache is not None
        if change is None and may_begin_cache and layout.num_frozen_layers and not layout.cache_level:
            change = self._adapt_to_cache(step, layout)
        if change is not None:
            return change
        self._report_measurement(layout)
        return self._try_microbatches(layout)

    def change_without_cache(self, step: int, stage: Stage) -> Change | None:
        """Return the change before `step` if the layout stores activations and they cannot be stored; collective then.

        Call it after the change of `change_before` was made.
        """
        layout = stage.layout
        if self.replay is not None or not layout.cache_level or self._has_cache:
            return None
        return self._adapt_to_cache(step, layout)

    def watch_gradients(self, squares: torch.Tensor) -> None:
        """Record this step's `GradientNorms.squares`."""
        self.last_squares = squares
        if self.norms is not None:
            # The embeddings' norm belongs to no layer, but where it is inf or nan, 0 times it makes all entries nan:
            # the step overflowed and counts nowhere.
            self.norms.record(squares[:-1] + 0 * squares[-1])

    def end_step(self) -> bool:
        """End the optimizer step. Returns False if none was running, as when Trainer calls at the end of an epoch."""
        has_run = self.meter.end_step()
        if has_run and self._trial is not None:
            self._trial.record(self.meter.last_seconds, max(1, self.meter.num_tokens))
        return has_run

    # ---- freezing ----

    def _decide(self, step: int, stage: Stage) -> Change | None:
        layout = stage.layout
        # Steps of a trial ran with several numbers of micro-batches, so their times describe no single layout.
        own = {} if self._trial is not None else self.meter.medians()
        reports = self.topology.gather(own and {**own, "latest": self.meter.latest_seconds})
        norms: tuple[float, ...] = ()
        if self.norms is not None:
            norms = self.norms.means()
            # Each decision has the mean since the one before it, whatever comes of it.
            self.norms.reset()
        answer = self.topology.decide(
            lambda: self.decisions.freeze(step, layout, reports, norms, self.context.run.learning_rate),
            {"step": step, "layout": layout.as_event()},
        )
        self._next_decision = answer["next_step"]
        # Rank 0 may have found, while it measured the disk for this decision, that nothing can be stored.
        if self.decisions.cache is not None and not answer["has_cache"]:
            self.decisions.cache.mode = "off"
        if answer["change"] is None:
            return None
        self._predicted = answer["change"]["predicted"]
        return self._begun(answer["change"])

    def _adapt_to_cache(self, step: int, layout: Layout) -> Change | None:
        change = self.topology.decide(lambda: self.decisions.adapt_to_cache(step, layout))
        return None if change is None else self._begun(change)

    @property
    def _has_cache(self) -> bool:
        """True if activations can be stored, as far as this rank knows: rank 0 may find out otherwise later."""
        cache = self.decisions.cache
        return cache is not None and cache.mode != "off"

    def _begun(self, change: dict[str, Any]) -> Change:
        return Change(**{**change, "layout": self._begin_layout(Layout.from_event(change["layout"]))}, moves=True)

    def _begin_layout(self, layout: Layout) -> Layout:
        """Restart the measurements; return `layout` itself, or with the first number of micro-batches to try."""
        # Steps that write activations of a new level take longer than the later steps that read them.
        cache, inputs = self.decisions.cache, self.decisions.inputs
        self.meter.reset(skip=cache.steps_per_epoch if cache and layout.cache_level else 0)
        asks = self.replay is None and inputs.measures_microbatches and layout.pipeline_size > 1
        self._trial = None
        if asks and layout.shape not in inputs.known_microbatches:
            # All ranks of the run have to try the same numbers at the same steps.
            tried = self.topology.decide(lambda: fitting_candidates(layout, inputs))
            self._trial = MicrobatchTrial(tried)
            return replace(layout, num_microbatches=self._trial.current())
        return layout

    # ---- measurements ----

    def _report_measurement(self, layout: Layout) -> None:
        """Log the measured time of a step beside its prediction, once for each layout. Collective then."""
        if self._trial is not None:
            self._predicted = None  # It was for another number of micro-batches than the trial will choose.
        # Ranks count the same steps, so that all of them come to the gather below in the same one.
        if not self.meter.is_done or self._predicted is None:
            return
        reports = [report for report in self.topology.gather(self.meter.medians()) if report]
        measured = max((report["total"] for report in reports), default=None)
        predicted, self._predicted = self._predicted, None
        self.context.journal.write(
            "profile",
            what="step",
            layout=layout.as_event(),
            predicted_step_s=predicted,
            measured_step_s=measured,
            parts=self.meter.medians(),
        )
        if self.topology.rank == 0 and measured is not None:
            announce(self._beside_prediction(layout, predicted, measured, reports))

    def _beside_prediction(
        self, layout: Layout, predicted: float, measured: float, reports: Sequence[Mapping[str, float]]
    ) -> str:
        state = self.context.run.state
        left = duration(measured * (state.max_steps - state.global_step))
        found = (
            f"Measured {duration(measured)} a step under {layout}, predicted {duration(predicted)}: {left} of "
            "steps are left if nothing changes."
        )
        if measured <= MOST_DRIFT * predicted:
            return found
        cause = likely_cause(self.decisions.inputs.predict(layout), reports)
        return f"{found} That is {measured / predicted:.1f} times the prediction. Likely cause: {cause}."

    # ---- micro-batches ----

    def _try_microbatches(self, layout: Layout) -> Change | None:
        trial, known = self._trial, self.decisions.inputs.known_microbatches
        if trial is not None and trial.is_done:
            # Clocks differ between ranks, and M must not: rank 0's times count.
            known[layout.shape] = int(self.topology.decide(trial.best))
            self._report_trial(trial, known[layout.shape], layout)
            self._trial = None
            self.meter.reset()
            chosen = replace(layout, num_microbatches=known[layout.shape])
            self._predicted = self.decisions.inputs.predict(chosen).seconds
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
        seconds = {str(count): value for count, value in trial.least.items()}
        self.context.journal.write(
            "profile",
            what="microbatches",
            pipeline_size=layout.pipeline_size,
            num_chunks=layout.num_chunks,
            num_layers=layout.num_layers,
            num_replicas=layout.num_replicas,
            samples_per_pipeline=self.decisions.inputs.samples(layout),
            schedule=layout.schedule,
            seconds_per_token=seconds,
            num_microbatches=chosen,
        )
        if self.topology.rank == 0:
            tried = ", ".join(f"M={count}: {value * 1e6:.1f}" for count, value in trial.least.items())
            announce(f"K={layout.pipeline_size}: M={chosen} micro-batches from now on; microseconds a token: {tried}.")

    # ---- replay ----

    def _replayed(self, new: Layout, layout: Layout) -> Change | None:
        if not self._has_cache:
            # The replayed run may have stored where this one cannot; its layouts hold all the same.
            new = replace(new, cache_level=0)
        if new == layout:
            return None
        moves = replace(new, num_microbatches=layout.num_microbatches) != layout
        if moves:
            # Steps with other numbers of micro-batches say nothing of the layout that follows.
            self.meter.reset()
        return Change(new, moves)

    # ---- resuming ----

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to continue with the same decisions; rank 0's counts.

        Raises:
            ValueError: the state of the policy is not JSON.
        """
        state = {
            **self.decisions.state(),
            "gradient_norms": None if self.norms is None else self.norms.state(),
            "known_microbatches": [[*shape, m] for shape, m in self.decisions.inputs.known_microbatches.items()],
        }
        return dict(plain(state, "What decides on layouts"))

    def load_state(
        self,
        state: Mapping[str, Any],
        is_elsewhere: bool,
        is_same_policy: bool,
    ) -> None:
        """Continue from `state`.

        Args:
            is_elsewhere: True under another layout than the saved run's, where its measured times do not apply.
            is_same_policy: False if the policy's class is not that of the saved run; it then starts fresh.
        """
        self.decisions.load_state(state, is_same_policy)
        if self.norms is not None and state["gradient_norms"] is not None:
            self.norms.load_state(state["gradient_norms"])
        if not is_elsewhere:
            # The saved run already decided on its cache. Only mode "on" needs no times, so only it is decided again.
            cache = self.decisions.cache
            self._is_first = cache is not None and cache.mode == "on"
