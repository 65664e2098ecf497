"""What happens before the first step: the ranks compare notes, the model is probed, rank 0 chooses the layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autodp.loader import CommonLength
from hf_pipetransformer.autodp.padding import pad_batch
from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.autopipe.costs import Overheads, UnitCosts, predict_step, stage_bytes, unit_loads
from hf_pipetransformer.autopipe.inputs import PlanInputs
from hf_pipetransformer.autopipe.planner import (
    PlanRules,
    choose_num_microbatches,
    choose_num_stages,
    largest_stage_size,
    plan_layout,
)
from hf_pipetransformer.batches import batch_size
from hf_pipetransformer.layout import Layout
from hf_pipetransformer.pipeline.losses import FoundRule, LossDoesNotDecomposeError, LossRule, Parts, find_loss_rule
from hf_pipetransformer.samples import with_two_labels
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.check import Probe, gradient_norms, gradients_discarded, probe_model, undisturbed
from hf_pipetransformer.splitters.padding_check import sees_padding
from hf_pipetransformer.splitters.precision import in_float32, in_full_precision
from hf_pipetransformer.splitters.profile import (
    UnitProfile,
    affordable_samples,
    profile_units,
    trainable,
    units_run_alone,
)
from hf_pipetransformer.units import block_of


ProbeCompute = Callable[[dict[str, Any], int], torch.Tensor]
ReadBatch = Callable[[int], dict[str, Any]]
"""A batch of so many samples from all over the data set."""


class StartUp:
    """Probes a model and plans the first layout.

    Args:
        model: the whole model.
        splitter: how it falls into layers.
        args: the options.
        topology: the ranks.
        device: where this rank computes.
        read: gives the batch that the units are measured with, called by rank 0 alone; None measures the tiny batch
            that is probed.
    """

    def __init__(
        self,
        model: nn.Module,
        splitter: Splitter,
        args: PipeTransformerArguments,
        topology: Topology,
        device: torch.device,
        read: ReadBatch | None = None,
    ) -> None:
        self.model = model
        self.splitter = splitter
        self.args = args
        self.topology = topology
        self.device = device
        self.read = read
        self._probe: Probe | None = None
        self.common_length: CommonLength | None = None
        self.pad_token_id = 0
        self.main_dtype = torch.float32
        self._has_dropout = has_dropout(model)
        self.sees_padding = True
        """Whether what stands at masked positions changes the loss."""

    @property
    def probe(self) -> Probe:
        """What `run` found."""
        assert self._probe is not None, "run() comes first"
        return self._probe

    def run(
        self, samples: dict[str, Any], compute: ProbeCompute, count: Callable[[Any], int], is_training: bool
    ) -> FoundRule:
        """Check on a tiny batch that the model can be split and that its loss can.

        What is found is rank 0's. Checks are made in full precision, whatever the run computes in.

        Args:
            compute: the loss of the whole model, given the number of items to divide by.
            count: items of a batch that the model's mean runs over.
            is_training: whether the model says so when it is asked.

        Raises:
            UnsupportedModelError: the split model gives other numbers.
            LossDoesNotDecomposeError: the loss is no mean or sum over samples or tokens.
        """
        main_input, device = main_input_of(self.model), self._probe_device()
        self.model.to(device)
        inputs = {key: _moved(value, device) for key, value in samples.items()}
        total = count(inputs)
        self.pad_token_id = getattr(self.model.config, "pad_token_id", None) or 0

        def whole(part: dict[str, Any]) -> torch.Tensor:
            return compute(part, total)

        with undisturbed(self.model, is_training):
            probe = probe_model(self.model, self.splitter, whole, inputs, main_input)
            self._probe = replace(probe, placeholders=frozenset(self.topology.broadcast(sorted(probe.placeholders))))
            with in_full_precision(self.model):
                exact = in_float32(inputs)
                rule = self._find_rule(exact, compute, count)
                self._look_at_padding(exact, main_input, whole)
            self._profile(inputs, whole)
            self.main_dtype = inputs[main_input].dtype
        if self.args.num_stages != 1 and self.topology.world_size > 1:
            self.model.to("cpu")
        return rule

    def _profile(self, inputs: dict[str, Any], compute: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        """Measure the units on the run's own micro-batch, on rank 0 while the others wait: they share a machine."""
        structure, costs = self.probe.structure, None
        if self.topology.rank == 0:
            with trainable(self.model):
                found, num_samples = self._measure_units(inputs, compute)
            costs = {
                "forward": found.forward,
                "backward": found.backward,
                "edge_backward": found.edge_backward,
                "activation_bytes": found.activation_bytes,
                "boundary_bytes": found.boundary_bytes,
                "num_samples": num_samples,
            }
        costs = self.topology.broadcast(costs)
        self._num_measured_samples = int(costs.pop("num_samples"))
        message_bytes = int(costs.pop("boundary_bytes") * self._num_measured_samples)
        hop, reduction = self.topology.measure(message_bytes)
        parameters, shared = [0] * structure.num_units, []
        for name, parameter in self.model.named_parameters():
            units = structure.units_of_parameter[name]
            # Of tied weights the first user keeps the state and takes the step.
            parameters[units[0]] += parameter.numel()
            if len(units) > 1:
                shared.append((units, parameter.numel()))
        self._units = UnitCosts(
            parameters=tuple(parameters),
            shared=tuple(shared),
            **{key: tuple(value) for key, value in costs.items()},
        )
        self._overheads = Overheads(hop=hop, reduction_per_byte=reduction)

    def _measure_units(
        self, inputs: dict[str, Any], compute: Callable[[dict[str, Any]], torch.Tensor]
    ) -> tuple[UnitProfile, int]:
        """What the units cost, and with how many samples that was measured.

        That many are in the run's largest micro-batch, or fewer where it is too much work or memory.
        """
        structure, size = self.probe.structure, batch_size(inputs)
        measure = partial(profile_units, self.model, self.splitter, structure, compute)
        if self.read is None:
            return measure(inputs, size), size
        wanted = samples_per_microbatch(self.args)
        device = next(self.model.parameters()).device
        if wanted > size:
            pilot = measure(inputs, size, num_repeats=1)
            free = _free_bytes(device, self.topology.num_ranks_here)
            wanted = max(size, affordable_samples(wanted, pilot, len(units_run_alone(structure)), free))
        batch = {key: _moved(value, device) for key, value in self.read(wanted).items()}
        return measure(batch, batch_size(batch)), batch_size(batch)

    def inputs(self, layout: Layout, samples_per_device: int, known_microbatches: Mapping[int, int]) -> PlanInputs:
        """What the plans of a run start from."""
        args, units = self.args, self._units
        rules = PlanRules(
            compression=args.pipeline_compression,
            cut_positions=tuple(self.probe.structure.cut_positions()),
            device_bytes=self._smallest_device_bytes(),
            elastic=args.elastic,
            num_microbatches=args.num_microbatches,
            known_microbatches=known_microbatches,
            initial_largest_size=largest_stage_size(units.parameters, layout.num_frozen_layers, layout.boundaries),
        )
        return PlanInputs(units, self._overheads, rules, samples_per_device, self.measures_microbatches)

    @property
    def measures_microbatches(self) -> bool:
        """Whether M is tried on training steps. By itself only where no number but the last digits hangs on it."""
        asked = self.args.pipeline_parallel_num_microbatches
        is_free = not (self._has_dropout or self.args.full_determinism)
        return asked == "measured" or (asked == "auto" and is_free)

    def _num_frozen_by_user(self) -> int:
        """F at the start: leading layers that the script froze, the embeddings included."""
        trainable_units = {
            unit
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
            for unit in self.probe.structure.units_of_parameter[name]
        }
        first = min(trainable_units, default=self.probe.structure.num_units - 1)
        return max(0, block_of(first) - 1)

    def _probe_device(self) -> torch.device:
        """This rank's device if the whole model with its gradients fits, else the CPU."""
        if self.device.type != "cuda":
            return self.device
        free, _ = torch.cuda.mem_get_info(self.device)
        # Beside the weights: float32 ones, two sets of gradients.
        needed = sum(p.numel() * (p.element_size() + 3 * 4) for p in self.model.parameters())
        return self.device if needed < free / 2 else torch.device("cpu")

    def _look_at_padding(
        self, inputs: dict[str, Any], main_input: str, compute: Callable[[dict[str, Any]], torch.Tensor]
    ) -> None:
        """Whether the loss sees padding (a softmax over positions does): replicas must pad alike, and rows keep it."""
        pads_alike = self._must_pad_alike(inputs, main_input, compute)
        keeps = self.args.activation_cache == "off" or self._sees_padding(inputs, main_input, compute)
        pads_alike, self.sees_padding = self.topology.broadcast([pads_alike, keeps])
        self.common_length = CommonLength(main_input, self.pad_token_id) if pads_alike else None

    def _must_pad_alike(
        self, inputs: dict[str, Any], main_input: str, compute: Callable[[dict[str, Any]], torch.Tensor]
    ) -> bool:
        tokens = inputs[main_input]
        if self.topology.world_size == 1 or tokens.dim() != 2 or tokens.is_floating_point():
            return False
        padded = self._padded_more(inputs, main_input)
        if padded is None:
            return True
        with torch.no_grad():
            expected, found = float(compute(inputs)), float(compute(padded))
        return abs(found - expected) > 1e-6 * abs(expected)

    def _sees_padding(
        self, inputs: dict[str, Any], main_input: str, compute: Callable[[dict[str, Any]], torch.Tensor]
    ) -> bool:
        padded = self._padded_more(inputs, main_input)
        if padded is None:
            return True
        return sees_padding(self.model, self.splitter, self.probe.structure, compute, padded)

    def _padded_more(self, inputs: dict[str, Any], main_input: str) -> dict[str, Any] | None:
        """A batch of text with one more position of padding; None where that is not possible."""
        tokens = inputs[main_input]
        if tokens.dim() != 2 or tokens.is_floating_point() or "attention_mask" not in inputs:
            return None
        longest = getattr(self.model.config, "max_position_embeddings", tokens.shape[1] + 1)
        if tokens.shape[1] + 2 >= longest:
            return None
        return pad_batch(inputs, main_input, tokens.shape[1] + 1, self.pad_token_id)

    def _find_rule(self, inputs: dict[str, Any], compute: ProbeCompute, count: Callable[[Any], int]) -> FoundRule:
        def measure(parts: Parts, num_items: int) -> torch.Tensor:
            with gradients_discarded(self.model):
                sum_of_losses = torch.zeros((), dtype=torch.float64)
                for part, weight in parts:
                    if weight:
                        loss = compute(dict(part), num_items) * weight
                        sum_of_losses += loss.detach().double().cpu()
                        if loss.requires_grad:
                            loss.backward()
                return torch.cat([sum_of_losses.reshape(1), gradient_norms(self.model).double().cpu()])

        found = find_loss_rule(measure, with_two_labels(inputs), count)
        answer = self.topology.broadcast([found.rule.value, found.ignores_num_items, found.refusal])
        found = FoundRule(LossRule(answer[0]), *answer[1:])
        is_whole = self.topology.world_size == 1 and self.args.num_microbatches in (None, 1)
        if found.refusal is not None and not is_whole:
            raise LossDoesNotDecomposeError(found.refusal)
        return found

    def layout(self, samples_per_device: int, num_frozen: int = 0) -> Layout:
        """The layout of the start, chosen by rank 0.

        Args:
            samples_per_device: samples of a loader batch by rank.
            num_frozen: layers that an earlier part of the run froze.
        """
        num_frozen = max(num_frozen, self._num_frozen_by_user())
        return Layout.from_event(self.topology.broadcast(self._choose(samples_per_device, num_frozen).as_event()))

    def _choose(self, samples_per_device: int, num_frozen: int) -> Layout:
        num_stages, smallest = self.args.num_stages, self._smallest_device_bytes()
        if num_stages is None:
            most = len(self.probe.structure.cut_positions()) - 1
            local = self.topology.local_world_size
            candidates = [k for k in range(1, min(local, most) + 1) if local % k == 0]
            num_stages = choose_num_stages(
                candidates,
                lambda k: max(
                    stage_bytes(self._plan(k, samples_per_device, num_frozen), self._units, k * samples_per_device)
                ),
                smallest,
            )
        self.topology.check_num_stages(num_stages)
        return self._plan(num_stages, samples_per_device, num_frozen)

    def _smallest_device_bytes(self) -> float:
        """Memory of the smallest device of the run: every rank plans with it. A collective call."""
        return min(self.topology.gather(_device_bytes(self.device, self.topology.num_ranks_here)))

    def _plan(self, num_stages: int, samples_per_device: int, num_frozen: int) -> Layout:
        structure = self.probe.structure
        samples = samples_per_device * num_stages
        return plan_layout(
            unit_costs=unit_loads(self._units, num_frozen),
            cut_positions=structure.cut_positions(),
            num_layers=structure.num_layers,
            num_stages=num_stages,
            num_replicas=self.topology.world_size // num_stages,
            num_microbatches=self.args.num_microbatches or choose_num_microbatches(num_stages, samples),
            schedule=self.args.pipeline_schedule,
            num_frozen_layers=num_frozen,
        )

    def describe(self, layout: Layout, samples_per_device: int, policy: str) -> dict[str, Any]:
        """The start-up line's honest expectation, and the inputs of the choice, for the event."""
        samples = samples_per_device * layout.num_stages
        accumulation = self.args.gradient_accumulation_steps
        prediction = predict_step(layout, self._units, self._overheads, samples, accumulation)
        k, m = layout.num_stages, layout.num_microbatches
        bubble = (
            "" if k == 1 else f" Bubble: at most {m / (m + k - 1):.0%} of {k} devices a pipeline are busy at M={m}."
        )
        rule = ""
        if k > 1 and self.args.num_microbatches is None and not self.measures_microbatches:
            cause = "dropout masks depend on M" if self._has_dropout else "full_determinism"
            rule = f" M={m} by rule, since {cause}; pipeline_parallel_num_microbatches='measured' tries others."
        return {
            "expectation": f"Freezing: {policy}. Activation cache: {self.args.activation_cache}.{bubble}{rule}",
            "predicted_step_s": prediction.seconds,
            "stage_seconds": list(prediction.stage_seconds),
            "measured_samples": self._num_measured_samples,
            "unit_costs": {key: list(value) for key, value in asdict(self._units).items()},
            "unit_flops": list(self.probe.unit_flops),
        }


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


def samples_per_microbatch(args: PipeTransformerArguments) -> int:
    """Samples of the largest micro-batch that the first layout has; with K to be chosen, that of the shortest."""
    num_stages = args.num_stages or 1
    samples = args.per_device_train_batch_size * num_stages
    return -(-samples // (args.num_microbatches or choose_num_microbatches(num_stages, samples)))


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random masks in training: a module, or the config, holds a rate above 0."""
    holders: list[Any] = [*model.modules(), *([model.config] if hasattr(model, "config") else [])]
    rates = [value for holder in holders for name, value in vars(holder).items() if "drop" in name]
    rates += [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def main_input_of(model: nn.Module) -> str:
    """Name of the input that the embeddings read."""
    name: str = getattr(model, "main_input_name", "input_ids")
    return name


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _free_bytes(device: torch.device, num_ranks_here: int) -> float:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free)
    return float(psutil.virtual_memory().available) / num_ranks_here


def _device_bytes(device: torch.device, num_ranks_here: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total) / num_ranks_here
