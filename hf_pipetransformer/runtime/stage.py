"""One rank's part of a running pipeline under one layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from hf_pipetransformer.comm.topology import PipelineGroups
from hf_pipetransformer.engine.engine import Engine
from hf_pipetransformer.engine.reduction import GradientReducer, SharedParameter
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.runtime.wiring import StageSettings
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import block_of
from hf_pipetransformer.splitters.view import StageView


@dataclass
class Stage:
    """This rank's part of a running pipeline, under one layout.

    Args:
        layout: the layout in force.
        groups: place and process groups of this rank.
        settings: of the run.
        view: the stage's view of the model.
        store: the model's parameters; while training only this rank's are held.
        engine: runs the schedule.
        owners: name of every parameter to the ranks that use it, as positions in the pipeline, first user first.
        shared: the parameters that this rank shares with others.
        reducer: sums gradients over replicas; None outside training.
    """

    layout: Layout
    groups: PipelineGroups
    settings: StageSettings
    view: StageView
    store: ParameterStore
    engine: Engine
    owners: dict[str, tuple[int, ...]]
    shared: list[SharedParameter]
    reducer: GradientReducer | None

    def own_names(self) -> set[str]:
        """Names of the parameters that this rank uses."""
        return {name for name, ranks in self.owners.items() if self.groups.position in ranks}

    def trained_here(self) -> dict[str, nn.Parameter]:
        """The parameters whose optimizer state this rank keeps."""
        held = self.store.held().items()
        return {name: p for name, p in held if p.requires_grad and self.owns_state_of(name)}

    def owns_state_of(self, name: str) -> bool:
        """Whether this rank keeps the optimizer state of a parameter: its first user does."""
        return self.owners[name][0] == self.groups.position

    def set_modes(self) -> None:
        """Training mode; evaluation mode, without dropout, for what the run froze and for what is stored.

        What the user froze trains on with dropout, as in Trainer, unless its activations are stored.
        """
        self.view.model.train()
        for block, modules in self._frozen_blocks():
            if block in self._cached_blocks() or block in self._trainable_blocks:
                for module in modules:
                    module.eval()

    def stores_what_the_user_froze(self) -> bool:
        """Whether layers are in evaluation mode for no other reason than that their activations are stored."""
        return not self._trainable_blocks.issuperset(self._cached_blocks())

    def _frozen_blocks(self) -> Iterator[tuple[int, list[nn.Module]]]:
        """The frozen prefix by number and modules: 0 is the embeddings, the layers follow."""
        structure, num_frozen = self.view.structure, self.layout.num_frozen_layers
        if num_frozen:
            yield 0, structure.entries
            for index, layer in enumerate(structure.layers[:num_frozen]):
                yield index + 1, [layer]

    def _cached_blocks(self) -> range:
        return range(self.layout.cache_level + 1 if self.layout.cache_level else 0)

    @cached_property
    def _trainable_blocks(self) -> frozenset[int]:
        """The blocks with parameters that the user did not freeze."""
        units = self.view.structure.units_of_parameter
        return frozenset(
            block_of(unit) for name, is_trained in self.store.trainable.items() if is_trained for unit in units[name]
        )

    @property
    def is_spread(self) -> bool:
        """Whether each rank holds its own parameters only: in training, with more than one rank in a pipeline."""
        return self.reducer is not None and self.layout.pipeline_size > 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """The model runs only this rank's stages inside; outside it has its own forward."""
        self.view.install(*self.layout.units_of_rank(self.groups.position))
        try:
            yield
        finally:
            self.view.remove()  # Also if the layout has changed inside: the view is one.
