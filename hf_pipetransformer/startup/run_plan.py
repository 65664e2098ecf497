"""Plan of a run before its first step: memory, waiting and time of every layout, what freezing and the cache change.

A `RunPlanner` holds the costs of the blocks, measured by the trainer or computed from a config; everything else
follows from them without a device, a process group or a clock.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hf_pipetransformer.options.combinations import check_combinations
from hf_pipetransformer.planning.blocks import BlockCosts
from hf_pipetransformer.planning.costs import Overheads, shard_seconds
from hf_pipetransformer.planning.forecast import Forecast
from hf_pipetransformer.planning.memory import MEMORY_RESERVE, RankMemory, shard_memory
from hf_pipetransformer.planning.storing import Caching, Storing, why_not_over_nodes
from hf_pipetransformer.schedules.abilities import SCHEDULE_NAMES
from hf_pipetransformer.schedules.placement import attention_of, mlp_of, pipeline_sizes
from hf_pipetransformer.splitters.adapters import bare_model, has_adapters
from hf_pipetransformer.splitters.base import is_causal_lm
from hf_pipetransformer.splitters.quantized import num_bytes
from hf_pipetransformer.startup.model import MOST_GRADIENTS
from hf_pipetransformer.startup.slices import choose_head_slices


if TYPE_CHECKING:
    from hf_pipetransformer.planning.course import RunSchedule
    from hf_pipetransformer.planning.forecast import Duration
    from hf_pipetransformer.planning.layouts import PlanInputs
    from hf_pipetransformer.planning.simulator import Timeline
    from hf_pipetransformer.schedules.layout import Layout
    from hf_pipetransformer.startup.planner import RunPlanner


COMMUNICATOR_BYTES = 3e8
"""Assumed memory of a NCCL communicator on each of its devices."""

LAUNCH_SECONDS = 2.5e-5
"""Assumed time of an operation, below which PyTorch's eager mode cannot keep a GPU busy."""

HEAD_SLICES = 8
"""Slices of the head that are tried where nothing fits: the logits that are left are few beside the rest."""

WINDOW_BYTES = 2**25
"""Bytes of other stages' weights that a rank holds at a time where weights are placed or saved."""


@dataclass(frozen=True)
class Machine:
    """Devices that a run is planned for: how many, bytes of each, operations and bytes per second between two.

    `node_bandwidth` is the bytes per second between two of different nodes; 0 if that is `bandwidth` too. `reading` is
    the seconds to read and collate a sample, `launch` those in which Python launches an operation. `is_host` says that
    devices are the host's own processors, so that their memory is the host's.
    """

    num_devices: int
    device_bytes: float
    devices_per_node: int
    flops: float = 1e14
    bandwidth: float = 2.5e10
    memory_bandwidth: float = 1e12
    communicator_bytes: float = COMMUNICATOR_BYTES
    reading: float = 0.0
    is_host: bool = False
    node_bandwidth: float = 0.0
    launch: float = LAUNCH_SECONDS

    @property
    def budget(self) -> float:
        """Bytes of a device that layouts may fill."""
        return self.device_bytes * (1 - MEMORY_RESERVE)

    # What a planner asks a run's `Topology` for.
    @property
    def world_size(self) -> int:
        return self.num_devices

    @property
    def pipeline_sizes(self) -> list[int]:
        return pipeline_sizes(self.num_devices, self.devices_per_node)


@dataclass(frozen=True)
class Row:
    """One way to train the model: its layout, the memory of each rank, and the seconds of an optimizer step.

    Args:
        kind: "Trainer" for its own data parallelism, "shards" for the same with FSDP2 or ZeRO-3, "run" for a layout
            under the options of the run, "schedule" for one under another schedule.
        name: of the way, as in "K=2 with zb_v".
        bubble: share of the time in which no pass runs; in a pass a device may still wait for Python.
    """

    kind: str
    name: str
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
class Remedy:
    """Change that would let a run fit that does not.

    Args:
        changes: options and their values, of the same number of samples a step; empty if none was found.
        row: what fits with them; None if nothing does.
        others: further means that the run has not taken yet, in words.
    """

    changes: dict[str, Any]
    row: Row | None
    others: tuple[str, ...]


