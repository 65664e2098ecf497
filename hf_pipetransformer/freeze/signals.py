"""Measurements for freeze policies: gradient norms, similarity of layer outputs, and weight changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.flattened import Sequences, sequences_of
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.schedules.placement import attention_of, head_of
from hf_pipetransformer.splitters.quantized import put_in_evaluation_mode


class GradientNormMonitor:
    """Mean gradient norm of each layer and the head, from the norms of gradient clipping; `record` never syncs."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        # The last entry counts the steps.
        self._sums = torch.zeros(num_layers + 2, dtype=torch.float64, device=device)

    def record(self, squares: torch.Tensor) -> None:
        """Add one optimizer step. A step with non-finite gradients does not count, as the optimizer skips it.

        Args:
            squares: `(num_layers + 1,)` squared L2 norms of the reduced, unscaled, unclipped gradients of the layers
                and the head.
        """
        squares = squares.to(self._sums)
        norms = torch.cat([squares.sqrt(), squares.new_ones(1)])
        self._sums += torch.where(squares.isfinite().all(), norms, torch.zeros_like(norms))

    def means(self) -> tuple[float, ...]:
        """Return the `num_layers + 1` mean norms since the last `reset`; empty if no step counted."""
        sums: list[float] = self._sums.tolist()
        count = sums.pop()
        return tuple(value / count for value in sums) if count else ()

    def reset(self) -> None:
        self._sums.zero_()

    def state(self) -> list[float]:
        return list(self._sums.tolist())

    def load_state(self, sums: list[float]) -> None:
        self._sums.copy_(torch.tensor(sums, dtype=torch.float64))


def linear_cka(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the linear centered kernel alignment of two representations (Kornblith et al., 2019, Eq. 4).

    1 if one is a rotated and scaled copy of the other, 0 if they are unrelated.

    Args:
        first: `(samples, features)`.
        second: `(samples, features)` of the same samples.
    """
    grams = []
    for found in (first.double(), second.double()):
        centered = found - found.mean(dim=0)
        grams.append(centered @ centered.T)
    scale = grams[0].norm() * grams[1].norm()
    # A representation that is constant over the samples has no similarity; 1 counts it as unchanged.
    return float((grams[0] * grams[1]).sum() / scale) if scale > 0 else 1.0


class SimilarityMonitor:
    """Layer outputs at the last freeze decision, kept on the process that decides."""

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor] = {}

    @property
    def has_begun(self) -> bool:
        return bool(self._before)

    def compare(self, outputs: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        """Return the CKA of each layer's output, `(samples, hidden)`, with the last call's; empty the first time."""
        before, self._before = self._before, dict(outputs)
        return tuple(linear_cka(before[layer], outputs[layer]) for layer in sorted(before, key=int))

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._before)

    def load_state(self, before: Mapping[str, torch.Tensor]) -> None:
        self._before = dict(before)


Report = Sequence[Sequence[float]]
"""Sums of squares of one rank: of the weight changes, then of the old weights; each one value per layer and head."""


class WeightMonitor:
    """Copy of the weights that a rank trains, made at the last freeze decision.

    Args:
        place_of: parameter name to the index of its layer, `num_layers` for the head; embeddings are left out.
    """

    def __init__(self, place_of: Mapping[str, int]) -> None:
        self._place_of = place_of
        self._before: dict[str, torch.Tensor] | None = None

    @property
    def has_begun(self) -> bool:
        return self._before is not None

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights; later changes are measured from this copy."""
        self._before = {name: value.detach().clone() for name, value in weights.items() if name in self._place_of}

    def forget(self) -> None:
        """Drop the copy, because weights may move to other ranks."""
        self._before = None

    def report(self, weights: Mapping[str, torch.Tensor], num_layers: int) -> Report:
        """Return the changes of this rank's weights since `begin`; `weights` must include all those names."""
        sums = torch.zeros(2, num_layers + 1, dtype=torch.float64)
        # A checkpoint file returns the names in another order; unsorted, the sums would differ in the last bit.
        for name, before in sorted((self._before or {}).items()):
            changed = (weights[name].detach() - before).double().square().sum()
            found = torch.stack([changed, before.double().square().sum()])
            sums[:, self._place_of[name]] += found.cpu()
        return list(sums.tolist())

    def state(self) -> dict[str, torch.Tensor]:
        return dict(self._before or {})

    def load_state(self, before: Mapping[str, torch.Tensor]) -> None:
        """Restore the copies from `state`; the names must be those of the weights trained on this rank."""
        self._before = dict(before)


def relative_changes(reports: Sequence[Report]) -> tuple[float, ...]:
    """Return the L2 norm of each layer's change relative to its old weights, from all reports of a pipeline."""
    changed, before = torch.tensor(reports, dtype=torch.float64).sum(dim=0).tolist()
    return tuple(math.sqrt(new / old) if old else 0.0 for new, old in zip(changed, before, strict=True))


class LayerProbe:
    """Collector of layer outputs on fixed samples (the same on every rank), averaged over positions, in eval mode."""

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
        found = {name: value for name, value in self.samples.items() if isinstance(value, torch.Tensor)}
        return {name: value.contiguous().cpu() for name, value in found.items()}

    def set_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the samples' tensors from a checkpoint; keep the current ones if `tensors` is empty."""
        if tensors:
            others = {name: value for name, value in self.samples.items() if not isinstance(value, torch.Tensor)}
            self.samples = {**others, **tensors}

    def outputs(self, stage: Stage) -> dict[str, torch.Tensor]:
        """Return the first pipeline's `(samples, hidden)` outputs by layer. Collective: call on every rank."""
        found: dict[int, list[torch.Tensor]] = {}
        pooled = partial(_pooled, sequences_of(self.samples))
        hooks = self._hooks(stage, lambda layer, hidden: found.setdefault(layer, []).append(pooled(hidden)))
        put_in_evaluation_mode(stage.view.model)  # Not restored: every training batch sets the modes again.
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
        """Hook a layer's output at the next layer's input: `StageExit` skips forward hooks of a stage's last layer."""
        view, layers = stage.view, stage.view.structure.layers

        def before(layer: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if attention_of(layer) in view.blocks:
                note(layer - 1, args[0] if args else kwargs["hidden_states"])

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if head_of(len(layers)) in view.blocks:
                note(len(layers) - 1, output[0] if isinstance(output, (tuple, list)) else output)

        hooks: list[Any] = [layers[-1].register_forward_hook(after)]
        for index, layer in enumerate(layers[1:], start=1):
            hooks.append(layer.register_forward_pre_hook(partial(before, index), with_kwargs=True))
        return hooks


def _pooled(sequences: Sequences | None, hidden: torch.Tensor) -> torch.Tensor:
    hidden = hidden.detach().float()
    if sequences is None:
        return hidden.flatten(1, -2).mean(dim=1).cpu()
    return torch.stack([tokens.mean(dim=0) for tokens in hidden[0].split(sequences.lengths)]).cpu()
