"""Steps that all stages begin and end together, and the check that the losses of their parts add up.

While a run goes on, the stage with the head computes the loss of a whole batch once more, from what entered the head,
and compares it and its gradient there with the weighted sum over micro-batches and replicas, dropout off in both. If
they differ, the optimizer step is run again with the loss of the whole batch, or the run ends before the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pipetransformer.comm.errors import LossDoesNotDecomposeError
from hf_pipetransformer.comm.transfers import all_gather_trees
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.compat.known_losses import known_loss
from hf_pipetransformer.data.batches import detach_tags
from hf_pipetransformer.data.effects import modes_kept
from hf_pipetransformer.data.rng import random_state, random_state_kept, set_random_state
from hf_pipetransformer.engine.losses import (
    PARTS_TOLERANCE,
    SMALLEST_SCALE,
    LossScope,
    agree_on_overflow,
)
from hf_pipetransformer.report import logger
from hf_pipetransformer.runtime.execution import LoaderBatch, StageRunner
from hf_pipetransformer.runtime.joining import BatchesDifferError, ReplicaJoin, join_parts
from hf_pipetransformer.training.metrics import MetricAccumulator, loss_apart
from hf_pipetransformer.training.steps import StepBatches, Steps


if TYPE_CHECKING:
    from hf_pipetransformer.engine.program import MicroBatch
    from hf_pipetransformer.runtime.pipeline import Pipeline
    from hf_pipetransformer.training.context import TrainingContext


NUM_FIRST = 3
"""Number of first steps in which the loss of transformers' and TRL's own code is checked."""
INTERVAL = 100
"""Number of steps from one check to the next after these. Of another loss, code of the script's would run again."""
ROUGH_TOLERANCE = 2e-2
"""Relative difference up to which losses in half precision, or of products in TF32, count as equal."""


@dataclass(frozen=True)
class Comparison:
    """Loss of a batch as the weighted sum of its parts and as a whole, and squared norms of their gradients.

    The gradients are those of what enters the head: of the difference, and of the whole.
    """

    parts: float
    whole: float
    difference: float
    scale: float

    def agree(self, tolerance: float) -> bool:
        """Return True if both are close, or the loss is not finite, of which nothing can be told."""
        values = torch.tensor([self.parts, self.whole, self.difference, self.scale], dtype=torch.float64)
        if not bool(values.isfinite().all()):
            return True
        is_near = abs(self.parts - self.whole) <= tolerance * max(abs(self.whole), SMALLEST_SCALE)
        return is_near and self.difference**0.5 <= tolerance * max(self.scale**0.5, SMALLEST_SCALE)

    @property
    def in_words(self) -> str:
        share = (self.difference / self.scale) ** 0.5 if self.scale else 0.0
        return (
            f"The weighted losses of the micro-batches add up to {self.parts:.7g}, the loss of the whole batch is "
            f"{self.whole:.7g}, and their gradients differ by {share:.2g} of their norm"
        )


