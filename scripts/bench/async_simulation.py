"""Asynchronous 1F1B simulated on the paper's machine: copies of weights, an epoch's time, and how it scales.

Set beside PipeOptim (Guan et al.), Table II, Table VI and Figure 8. Each kind of weights is run through the windows of
the schedule: which version a pass sees is asked of the kind, the values of weights that it moves for that are counted,
and take time at the bandwidth of the device's memory. Computation takes time by its FLOPs; stages are alike, and every
forward is computed again before its backward, as in the paper's runs. No order of the kinds is put in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hf_pipetransformer.planning.simulator import Durations, simulate, steady_seconds
from hf_pipetransformer.schedules import Op, find_schedule
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES, ForwardPass, find_weights

from .measure import Settings, experiment


VALUE = 4
"""Bytes of a weight, a gradient, a moment or an activation: the paper trains in fp32."""

COPY = 2
"""Values of memory traffic to copy one: a read and a write."""

UPDATE = {"sgdm": 5, "adam": 7}
"""Values read and written for each weight that is updated: the weight, its gradient, and one moment or two."""

PREDICTION = {"sgdm": 3, "adam": 4}
"""Values read and written for each weight that is predicted: the weight, the moments, and the prediction."""

STATE = {"sgdm": 3, "adam": 4}
"""Values held for each weight: the weight, its gradient and the moments."""

MICRO_BATCHES = 4
"""T of GPipe (section V-C)."""

SYNCHRONOUS = "gpipe"
NAMES = {
    SYNCHRONOUS: "GPipe", "stashing": "PipeDream", "double_buffer": "PipeDream-2BW", "spectrain": "SpecTrain",
    "xpipe": "XPipe", "pipeoptim": "PipeOptim", "vanilla": "Vanilla-1F1B",
}  # fmt: skip
"""What the paper calls each."""


@dataclass(frozen=True)
class Assumed:
    """What the simulation takes for true of one P100 with 16 GB, of its node, and of the network.

    Args:
        flops: a second that the computation of a stage reaches, half of the 9.3e12 of the device's data sheet.
        memory_bandwidth: bytes a second, three quarters of the 732e9 of the data sheet.
        memory: bytes that training may fill, nine tenths of the device's.
        link: bytes a second of a message between devices of a node, over PCIe 3.0.
        network: bytes a second of a message between nodes, 10 Gbit/s; the paper names no network.
    """

    flops: float = 0.5 * 9.3e12
    memory_bandwidth: float = 0.75 * 732e9
    memory: float = 0.9 * 16e9
    link: float = 10e9
    network: float = 10e9 / 8


ASSUMED = Assumed()


@dataclass(frozen=True)
class Model:
    """What a model costs; K stages have a Kth of everything.

    Args:
        parameters: weights.
        flops: of a sample's forward.
        boundary: values of a sample that pass from a stage to the next; an average where they differ.
        activations: bytes that a sample's forward keeps in all stages.
        optimizer: `sgdm` or `adam`.
    """

    parameters: float
    flops: float
    boundary: float
    activations: float
    optimizer: str


def bert(
    num_layers: int = 48, hidden: int = 1024, heads: int = 16, length: int = 128, vocabulary: int = 30522
) -> Model:
    """BERT with as many layers, and a head over the vocabulary with weights of its own.

    A layer keeps what Korthikanti et al. (Reducing Activation Recomputation in Large Transformer Models, section 4)
    count, in fp32: 16 values and 2 bytes of masks a position and channel, and 2 values and a byte a pair of positions.
    """
    layer, embeddings = 12 * hidden**2 + 13 * hidden, vocabulary * hidden
    weighted = 2 * (num_layers * 12 * hidden**2 + embeddings) * length
    attention = num_layers * 4 * length**2 * hidden
    kept = num_layers * ((16 * VALUE + 2) * length * hidden + (2 * VALUE + 1) * heads * length**2)
    return Model(num_layers * layer + 2 * embeddings, weighted + attention, length * hidden, kept, "adam")


BERT_48 = bert()

CNNS = {
    # Parameters with a head for 200 classes, multiplications and additions of images of 224 and 299, both from the
    # models' papers; boundaries halfway down the networks.
    "ResNet-101": (Model(42.9e6, 2 * 7.8e9, 1024 * 14 * 14, 0.0, "sgdm"), {SYNCHRONOUS: 86, "spectrain": 90}, 86),
    "Inception-V3": (Model(22.2e6, 2 * 5.7e9, 768 * 17 * 17, 0.0, "sgdm"), {}, 84),
}
"""Of Table VI: the model, and the largest batch of a device by Table V, where it differs and where it does not."""

PAPERS_EPOCHS = {
    "ResNet-101": dict(zip(NAMES, (1554.07, 918.15, 911.35, 914.78, 920.21, 915.48), strict=False)),
    "Inception-V3": dict(zip(NAMES, (1106.46, 656.29, 664.21, 671.02, 679.84, 667.16), strict=False)),
}
"""Seconds of an epoch, Table VI."""

PAPERS_COPIES = {
    "stashing": "1 to K", "double_buffer": "2", "spectrain": "2", "xpipe": "2", "pipeoptim": "1 to 2", "vanilla": "1",
}  # fmt: skip
"""Versions of a stage's weights: Table II, and section V-F for the plain schedule."""