@dataclass(frozen=True)
class RunPlan:
    """Rows of the ways to train a model, and what the one means that the run would begin with.

    Args:
        blocks: with `overheads` the costs behind the times.
        rows: Trainer and its shards, the layouts of the run, shortest pipeline first, and those of other schedules on
            several stages, fastest first.
        refused: why schedules are not among the rows, by name.
        host: bytes of host memory of the fullest rank by phase.
        timeline: a batch of the chosen row.
        computing_seconds: those of its step if launching operations took no time.
        encoders: how frozen encoders of images count, in words; empty without any, or if nothing is stored.
        remedy: what to change where nothing fits.
        head_slices: the line on `pipeline_head_slices="auto"`.
    """

    model: str
    num_parameters: int
    weight_bytes: int
    num_layers: int
    machine: Machine
    course: RunSchedule
    blocks: BlockCosts
    overheads: Overheads
    rows: tuple[Row, ...]
    chosen: Row
    host: dict[str, float]
    refused: dict[str, str]
    caching: Caching | None
    duration: Duration
    timeline: Timeline
    computing_seconds: float
    encoders: str
    remedy: Remedy | None = None
    head_slices: str | None = None


def plan_run(model: Any, planner: RunPlanner, machine: Machine, course: RunSchedule) -> RunPlan:
    """Plan every possible number of stages of a run. `model` is read for its name and sizes, not run."""
    args, frozen = planner.args, planner.num_frozen_by_user
    sizes = list(filter(planner.num_chunks, planner.topology.pipeline_sizes))
    if args.pipeline_size is not None and args.pipeline_size not in sizes:
        raise ValueError(
            f"pipeline_parallel_size={args.pipeline_size} cannot be planned: the nodes, and the places where the "
            f"model may be cut, allow {sizes}."
        )
    head_slices = None
    if args.head_slices is None:
        planner, head_slices = choose_head_slices(planner, lambda other: other.choose(frozen))
    of_run = [make_row(planner, planner.plan(k, frozen), machine) for k in sizes]
    # As a run chooses: the size that is asked for, or the shortest pipeline that fits.
    asked = [row for row in of_run if row.layout.pipeline_size == args.pipeline_size]
    chosen = next((row for row in asked or of_run if asked or row.fits), of_run[-1])
    others, refused = _other_schedules(model, planner, machine, sizes)
    weights = [num_bytes(parameter) for parameter in model.parameters()]
    caching, storing = _caching(planner, chosen.layout, machine, course)
    inputs = _inputs(planner, chosen.layout)
    forecast = Forecast(chosen.layout, inputs, storing)
    if caching is not None and course.freezing is not None:
        # What the run would decide when layers freeze.
        way = forecast.way(course.freezing.spans)
        caching = replace(caching, is_used=way.use, reason=way.reason)
    # The same step on a device that never waits for Python.
    at_once = replace(
        inputs,
        blocks=replace(inputs.blocks, launch=()),
        overheads=replace(inputs.overheads, per_forward=0.0, per_backward=0.0),
    )
    return RunPlan(
        model=type(bare_model(model)).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weight_bytes=sum(weights),
        num_layers=planner.probe.structure.num_layers,
        machine=machine,
        course=course,
        blocks=planner.blocks,
        overheads=planner.costs.overheads,
        rows=(*_data_parallel(model, planner, machine), *of_run, *others),
        chosen=chosen,
        host=_host_memory(chosen, planner, machine, weights),
        refused=refused,
        caching=caching,
        duration=forecast.duration(course),
        timeline=inputs.predict(chosen.layout).timeline,
        computing_seconds=at_once.predict(chosen.layout).seconds,
        encoders=planner.encoders_in_words(chosen.layout),
        remedy=None if any(row.fits for row in of_run) else _remedy(model, planner, machine, sizes),
        head_slices=head_slices,
    )


