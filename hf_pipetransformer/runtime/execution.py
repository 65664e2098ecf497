"""Execution of training and prediction batches on this rank's stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply

from hf_pipetransformer.comm.staging import Arriving, CopyStream
from hf_pipetransformer.comm.transfers import broadcast_tree, reduced
from hf_pipetransformer.data.batches import (
    Axis,
    CacheTags,
    SampleBatch,
    are_of_samples,
    count_items,
    cut_tokens,
    detach_tags,
    join_outputs,
    split_batch,
)
from hf_pipetransformer.engine.head import HeadMode
from hf_pipetransformer.engine.linear_layers import linear_layers
from hf_pipetransformer.engine.losses import LossRule, LossScope
from hf_pipetransformer.engine.program import Forward, MicroBatch, TokenSpan, Write
from hf_pipetransformer.engine.reduction import GradientReducer, last_gradients
from hf_pipetransformer.planning.layouts import evaluation_microbatches
from hf_pipetransformer.runtime.joining import BatchOfAll, ReplicaJoin, join_parts
from hf_pipetransformer.runtime.loss_call import LossCall
from hf_pipetransformer.runtime.messages import as_message, from_message, num_bytes, spread
from hf_pipetransformer.runtime.stage import GradientNorms, Stage
from hf_pipetransformer.schedules.abilities import FORWARDS_FIRST
from hf_pipetransformer.schedules.actions import BEGINS_BACKWARD, SENDS, Action, ActionList
from hf_pipetransformer.schedules.placement import slice_bounds
from hf_pipetransformer.schedules.schedule import Schedule
from hf_pipetransformer.schedules.tables import FORWARD_ONLY, find_schedule


if TYPE_CHECKING:
    from hf_pipetransformer.data.rng import SharedRngState
    from hf_pipetransformer.engine.engine import ActionListRun
    from hf_pipetransformer.splitters.structure import ActivationShape


JOINED_BYTES = 2**28
"""Largest output of a head, in bytes, that the last stage computes for the whole batch if only a little is kept."""


@dataclass(frozen=True)
class LoaderBatch:
    """Batch of a loader, and how its loss is computed.

    Args:
        inputs: empty for a replica without samples.
        forward: computes the loss of one micro-batch, or of the whole batch.
        num_items: items (samples or label tokens) of the batch over all replicas.
        prepare: moves a micro-batch to this stage's device.
        loss_scale: factor of the loss in the backward. A tensor must be on this stage's device.
        write: stores the activations that enter the entry block.
        reference: runs one micro-batch of a pass without gradients that comes first, and returns entries of the batch
            that the loss reads; None for most losses.
        shared: random numbers that a loss of the whole batch draws alike on all ranks; None to draw this rank's own.
    """

    inputs: SampleBatch
    forward: Forward
    num_items: int
    prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict
    loss_scale: float | torch.Tensor = 1.0
    write: Write | None = None
    reference: Forward | None = None
    shared: SharedRngState | None = None


@dataclass(frozen=True)
class Prediction:
    """Way to run batches without a backward, and the part of their outputs that is read.

    Args:
        write: stores the activations that enter the entry block.
        reduce: replaces the output of a batch or a part of it, given with its inputs, by what is read.
        is_read_by_first: outputs are read on the first position only; elsewhere they are tensors of no samples.
        samples: batch that is predicted, which knows how its samples lie in what the model is given.
        joins_replicas: the loss sees the samples of all replicas.
    """

    write: Write | None = None
    reduce: Callable[[Any, dict[str, Any]], Any] | None = None
    is_read_by_first: bool = False
    samples: SampleBatch = field(default_factory=SampleBatch)
    joins_replicas: bool = False


class StageRunner:
    """Runner that cuts batches into micro-batches and runs them through this rank's part of the pipeline.

    `shifts_labels` is True for next-token losses, where the first label of a sequence does not count. `called` gives a
    forward of the model these inputs, as Trainer's wrapped model does. `untried` are media that the stages were not
    tried with.
    """

    def __init__(
        self,
        stage: Stage,
        activation: ActivationShape,
        loss_rule: LossRule,
        scope: LossScope,
        shifts_labels: bool,
        called: Callable[[Callable[..., Any], Mapping[str, Any]], Any],
        untried: frozenset[str] = frozenset(),
    ) -> None:
        layout = stage.layout
        self.stage = stage
        self.called, self._untried = called, untried
        self.present: LossCall | None = None
        """Loss that is being computed for a whole batch."""
        self.activation = activation
        self.loss_rule = loss_rule
        self.scope = scope
        self.shifts_labels = shifts_labels
        self._schedule, self._forward_only = find_schedule(layout.schedule), FORWARD_ONLY[layout.placement]
        self._first_active_stage = layout.first_active_stage
        self.norms = GradientNorms(stage)
        self.copies = CopyStream(stage.settings.device)
        self._actions_seen: ActionList = ()
        self._last_gradients: list[tuple[Action, list[torch.nn.Parameter]]] = []
        self._growth: float | None = None
        """Bytes of the head's output per byte of what enters it; None before the first output that is reduced."""

    def train(self, batch: LoaderBatch, is_last_batch: bool, watches: bool = False) -> torch.Tensor:
        """Run forward and backward of one loader batch of this replica, and reduce gradients if it ends the step.

        Collective: call on every rank. Returns this replica's weighted share of the batch loss on the last stage, zero
        elsewhere.

        Args:
            is_last_batch: True if the optimizer steps after this batch.
            watches: True if the loss is to be compared with that of the whole batch.
        """
        stage = self.stage
        bounds = self._token_bounds(batch.inputs)
        cut = self.cut(batch, self.loss_rule, stage.layout.num_microbatches, bounds)
        loss = torch.zeros((), device=stage.settings.device)
        # First of all: the loss finds what the reference gives among its inputs.
        if cut and batch.reference is not None:
            cut = self._with_reference(cut, batch.reference, batch.prepare)
        if self._sees_whole(len(cut)):
            loss = self._train_whole(batch, cut, is_last_batch)
        elif cut:
            stage.head.begin(HeadMode.WATCHED if watches else HeadMode.PARTS)
            num_slices = max(1, len(bounds) - 1)
            actions = self._actions(self._schedule, len(cut) // num_slices, num_slices)
            run = stage.engine.begin(actions, OnDevice(cut, _uses(actions), batch.prepare, self.copies))
            for stop in self.stops(actions, is_last_batch):
                run.advance(before=stop)
            shares = self._ended(run)
            # Added on the device: a sum of Python numbers would have the host wait for every micro-batch.
            loss = torch.stack(shares).sum() if shares else loss
        elif batch.num_items == 0 and stage.groups.is_last:
            loss += float("nan")  # No replica had an item: the mean is nan on all of them, and Trainer filters it.
        # Outside of the branches: other replicas wait for this one in the all-reduce, even if it has no samples.
        if is_last_batch:
            self.reduce_gradients()
        return loss

    def _sees_whole(self, num_parts: int) -> bool:
        """Return True if the loss is called once, for a batch that is cut into parts, by micro-batches or stages."""
        if self.scope is LossScope.PARTS:
            return False
        return self._joins_replicas or num_parts > 1 or (num_parts > 0 and self.stage.layout.pipeline_size > 1)

    def _train_whole(self, batch: LoaderBatch, cut: list[MicroBatch], is_last_batch: bool) -> torch.Tensor:
        """Run a batch whose loss is called once; see `train`."""
        stage, run, loss = self.stage, None, torch.zeros((), device=self.stage.settings.device)
        # What the loss is given is exchanged first, and by all replicas.
        of_all = self._batch_of_all(batch.inputs) if self._joins_replicas else None
        if not cut:
            # The last stages of other replicas wait for this one.
            if self.replicas is not None:
                self.replicas.take_part(stage.settings)
            self._follow_draws(batch.shared, of_all)
            return loss
        stage.head.begin(HeadMode.APART)

        def forwards(parts: list[MicroBatch]) -> list[torch.Tensor] | None:
            nonlocal run
            # The loss needs what enters the head in all micro-batches.
            actions = self._actions(find_schedule(FORWARDS_FIRST), len(parts))
            run = stage.engine.begin(actions, parts)
            run.advance(before=next((action for action in actions if action.op in BEGINS_BACKWARD), None))
            entered = stage.head.entered
            return [entered[number][1] for number in sorted(entered)] if stage.groups.is_last else None

        call = LossCall(self, batch, cut, forwards, of_all)
        found = self._computed(call)
        self._follow_draws(batch.shared, of_all)
        assert run is not None, "the loss has called the model"
        if call.found is not None:
            # This replica's share of the loss of all, or the weight of the loss of its own batch.
            is_of_all, num_items = self.scope is LossScope.BATCH, count_items(batch.inputs, self.shifts_labels)
            weight = call.found.share if is_of_all else self.loss_rule.weight(num_items, batch.num_items)
            call.backward(found * (weight * batch.loss_scale))
            loss = found.detach() * weight
        for stop in self.stops(run.actions, is_last_batch):
            run.advance(before=stop)
        self._ended(run)
        return loss

    def _batch_of_all(self, inputs: SampleBatch) -> BatchOfAll:
        return ReplicaJoin(self.stage.groups, frozenset()).exchange(detach_tags(inputs)[0])

    def _follow_draws(self, shared: SharedRngState | None, of_all: BatchOfAll | None) -> None:
        """Let replicas without samples draw on from the random numbers of those that have called the loss.

        Collective: call on every replica's rank of a position, if the loss sees the samples of all.
        """
        groups = self.stage.groups
        if shared is None or of_all is None or len(of_all.sizes) == groups.num_replicas:
            return
        source, rank = groups.replica_ranks[of_all.first], groups.replica_ranks[groups.replica]
        tensors, values = broadcast_tree([*shared.states], source, groups.replica_control, rank)
        shared.states = {name: state.clone() for name, state in tensors.items()}, values

    def _computed(self, call: LossCall) -> Any:
        """Compute the loss of a whole batch; all ranks of the pipeline draw on from the same random numbers."""
        self.present = call
        try:
            found = call.compute()
        finally:
            self.present = None
        call.share_states()
        return found

    def _ended(self, run: ActionListRun) -> list[Any]:
        """End a run, and what it has set for its batch; returns the last stage's results."""
        results = run.drain()
        self.stage.view.widen()
        self.stage.head.begin(HeadMode.PARTS)
        return results

    @property
    def _joins_replicas(self) -> bool:
        return self.scope is LossScope.BATCH and self.stage.layout.num_replicas > 1

    @property
    def replicas(self) -> ReplicaJoin | None:
        """Join over the replicas, on the last stage alone, if the loss sees the samples of all of them."""
        groups = self.stage.groups
        joins = self._joins_replicas and groups.is_last
        return ReplicaJoin(groups, self.stage.settings.probe.placeholders) if joins else None

    @torch.no_grad()
    def _with_reference(
        self, cut: list[MicroBatch], reference: Forward, prepare: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> list[MicroBatch]:
        """Return the micro-batches with the entries that `reference` gives; on the last stage alone, which reads them.

        Collective: call on every rank of the pipeline.
        """
        actions = self.forwards(len(cut))
        given = [replace(part, forward=reference, is_predicted=True) for part in cut]
        found = self.stage.engine.begin(actions, OnDevice(given, _uses(actions), prepare, self.copies)).drain()
        # Results come out on the last stage alone, whose head is the one to read the entries.
        if not found:
            return cut
        return [replace(part, inputs={**part.inputs, **own}) for part, own in zip(cut, found, strict=True)]

    def stops(self, actions: ActionList, is_last_batch: bool) -> Iterator[Action | None]:
        """Iterate over the actions before which an action list stops, None for its end; it runs on in between.

        In the last batch of a step, gradients are reduced as soon as they are complete.
        """
        if is_last_batch and self._reducer.buckets:
            for action, parameters in self._last_gradients_of(actions):
                yield action
                # Only after all that comes before the action: an earlier gradient would be taken for the last one.
                self._reducer.arm(parameters)
        yield None
        # The rows that embeddings keep back come last of all: only `add` completes the gradient of their tables.
        late = self.stage.embeddings
        if is_last_batch:
            self._reducer.arm(late.parameters)
        late.add()

    def reduce_gradients(self) -> None:
        """Reduce what is left of the gradients of a step. Collective: call on every rank."""
        meter = self.stage.settings.meter
        with meter.part("reduction"), meter.tracing("reduce gradients"):
            self._reducer.finish(self.stage.shared)

    @property
    def _reducer(self) -> GradientReducer:
        assert self.stage.reducer is not None, "the stage was started for training"
        return self.stage.reducer

    def over_replicas(self, counts: list[int]) -> list[int]:
        """Sum item counts over replicas. Collective on the last stage; other stages get their own counts back."""
        groups = self.stage.groups
        if groups.replica_control is None or not groups.is_last:
            return counts
        # On the CPU over the control group: the counts are known on the host, and no device need be waited for.
        what = f"counting the samples of {groups.replicas}"
        return reduced(torch.tensor(counts), groups.replica_control, what).tolist()

    def predict(self, inputs: dict[str, Any], forward: Forward, how: Prediction) -> Any:
        """Return the model output for one batch on every stage. Collective: call on every rank of the pipeline.

        `forward` runs a micro-batch through the stages, and the head on the whole batch.
        """
        stage, batch = self.stage, how.samples.like(inputs)
        total = count_items(batch, self.shifts_labels)
        # Without num_items_in_batch every loss is a mean, even if it would be a sum with it.
        rule = self.loss_rule if "num_items_in_batch" in batch else LossRule.MEAN
        count = evaluation_microbatches(stage.layout, batch.size)
        cut = self.cut(LoaderBatch(batch, forward, total, write=how.write), rule, count)
        entering = self._entering_head(cut)
        return self._told(self._through_head(batch, cut, entering, how) if stage.groups.is_last else None, how)

    def predict_whole(self, batch: LoaderBatch, how: Prediction) -> Any:
        """Return the loss and the output of a batch, which `batch.forward` computes once, on every stage.

        Collective: call on every rank of the pipeline.
        """
        stage = self.stage
        batch = replace(batch, inputs=how.samples.like(batch.inputs), write=how.write)
        of_all = self._batch_of_all(batch.inputs) if how.joins_replicas else None
        cut = self.cut(batch, LossRule.SUM, evaluation_microbatches(stage.layout, batch.inputs.size))

        def forwards(parts: list[MicroBatch]) -> list[torch.Tensor] | None:
            entered = self._entering_head(parts)
            return entered if stage.groups.is_last else None

        call = LossCall(self, batch, cut, forwards, of_all)
        output = self._computed(call)
        if call.found is not None:
            output = call.found.own_outputs(output if how.reduce is None else how.reduce(output, call.found.inputs))
            output = recursively_apply(torch.Tensor.cpu, output)
        return self._told(output, how)

    def _entering_head(self, parts: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return what enters the head in each micro-batch on the last stage; the head sees the whole batch at once."""
        parts = [replace(part, is_predicted=True, ends_before_head=True) for part in parts]
        return self.stage.engine.begin(self.forwards(len(parts)), parts).drain()

    def _told(self, output: Any, how: Prediction) -> Any:
        """Return the last stage's output on every stage."""
        stage, message = self.stage, None
        stage.view.widen()
        if stage.groups.is_last:
            message = as_message(output)
        message = spread(message, stage.groups, stage.settings.timeout, how.is_read_by_first)
        return from_message(message, stage.settings.device)

    @torch.no_grad()
    def _through_head(
        self,
        batch: SampleBatch,
        parts: Sequence[MicroBatch],
        entering: list[torch.Tensor],
        how: Prediction,
    ) -> Any:
        """Return the head's output for a batch that was cut into parts, as it comes out of the last layer.

        The head sees the whole batch at once, as in Trainer: its output need not have one row a sample, and its loss
        need not be a mean. Only what is reduced anyway (logits of a vocabulary) leaves the device part by part if it
        is large.
        """
        forward, blocks = parts[0].forward, self.stage.view.structure.num_blocks

        def head(hidden: torch.Tensor, given: dict[str, Any]) -> Any:
            return self.stage.view.run(range(blocks - 1, blocks), hidden, lambda: forward(dict(given)))

        def run(hidden: torch.Tensor, given: dict[str, Any]) -> Any:
            output = head(hidden, given)
            return recursively_apply(torch.Tensor.cpu, output if how.reduce is None else how.reduce(output, given))

        if how.reduce is not None and len(parts) > 1 and self.scope is LossScope.PARTS:
            # Measured on one part and kept: it depends on the widths and dtypes of the head, hardly on the batch.
            if self._growth is None:
                self._growth = num_bytes(head(entering[0], parts[0].inputs)) / max(num_bytes(entering[0]), 1)
            if self._growth * num_bytes(entering) > JOINED_BYTES:
                outputs = [run(hidden, part.inputs) for hidden, part in zip(entering, parts, strict=True)]
                joined = _joined_outputs(outputs, batch, parts)
                if joined is not None:
                    return joined
        joins = self.replicas if how.joins_replicas else None
        found = join_parts(detach_tags(batch)[0], parts, entering, joins)
        return found.own_outputs(run(found.entering, found.inputs))

    def forwards(self, num_microbatches: int) -> ActionList:
        """Return this rank's action list of forwards alone."""
        return self._actions(self._forward_only, num_microbatches)

    def _actions(self, schedule: Schedule, num_microbatches: int, num_token_slices: int = 1) -> ActionList:
        """Return this rank's action list; the same object each time, as schedules keep their tables."""
        groups, num_chunks = self.stage.groups, self.stage.layout.num_chunks
        shape = groups.pipeline_size, num_microbatches, num_chunks, self._first_active_stage
        return schedule.table(*shape, num_token_slices)[groups.position]

    def _last_gradients_of(self, actions: ActionList) -> list[tuple[Action, list[torch.nn.Parameter]]]:
        # By identity, as comparing would take longer than a micro-batch of a small model.
        if actions is not self._actions_seen:
            stage = self.stage
            layout, users = stage.layout, stage.view.structure.blocks_of_parameter
            late = stage.embeddings.parameters
            own = layout.places.stages_of(stage.groups.position)
            # Where the head runs apart from the layers, its backward is another one: what both use gets two gradients.
            head = stage.view.structure.num_blocks - 1
            twice = {name for name, blocks in users.items() if head in blocks and len(blocks) > 1}
            chunks = {
                parameter: {own.index(user) for block in users[name] if (user := layout.stage_of(block)) in own}
                for name, parameter in stage.store.held().items()
                if parameter not in late and name not in twice
            }
            put_off = {p for layer in linear_layers(stage.view.model) for p in layer.parameters()}
            self._actions_seen, self._last_gradients = actions, last_gradients(actions, chunks, put_off)
        return self._last_gradients

    def cut(
        self,
        batch: LoaderBatch,
        rule: LossRule,
        num_microbatches: int,
        bounds: Sequence[int] = (),
        on_host: Sequence[dict[str, Any] | None] = (),
    ) -> list[MicroBatch]:
        """Cut a batch into micro-batches, and these into token slices at `bounds`.

        `on_host`: what was read of each, if the batch is on the device.
        """
        if found := self._untried & batch.inputs.names:
            raise ValueError(
                f"A batch has {', '.join(sorted(found))}, with which the stages of this model were not tried, since "
                "no sample of the first batch has any. Let the data set begin with one, use larger batches, or "
                "another seed."
            )
        media, is_alone = self.stage.view.structure.media, self.stage.groups.pipeline_size == 1
        if media is not None and media.names & batch.inputs.names:
            num_microbatches = 1  # A batch that was collated whole, whose images have no row for each sample.
        cut: list[tuple[dict[str, Any], CacheTags | None, TokenSpan | None]] = []
        for number, whole in enumerate(split_batch(batch.inputs, num_microbatches)):
            part, tags = detach_tags(whole)
            if not bounds:
                cut.append((part, tags, None))
            for (start, stop), own in zip(pairwise(bounds), cut_tokens(part, bounds), strict=True):
                cut.append((own, tags, TokenSpan(number, start, stop, bounds[-1])))
        return [
            MicroBatch(
                index=i,
                inputs=part,
                # Where nothing depends on it, no device is asked for the number.
                weight=1.0
                if rule is LossRule.SUM
                else rule.weight(count_items(part, self.shifts_labels), batch.num_items),
                # Of no use without neighbors; the shape would refuse lengths that one stage can run.
                activation_shape=() if is_alone else self.activation.of(part),
                forward=batch.forward,
                loss_scale=batch.loss_scale,
                tags=tags,
                write=batch.write,
                on_host=on_host[i] if i < len(on_host) else part,
                place=place,
            )
            for i, (part, tags, place) in enumerate(cut)
        ]

    def _token_bounds(self, inputs: dict[str, Any]) -> tuple[int, ...]:
        """Return the start of each token slice and the end of the last; empty if sequences stay whole."""
        plans, value = self.stage.layout.token_slices, inputs.get(self.activation.main_input)
        if not plans or not isinstance(value, torch.Tensor):
            return ()
        bounds = slice_bounds(plans, value.shape[1])
        return bounds if len(bounds) > 2 else ()


def _uses(actions: ActionList) -> Counter[int]:
    """Return how many actions look up each micro-batch: all but the sends, each of them once."""
    return Counter(action.micro_batch for action in actions if action.op not in SENDS)


def _joined_outputs(outputs: list[Any], batch: SampleBatch, parts: Sequence[MicroBatch]) -> Any:
    """Return the outputs of the parts of a batch as one; None if they have no row for each sample."""
    sizes = [SampleBatch(part.inputs, batch.rows).size for part in parts]
    if batch.sequences is None and not are_of_samples(outputs, sizes, batch.rows):
        return None
    return join_outputs(outputs, [part.weight for part in parts], Axis.of(batch, sizes).joined)


class OnDevice:
    """Micro-batches by number, moved to the device on first lookup, together with a prefetch of the next one.

    `uses` is the number of lookups of each: the device copy is freed after the last one. `prepare` moves inputs to the
    device, on the stream `copies`.
    """

    def __init__(
        self,
        parts: Iterable[MicroBatch],
        uses: Counter[int],
        prepare: Callable[[dict[str, Any]], dict[str, Any]],
        copies: CopyStream,
    ) -> None:
        self.parts = {part.index: part for part in parts}
        self._num_left = uses
        self._prepare = prepare
        self.copies = copies
        self._coming: dict[int, Arriving[dict[str, Any]]] = {}
        self._there: dict[int, MicroBatch] = {}

    def __getitem__(self, i: int) -> MicroBatch:
        if i not in self._there:
            self._fetch(i)
            inputs = self._coming.pop(i).on_device()
            self._there[i] = self.parts[i].with_inputs(inputs)
            # Ahead, so that the copy runs beside the computations of this one.
            self._fetch(i + 1)
        self._num_left[i] -= 1
        return self._there[i] if self._num_left[i] else self._there.pop(i)

    def _fetch(self, i: int) -> None:
        # Neither beyond the last one nor what no action of this rank looks up.
        if self._num_left[i] and i not in self._coming and i not in self._there:
            given = self.parts[i].inputs
            self._coming[i] = self.copies.start(lambda: self._prepare(given))