@dataclass
class LossCheck:
    """Checks the losses of the batches of synchronous steps: `begin` before each, `end` after it."""

    context: TrainingContext
    pipeline: Pipeline
    metrics: MetricAccumulator
    _is_due: bool = field(default=False, init=False)
    _ran: list[tuple[LoaderBatch, torch.Tensor]] = field(default_factory=list, init=False)
    _found: list[Comparison] = field(default_factory=list, init=False)
    _start: Any = field(default=None, init=False)

    @cached_property
    def _is_known(self) -> bool:
        return known_loss(self.context.trainer) is not None

    @property
    def _runner(self) -> StageRunner:
        return self.pipeline.runner

    def begin(self) -> bool:
        """Return True if the next batch is checked."""
        if not self._ran:
            self._begin_step()
        return self._is_due

    def end(self, batch: LoaderBatch, loss: torch.Tensor, is_last_batch: bool) -> torch.Tensor:
        """Check the batch that has run with `loss`; after the last one of a step, return the loss that counts.

        Collective: call on every rank.

        Raises:
            LossDoesNotDecomposeError: on every rank, if the loss is no sum over parts and cannot be joined.
        """
        if self._is_due:
            self._ran.append((batch, loss))
            self._compare(batch)
            if is_last_batch:
                loss = self._decide(loss)
        if is_last_batch:
            self._ran, self._found, self._start = [], [], None
        return loss

    def _begin_step(self) -> None:
        # By the step of the run: one that is resumed checks the same steps, and so has the same bits.
        step = self.context.trainer.state.global_step
        self._is_due = self._is_known and (step < NUM_FIRST or step % INTERVAL == 0) and self._is_watched
        if self._is_due:
            # Taken before the step runs, in case that it has to run again.
            self._start = random_state(self.pipeline.settings.device), self.metrics.mark()

    @property
    def _is_watched(self) -> bool:
        """True if the loss is a sum over parts that can be compared with the whole."""
        layout = self.pipeline.layout
        has_replicas = layout.num_replicas > 1
        is_cut = layout.num_microbatches > 1 or has_replicas
        # Rows that hold several samples are cut between them, but replicas' rows are not joined.
        is_joinable = not (has_replicas and self.pipeline.start_up.samples.sequences is not None)
        is_watched = self._runner.scope is LossScope.PARTS and is_cut and layout.abilities.runs_steps_whole
        # Of a model whose activations follow the tokens in another way, the head runs apart at one length only.
        return is_watched and is_joinable and self.pipeline.start_up.probe.activation.multiple != 0

    def _compare(self, batch: LoaderBatch) -> None:
        """Compare the parts of the batch that has just run with the whole. Collective over the last stage's ranks."""
        stage = self.pipeline.stage
        groups, entered = stage.groups, [pair for _, pair in sorted(stage.head.entered.items())]
        # Kept activations would add up over the batches of a step.
        stage.head.entered = {}
        if not groups.is_last:
            return
        replicas = ReplicaJoin(groups, stage.settings.probe.placeholders) if groups.num_replicas > 1 else None
        numbers = random_state_kept(self.pipeline.settings.device)
        with loss_apart(self.context.trainer), numbers, self._without_dropout():
            try:
                found = self._parts_and_whole(batch, entered, replicas)
            except BatchesDifferError:  # On every replica: texts of other lengths, whose mean does not depend on them.
                found = [float("nan")] * 4
        stage.view.widen()
        # Every replica of the last stage comes here, also without samples, since all gather.
        sums = torch.tensor(all_gather_trees(found, groups.replica_control, groups.num_replicas), dtype=torch.float64)
        self._found.append(Comparison(*sums.sum(0).tolist()))

    def _parts_and_whole(
        self, batch: LoaderBatch, entered: list[tuple[MicroBatch, torch.Tensor]], replicas: ReplicaJoin | None
    ) -> list[float]:
        """Return the fields of this replica's `Comparison`, zeros without samples."""
        if not entered:
            if replicas is not None:
                replicas.take_part(self.pipeline.settings)
            return [0.0] * 4
        cut, hidden = [part for part, _ in entered], [each for _, each in entered]
        inputs, _ = detach_tags(batch.inputs)
        # A frozen reference has given entries to the micro-batches, which the batch does not have.
        of_reference = sorted({*cut[0].inputs} - inputs.names)
        inputs = inputs | {name: torch.cat([part.inputs[name] for part in cut]) for name in of_reference}
        joined = join_parts(inputs, cut, hidden, replicas)
        share, given = joined.share, batch.prepare(joined.inputs)
        part = replace(cut[0], index=0, inputs=given, weight=share, activation_shape=(), tags=None, place=None)
        whole, gradient = self._loss_of(part, joined.entering)
        of_parts = [self._loss_of(part, each) for part, each in entered]
        losses = [float(loss) * part.weight for (loss, _), part in zip(of_parts, cut, strict=True) if part.weight]
        of_whole = joined.cut(gradient * share)
        pairs = zip(of_whole, of_parts, cut, strict=True)
        differences = [own - each * part.weight for own, (_, each), part in pairs]
        return [sum(losses), float(whole) * share, _squares(differences), _squares(of_whole)]

    def _loss_of(self, part: MicroBatch, entering: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of what enters the head, and its gradient there; zeros for a part that does not count."""
        entering = entering.detach().requires_grad_()
        if not part.weight:
            return entering.new_zeros(()), torch.zeros_like(entering)
        slices, length = self.pipeline.settings.head_slices, entering.shape[1]
        if slices.number == 1:
            return self._loss_at_once(part, entering)
        # Otherwise the logits of a whole batch would be in memory.
        whole, total = torch.zeros_like(entering), torch.zeros((), device=entering.device)
        # With weight 1, so that the weights of the slices are their shares in this part.
        for where, cut in slices.of(replace(part, weight=1.0), length):
            if cut.weight:
                loss, gradient = self._loss_at_once(cut, entering[:, where])
                total, whole[:, where] = total + cut.weight * loss, cut.weight * gradient
        return total, whole

    def _loss_at_once(self, part: MicroBatch, entering: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entering = entering.detach().contiguous().requires_grad_()
        view = self.pipeline.stage.view
        head = range(view.structure.num_blocks - 1, view.structure.num_blocks)
        with torch.enable_grad():
            loss = view.run(head, entering, partial(part.forward, dict(part.inputs)))
        if not loss.requires_grad:
            return loss.detach(), torch.zeros_like(entering)
        (gradient,) = torch.autograd.grad(loss, entering, allow_unused=True)
        return loss.detach(), torch.zeros_like(entering) if gradient is None else gradient

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        """Put the modules of the head into evaluation mode; the outermost keeps its mode, which a loss may read."""
        view = self.pipeline.stage.view
        inside = {id(module) for layer in view.structure.layers for module in layer.modules()}
        modules: list[nn.Module] = [module for module in view.model.modules() if id(module) not in inside][1:]
        with modes_kept(modules):
            for module in modules:
                module.training = False
            yield

    def _decide(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the last batch, after a second run of the step if parts do not add up to the whole."""
        settings = self.pipeline.settings
        # Parts have other shapes than the whole, for which kernels round otherwise: visibly so in low precision.
        rough = settings.is_mixed or torch.backends.cuda.matmul.allow_tf32 or self._has_half_weights()
        tolerance = ROUGH_TOLERANCE if rough else PARTS_TOLERANCE
        wrong = [each.in_words for each in self._found if not each.agree(tolerance)]
        # The last stage alone has compared, but all stages must run the step again, or none.
        found = next((each for each in self.context.topology.gather(wrong[0] if wrong else None) if each), None)
        if found is None:
            return loss
        step = self.context.trainer.state.global_step
        why = f"Step {step}: {found}: this loss is no mean or sum over samples or label tokens."
        refusal = self._why_not_joined()
        if refusal is not None:
            raise LossDoesNotDecomposeError(f"{why} The run ends before the optimizer takes this step. {refusal}")
        if self.context.topology.rank == 0:
            logger.warning(
                f"{why} This step is run again, and all that follow run, with the loss of the whole batch: all "
                "forwards before the first backward, and the head once a batch. pipeline_loss='batch' does so from "
                "the start."
            )
        return self._run_again()

    def _has_half_weights(self) -> bool:
        return any(p.dtype in (torch.bfloat16, torch.float16) for p in self.pipeline.stage.store.held().values())

    def _why_not_joined(self) -> str | None:
        """Return what to change if the loss of whole batches cannot take over. The same on every rank."""
        layout = self.pipeline.layout
        # All forwards first takes one stage a rank, and stages cannot move amid a step.
        if self.context.args.pipeline_loss != "auto" or layout.num_chunks > 1:
            return (
                "Set pipeline_loss='batch', which computes the loss of the whole batch at once; or, for "
                "pipeline_loss='parts' of a loss that is the mean of its batch, trainer.loss_is_scaled_for_ga=False."
            )
        plans = replace(self.pipeline.start_up.plans, scope=LossScope.BATCH)
        if not plans.fits(replace(layout, schedule="gpipe")):
            return (
                "That of the whole batch takes all forwards before the first backward, which does not fit in memory: "
                "use more stages, smaller batches or pipeline_checkpoint='layers', with pipeline_loss='batch'."
            )
        return None

    def _run_again(self) -> torch.Tensor:
        """Run the batches of this step with the loss of the whole batch, from where the step began."""
        states, mark = self._start
        start_up = self.pipeline.start_up
        self.pipeline.start_up = replace(start_up, plans=replace(start_up.plans, scope=LossScope.BATCH))
        self._runner.scope = LossScope.BATCH
        # Nothing of the first run may count: its gradients, metrics and random numbers.
        self.pipeline.shell.zero_grad()
        self.metrics.rewind(mark)
        set_random_state(states[0], states[1], self.pipeline.settings.device)
        loss, last = torch.zeros((), device=self.pipeline.settings.device), len(self._ran) - 1
        for number, (batch, _) in enumerate(self._ran):
            self.metrics.begin_batch(batch.inputs)
            loss = loss + self._runner.train(batch, number == last)
        # Trainer has added the losses of the batches before the last one.
        return loss - sum(own for _, own in self._ran[:-1])


def _squares(tensors: list[torch.Tensor]) -> float:
    return sum(float(each.double().square().sum()) for each in tensors)


@dataclass
class SynchronousSteps(Steps):
    """Steps that all stages begin and end together, so that nothing is in flight between two batches."""

    def _read_step(self, num_batches: int) -> StepBatches:
        return self._fetch(num_batches)

    def __post_init__(self) -> None:
        self._check = LossCheck(self.context, self.pipeline, self.metrics)

    def run(self, batch: LoaderBatch, is_last_batch: bool) -> torch.Tensor:
        loss = self.pipeline.runner.train(batch, is_last_batch, watches=self._check.begin())
        loss = self._check.end(batch, loss, is_last_batch)
        # The next call of the loss may read it in front of the model, where the other stages are too.
        if self.context.gains.is_of_script:
            self.context.gains.share(self.pipeline.stage.groups)
        return loss

    def gradient_norm(self) -> torch.Tensor:
        scaler = self.trainer.accelerator.scaler
        if scaler is not None:
            optimizer = trainer_compat.torch_optimizer(self.trainer)
            # Each stage sees its own gradients only, and a step must be skipped on all stages or on none.
            agree_on_overflow(scaler, optimizer, self.trainer.args.device, self.context.topology.largest)
        squares = self.pipeline.runner.norms.squares()
        self.controller.watch_gradients(squares)
        return squares.sum().sqrt().float()
