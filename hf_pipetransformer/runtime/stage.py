"""One rank's part of a pipeline under one layout, and what stays the same from layout to layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_pipetransformer.comm.transfers import broadcast_tree, reduced
from hf_pipetransformer.data.effects import modes_kept
from hf_pipetransformer.data.rng import drawing_with
from hf_pipetransformer.engine.head import HeadPlan, HeadSlices
from hf_pipetransformer.schedules.placement import block_of
from hf_pipetransformer.splitters.quantized import put_in_evaluation_mode


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import PipelineGroups, Topology
    from hf_pipetransformer.engine.embeddings import EmbeddingGradients
    from hf_pipetransformer.engine.engine import Engine
    from hf_pipetransformer.engine.reduction import GradientReducer, SharedParameter
    from hf_pipetransformer.engine.timing import StepMeter
    from hf_pipetransformer.runtime.ownership import ParameterStore
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.splitters.structure import Probe
    from hf_pipetransformer.splitters.view import Compile, StageView


@dataclass(frozen=True)
class StageSettings:
    """Parts and settings that a rank's stages are built from under every layout.

    `timeout` is in seconds; `recompute` is a mode of `recomputed_micro_batches`, or `layers`. With `is_mixed` forwards
    run under autocast; `sums_in_float32` adds the gradients of half-precision weights in float32, and
    `masters_in_float32` casts such weights when training starts. `head_slices` says how the loss is cut.
    """

    probe: Probe
    topology: Topology
    device: torch.device
    timeout: float
    recompute: str
    meter: StepMeter
    compiled: Compile | None = None
    is_mixed: bool = False
    sums_in_float32: bool = False
    masters_in_float32: bool = False
    head_slices: HeadSlices = HeadSlices()


@dataclass
class Stage:
    """This rank's part of a pipeline, under one layout.

    Args:
        store: the model's parameters. If the stage is spread it holds only this rank's.
        embeddings: gradients of embeddings that the engine keeps back during a batch.
        head: way to run the head of the next batches.
        engine: runs this rank's stages; made last, as their programs take parts of this.
        shared: parameters that this rank shares with other ranks of the pipeline.
        reducer: gradient all-reduce over replicas; None outside training.
    """

    layout: Layout
    groups: PipelineGroups
    settings: StageSettings
    view: StageView
    store: ParameterStore
    embeddings: EmbeddingGradients
    head: HeadPlan
    engine: Engine = field(init=False)
    shared: list[SharedParameter] = field(default_factory=list, init=False)
    reducer: GradientReducer | None = field(default=None, init=False)
    _modes: tuple[Layout, list[tuple[nn.Module, bool]]] | None = field(default=None, init=False)
    """All modules and the mode in which `set_modes` has put them, under a layout."""

    def own_names(self) -> set[str]:
        return {name for name, ranks in self.owners.items() if self.groups.position in ranks}

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Positions in the pipeline of the ranks that use each parameter, by name, first user first."""
        return {name: self.layout.ranks_of(blocks) for name, blocks in self.view.structure.blocks_of_parameter.items()}

    @cached_property
    def buffer_owners(self) -> dict[str, tuple[int, ...]]:
        """The same for buffers."""
        return {name: self.layout.ranks_of(blocks) for name, blocks in self.view.structure.blocks_of_buffer.items()}

    def own_buffers(self) -> set[str]:
        return {name for name, ranks in self.buffer_owners.items() if self.groups.position in ranks}

    def trained_here(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters whose optimizer state this rank keeps."""
        held = self.store.held().items()
        # The first user of a parameter keeps it.
        return {name: p for name, p in held if p.requires_grad and self.owners[name][0] == self.groups.position}

    def set_modes(self) -> None:
        """Set training mode, except for blocks that the run froze or whose activations are cached.

        Blocks that the user froze keep dropout, as in Trainer, unless their activations are cached.
        """
        # Comparing takes microseconds, setting takes milliseconds in which a GPU may wait.
        known = self._modes
        if known and known[0] == self.layout and all(module.training is mode for module, mode in known[1]):
            return
        self.view.model.train()
        structure, layout = self.view.structure, self.layout
        # Block 0 is the embeddings, then come the layers.
        blocks = [structure.entries, *([layer] for layer in structure.layers)]
        num_frozen = layout.num_frozen_layers + 1 if layout.num_frozen_layers else 0
        for block, modules in enumerate(blocks[:num_frozen]):
            is_cached = layout.cache_level > 0 and block <= layout.cache_level
            if is_cached or block in self._trainable_blocks:
                for module in modules:
                    put_in_evaluation_mode(module)
        self._modes = self.layout, [(module, module.training) for module in self.view.model.modules()]

    @torch.no_grad()
    def output_below(self, stop: int, forward: Callable[[], Any], seed: int = 0) -> torch.Tensor:
        """Return what the blocks below `stop` give, `(batch, seq, hidden)`, on the host of every rank.

        Collective: call on every rank of the pipeline. `forward` runs the model on a batch that every rank has; RNG
        states and modes of the modules are restored. What draws here gives the same at every call with this `seed`.
        """
        layout, groups, hidden = self.layout, self.groups, None
        device = self.settings.device
        with modes_kept(self.view.model.modules()), drawing_with(seed, device):
            self.set_modes()
            for stage in range(layout.stage_of(stop - 1) + 1):
                blocks, position = layout.blocks_of(stage), layout.places.rank_of(stage)
                if position == groups.position:
                    given = None if hidden is None else hidden.to(device)
                    hidden = self.view.run(range(blocks.start, min(blocks.stop, stop)), given, forward).cpu()
                ranks = groups.pipeline_ranks
                # To all ranks and not only to the next stage, as each of them returns the last one.
                hidden = broadcast_tree(hidden, ranks[position], groups.pipeline_control, ranks[groups.position])
        self.view.widen()
        assert hidden is not None
        return hidden

    def install(self) -> None:
        """Restrict the model to this rank's stages."""
        self.view.install(*self.layout.blocks_of_rank(self.groups.position))

    @cached_property
    def _trainable_blocks(self) -> frozenset[int]:
        blocks = self.view.structure.blocks_of_parameter
        return frozenset(
            block_of(block)
            for name, is_trained in self.store.trainable.items()
            if is_trained
            for block in blocks[name]
        )

    @property
    def is_spread(self) -> bool:
        """True if each rank holds only its own stages' parameters; the same on every rank."""
        return self.store.is_divided and self.layout.pipeline_size > 1

    @property
    def is_training(self) -> bool:
        """True from the start of a training to its end; after an error too."""
        return self.reducer is not None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Restrict the model to this rank's stages inside; restore its original forward afterward."""
        self.install()
        try:
            yield
        finally:
            self.view.remove()  # Correct even if the layout changed inside: all layouts share one view.


class GradientNorms:
    """Squared gradient norms of the model's layers, which freezing and gradient clipping share."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._layer_of = {
            # Index into `squares`: layers, head, embeddings. Block 0, the embeddings, wraps to the last one.
            name: (block_of(blocks[0]) - 1) % (stage.layout.num_layers + 2)
            for name, blocks in stage.view.structure.blocks_of_parameter.items()
        }
        self._places: tuple[int, ...] = ()
        self._mask = torch.zeros(0, 0, dtype=torch.bool)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's parameters with a gradient. A shared one has its gradient on its first user only."""
        return [p for p in self.stage.store.held().values() if p.grad is not None]

    def squares(self) -> torch.Tensor:
        """Return squared L2 norms of the reduced gradients of the whole model, `(num_layers + 2,)`, float64.

        One entry per layer, then the head, then the embeddings. Both freezing and gradient clipping use the result.
        Collective: call on every rank of the pipeline.
        """
        return self.sum_over_stages(self.own_squares())

    def sum_over_stages(self, squares: torch.Tensor) -> torch.Tensor:
        """Sum the result of `own_squares` over the stages. Collective: call on every rank of the pipeline."""
        return reduced(squares, self.stage.groups.pipeline_group, "summing the gradient norms over the stages")

    def own_squares(self) -> torch.Tensor:
        """Return `squares` of this rank's stages only."""
        num_layers, device = self.stage.layout.num_layers, self.stage.settings.device
        # In float64: the square of a norm that fits float32 may not fit it.
        squares = torch.zeros(num_layers + 2, dtype=torch.float64, device=device)
        held = self.stage.store.held().items()
        trained = {name: p.grad for name, p in held if p.requires_grad or p.grad is not None}
        gradients = [gradient for gradient in trained.values() if gradient is not None]
        if gradients:
            known = torch._foreach_norm(gradients)
            if len({each.dtype for each in known}) > 1:  # Otherwise one launch on a GPU converts all of them.
                known = tuple(each.double() for each in known)
            found, none = iter(known), known[0].new_zeros(())
            # Parameters without gradient count as zeros. Without them the cached mask would change from step to step.
            norms = torch.stack([none if each is None else next(found) for each in trained.values()]).double()
            parts = self._parts(tuple(self._layer_of[name] for name in trained))
            # Not index_add_, which is nondeterministic on a GPU: replicas must get bitwise equal results.
            squares = torch.where(parts, norms.square(), 0.0).sum(dim=1)
        return squares

    def _parts(self, places: tuple[int, ...]) -> torch.Tensor:
        # The mask, `(num_layers + 2, parameters)`, is the same in almost every step; building it copies to the device.
        if self._places != places:
            parts = torch.arange(self.stage.layout.num_layers + 2)[:, None] == torch.tensor(places)
            self._places, self._mask = places, parts.to(self.stage.settings.device)
        return self._mask
