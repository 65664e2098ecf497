"""Tables of the PipeTransformer paper, simulated on its machine by the library's own planner.

Facts of the machines and what is assumed of them stand in `machines.json`, each with its source. Blocks take the time
of their operations; layouts, stages, freezing and the cache are those that a run would plan. The global batch is
constant, as in this library: with R replicas a pipeline has an R-th of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import BertConfig, PreTrainedConfig, ViTConfig

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.freeze.policies import Schedule, freezing_of
from hf_pipetransformer.planning.costs import (
    BlockCosts,
    Overheads,
    Prediction,
    block_loads,
    gradient_bytes,
    predict_step,
    rank_memory,
)
from hf_pipetransformer.planning.forecast import MOVED_BYTES, Span, prefix_seconds
from hf_pipetransformer.planning.partition import Candidate, choose_by_throughput, compress_by_memory
from hf_pipetransformer.planning.planner import MEMORY_RESERVE, PipelineShape, largest_rank_size, plan_layout
from hf_pipetransformer.planning.storing import CacheCosts, Stored, decide_cache, passes_ahead
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import first_above
from hf_pipetransformer.startup.estimate import batch_on_meta, build_on_meta, estimate
from hf_pipetransformer.startup.run_plan import Machine

from .measure import REPOSITORY, Settings, experiment


MACHINES: dict[str, dict[str, tuple[float, str]]] = json.loads(Path(__file__).with_name("machines.json").read_text())


def machine_of(paper: str) -> dict[str, float]:
    """Return the values of a paper's machine."""
    return {name: value for name, (value, _) in MACHINES[paper].items()}