def _remedy(model: Any, planner: RunPlanner, machine: Machine, sizes: Sequence[int]) -> Remedy:
    """Try what saves memory and costs least, one after the other and together, on every number of stages."""
    args = planner.args
    sizes = [k for k in sizes if args.pipeline_size in (None, k)]
    means = {"adapters (PEFT)": has_adapters(model), "an 8-bit optimizer": "8bit" in planner.memory_rules.optim}
    others = tuple(name for name, is_taken in means.items() if not is_taken)
    has_fewer_slices = args.head_slices is not None and args.head_slices < HEAD_SLICES
    slices: dict[str, Any] = (
        {"pipeline_head_slices": HEAD_SLICES} if planner.why_whole_head is None and has_fewer_slices else {}
    )
    recomputed = {} if args.pipeline_checkpoint == "layers" else {"pipeline_checkpoint": "layers"}
    # What costs least comes first: slices hardly any time, recomputation a forward, small batches launches.
    tried = [slices, recomputed, slices | recomputed]
    size, number = args.per_device_train_batch_size, args.gradient_accumulation_steps
    # Divisors alone, so that a step keeps its samples.
    for smaller in (count for count in range(size - 1, 0, -1) if size % count == 0):
        batch = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": number * (size // smaller)}
        tried.append(slices | recomputed | batch)
    for changes in filter(None, tried):
        other = _with_options(planner, **changes)
        # With `split_batches` a batch may be too small for all processes.
        for k in sizes if other.args.train_samples_per_device else ():
            row = make_row(other, other.plan(k, planner.num_frozen_by_user), machine)
            if row.fits:
                return Remedy(changes, row, others)
    return Remedy({}, None, others)


def _inputs(planner: RunPlanner, layout: Layout, sums: bool = True) -> PlanInputs:
    """Return the inputs of plans under a layout: the planner has the reading's time if each rank reads its own.

    Without `sums`, no gradients are added in float32.
    """
    inputs = planner.inputs(layout if sums else None)
    per_step = inputs.overheads.per_step * layout.pipeline_size
    return replace(inputs, overheads=replace(inputs.overheads, per_step=per_step))


# ---- layouts ----


def make_row(planner: RunPlanner, layout: Layout, machine: Machine, kind: str = "run", name: str = "") -> Row:
    """Predict the memory and the time of a layout; under Trainer no float32 sums of gradients are kept."""
    inputs = _inputs(planner, layout, kind != "Trainer")
    memory, step = inputs.memory(layout), inputs.predict(layout)
    shared = [used_by for used_by, _ in inputs.blocks.shared]
    for rank, count in enumerate(communicators(layout, shared)):
        memory[rank].communicators = count * machine.communicator_bytes
    waiting = 1 - sum(step.rank_seconds) / layout.pipeline_size / step.pipeline if step.pipeline else 0.0
    schedule = f" with {layout.schedule}" if layout.pipeline_size > 1 else ""
    name = name or f"K={layout.pipeline_size}{schedule}"
    return _row(kind, name, layout, memory, waiting, step.seconds, planner, machine)


def _row(
    kind: str,
    name: str,
    layout: Layout,
    memory: Sequence[RankMemory],
    bubble: float,
    seconds: float,
    planner: RunPlanner,
    machine: Machine,
) -> Row:
    args = planner.args
    samples = args.train_samples_per_device * machine.num_devices * args.gradient_accumulation_steps
    fits = max(rank.total for rank in memory) <= machine.budget
    speed = samples / seconds if seconds else 0.0
    return Row(kind, name, layout, tuple(memory), max(0.0, bubble), seconds, speed, fits)


