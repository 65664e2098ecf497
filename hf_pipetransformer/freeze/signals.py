"""Measurements that freeze policies may ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.schedules.placement import attention_of, head_of


class GradientNormMonitor:
    """Averages what the gradient norm for clipping computes anyway; never waits for the device.

    Args:
        num_layers: L.
        device: where the squares come from.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        # The last entry counts the steps.
        self._sums = torch.zeros(num_layers + 2, dtype=torch.float64, device=device)

    def record(self, squares: torch.Tensor) -> None:
        """Add one optimizer step.

        Args:
            squares: `(num_layers + 1,)` squared L2 norms of the reduced, unscaled, unclipped gradients of the layers
                and the head. A step whose gradients are not finite will be skipped and does not count.
        """
        squares = squares.to(self._sums)
        norms = torch.cat([squares.sqrt(), squares.new_ones(1)])
        self._sums += torch.where(squares.isfinite().all(), norms, torch.zeros_like(norms))

    def means(self) -> tuple[float, ...]:
        """`num_layers + 1` mean norms since the last `reset`; empty if no step counted."""
        sums: list[float] = self._sums.tolist()
        count = sums.pop()
        return tuple(value / count for value in sums) if count else ()

    def reset(self) -> None:
        """Begin a new interval."""
        self._sums.zero_()

    def state(self) -> list[float]:
        """The sums, for a checkpoint."""
        return list(self._sums.tolist())

    def load_state(self, sums: list[float]) -> None:
        """Go on from `state`."""
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))


def linear_cka(first: torch.Tensor, second: torch.Tensor) -> float:
    """Linear centered kernel alignment of two representations of the same samples (Kornblith et al., 2019, Eq. 4).

    1 if one is the other rotated and scaled, 0 if they have nothing in common.

    Args:
        first: `(samples, features)`.
        second: `(samples, features)`, of as many samples.
    """
    grams = []
    for found in (first.double(), second.double()):
        centered = found - found.mean(dim=0)
        grams.append(centered @ centered.T)
    scale = grams[0].norm() * grams[1].norm()
    # What is the same for all samples has nothing that could change.
    return float((grams[0] * grams[1]).sum() / scale) if scale > 0 else 1.0


class SimilarityMonitor:
    """Keeps what the layers gave at the last decision, on the process that decides."""

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor] = {}

    @property
    def has_begun(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._before)

    def compare(self, outputs: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        """The similarity of each layer's output to that of the last call; empty the first time.

        Args:
            outputs: number of each layer to its output, `(samples, hidden)`.
        """
        before, self._before = self._before, dict(outputs)
        return tuple(linear_cka(before[layer], outputs[layer]) for layer in sorted(before, key=int))

    def state(self) -> dict[str, torch.Tensor]:
        """What the layers gave, for a checkpoint."""
        return dict(self._before)

    def load_state(self, before: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`."""
        self._before = dict(before)


Report = Sequence[Sequence[float]]
"""Of one rank: for each layer and the head the sums of squares of the changes, and of the weights before them."""


class WeightMonitor:
    """Keeps a copy of the weights that a rank trains, made at the last decision.

    Args:
        place_of: name of each parameter to its index among the layers, the head behind them; embeddings have none.
    """

    def __init__(self, place_of: Mapping[str, int]) -> None:
        self._place_of = place_of
        self._before: dict[str, torch.Tensor] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is something to compare with."""
        return self._before is not None

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """From now on changes are measured from here."""
        self._before = {name: value.detach().clone() for name, value in weights.items() if name in self._place_of}

    def forget(self) -> None:
        """The weights may go to other ranks."""
        self._before = None

    def report(self, weights: Mapping[str, torch.Tensor], num_layers: int) -> Report:
        """What has changed of the weights here; they are those of `begin`."""
        sums = torch.zeros(2, num_layers + 1, dtype=torch.float64)
        # In one order: a file gives the names in another one, and sums would differ in the last bit.
        for name, before in sorted((self._before or {}).items()):
            changed = (weights[name].detach() - before).double().square().sum()
            found = torch.stack([changed, before.double().square().sum()])
            sums[:, self._place_of[name]] += found.cpu()
        return list(sums.tolist())

    def state(self) -> dict[str, torch.Tensor]:
        """The copies by name, for a checkpoint."""
        return dict(self._before or {})

    def load_state(self, before: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state`; the names are those of the weights that are trained here."""
        self._before = dict(before)


def relative_changes(reports: Sequence[Report]) -> tuple[float, ...]:
    """The L2 norms of the changes over those of the weights before, from what all ranks of a pipeline report."""
    changed, before = torch.tensor(reports, dtype=torch.float64).sum(dim=0).tolist()
    return tuple(math.sqrt(new / old) if old else 0.0 for new, old in zip(changed, before, strict=True))


class LayerProbe:
    """Runs the samples through all stages in evaluation mode, and collects a mean over positions for each layer.

    Args:
        compute: what training computes for a batch; it runs all stages.
        samples: a batch, the same on every rank.
        topology: the ranks.
        device: where this rank computes.
    """

    def __init__(
        self,
        compute: Callable[[dict[str, Any]], Any],
        samples: Mapping[str, Any],
        topology: Topology,
        device: torch.device,
    ) -> None:
        self.compute = compute
        self.samples = dict(samples)
        self.topology = topology
        self.device = device

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the samples, for a checkpoint."""
        found = {name: value for name, value in self.samples.items() if isinstance(value, torch.Tensor)}
        return {name: value.contiguous().cpu() for name, value in found.items()}

    def set_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on with those of `tensors`; with the own samples if there are none."""
        if tensors:
            others = {name: value for name, value in self.samples.items() if not isinstance(value, torch.Tensor)}
            self.samples = {**others, **tensors}

    def outputs(self, stage: Stage) -> dict[str, torch.Tensor]:
        """Number of each layer to its output, `(samples, hidden)`, of the first pipeline. A collective call."""
        found: dict[int, list[torch.Tensor]] = {}
        hooks = self._hooks(stage, lambda layer, hidden: found.setdefault(layer, []).append(_pooled(hidden)))
        stage.view.model.eval()  # Each batch of training sets the modes anew.
        here = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in self.samples.items()}
        try:
            with torch.no_grad():
                self.compute(here)
        finally:
            for hook in hooks:
                hook.remove()
        own = {str(layer): torch.cat(parts) for layer, parts in found.items()}
        answers = self.topology.gather(own)[: stage.layout.pipeline_size]
        return {layer: output for answer in answers for layer, output in answer.items()}

    def _hooks(self, stage: Stage, note: Callable[[int, torch.Tensor], None]) -> list[Any]:
        """A layer's output is noted where the next one reads it: a stage may end between them."""
        view, layers = stage.view, stage.view.structure.layers

        def before(layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if attention_of(layer) in view.units:
                note(layer - 1, args[0] if args else kwargs["hidden_states"])

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if head_of(len(layers)) in view.units:
                note(len(layers) - 1, output[0] if isinstance(output, (tuple, list)) else output)

        hooks: list[Any] = [layers[-1].register_forward_hook(after)]
        for index, layer in enumerate(layers[1:], start=1):
            hooks.append(layer.register_forward_pre_hook(partial(before, index), with_kwargs=True))
        return hooks


def _pooled(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.detach().float().flatten(1, -2).mean(dim=1).cpu()
