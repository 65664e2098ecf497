"""A pipeline whose ranks are threads of one process: links are queues, and each rank has a copy of the model."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from hf_pipetransformer.data.batches import split_batch
from hf_pipetransformer.engine.embeddings import EmbeddingGradients, embeddings_of
from hf_pipetransformer.engine.engine import ActionListRun, Engine, Local, StageLinks
from hf_pipetransformer.engine.linear_layers import WeightGradients, linear_layers
from hf_pipetransformer.engine.program import MicroBatch, ModelProgram, StageProgram
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.schedules.actions import Table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import trace_structure
from hf_pipetransformer.splitters.view import StageView


CPU = torch.device("cpu")

T = TypeVar("T")


@dataclass
class QueueLink:
    """A link between two threads; it knows which of its sends were waited for."""

    messages: queue.Queue[torch.Tensor] = field(default_factory=queue.Queue)
    num_sent: int = 0
    num_waited_for: int = 0

    def send(self, tensor: torch.Tensor) -> Any:
        self.num_sent += 1
        self.messages.put(tensor.detach().clone())
        return _Sent(self)

    def receive(self, shape: tuple[int, ...]) -> Any:
        return _Coming(self, shape)


@dataclass
class _Sent:
    link: QueueLink

    def wait(self) -> None:
        self.link.num_waited_for += 1


@dataclass
class _Coming:
    link: QueueLink
    shape: tuple[int, ...]

    def wait(self) -> torch.Tensor:
        tensor = self.link.messages.get(timeout=20)
        assert tuple(tensor.shape) == tuple(self.shape)
        return tensor


def make_links(placement: Placement) -> list[list[StageLinks]]:
    """Of each rank, by chunk."""
    wires: dict[tuple[int, str], QueueLink] = {}

    def link(stage: int, lower: int, direction: str) -> Any:
        if not 0 <= lower < placement.num_stages - 1:
            return None
        if not placement.is_crossed(lower):
            return Local(placement.chunk_of(lower if lower < stage else lower + 1))
        return wires.setdefault((lower, direction), QueueLink())

    return [
        [
            StageLinks(
                forward_in=link(stage, stage - 1, "forward"),
                backward_out=link(stage, stage - 1, "backward"),
                forward_out=link(stage, stage, "forward"),
                backward_in=link(stage, stage, "backward"),
            )
            for stage in placement.stages_of(rank)
        ]
        for rank in range(placement.pipeline_size)
    ]


def make_engines(placement: Placement, program_of: Callable[[int], StageProgram]) -> list[Engine]:
    """One a rank; `program_of` makes the program of a stage."""
    return [
        Engine([program_of(stage) for stage in placement.stages_of(rank)], links, StepMeter(CPU))
        for rank, links in enumerate(make_links(placement))
    ]


def together(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """What each gives, run at the same time."""
    with ThreadPoolExecutor(len(tasks)) as threads:
        return [future.result(timeout=60) for future in [threads.submit(task) for task in tasks]]


def run_table(
    table: Table,
    engines: Sequence[Engine],
    micro_batches: Sequence[Sequence[MicroBatch]],
    at_end: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """What the last stage gave for each micro-batch, given as each rank has them.

    `at_end` is called for each rank after its last action.
    """

    def executed(rank: int, run: ActionListRun) -> list[Any]:
        run.advance()
        at_end(rank)
        return run.drain()

    runs = [
        partial(executed, rank, engine.begin(actions, own))
        for rank, (engine, actions, own) in enumerate(zip(engines, table, micro_batches, strict=True))
    ]
    return [result for results in together(runs) for result in results]


class ModelPipeline:
    """A model on the ranks of a pipeline.

    Args:
        model: copied for each rank.
        boundaries: of the stages' blocks.
        placement: of the stages.
        inputs: a batch.
        num_microbatches: it is cut into.
        first_active_stage: see `Schedule.table`.
        splits: whether programs put off weight gradients.
        wrap: makes another program of a stage's; gets its view and blocks too.
        splitter: of the model; None looks for it.
        loss_of: what the model gives.
        by_layer: whether each layer is recomputed in the backward.
    """

    def __init__(
        self,
        model: nn.Module,
        boundaries: Sequence[int],
        placement: Placement,
        inputs: dict[str, torch.Tensor],
        num_microbatches: int,
        first_active_stage: int = 0,
        splits: bool = False,
        wrap: Callable[[StageProgram, int], StageProgram] = lambda program, stage: program,
        splitter: Splitter | None = None,
        loss_of: Callable[[Any], torch.Tensor] = lambda outputs: outputs.loss,
        by_layer: bool = False,
    ) -> None:
        splitter = splitter or find_splitter(model)
        structure = trace_structure(model, splitter, lambda: model(**inputs))
        self.models = [copy.deepcopy(model) for _ in range(placement.pipeline_size)]
        self.views = [
            StageView(own, splitter, trace(own, inputs, splitter), recomputes_layers=by_layer) for own in self.models
        ]

        def program_of(stage: int) -> StageProgram:
            view = self.views[placement.rank_of(stage)]
            blocks = range(boundaries[stage], boundaries[stage + 1])
            later = WeightGradients(linear_layers(view.model) if splits else [])
            kept = self.embeddings if stage == 0 < placement.num_stages - 1 else None
            return wrap(ModelProgram(view, blocks, torch.float32, stage > first_active_stage, later, kept), stage)

        self.structure = structure
        self.embeddings = EmbeddingGradients(embeddings_of(self.models[0], self.views[0].structure.layers))
        self.engines = make_engines(placement, program_of)
        parts = split_batch(inputs, num_microbatches)
        size = len(inputs["labels"])
        with torch.no_grad():
            hidden = self.views[0].run(range(1), None, lambda: self.models[0](**inputs))
        for rank, own in enumerate(self.views):
            own.install(*[range(boundaries[s], boundaries[s + 1]) for s in placement.stages_of(rank)])
        self.micro_batches = [
            [
                MicroBatch(
                    i,
                    part,
                    len(part["labels"]) / size,
                    (len(part["labels"]), *hidden.shape[1:]),
                    lambda inputs, own=own: loss_of(own(**inputs)),
                    loss_scale=2.0,
                )
                for i, part in enumerate(parts)
            ]
            for own in self.models
        ]

    def run(self, table: Table) -> torch.Tensor:
        """The loss."""
        try:
            return torch.stack(run_table(table, self.engines, self.micro_batches, self._at_end)).sum()
        finally:
            for view in self.views:
                view.remove()

    def _at_end(self, rank: int) -> None:
        if rank == 0:
            self.embeddings.add()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Summed over the ranks, without the factor of the loss."""
        sums: dict[str, torch.Tensor] = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad / 2.0
        return sums


def trace(model: nn.Module, inputs: dict[str, torch.Tensor], splitter: Splitter | None = None) -> Any:
    """The structure of a model."""
    return trace_structure(model, splitter or find_splitter(model), lambda: model(**inputs))


def whole_gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and gradients of a copy of the whole model in one piece."""
    own = copy.deepcopy(model)
    loss = own(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