CLUSTER = machine_of("PipeTransformer")
LONGEST = int(CLUSTER["devices_per_node"])
NUM_DEVICES = LONGEST * int(CLUSTER["nodes"])
MODELS: dict[str, PreTrainedConfig] = {
    "ViT-B/16": ViTConfig(architectures=["ViTForImageClassification"]),
    "BERT-large": BertConfig(
        architectures=["BertForQuestionAnswering"], hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
}  # fmt: skip
LENGTH = 512
"""Tokens of SQuAD's windows, Table 3."""


class Setting(NamedTuple):
    """A data set: Tables 1 and 3, hours of the baseline and of PipeTransformer, and the speed-up of Table 1."""

    model: str
    samples: int
    epochs: int
    batch: int
    hours: tuple[float, float]
    speedup: float


SETTINGS = {
    "ImageNet": Setting("ViT-B/16", 1_281_167, 10, 400, (26.5, 9.35), 2.83),
    "CIFAR-100": Setting("ViT-B/16", 50_000, 10, 320, (0.585, 0.2064), 2.44),
    "SQuAD 1.1": Setting("BERT-large", 88_524, 3, 64, (5.117, 2.433), 2.10),
}
PAPERS_PARTS = {
    "freeze only": 0.95, "freeze + AutoPipe": None, "freeze + AutoPipe + AutoCache": 1.26,
    "freeze + AutoPipe + AutoDP": 2.27, "freeze + AutoPipe + AutoDP + AutoCache": 2.83,
}  # fmt: skip
"""Figure 9, ViT on ImageNet."""
PAPERS_COMMUNICATION = {"ImageNet": 0.059, "SQuAD 1.1": 0.088}
"""Table 2."""
PAPERS_CACHE_STARTS = {"ViT-B/16": 3, "BERT-large": 5}
"""Frozen layers from which caching pays, section 4.3.5."""
PAPERS_TRANSITIONS = {"8 to 4": (10.2, 8.3), "4 to 2": (5.5, 3.8), "2 to 1": (9.5, 2.3)}
"""Table 4: seconds, and those of them that creating CUDA contexts takes."""


@dataclass(frozen=True)
class Parts:
    """Mechanisms of a run besides freezing, and the rule for K: `throughput`, or `memory` for the paper's Eq. 2."""

    is_elastic: bool = True
    more_replicas: bool = True
    cache: str = "auto"
    rule: str = "throughput"


@cache
def planner_of(model_name: str) -> Any:
    """Return the library's planner of a model from its config alone, on devices that reach their peak."""
    args = PipeTransformerArguments(output_dir="planned", pipeline_schedule="gpipe", use_cpu=True, report_to=[])
    rates = CLUSTER["memory"], LONGEST, CLUSTER["peak"], CLUSTER["link"], CLUSTER["memory_bandwidth"]
    machine = Machine(NUM_DEVICES, *rates, node_bandwidth=CLUSTER["network"])
    with TemporaryDirectory() as folder:
        MODELS[model_name].save_pretrained(folder)
        model = build_on_meta(folder, None)
    return estimate(model, batch_on_meta(model, LENGTH), args, machine)


@dataclass(frozen=True)
class Job:
    """A data set on the paper's cluster; `utilization` is the share of the peak that a device reaches."""

    setting: Setting
    utilization: float = CLUSTER["utilization"]
    longest: int = LONGEST

    @property
    def planner(self) -> Any:
        return planner_of(self.setting.model)

    @cached_property
    def costs(self) -> BlockCosts:
        return self.planner.costs.blocks.scaled(1 / self.utilization, 1 / self.utilization)

    @property
    def num_layers(self) -> int:
        return self.planner.probe.structure.num_layers

    @property
    def global_batch(self) -> int:
        return self.setting.batch * NUM_DEVICES // LONGEST

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.setting.samples // self.global_batch)

    def overheads(self, layout: Layout, samples: int) -> Overheads:
        """The rings of a pipeline's stages share the network; a message is of one micro-batch."""
        boundary = max(self.costs.boundary_bytes)
        return replace(
            self.planner.costs.overheads,
            hop=boundary * samples / layout.num_microbatches / CLUSTER["link"],
            per_microbatch=CLUSTER["per_microbatch"],
            reduction_per_byte=layout.pipeline_size / CLUSTER["network"],
        )

    def step(self, layout: Layout) -> Prediction:
        samples = self.global_batch // layout.num_replicas
        return predict_step(layout, self.costs, self.overheads(layout, samples), samples)

    def tuned(self, layout: Layout) -> Layout:
        """Give the layout the fastest number of micro-batches from K to 6K (section 3.2.3)."""
        k, most = layout.pipeline_size, self.global_batch // layout.num_replicas
        tried = [replace(layout, num_microbatches=m) for m in (k, 2 * k, 3 * k, 4 * k, 6 * k) if m <= most]
        return min(tried or [layout], key=lambda each: self.step(each).seconds)

    def layout(self, k: int, replicas: int, frozen: int = 0, level: int = 0) -> Layout:
        """Return even stages."""
        loads = block_loads(self.costs, frozen, level)
        shape = PipelineShape(k, replicas, k, "gpipe")
        return self.tuned(plan_layout(loads, self.planner.probe.structure.cut_positions(), shape, frozen, level))

    @cached_property
    def start(self) -> Layout:
        return self.layout(self.longest, NUM_DEVICES // self.longest)

    def following(self, current: Layout, frozen: int, level: int, parts: Parts) -> Layout:
        """Return the layout after a freeze, as `plan_transition` chooses, with or without more replicas."""
        if not parts.is_elastic:
            return self.tuned(replace(current, num_frozen_layers=frozen, cache_level=level))
        active = current.num_blocks - first_above(frozen)
        sizes = [k for k in (8, 4, 2, 1) if k <= min(current.pipeline_size, active)]
        replicas = self.start.num_replicas
        found = {}
        for k in sizes:
            layout = self.layout(k, NUM_DEVICES // k if parts.more_replicas else replicas, frozen, level)
            ranks = rank_memory(layout, self.costs, self.global_batch // layout.num_replicas)
            fits = max(rank.total for rank in ranks) <= (1 - MEMORY_RESERVE) * CLUSTER["memory"]
            found[k] = Candidate(layout, self.step(layout).seconds, fits)
        if parts.rule == "throughput":
            return choose_by_throughput(list(found.values())).layout
        elements = self.costs.parameters
        initial = largest_rank_size(elements, self.start)
        chosen = compress_by_memory(
            max(found), lambda k: largest_rank_size(elements, found[k].layout), initial, list(found)
        )
        return found[chosen].layout

    def spans(self, alpha: float, interval: str = "epoch") -> tuple[Span, ...]:
        """Return the bound of Eq. 1 over the run, without a warm-up or a minimum of active layers."""
        args = PipeTransformerArguments(
            output_dir="planned", freeze_policy="schedule", freeze_interval=interval, freeze_warmup=0.0,
            freeze_min_active_layers=0, use_cpu=True, report_to=[],
        )  # fmt: skip
        length = self.steps_per_epoch * self.setting.epochs, self.steps_per_epoch
        freezing, *_ = freezing_of(Schedule(alpha), args, self.num_layers, 0, length)
        assert freezing is not None
        return freezing.spans

    def cache_costs(self) -> CacheCosts:
        record = max(self.costs.boundary_bytes)
        prefix = prefix_seconds(self.costs, self.num_layers)
        return CacheCosts(prefix, 0.0, record / CLUSTER["cache_read"], record / CLUSTER["cache_write"])


class Run(NamedTuple):
    """Seconds of a run, those of its all-reduces (hidden or not), and (steps, F, K, R, M, cached layers) by span."""

    seconds: float
    communication: float
    spans: list[tuple[int, int, int, int, int, int]]


def simulate_run(job: Job, spans: Sequence[Span], parts: Parts) -> Run:
    """Add up the steps of a run, as `Forecast.seconds` does, with the network that the stages of a layout share."""
    layout, share, level = job.start, 0.0, 0
    seconds = communication = 0.0
    left, shown = sum(span.num_steps for span in spans), []
    for span in spans:
        stored, costs = Stored(level if share else 0, share), job.cache_costs()
        if span.num_frozen > layout.num_frozen_layers:
            decision = decide_cache(costs, span.num_frozen, stored, left / job.steps_per_epoch, parts.cache)
            level = decision.level if decision.use else 0
            before, layout = layout, job.following(layout, span.num_frozen, level, parts)
            if (before.places, before.boundaries) != (layout.places, layout.boundaries):
                seconds += move_seconds(job, layout)
        steps = span.num_steps
        ring = 2 * (layout.num_replicas - 1) / layout.num_replicas
        of_rank = max(gradient_bytes(layout, job.costs)) * job.overheads(layout, 1).reduction_per_byte * ring
        communication += span.num_steps * of_rank
        for each in passes_ahead(costs, level, stored, left, job.steps_per_epoch):
            now = min(each.steps, steps)
            reads = job.step(replace(layout, cache_level=each.level)).seconds if each.share else 0.0
            computes = job.step(replace(layout, cache_level=0)).seconds
            samples = job.global_batch // layout.num_replicas
            records = samples * (each.record_seconds + (share * costs.read if level else 0.0))
            seconds += now * (each.share * reads + (1 - each.share) * computes + max(0.0, records))
            steps -= now
        written = min(1.0, span.num_steps / job.steps_per_epoch)
        share = max(share if level == stored.level else 0.0, written) if level else 0.0
        left -= span.num_steps
        shown.append((span.num_steps, layout.num_frozen_layers, *_shape(layout), level))
    return Run(seconds, communication, shown)


def _shape(layout: Layout) -> tuple[int, int, int]:
    return layout.pipeline_size, layout.num_replicas, layout.num_microbatches


def move_seconds(job: Job, layout: Layout) -> float:
    """Return the seconds of a transition: weights and moments of the active blocks between devices of a node."""
    return MOVED_BYTES * sum(job.costs.trained[layout.first_active_block :]) / CLUSTER["link"]


def baseline_hours(job: Job) -> float:
    """Hours of the static pipeline with nothing frozen."""
    return job.step(job.start).seconds * job.steps_per_epoch * job.setting.epochs / 3600


def fitted(setting: Setting, longest: int = LONGEST) -> Job:
    """Return the job whose baseline takes the paper's time: bisection over the device's utilization."""
    low, high = 0.01, 1.0
    for _ in range(7):
        middle = (low * high) ** 0.5
        low, high = (
            (middle, high) if baseline_hours(Job(setting, middle, longest)) > setting.hours[0] else (low, middle)
        )
    return Job(setting, (low * high) ** 0.5, longest)


def speedup(job: Job, alpha: float = 1 / 3, parts: Parts | None = None, interval: str = "epoch") -> float:
    """Return how many times as fast as its static pipeline a run is."""
    run = simulate_run(job, job.spans(alpha, interval), parts or Parts())
    return 3600 * baseline_hours(job) / run.seconds


# ---- the paper's tables and figures: lists of rows, each a row of a table ----

RULES = {"ours": Parts(), "ours, K by Eq. 2": Parts(rule="memory")}
Rows = list[dict[str, Any]]


def against(paper: float | None, **ours: float) -> dict[str, Any]:
    """Return figures beside the paper's, and the ratio of the first of them to it."""
    over = None if paper is None else round(next(iter(ours.values())) / paper, 2)
    return {**{name: round(each, 3) for name, each in ours.items()}, "the paper": paper, "ours over it": over}


def table_1(job_of: dict[str, Job], quick: bool) -> dict[str, Rows]:
    """Speed-ups and hours, the layouts of each epoch, and speed-ups if decisions come more often."""
    times, layouts, often = [], [], []
    for name, setting in SETTINGS.items():
        job = job_of[name]
        runs = {kind: simulate_run(job, job.spans(1 / 3), parts) for kind, parts in RULES.items()}
        whole = 3600 * baseline_hours(job)
        times.append({
            "data set": name, **against(setting.speedup, **{kind: whole / run.seconds for kind, run in runs.items()}),
            "at half of the peak": round(speedup(Job(setting)), 2),
            "share of the peak, fitted": round(job.utilization, 3),
            "baseline, h": round(whole / 3600, 2), "ours, h": round(runs["ours"].seconds / 3600, 2),
            "the paper's, h": setting.hours[1],
        })  # fmt: skip
        for kind, run in runs.items():
            frozen, *shape, stored = (", ".join(map(str, each)) for each in [*zip(*run.spans, strict=True)][1:])
            layouts.append({"data set": name, "rule": kind, "layers frozen": frozen,
                            **dict(zip("KRM", shape, strict=True)), "layers stored": stored})  # fmt: skip
        shares = () if quick else (0.5, 0.25)
        more = {f"every {each:g} epoch": speedup(job, interval=str(each / setting.epochs)) for each in shares}
        often.append(
            {"data set": name, **against(setting.speedup, **{"every epoch": whole / runs["ours"].seconds, **more})}
        )
    return {"Table 1": times, "layouts": layouts, "intervals": often}


def figure_9(job: Job) -> Rows:
    """Speed-up of each combination of mechanisms, ViT on ImageNet, by both rules for K."""
    rows = []
    for name, paper in PAPERS_PARTS.items():
        flags = "AutoPipe" in name, "AutoDP" in name, "auto" if "AutoCache" in name else "off"
        found = {kind: speedup(job, parts=Parts(*flags, parts.rule)) for kind, parts in RULES.items()}
        rows.append({"mechanisms": name, **against(paper, **found)})
    return rows


def figure_10a(job: Job) -> Rows:
    """Alpha, and the share of layers and steps that is frozen."""
    rows = []
    for alpha, paper in {1 / 5: 2.04, 1 / 3: 2.83, 2 / 5: None, 1 / 2: None}.items():
        spans = job.spans(alpha)
        frozen = sum(span.num_steps * span.num_frozen for span in spans)
        share = frozen / (sum(span.num_steps for span in spans) * job.num_layers)
        rows.append(
            {"alpha": round(alpha, 2), "share frozen": round(share, 3), **against(paper, ours=speedup(job, alpha))}
        )
    return rows


def figure_10b(vit: Job) -> Rows:
    """Samples a second of static pipelines by number of micro-batches, and what runs that start with them gain."""
    rows = []
    for k in (8, 4, 2):
        job = Job(vit.setting, vit.utilization, k)
        seconds = {n: job.step(replace(job.start, num_microbatches=n * k)).seconds for n in (1, 2, 3, 4, 6)}
        rates = {f"M = {n} K": round(job.global_batch / each, 1) for n, each in seconds.items()}
        rows.append({"K": k, **rates, "best M": k * min(seconds, key=lambda n: seconds[n]),
                     "static run, h": round(baseline_hours(job), 2), "speed-up": round(speedup(job), 2)})  # fmt: skip
    return rows


def figure_10c(jobs: Sequence[Job]) -> Rows:
    """Frozen layers from which reading a record is faster than computing it, by the rate of reading."""
    rows = []
    for job in jobs:
        costs, paper = job.cache_costs(), PAPERS_CACHE_STARTS[job.setting.model]
        size = costs.read * CLUSTER["cache_read"] / 1e9
        starts = {
            f"{rate} GB/s": next((f for f, own in enumerate(costs.prefix) if f and size / rate < own), None)
            for rate in (0.05, 0.1, 0.25, 0.5, 2.5)
        }
        implied = "{:.3f} to {:.3f}".format(*(size / costs.prefix[f] for f in (paper, paper - 1)))
        rows.append({"model": job.setting.model, **starts, "the paper": paper, "GB/s that it implies": implied})
    return rows


def table_2(job_of: dict[str, Job]) -> Rows:
    """Share of all-reduces in the time of a run."""
    rows = []
    for name, paper in PAPERS_COMMUNICATION.items():
        job = job_of[name]
        runs = {kind: simulate_run(job, job.spans(1 / 3), parts) for kind, parts in RULES.items()}
        found = {kind: run.communication / run.seconds for kind, run in runs.items()}
        rows.append({"data set": name, **against(paper, **found)})
    return rows


def table_4() -> Rows:
    """Seconds of a transition; ours is the most, all weights and moments of the model."""
    ours = {
        f"ours, {job.setting.model}": round(move_seconds(job, job.start), 3) for job in map(Job, SETTINGS.values())
    }
    return [
        {"K": name, "the paper": whole, "without CUDA contexts": round(whole - contexts, 1), **ours}
        for name, (whole, contexts) in PAPERS_TRANSITIONS.items()
    ]


def pipeoptim() -> dict[str, Rows]:
    """Table VI and Figure 8 of PipeOptim, of what `async_simulation.json` has."""
    found = json.loads((REPOSITORY / "benchmarks" / "async_simulation.json").read_text(encoding="utf-8"))
    epochs = [
        {"model": model, "approach": name, **against(each["the paper's"], ours=each["time over PipeOptim's"])}
        for model, kinds in found["Table VI, an epoch"].items()
        for name, each in kinds.items()
    ]
    orders = {case: each for case, each in found["Figure 8, BERT-48"].items() if isinstance(each, dict)}
    pairs = [
        {"case": case, "pairs in the paper's order": each["pairs in the paper's order"]}
        for case, each in orders.items()
    ]
    return {"Table VI": epochs, "Figure 8": pairs}


@experiment("papers.json", minutes=3, quick_minutes=1, processes=1)
def papers(settings: Settings) -> dict[str, Any]:
    """Tables and figures of PipeTransformer and TeraPipe, simulated on the papers' machines."""
    from . import terapipe

    job_of = {name: fitted(setting) for name, setting in SETTINGS.items()}
    vit = job_of["ImageNet"]
    machines = [
        {"paper": paper, "what": name.replace("_", " "), "value": value, "source": source}
        for paper, values in MACHINES.items()
        for name, (value, source) in values.items()
    ]
    return {
        "machines": machines, **table_1(job_of, settings.quick), "Figure 9": figure_9(vit),
        "Figure 10a": figure_10a(vit), "Figure 10b": figure_10b(vit),
        "Figure 10c": figure_10c([vit, job_of["SQuAD 1.1"]]), "Table 2": table_2(job_of), "Table 4": table_4(),
        **terapipe.figures(settings.quick), **pipeoptim(),
    }  # fmt: skip
