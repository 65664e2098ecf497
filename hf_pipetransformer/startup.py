"""What happens before the first step: the ranks compare notes, the model is probed, rank 0 chooses the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.loader import CommonLength
from hf_pipetransformer.autodp.padding import pad_batch
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autopipe.planner import choose_num_microbatches, choose_num_stages, plan_layout
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.losses import LossDoesNotDecomposeError, LossRule, find_loss_rule
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.check import Probe, probe_model, undisturbed


NUM_PROBE_SAMPLES = 6
TRAINING_BYTES_FACTOR = 4
"""Weights, gradients and Adam's two moments."""

ProbeCompute = Callable[[dict[str, Any], int], torch.Tensor]


@dataclass(frozen=True)
class FoundRule:
    """How losses add up, and whether the model's loss ignores `num_items_in_batch`."""

    rule: LossRule
    ignores_num_items: bool


class StartUp:
    """Probes a model and plans the first layout.

    Args:
        model: the whole model.
        splitter: how it falls into layers.
        args: the options.
        topology: the ranks.
        device: where this rank computes.
    """

    def __init__(
        self,
        model: nn.Module,
        splitter: Splitter,
        args: PipeTransformerArguments,
        topology: Topology,
        device: torch.device,
    ) -> None:
        self.model = model
        self.splitter = splitter
        self.args = args
        self.topology = topology
        self.device = device
        self._probe: Probe | None = None
        self.common_length: CommonLength | None = None

    @property
    def probe(self) -> Probe:
        """What `run` found."""
        assert self._probe is not None, "run() comes first"
        return self._probe

    def run(self, samples: dict[str, Any], compute: ProbeCompute, count: Callable[[Any], int]) -> FoundRule:
        """Check on a tiny batch that the model can be split and that its loss can.

        Raises:
            UnsupportedModelError: the split model gives other numbers.
            LossDoesNotDecomposeError: the loss is no mean or sum over samples or tokens.
        """
        main_input = getattr(self.model, "main_input_name", "input_ids")
        is_exact = self._probe_device().type == "cpu" and not (self.args.bf16 or self.args.fp16)
        tolerance = 1e-5 if is_exact else 3e-2
        device = self._probe_device()
        self.model.to(device)
        inputs = {key: _moved(value, device) for key, value in samples.items()}
        total = count(inputs)
        with undisturbed(self.model):
            self._probe = probe_model(
                self.model, self.splitter, lambda part: compute(part, total), inputs, main_input, tolerance
            )
            rule = self._find_rule(inputs, compute, count, 10 * tolerance)
            self.common_length = self._find_common_length(inputs, main_input, lambda part: compute(part, total))
        if self.args.num_stages != 1 and self.topology.world_size > 1:
            self.model.to("cpu")
        return rule

    def _probe_device(self) -> torch.device:
        """This rank's device if the whole model with its gradients fits, else the CPU."""
        if self.device.type != "cuda":
            return self.device
        free, _ = torch.cuda.mem_get_info(self.device)
        needed = 2 * sum(p.numel() * p.element_size() for p in self.model.parameters())
        return self.device if needed < free / 2 else torch.device("cpu")

    def _find_common_length(
        self, inputs: dict[str, Any], main_input: str, compute: Callable[[dict[str, Any]], torch.Tensor]
    ) -> CommonLength | None:
        """Whether the loss sees padding (a softmax over positions does), so that replicas must pad alike."""
        tokens = inputs[main_input]
        if self.topology.world_size == 1 or tokens.dim() != 2 or tokens.is_floating_point():
            return None
        pad_token_id: int | None = getattr(self.model.config, "pad_token_id", None)
        rule = CommonLength(main_input, pad_token_id or 0)
        longest = getattr(self.model.config, "max_position_embeddings", tokens.shape[1] + 1)
        if "attention_mask" not in inputs or tokens.shape[1] + 2 >= longest:
            return rule
        padded = pad_batch(inputs, main_input, tokens.shape[1] + 1, rule.pad_token_id)
        with torch.no_grad():
            expected, found = float(compute(inputs)), float(compute(padded))
        return rule if abs(found - expected) > 1e-6 * abs(expected) else None

    def _find_rule(
        self, inputs: dict[str, Any], compute: ProbeCompute, count: Callable[[Any], int], tolerance: float
    ) -> FoundRule:
        def loss_of(part: dict[str, Any], total: int) -> float:
            with torch.no_grad():
                return float(compute(part, total))

        total = count(inputs)
        ignores = abs(loss_of(inputs, total) - loss_of(inputs, 2 * total)) <= 1e-6 * abs(loss_of(inputs, total))
        try:
            return FoundRule(find_loss_rule(loss_of, inputs, count, tolerance), ignores)
        except LossDoesNotDecomposeError:
            if self.topology.world_size == 1 and self.args.num_microbatches in (None, 1):
                return FoundRule(LossRule.MEAN, ignores)
            raise

    def layout(self, samples_per_pipeline: Callable[[int], int]) -> Layout:
        """The layout of the start, chosen by rank 0.

        Args:
            samples_per_pipeline: samples of a pipeline's mini-batch for a K.
        """
        num_stages, num_microbatches = self.topology.broadcast(self._choose(samples_per_pipeline))
        return self._plan(num_stages, num_microbatches, tuple(self.topology.broadcast(list(self.probe.unit_flops))))

    def _choose(self, samples_per_pipeline: Callable[[int], int]) -> list[int]:
        num_stages = self.args.num_stages
        if num_stages is None:
            most = len(self.probe.structure.cut_positions()) - 1
            local = self.topology.local_world_size
            candidates = [k for k in range(1, min(local, most) + 1) if local % k == 0]
            num_stages = choose_num_stages(candidates, self._largest_stage_bytes, _device_bytes(self.device, local))
        self.topology.check_num_stages(num_stages)
        batch = samples_per_pipeline(num_stages)
        return [num_stages, self.args.num_microbatches or choose_num_microbatches(num_stages, batch)]

    def _largest_stage_bytes(self, num_stages: int) -> float:
        layout = self._plan(num_stages, 1, self.probe.unit_flops)
        sizes = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters()}
        loads = [0.0] * num_stages
        for name, units in self.probe.structure.units_of_parameter.items():
            for stage in {layout.stage_of(unit) for unit in units}:
                loads[stage] += TRAINING_BYTES_FACTOR * sizes[name]
        return max(loads)

    def _plan(self, num_stages: int, num_microbatches: int, unit_costs: tuple[float, ...]) -> Layout:
        structure = self.probe.structure
        return plan_layout(
            unit_costs=unit_costs,
            cut_positions=structure.cut_positions(),
            num_layers=structure.num_layers,
            num_stages=num_stages,
            num_replicas=self.topology.world_size // num_stages,
            num_microbatches=num_microbatches,
            schedule=self.args.pipeline_schedule,
        )

    def describe(self, layout: Layout) -> dict[str, Any]:
        """The start-up line's honest expectation, and the inputs of the choice, for the event."""
        k, m = layout.num_stages, layout.num_microbatches
        if k == 1:
            text = "No pipeline and no freezing in this release: expect the speed of data-parallel training."
        else:
            share = m / (m + k - 1)
            text = f"Bubble: at most {share:.0%} of {k} devices a pipeline are busy at M={m}."
        return {"expectation": text, "unit_flops": list(self.probe.unit_flops)}


def check_agreement(topology: Topology, what: str, values: dict[str, Any]) -> None:
    """Compare `values` over all ranks before anything depends on them.

    Raises:
        ValueError: on every rank, names the rank that differs from rank 0, and both values.
    """
    answers = topology.gather(values)
    for rank, answer in enumerate(answers):
        for key in sorted({*answer, *answers[0]}):
            found, expected = answer.get(key), answers[0].get(key)
            if found != expected:
                raise ValueError(
                    f"The {what} differ between ranks: {key} is {found} on rank {rank} and {expected} on rank 0. "
                    "Every process must run the same script with the same arguments and data."
                )


def probe_samples(dataset: Any, collate: Any) -> dict[str, Any]:
    """A tiny batch from all over the data set: sorted data would show one label only.

    Raises:
        ValueError: the data set is empty.
    """
    if len(dataset) == 0:
        raise ValueError("The data set is empty: expected at least one sample.")
    indices = [i * len(dataset) // NUM_PROBE_SAMPLES for i in range(NUM_PROBE_SAMPLES)]
    batch: Mapping[str, Any] = collate([dataset[i] for i in indices])
    return dict(batch)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _device_bytes(device: torch.device, local_world_size: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total) / local_world_size
