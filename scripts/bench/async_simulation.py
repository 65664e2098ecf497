"""Asynchronous 1F1B simulated on the paper's machine: copies of weights, an epoch's time, and how it scales.

Set beside PipeOptim (Guan et al.), Table II, Table VI and Figure 8. Each kind of weights is run through the windows of
the schedule: which version a pass sees is asked of the kind, the values of weights that it moves for that are counted,
and take time at the bandwidth of the device's memory. Computation takes time by its FLOPs; stages are alike, and every
forward is computed again before its backward, as in the paper's runs. No order of the kinds is put in. What is assumed
of the machine stands in `machines.json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from hf_pipetransformer.planning.simulator import Durations, simulate, steady_seconds
from hf_pipetransformer.schedules import Op, find_schedule
from hf_pipetransformer.schedules.asynchronous import window_table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES, ForwardPass, WeightKind, find_weights

from .measure import Settings, experiment
from .papers import machine_of


MACHINE = machine_of("PipeOptim")
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
SYNCHRONOUS = "gpipe"


class Model(NamedTuple):
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
    activations: float = 0.0
    optimizer: str = "sgdm"


def bert(num_layers: int, hidden: int, heads: int, length: int, vocabulary: int) -> Model:
    """BERT with as many layers, and a head over the vocabulary with weights of its own.

    A layer keeps what Korthikanti et al. (Reducing Activation Recomputation in Large Transformer Models, section 4)
    count, in fp32: 16 values and 2 bytes of masks a position and channel, and 2 values and a byte a pair of positions.
    """
    layer, embeddings = 12 * hidden**2 + 13 * hidden, vocabulary * hidden
    weighted = 2 * (num_layers * 12 * hidden**2 + embeddings) * length
    attention = num_layers * 4 * length**2 * hidden
    kept = num_layers * ((16 * VALUE + 2) * length * hidden + (2 * VALUE + 1) * heads * length**2)
    return Model(num_layers * layer + 2 * embeddings, weighted + attention, length * hidden, kept, "adam")


BERT_48 = bert(48, 1024, 16, 128, 30522)
NAMES = {
    SYNCHRONOUS: "GPipe", "stashing": "PipeDream", "double_buffer": "PipeDream-2BW", "spectrain": "SpecTrain",
    "xpipe": "XPipe", "pipeoptim": "PipeOptim", "vanilla": "Vanilla-1F1B",
}  # fmt: skip
"""What the paper calls each."""
PAPERS_COPIES = {
    "stashing": "1 to K", "double_buffer": "2", "spectrain": "2", "xpipe": "2", "pipeoptim": "1 to 2", "vanilla": "1",
}  # fmt: skip
"""Versions of a stage's weights: Table II, and section V-F for the plain schedule."""
PAPERS_ORDER = ["vanilla", "double_buffer", "pipeoptim", "stashing", SYNCHRONOUS]
"""By throughput, at 4, 8 and 12 stages: Figure 8."""
# Parameters with a head for 200 classes, multiplications and additions of images of 224 and 299, both from the
# models' papers; boundaries halfway down the networks.
RESNET, INCEPTION = Model(42.9e6, 2 * 7.8e9, 1024 * 14 * 14), Model(22.2e6, 2 * 5.7e9, 768 * 17 * 17)
PAPERS_EPOCHS = {
    "ResNet-101": (RESNET, (86, 86, 86, 90, 86, 86), (1554.07, 918.15, 911.35, 914.78, 920.21, 915.48)),
    "Inception-V3": (INCEPTION, (84,) * 6, (1106.46, 656.29, 664.21, 671.02, 679.84, 667.16)),
}
"""The model; for each of `NAMES` the largest batch of a device (Table V) and seconds of an epoch (Table VI)."""


# ---- what a kind moves ----


def kind_of(name: str) -> WeightKind:
    """GPipe sees the weights as they are in all passes of a step, as the plain schedule does."""
    return find_weights("vanilla" if name == SYNCHRONOUS else name)


class Moves(NamedTuple):
    """Values of memory traffic for each weight of a stage, in the steady state, beside what computing takes.

    They are those of a block's forward and backward, and of a step's update, what the optimizer moves included.
    """

    forward: float
    backward: float
    update: float


def moves(name: str, stage: int, num_stages: int, step_size: int, optimizer: str) -> Moves:
    """Counted over the row of a long window, whose beginning and end cancel between two lengths."""
    steps = 4 * num_stages
    short, long = (_moved(name, stage, num_stages, step_size, optimizer, each * steps) for each in (1, 2))
    counts = (steps if op is Op.UPDATE else steps * step_size for op in short)
    return Moves(*((long[op] - short[op]) / count for op, count in zip(short, counts, strict=True)))