def communicators(layout: Layout, shared: Iterable[Sequence[int]]) -> list[int]:
    """Return how many communicators each rank of a pipeline is a member of; see `Topology`.

    One of all ranks; with several stages one of the pipeline, and one for each way of messages to or from another
    rank; one of the replicas; and for parameters of several stages, `shared` by these blocks, one or two.
    """
    places, several = layout.places, layout.num_replicas > 1
    alone = layout.pipeline_size == 1
    if alone and not several:
        return [0]
    counts = [1 + (not alone) + several] * layout.pipeline_size
    ways = set()
    for lower in filter(places.is_crossed, range(layout.num_stages)):
        pair = places.rank_of(lower), places.rank_of(lower + 1)
        # NCCL runs the transfers of a communicator in the order in which they are posted: one for each way.
        ways |= {pair, pair[::-1]}
    for rank in range(layout.pipeline_size):
        counts[rank] += sum(rank in way for way in ways)
    for members in {layout.ranks_of(blocks) for blocks in shared}:
        for rank in members if len(members) > 1 else ():
            counts[rank] += 1 + several
    return counts


def _data_parallel(model: Any, planner: RunPlanner, machine: Machine) -> Iterator[Row]:
    """Yield Trainer's own data parallelism, and the same with shards where there is something to shard.

    Trainer has one stage, gradients in the precision of the weights, and computes what is frozen in every epoch.
    """
    world_size, accumulation = machine.num_devices, planner.args.gradient_accumulation_steps
    options = {"pipeline_schedule": "1f1b", "pipeline_chunks": None, "pipeline_head_slices": 1}
    on_one = _with_options(planner, activation_cache="off", **options)
    layout = on_one.plan(1, planner.num_frozen_by_user)
    yield make_row(on_one, layout, machine, "Trainer", "Trainer" if world_size == 1 else "Trainer, DDP")
    has_scales = any(num_bytes(weight) != weight.numel() * weight.element_size() for weight in model.parameters())
    if world_size == 1 or has_scales:
        return
    alone = replace(layout, num_replicas=1)
    inputs = _inputs(on_one, alone, sums=False)
    step, blocks, casts = inputs.predict(alone), inputs.blocks, inputs.memory_rules.casts
    # With gradients of an earlier batch at any time, the fullest moment is that of most activations.
    (whole,) = replace(inputs, accumulation=max(2, accumulation)).memory(alone)
    memory = shard_memory(whole, blocks, world_size, casts)
    memory.communicators = machine.communicator_bytes
    seconds = shard_seconds(step, blocks, inputs.overheads, world_size, accumulation, casts)
    # Where batches are accumulated, FSDP2 under Trainer keeps whole gradients, which is not what is counted.
    name = "ZeRO-3" if accumulation > 1 else "FSDP2/ZeRO-3"
    bubble = 1 - step.pipeline / seconds if seconds else 0.0
    yield _row("shards", name, layout, [memory], bubble, seconds, planner, machine)


def _with_options(planner: RunPlanner, **changes: Any) -> RunPlanner:
    # A copy without `__post_init__`, which has read the options already.
    args = copy.copy(planner.args)
    for name, value in changes.items():
        setattr(args, name, value)
    # What the run chose by itself gives way to what is changed.
    replaced_by = None if "pipeline_schedule" in changes else planner.replaced_by
    head_slices = changes.get("pipeline_head_slices", planner.head_slices)
    return replace(planner, args=args, replaced_by=replaced_by, head_slices=head_slices)


def _other_schedules(
    model: Any, planner: RunPlanner, machine: Machine, sizes: Sequence[int]
) -> tuple[list[Row], dict[str, str]]:
    """Return the layouts of other schedules on several stages, fastest first, and why some are not among them."""
    rows, refused = [], {}
    frozen = planner.num_frozen_by_user
    for name in SCHEDULE_NAMES:
        if name == planner.schedule:
            continue
        other = _with_options(planner, pipeline_schedule=name)
        try:
            check_combinations(other.args)
        except ValueError as error:
            refused[name] = str(error)
            continue
        if planner.costs.overheads.has_reference and (why := other.args.abilities.refuses.get("reference")):
            refused[name] = f"it {why}."
            continue
        if other.args.abilities.cuts_tokens and planner.costs.blocks.slices is None:
            refused[name] = (
                "only a run with it measures the slices that it needs."
                if is_causal_lm(model)
                else "causal language models alone can use it."
            )
            continue
        longer = [k for k in sizes if k > 1 and other.num_chunks(k)]
        rows += [make_row(other, other.plan(k, frozen), machine, "schedule") for k in longer]
    return sorted(rows, key=lambda row: (not row.fits, row.step_seconds)), refused


