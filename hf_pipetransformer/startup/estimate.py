"""Estimate of a run from a model's config alone: the bytes of each rank and the time of a step, before any weight.

The model is built of meta tensors, which have shapes and no memory, and its twin runs one sample to count operations
and the activations that its backward would keep. Times follow from assumed rates of a device: they compare layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel

from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.planning.costs import Overheads, RankMemory, predict_step, rank_memory, trained_elements
from hf_pipetransformer.planning.planner import MEMORY_RESERVE
from hf_pipetransformer.planning.simulator import simulate_equal
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import ActivationShape, Probe, trace_structure
from hf_pipetransformer.startup.check import run_stages
from hf_pipetransformer.startup.costs import BlockProfile, block_costs, saved_activations
from hf_pipetransformer.startup.model import ProbeTarget, has_dropout
from hf_pipetransformer.startup.planner import MeasuredCosts, RunPlanner
from hf_pipetransformer.startup.twin import as_twin


GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Devices that a run is planned for: how many, bytes of each, operations and bytes per second between two.

    `devices_per_node` bounds a pipeline, which does not leave its node.
    """

    num_devices: int
    device_bytes: float
    devices_per_node: int
    flops: float = 1e14
    bandwidth: float = 2.5e10

    # What a planner asks a run's `Topology` for.
    @property
    def world_size(self) -> int:
        return self.num_devices

    @property
    def local_world_size(self) -> int:
        return self.devices_per_node


@dataclass(frozen=True)
class Option:
    """One possible layout: the memory of its ranks, the share of time that devices wait, and a step's seconds."""

    layout: Layout
    memory: tuple[RankMemory, ...]
    bubble: float
    step_seconds: float
    samples_per_second: float
    fits: bool

    @property
    def fullest(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.total for rank in self.memory)


@dataclass(frozen=True)
class Estimate:
    """Possible layouts of a run, shortest pipeline first, and the one that a run would begin with."""

    model: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    trained_by_rank: tuple[float, ...]
    machine: Machine
    options: tuple[Option, ...]
    chosen: Option


def build_on_meta(path: str, dtype: torch.dtype | None, lora_rank: int | None = None) -> Any:
    """Build the model of a config without memory for its weights, of the class that its checkpoint was saved from.

    With `lora_rank`, only LoRA adapters on all linear layers are trained.

    Raises:
        ValueError: `path` has no config.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except OSError as error:
        raise ValueError(f"{path!r} has no config.json that can be read: {error}") from error
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with torch.device("meta"):
        model: Any = AutoModel.from_config(config) if kind is None else kind(config)
        model = model.to(dtype or config.dtype or torch.float32).eval()
        if lora_rank is not None:
            from peft import LoraConfig, get_peft_model  # Optional, and needed for adapters alone.

            model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules="all-linear"))
    return model


def batch_on_meta(model: Any, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of one sample: an image of the config's size, or `length` tokens, with labels.

    Raises:
        ValueError: the model reads something else, or fewer tokens than `length`.
    """
    model = bare_model(model)
    name, config = model.main_input_name, model.config
    whole = partial(torch.zeros, device="meta", dtype=torch.int64)
    labels = whole(1)
    if name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
        shape = (1, getattr(config, "num_channels", 3), size, size)
        return {name: torch.zeros(shape, device="meta", dtype=model.dtype), "labels": labels}
    if name != "input_ids":
        raise ValueError(f"{type(model).__name__} reads {name!r}: expected a model for text or images.")
    longest = getattr(config, "max_position_embeddings", None) or length
    if length > longest:
        raise ValueError(f"{type(model).__name__} takes up to {longest} tokens, found a sequence length of {length}.")
    tokens = whole(1, length)
    kind = type(model).__name__
    if kind.endswith("ForQuestionAnswering"):
        return {name: tokens, "start_positions": labels, "end_positions": labels}
    is_of_sequences = kind.endswith(("ForSequenceClassification", "ForMultipleChoice"))
    return {name: tokens, "labels": labels if is_of_sequences else tokens}