PAPERS_ORDER = ["vanilla", "double_buffer", "pipeoptim", "stashing", SYNCHRONOUS]
"""By throughput, at 4, 8 and 12 stages: Figure 8."""


# ---- what a kind moves ----


class Moves(NamedTuple):
    """Values of memory traffic for each weight of a stage, beside what computing takes, in the steady state.

    Args:
        forward: of a block's forward.
        backward: of a block's backward.
        update: of a step's update, what the optimizer moves included.
    """

    forward: float
    backward: float
    update: float

    def of_block(self, step_size: int) -> float:
        """A block's share of everything."""
        return self.forward + self.backward + self.update / step_size


def moves(kind_name: str, stage: int, num_stages: int, step_size: int, optimizer: str) -> Moves:
    """Counted over the row of a long window, whose beginning and end cancel between two lengths."""
    steps = 4 * num_stages
    short, long = (_moved(kind_name, stage, num_stages, step_size, optimizer, each * steps) for each in (1, 2))
    blocks = steps * step_size
    counts = (steps if op is Op.UPDATE else blocks for op in short)
    return Moves(*((long[op] - short[op]) / count for op, count in zip(short, counts, strict=True)))


def _moved(kind_name: str, stage: int, num_stages: int, step_size: int, optimizer: str, steps: int) -> dict[Op, float]:
    """A stage writes other values into its weights only when the next pass sees others than those that are there.

    The current weights are copied aside before others take their place, unless a copy is there, and come back before
    the update. A version that is kept needs a copy, too.
    """
    kind = find_weights(kind_name)
    row = window_table(Placement(num_stages), 0, (step_size,) * steps)[stage]
    moved = {Op.FORWARD: 0.0, Op.BACKWARD: 0.0, Op.UPDATE: 0.0}
    num_updates, has_copy = 0, False
    seen: dict[int, int] = {}
    # The version in the weights, and how many updates were done when it was written, if it is a prediction.
    there: tuple[int, int | None] = (0, None)
    for op, number, _ in row:
        if op is Op.FORWARD:
            step, position = divmod(number, step_size)
            about = ForwardPass(stage, num_stages, step_size, step, position, num_updates)
            wanted = seen[number] = kind.forward_version(about)
        elif op is Op.BACKWARD:
            wanted = kind.backward_version(seen.pop(number), num_updates)
            if step_size > 1:
                # Gradients are added to those of the step's other blocks: all but the first read and write the sum.
                moved[op] += 3 * (step_size - 1) / step_size
        elif op is Op.UPDATE:
            wanted = num_updates
        else:
            continue
        is_predicted = wanted > num_updates
        values = (wanted, num_updates if is_predicted else None)
        if values != there:
            if there == (num_updates, None) and not has_copy:
                moved[op] += COPY
                has_copy = True
            moved[op] += PREDICTION[optimizer] if is_predicted else COPY
            there = values
        if op is Op.UPDATE:
            keeps = num_updates in kind.kept_versions(num_updates + 1, tuple(seen.values()))
            moved[op] += UPDATE[optimizer] + (COPY if keeps and not has_copy else 0)
            if kind.direction == "adam" and optimizer != "adam":
                moved[op] += 5  # Moments of its own: both read and written, the gradient read.
            num_updates, has_copy = num_updates + 1, False
            there = (num_updates, None)
    return moved


# ---- time and memory ----


def step_size_of(name: str, num_stages: int) -> int:
    """Micro-batches of an optimizer step: T of GPipe, K of 2BW (Narayanan et al., 2021, section 3.1), else one."""
    return {SYNCHRONOUS: MICRO_BATCHES, "double_buffer": num_stages}.get(name, 1)


def throughput(name: str, model: Model, num_stages: int, batch: int, messages: float) -> float:
    """Samples a second.

    Args:
        name: a kind of weights, or GPipe.
        model: in so many equal stages.
        num_stages: K.
        batch: samples of a micro-batch.
        messages: bytes a second that pass from a stage to the next.
    """
    weights, step_size = model.parameters / num_stages, step_size_of(name, num_stages)
    forward = batch * model.flops / num_stages / ASSUMED.flops
    hop = batch * model.boundary * VALUE / messages
    a_value = weights * VALUE / ASSUMED.memory_bandwidth
    stages = range(num_stages)
    if name == SYNCHRONOUS:
        backward = 3 * forward + 3 * (step_size - 1) / step_size * a_value
        durations = Durations((forward,) * num_stages, (backward,) * num_stages, hop)
        seconds = simulate(find_schedule(name).table(num_stages, step_size), durations).end
        seconds += UPDATE[model.optimizer] * a_value
    else:
        moved = [moves(name, stage, num_stages, step_size, model.optimizer) for stage in stages]
        durations = Durations(
            tuple(forward + each.forward * a_value for each in moved),
            tuple(3 * forward + each.backward * a_value for each in moved),
            hop,
            update=tuple(each.update * a_value for each in moved),
        )
        seconds = steady_seconds(Placement(num_stages), 0, step_size, durations)
    return step_size * batch / seconds