def _host_memory(chosen: Row, planner: RunPlanner, machine: Machine, weights: Sequence[int]) -> dict[str, float]:
    """Return bytes of host memory of the fullest rank by phase.

    Weights that are mapped from a file are counted as if they were the rank's own. The checks compute in float32 on
    two layers, and take few gradients. Where devices are the host's, the training state is the host's too.
    """
    blocks, layout = planner.costs.blocks, chosen.layout
    whole, several = sum(weights), layout.pipeline_size > 1
    layers = [blocks.parameters[attention_of(i)] + blocks.parameters[mlp_of(i)] for i in range(layout.num_layers)]
    placed = max(rank.weights for rank in chosen.memory)
    state = chosen.fullest if machine.is_host else 0.0
    # The whole model is put together again unless the run says never.
    gathered = planner.args.pipeline_gather_at_end != "never" and several
    return {
        "model loaded": whole,
        # 4 bytes each: two layers, and the gradients of two runs that are compared.
        "checks at the start": whole + 8.0 * max(layers) + 8.0 * MOST_GRADIENTS,
        "weights placed": placed + WINDOW_BYTES + max(weights) if several else whole,
        "training": state,
        "saving": state + (max(WINDOW_BYTES, max(weights)) if several else 0.0),
        "end of train()": state + (whole if gathered else 0.0),
    }


# ---- freezing and the cache ----


def _caching(
    planner: RunPlanner, layout: Layout, machine: Machine, course: RunSchedule
) -> tuple[Caching | None, Storing | None]:
    """Return what a store of the run's samples takes, and what a forecast needs to know of it; None without one."""
    storage, freezing, args, overheads = course.storage, course.freezing, planner.args, planner.costs.overheads
    most_frozen = 0 if freezing is None else max((span.num_frozen for span in freezing.spans), default=0)
    if storage is None or course.num_samples is None or not most_frozen or planner.probe.structure.media is not None:
        return None, None
    why = storage.why_off
    if args.activation_cache == "off":
        why = "activation_cache='off'"
    elif "activation_cache" in args.abilities.refuses:
        why = f"pipeline_schedule={args.pipeline_schedule!r} stores nothing"
    # An elastic run stores as soon as its pipelines fit on a node.
    elif overheads.spans_nodes(layout.pipeline_size) and not args.elastic:
        why = why_not_over_nodes(layout.pipeline_size, machine.devices_per_node)
    elif args.activation_cache == "auto" and most_frozen >= planner.dropout_from:
        why = (
            "layers that the script froze have dropout, which stored ones have not: activation_cache='on' stores them"
        )
    # Each node stores the samples of its own devices, an equal part for each.
    here = -(-course.num_samples * machine.devices_per_node // machine.num_devices)
    needed = storage.record_bytes * here
    share = min(1.0, storage.allowed_bytes / needed) if needed else 1.0
    caching = Caching(needed, storage.allowed_bytes, 0.0 if why else share, why)
    if why is not None:
        return caching, None
    # One rank of each pipeline reads, and the pipelines of a node share its disk.
    local = max(1, overheads.node_size // layout.pipeline_size) if storage.is_shared else 1
    storing = Storing(
        prefix=(),
        read=local * storage.read,
        write=local * storage.write,
        is_apart=not machine.is_host,
        num_at_once=args.gradient_accumulation_steps,
        mode=args.activation_cache,
        fits_share=caching.share,
        steps_per_epoch=course.steps_per_epoch,
    )
    return caching, storing