class _FlashAttention(TorchFunctionMode):
    """Attention as devices compute it: on meta tensors, torch would keep the whole matrix of attention weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]


def estimate(model: Any, batch: Mapping[str, Any], args: PipeTransformerArguments, machine: Machine) -> Estimate:
    """Estimate every possible number of stages of a run: `model` on meta tensors, a `batch` of one sample."""
    splitter = find_splitter(model)
    with as_twin(model, splitter) as twin, _FlashAttention():
        target = ProbeTarget(model, splitter, dict(batch), lambda given, _: model(**given).loss, lambda _: 1, twin)
        structure = trace_structure(model, splitter, lambda: target.loss(target.inputs), target.is_text)
        with torch.no_grad():
            sent, per_stage = run_stages(target, structure, target.inputs)
        flops = twin.of_all_blocks(per_stage)
        stages = pairwise(twin.cut_positions(structure))
        per_block = [
            each.dtype for (start, end), each in zip(stages, sent[:-1], strict=False) for _ in range(end - start)
        ]
        activation = ActivationShape(target.main_input, tuple(batch[target.main_input].shape[1:]), sent[-2].shape[1:])
        boundary = float(sent[-2].numel() * sent[-2].element_size())
        saved = twin.of_all_blocks(saved_activations(target, structure))
    forward = [each / machine.flops for each in flops]
    # A backward takes two forwards, for the weights alone one, and recomputation another one.
    again = args.pipeline_checkpoint != "never"
    backward, edge = ([(count + again) * each for each in forward] for count in (2, 1))
    profile = BlockProfile(forward, backward, edge, saved, boundary)
    blocks = block_costs(model, structure, profile)
    overheads = Overheads(hop=boundary / machine.bandwidth, reduction_per_byte=1 / machine.bandwidth)
    dtypes = tuple(twin.of_all_blocks(per_block))
    probe = Probe(structure, tuple(flops), dtypes, activation, frozenset())
    measured = MeasuredCosts(blocks, overheads, 1)
    planner = RunPlanner(
        args, cast(Any, machine), probe, measured, machine.device_bytes, 0, has_dropout(model), 0
    )  # fmt: skip
    samples, local = args.train_samples_per_device, machine.devices_per_node
    sizes = [k for k in range(1, local + 1) if local % k == 0 and planner.num_chunks(k)]
    options = tuple(_option(planner, planner.plan(k, samples, 0), machine) for k in sizes)
    fitting = [each for each in options if each.fits]
    chosen = fitting[0] if fitting else options[-1]
    if args.pipeline_size is not None:
        chosen = next((each for each in options if each.layout.pipeline_size == args.pipeline_size), chosen)
    weights = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return Estimate(
        type(bare_model(model)).__name__,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(weights),
        structure.num_layers,
        tuple(trained_elements(chosen.layout, blocks)),
        machine,
        options,
        chosen,
    )


def _option(planner: RunPlanner, layout: Layout, machine: Machine) -> Option:
    args, blocks, overheads = planner.args, planner.costs.blocks, planner.costs.overheads
    accumulation, samples = args.gradient_accumulation_steps, args.train_samples_per_device * layout.pipeline_size
    rules = replace(planner.memory_rules, sums=planner.sums_in_float32(layout))
    memory = tuple(rank_memory(layout, blocks, samples, accumulation, args.pipeline_weights, rules))
    seconds = predict_step(layout, blocks, overheads, samples, accumulation).seconds
    bubble = 0.0
    if layout.pipeline_size > 1 and not layout.abilities.overlaps_steps:
        bubble = simulate_equal(find_schedule(layout.schedule), layout.places, layout.num_microbatches).bubble
    per_second = samples * layout.num_replicas * accumulation / seconds if seconds else 0.0
    fits = max(rank.total for rank in memory) <= machine.device_bytes * (1 - MEMORY_RESERVE)
    return Option(layout, memory, bubble, seconds, per_second, fits)


def in_words(found: Estimate) -> str:
    """Return the table of all layouts, the bytes of each rank of the chosen one, and what to do if nothing fits."""
    machine, chosen = found.machine, found.chosen
    budget = machine.device_bytes * (1 - MEMORY_RESERVE)
    lines = [
        f"{found.model}: {found.num_parameters / GB:.2f} billion parameters in {found.num_layers} layers, "
        f"{found.weight_bytes / GB:.1f} GB of weights; {machine.num_devices} devices of "
        f"{machine.device_bytes / GB:g} GB, of which {budget / GB:g} GB are planned with.",
        "",
        f"{'stages K':>8} {'replicas R':>10} {'micro-batches M':>15} {'fullest rank':>12} {'fits':>5} {'waiting':>8} "
        f"{'step':>9} {'samples/s':>9}",
    ]
    for each in found.options:
        layout = each.layout
        lines.append(
            f"{layout.pipeline_size:>8} {layout.num_replicas:>10} {layout.num_microbatches:>15} "
            f"{each.fullest / GB:>9.1f} GB {'yes' if each.fits else 'no':>5} {each.bubble:>8.0%} "
            f"{each.step_seconds:>7.3g} s {each.samples_per_second:>9.3g}"
        )
    parts = [field.name for field in fields(RankMemory)]
    head = " ".join(f"{part:>11}" for part in [*parts, "total"])
    lines += ["", f"{chosen.layout}; GB of each rank:", f"{'rank':>8} {'trained':>10} {head}"]
    for rank, (trained, memory) in enumerate(zip(found.trained_by_rank, chosen.memory, strict=True)):
        sizes = [*(getattr(memory, part) for part in parts), memory.total]
        lines.append(f"{rank:>8} {trained / GB:>8.2f} B " + " ".join(f"{size / GB:>11.1f}" for size in sizes))
    lines += [
        "",
        f"Times assume {machine.flops / 1e12:g} TFLOP/s a device and {machine.bandwidth / GB:g} GB/s between two: "
        "they compare layouts, and a run measures its own.",
    ]
    if not chosen.fits:
        lines.append(
            f"Does not fit: the fullest rank needs {chosen.fullest / GB:.1f} GB of {budget / GB:g} GB. "
            "Take more or larger devices, adapters (PEFT), an 8-bit optimizer, smaller batches or sequences, or "
            "pipeline_checkpoint='layers'."
        )
    return "\n".join(lines)


def as_json(found: Estimate) -> dict[str, Any]:
    """Return the estimate as JSON values."""

    def option(each: Option) -> dict[str, Any]:
        return {
            "pipeline_size": each.layout.pipeline_size,
            "fullest": each.fullest,
            **asdict(each),
            "layout": each.layout.as_event(),
        }

    return {
        **{name: value for name, value in asdict(found).items() if name not in ("options", "chosen")},
        "options": [option(each) for each in found.options],
        "chosen": option(found.chosen),
    }