def largest_batch(name: str, model: Model, num_stages: int) -> int:
    """Samples of a micro-batch that fit every stage.

    A stage holds its training state, its further versions, what enters it for every micro-batch in flight, and the
    activations of the one whose forward is computed again.
    """
    weights = model.parameters / num_stages * VALUE
    step_size = step_size_of(name, num_stages)
    schedule = find_schedule(name if name == SYNCHRONOUS else "async_1f1b")
    in_flight = schedule.in_flight(num_stages, step_size)
    fitting = []
    for stage in range(num_stages):
        copies = 1 if name == SYNCHRONOUS else find_weights(name).copies(stage, num_stages, step_size)
        free = ASSUMED.memory - weights * (STATE[model.optimizer] + copies - 1)
        fitting.append(free / (model.activations / num_stages + in_flight[stage] * model.boundary * VALUE))
    return int(min(fitting))


# ---- the paper's tables ----


def copies_of_stages(num_stages: int) -> dict[str, Any]:
    """Table II: versions by stage, with one micro-batch an optimizer step, or as many as it takes."""
    found: dict[str, Any] = {}
    for name in WEIGHTS_NAMES:
        step_size = step_size_of(name, num_stages)
        held = [find_weights(name).copies(stage, num_stages, step_size) for stage in range(num_stages)]
        found[NAMES[name]] = {"by stage": held, "the paper's": PAPERS_COPIES[name]}
    return found


def one_epoch(model: Model, batches: dict[str, int], batch: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Table VI, K=4: time of an epoch over PipeOptim's, simulated and as the paper has it."""
    found = {name: throughput(name, model, 4, batches.get(name, batch), ASSUMED.link) for name in seconds}
    return {
        NAMES[name]: {
            "time over PipeOptim's": round(found["pipeoptim"] / found[name], 4),
            "the paper's": round(seconds[name] / seconds["pipeoptim"], 4),
        }
        for name in seconds
    }  # fmt: skip


def scaling(num_stages: int, batch: int | None, messages: float) -> dict[str, Any]:
    """Figure 8: throughput of BERT-48 over the plain schedule's, each with its largest batch, or all with one."""
    names = [name for name in NAMES if name not in ("spectrain", "xpipe")]
    batches = {name: batch or largest_batch(name, BERT_48, num_stages) for name in names}
    found = {name: throughput(name, BERT_48, num_stages, batches[name], messages) for name in names}
    order = sorted(names, key=lambda name: -found[name])
    return {
        "throughput over Vanilla-1F1B's": {NAMES[each]: round(found[each] / found["vanilla"], 5) for each in order},
        "samples of a micro-batch": {NAMES[each]: batches[each] for each in order},
        "values moved a weight and block": {
            NAMES[each]: round(max(_of_blocks(each, num_stages)), 2) for each in order if each != SYNCHRONOUS
        },
        "Vanilla-1F1B, samples a second": round(found["vanilla"], 1),
        "pairs in the paper's order": _pairs_in_order(order),
    }  # fmt: skip


def _of_blocks(name: str, num_stages: int) -> list[float]:
    step_size = step_size_of(name, num_stages)
    stages = range(num_stages)
    return [moves(name, stage, num_stages, step_size, "adam").of_block(step_size) for stage in stages]


def _pairs_in_order(order: Sequence[str]) -> str:
    place = {name: number for number, name in enumerate(PAPERS_ORDER)}
    pairs = [(a, b) for number, a in enumerate(order) for b in order[number + 1 :]]
    return f"{sum(place[a] < place[b] for a, b in pairs)} of {len(pairs)}"


@experiment("async_simulation.json", minutes=1, quick_minutes=1, processes=1)
def async_simulation(settings: Settings) -> dict[str, Any]:
    """Copies of weights, an epoch's time and scaling of every kind, simulated, beside the paper's."""
    return {
        "assumed": asdict(ASSUMED), "BERT-48": asdict(BERT_48),
        "Table II, copies of weights": {f"K={size}": copies_of_stages(size) for size in (4, 8)},
        "Table VI, an epoch": {name: one_epoch(*CNNS[name], PAPERS_EPOCHS[name]) for name in CNNS},
        "Figure 8, BERT-48": {
            "the paper's order": [NAMES[name] for name in PAPERS_ORDER],
            **{
                f"{size} stages, {batch}, {messages}": scaling(size, samples, rate)
                for batch, samples in (("largest batches", None), ("4 samples", 4))
                for messages, rate in (("messages at once", math.inf), ("10 Gbit/s", ASSUMED.network))
                for size in (4, 8, 12)
            },
        },
    }  # fmt: skip
