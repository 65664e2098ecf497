"""What each layer of a running pipeline gives for a few fixed samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.transition import Stage
from hf_pipetransformer.units import attention_of, head_of


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
