"""Random numbers of the ranks: stages and replicas draw different dropout masks, new ones after each transition."""

from __future__ import annotations

import torch

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.transition import Stage


class Seeds:
    """Seeds this rank's generator by its place, the trainings that began, and the transitions of this one.

    One process draws what Trainer draws.

    Args:
        topology: the ranks.
        seed: of the run.
    """

    def __init__(self, topology: Topology, seed: int) -> None:
        self.topology = topology
        self.seed = seed
        self.num_starts = 0
        self.num_transitions = 0

    def begin(self, stage: Stage) -> None:
        """A training begins on `stage`."""
        self.num_transitions = 0
        self.part(stage)
        self.num_starts += 1

    def part(self, stage: Stage) -> None:
        """From now on this rank draws what no other does."""
        if self.topology.world_size > 1:
            place = stage.groups.replica * stage.groups.pipeline_size + stage.groups.position
            times = self.num_starts + 1_009 * self.num_transitions
            torch.manual_seed(self.seed + 1_000_003 * (1 + place) + 7_919 * times)