def _moved(name: str, stage: int, num_stages: int, step_size: int, optimizer: str, steps: int) -> dict[Op, float]:
    """A stage writes other values into its weights only when the next pass sees others than those that are there.

    The current weights are copied aside before others take their place, unless a copy is there, and come back before
    the update. A version that is kept needs a copy, too.
    """
    kind = kind_of(name)
    moved = {Op.FORWARD: 0.0, Op.BACKWARD: 0.0, Op.UPDATE: 0.0}
    num_updates, has_copy = 0, False
    seen: dict[int, int] = {}
    # The version in the weights, and how many updates were done when it was written, if it is a prediction.
    there: tuple[int, int | None] = (0, None)
    for op, number, _ in window_table(Placement(num_stages), 0, (step_size,) * steps)[stage]:
        if op is Op.FORWARD:
            about = ForwardPass(stage, num_stages, step_size, *divmod(number, step_size), num_updates)
            wanted = seen[number] = kind.forward_version(about)
        elif op is Op.BACKWARD:
            wanted = kind.backward_version(seen.pop(number), num_updates)
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
    """Micro-batches of a step: GPipe's T (section V-C), K of 2BW (Narayanan et al., 2021, section 3.1), else one."""
    return {SYNCHRONOUS: 4, "double_buffer": num_stages}.get(name, 1)


def throughput(name: str, model: Model, num_stages: int, batch: int, messages: float) -> float:
    """Samples a second of a kind of weights, or of GPipe.

    Args:
        batch: samples of a micro-batch.
        messages: bytes a second that pass from a stage to the next.
    """
    step_size = step_size_of(name, num_stages)
    forward = batch * model.flops / num_stages / (MACHINE["utilization"] * MACHINE["peak"])
    a_value = model.parameters / num_stages * VALUE / MACHINE["memory_bandwidth"]
    moved = [moves(name, stage, num_stages, step_size, model.optimizer) for stage in range(num_stages)]
    durations = Durations(
        tuple(forward + each.forward * a_value for each in moved),
        tuple(3 * forward + each.backward * a_value for each in moved),
        batch * model.boundary * VALUE / messages,
        update=tuple(each.update * a_value for each in moved),
    )
    if name == SYNCHRONOUS:
        seconds = simulate(find_schedule(name).table(num_stages, step_size), durations).end + durations.update[0]
    else:
        seconds = steady_seconds(Placement(num_stages), 0, step_size, durations)
    return step_size * batch / seconds


def copies(name: str, num_stages: int) -> list[int]:
    """Versions of its weights that each stage holds."""
    step_size = step_size_of(name, num_stages)
    return [kind_of(name).copies(stage, num_stages, step_size) for stage in range(num_stages)]


def largest_batch(name: str, model: Model, num_stages: int) -> int:
    """Samples of a micro-batch that fit every stage.

    A stage holds its training state, its further versions, what enters it for every micro-batch in flight, and the
    activations of the one whose forward is computed again.
    """
    weights = model.parameters / num_stages * VALUE
    schedule = find_schedule(name if name == SYNCHRONOUS else "async_1f1b")
    in_flight = schedule.in_flight(num_stages, step_size_of(name, num_stages))
    fitting = [
        (0.9 * MACHINE["memory"] - weights * (STATE[model.optimizer] + held - 1))
        / (model.activations / num_stages + entered * model.boundary * VALUE)
        for held, entered in zip(copies(name, num_stages), in_flight, strict=True)
    ]
    return int(min(fitting))


# ---- the paper's tables ----


def one_epoch(model: Model, batches: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    """Table VI, K=4: time of an epoch over PipeOptim's, simulated and as the paper has it."""
    paper = dict(zip(NAMES, seconds, strict=False))
    rates = {
        name: throughput(name, model, 4, each, MACHINE["link"]) for name, each in zip(paper, batches, strict=True)
    }
    return {
        NAMES[name]: {
            "time over PipeOptim's": round(rates["pipeoptim"] / rates[name], 4),
            "the paper's": round(paper[name] / paper["pipeoptim"], 4),
        }
        for name in paper
    }


def scaling(num_stages: int, batch: int | None, messages: float) -> dict[str, Any]:
    """Figure 8: throughput of BERT-48 over the plain schedule's, each with its largest batch, or all with one."""
    batches = {name: batch or largest_batch(name, BERT_48, num_stages) for name in PAPERS_ORDER}
    found = {name: throughput(name, BERT_48, num_stages, batches[name], messages) for name in PAPERS_ORDER}
    in_order = [found[faster] > found[slower] for faster, slower in combinations(PAPERS_ORDER, 2)]
    return {
        "throughput over Vanilla-1F1B's": {NAMES[name]: round(found[name] / found["vanilla"], 5) for name in found},
        "samples of a micro-batch": {NAMES[name]: batches[name] for name in found},
        "pairs in the paper's order": f"{sum(in_order)} of {len(in_order)}",
    }


@experiment("async_simulation.json", minutes=1, quick_minutes=1, processes=1)
def async_simulation(settings: Settings) -> dict[str, Any]:
    """Copies of weights, an epoch's time and scaling of every kind, simulated, beside the paper's."""
    return {
        "Table II, copies of weights": {
            "K=4": {NAMES[n]: {"by stage": copies(n, 4), "the paper's": PAPERS_COPIES[n]} for n in WEIGHTS_NAMES}
        },
        "Table VI, an epoch": {name: one_epoch(*each) for name, each in PAPERS_EPOCHS.items()},
        "Figure 8, BERT-48": {
            f"{size} stages, {batch}, {messages}": scaling(size, samples, rate)
            for batch, samples in (("largest batches", None), ("4 samples", 4))
            for messages, rate in (("messages at once", math.inf), ("10 Gbit/s", MACHINE["network"]))
            for size in (4, 8, 12)
        },
    }
