"""Tables of the PipeTransformer paper, simulated on its machine by the library's own planner.

Facts of the machines and what is assumed of them stand in `machines.json`, each with its source. Blocks take the time
of their operations; layouts, stages, freezing and the cache are those that a run would plan. The global batch is
constant, as in this library: with R replicas a pipeline has an R-th of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import BertConfig, PreTrainedConfig, ViTConfig

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.freeze.policies import Schedule, freezing_of
from hf_pipetransformer.planning.costs import BlockCosts, Overheads, block_loads, gradient_bytes, predict_step
from hf_pipetransformer.planning.forecast import MOVED_BYTES, Forecast, Storing, prefix_seconds, seconds_left
from hf_pipetransformer.planning.memory import MEMORY_RESERVE, rank_memory
from hf_pipetransformer.planning.planner import Candidate, PipelineShape, largest_rank_size, plan_layout
from hf_pipetransformer.planning.search import choose_by_throughput, compress_by_memory
from hf_pipetransformer.planning.storing import CacheCosts
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.schedules.placement import first_above
from hf_pipetransformer.startup.estimate import batch_on_meta, build_on_meta, estimate
from hf_pipetransformer.startup.run_plan import Machine

from .measure import Settings, experiment


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


RULES = {"ours": Parts(), "ours, K by Eq. 2": Parts(rule="memory")}


class Run(NamedTuple):
    """Speed-up over the static pipeline, seconds, and the share of them that all-reduces take, hidden or not."""

    speedup: float
    seconds: float
    communication: float
    spans: list[tuple[int, ...]]
    """Steps, F, K, R, M and cached layers."""


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


class Job:
    """A data set on the paper's cluster, of whose peak a device reaches `utilization`; at first K is `longest`."""

    def __init__(self, setting: Setting, utilization: float = CLUSTER["utilization"], longest: int = LONGEST) -> None:
        planner = planner_of(setting.model)
        self.setting, self.utilization, self.structure = setting, utilization, planner.probe.structure
        self.costs: BlockCosts = planner.costs.blocks.scaled(1 / utilization, 1 / utilization)
        self.batch = setting.batch * NUM_DEVICES // LONGEST
        self.steps_per_epoch = -(-setting.samples // self.batch)
        record = max(self.costs.boundary_bytes)
        prefix = prefix_seconds(self.costs, self.structure.num_layers)
        rates = CLUSTER["cache_read"], CLUSTER["cache_write"]
        self.cache = CacheCosts(prefix, 0.0, *(record / rate for rate in rates), is_apart=True)
        self.start = self.layout(longest, NUM_DEVICES // longest)
        self.static_seconds = self.step_seconds(self.start) * self.steps_per_epoch * setting.epochs

    def overheads(self, layout: Layout) -> Overheads:
        """The rings of a pipeline's stages share the network; a message is of one micro-batch."""
        samples = self.batch // layout.num_replicas / layout.num_microbatches
        return replace(
            planner_of(self.setting.model).costs.overheads,
            hop=max(self.costs.boundary_bytes) * samples / CLUSTER["link"],
            per_forward=CLUSTER["per_pass"],
            per_backward=CLUSTER["per_pass"],
            reduction_per_byte=layout.pipeline_size / CLUSTER["network"],
        )

    def step_seconds(self, layout: Layout) -> float:
        return predict_step(layout, self.costs, self.overheads(layout), self.batch // layout.num_replicas).seconds

    def tuned(self, layout: Layout) -> Layout:
        """Give the layout the fastest number of micro-batches from K to 6K (section 3.2.3)."""
        k, most = layout.pipeline_size, self.batch // layout.num_replicas
        tried = [replace(layout, num_microbatches=m) for m in (k, 2 * k, 3 * k, 4 * k, 6 * k) if m <= most]
        return min(tried or [layout], key=self.step_seconds)

    def layout(self, k: int, replicas: int, frozen: int = 0, level: int = 0) -> Layout:
        """Return even stages."""
        loads = block_loads(self.costs, frozen, level)
        shape = PipelineShape(k, replicas, k, "gpipe")
        return self.tuned(plan_layout(loads, self.structure.cut_positions(), shape, frozen, level))

    def following(self, parts: Parts, current: Layout, frozen: int, level: int) -> Layout:
        """Return the layout after a freeze, as `plan_transition` chooses, with or without more replicas."""
        if not parts.is_elastic:
            return self.tuned(replace(current, num_frozen_layers=frozen, cache_level=level))
        active, found = current.num_blocks - first_above(frozen), {}
        for k in (8, 4, 2, 1):
            if k <= min(current.pipeline_size, active):
                replicas = NUM_DEVICES // k if parts.more_replicas else self.start.num_replicas
                layout = self.layout(k, replicas, frozen, level)
                fullest = max(rank.total for rank in rank_memory(layout, self.costs, self.batch // replicas))
                fits = fullest <= (1 - MEMORY_RESERVE) * CLUSTER["memory"]
                found[k] = Candidate(layout, self.step_seconds(layout), fits)
        if parts.rule == "throughput":
            return choose_by_throughput(list(found.values())).layout
        sizes = {k: largest_rank_size(self.costs.parameters, each.layout) for k, each in found.items()}
        initial = largest_rank_size(self.costs.parameters, self.start)
        return found[compress_by_memory(max(found), sizes.__getitem__, initial, list(found))].layout

    def run(self, alpha: float = 1 / 3, parts: Parts = RULES["ours"], interval: str = "epoch") -> Run:
        """Forecast a run by the bound of Eq. 1, without a warm-up or a minimum of active layers."""
        args = PipeTransformerArguments(
            output_dir="planned", freeze_policy="schedule", freeze_interval=interval, freeze_warmup=0.0,
            freeze_min_active_layers=0, use_cpu=True, report_to=[],
        )  # fmt: skip
        length = self.steps_per_epoch * self.setting.epochs, self.steps_per_epoch
        freezing, *_ = freezing_of(Schedule(alpha), args, self.structure.num_layers, 0, length)
        assert freezing is not None
        # Weights move inside a node.
        between = replace(self.overheads(self.start), reduction_per_byte=1 / CLUSTER["link"])
        plan, storing = partial(self.following, parts), Storing(self.cache, parts.cache)
        forecast = Forecast(self.start, self.costs, between, 1, 1, self.steps_per_epoch, plan, storing)
        seconds, communication, shown = 0.0, 0.0, []
        for span, (layout, passes, moving, _) in zip(freezing.spans, forecast.stretches(freezing.spans), strict=True):
            k, replicas, overheads = layout.pipeline_size, layout.num_replicas, self.overheads(layout)
            seconds += moving + seconds_left(layout, passes, self.costs, overheads, self.batch // replicas // k)
            ring = 2 * (replicas - 1) / replicas * overheads.reduction_per_byte
            communication += span.num_steps * ring * max(gradient_bytes(layout, self.costs))
            shown.append((span.num_steps, span.num_frozen, k, replicas, layout.num_microbatches, layout.cache_level))
        return Run(self.static_seconds / seconds, seconds, communication / seconds, shown)


def fitted(setting: Setting) -> Job:
    """Return the job whose baseline takes the paper's time: bisection over the device's utilization."""
    low, high = 0.01, 1.0
    for _ in range(7):
        middle = (low * high) ** 0.5
        is_slow = Job(setting, middle).static_seconds > 3600 * setting.hours[0]
        low, high = (middle, high) if is_slow else (low, middle)
    return Job(setting, (low * high) ** 0.5)


# ---- the paper's tables and figures: lists of rows, each a row of a table ----

Rows = list[dict[str, Any]]


def against(paper: float | None, **ours: float) -> dict[str, Any]:
    """Return figures beside the paper's, and the ratio of the first of them to it."""
    over = None if paper is None else round(next(iter(ours.values())) / paper, 2)
    return {**{name: round(each, 3) for name, each in ours.items()}, "the paper": paper, "ours over it": over}


def table_1(job_of: dict[str, Job], quick: bool) -> dict[str, Rows]:
    """Speed-ups and hours, the layouts of each epoch, and speed-ups if decisions come more often."""
    times, layouts, often = [], [], []
    for name, job in job_of.items():
        setting, runs = job.setting, {kind: job.run(parts=parts) for kind, parts in RULES.items()}
        times.append({
            "data set": name, **against(setting.speedup, **{kind: run.speedup for kind, run in runs.items()}),
            "at half of the peak": round(Job(setting).run().speedup, 2),
            "share of the peak, fitted": round(job.utilization, 3),
            "baseline, h": round(job.static_seconds / 3600, 2), "ours, h": round(runs["ours"].seconds / 3600, 2),
            "the paper's, h": setting.hours[1],
        })  # fmt: skip
        for kind, run in runs.items():
            frozen, *shape, stored = (", ".join(map(str, each)) for each in [*zip(*run.spans, strict=True)][1:])
            layouts.append({"data set": name, "rule": kind, "layers frozen": frozen,
                            **dict(zip("KRM", shape, strict=True)), "layers stored": stored})  # fmt: skip
        shares = () if quick else (0.5, 0.25)
        more = {f"every {each:g} epoch": job.run(interval=str(each / setting.epochs)).speedup for each in shares}
        often.append({"data set": name, **against(setting.speedup, **{"every epoch": runs["ours"].speedup, **more})})
    return {"Table 1": times, "layouts": layouts, "intervals": often}


def figure_9(job: Job) -> Rows:
    """Speed-up of each combination of mechanisms, ViT on ImageNet, by both rules for K."""
    rows = []
    for name, paper in PAPERS_PARTS.items():
        flags = "AutoPipe" in name, "AutoDP" in name, "auto" if "AutoCache" in name else "off"
        found = {kind: job.run(parts=Parts(*flags, parts.rule)).speedup for kind, parts in RULES.items()}
        rows.append({"mechanisms": name, **against(paper, **found)})
    return rows


def figure_10a(job: Job) -> Rows:
    """Alpha, and the share of layers and steps that is frozen."""
    rows = []
    for alpha, paper in {1 / 5: 2.04, 1 / 3: 2.83, 2 / 5: None, 1 / 2: None}.items():
        run = job.run(alpha)
        steps = sum(num_steps for num_steps, *_ in run.spans) * job.structure.num_layers
        share = sum(num_steps * frozen for num_steps, frozen, *_ in run.spans) / steps
        rows.append({"alpha": round(alpha, 2), "share frozen": round(share, 3), **against(paper, ours=run.speedup)})
    return rows


def figure_10b(vit: Job) -> Rows:
    """Samples a second of static pipelines by number of micro-batches, and what runs that start with them gain."""
    rows = []
    for k in (8, 4, 2):
        job = Job(vit.setting, vit.utilization, k)
        seconds = {n: job.step_seconds(replace(job.start, num_microbatches=n * k)) for n in (1, 2, 3, 4, 6)}
        rates = {f"M = {n} K": round(job.batch / each, 1) for n, each in seconds.items()}
        rows.append({"K": k, **rates, "best M": k * min(seconds, key=lambda n: seconds[n]),
                     "static run, h": round(job.static_seconds / 3600, 2),
                     "speed-up": round(job.run().speedup, 2)})  # fmt: skip
    return rows


def figure_10c(jobs: Sequence[Job]) -> Rows:
    """Frozen layers from which reading a record is faster than computing it, by the rate of reading."""
    rows = []
    for job in jobs:
        prefix, paper = job.cache.prefix, PAPERS_CACHE_STARTS[job.setting.model]
        size = max(job.costs.boundary_bytes) / 1e9
        starts = {
            f"{rate} GB/s": next((f for f, own in enumerate(prefix) if f and size / rate < own), None)
            for rate in (0.05, 0.1, 0.25, 0.5, 2.5)
        }
        implied = f"{size / prefix[paper]:.3f} to {size / prefix[paper - 1]:.3f}"
        rows.append({"model": job.setting.model, **starts, "the paper": paper, "GB/s that it implies": implied})
    return rows


def table_2(job_of: dict[str, Job]) -> Rows:
    """Share of all-reduces in the time of a run."""
    return [
        {
            "data set": name,
            **against(paper, **{kind: job_of[name].run(parts=parts).communication for kind, parts in RULES.items()}),
        }
        for name, paper in PAPERS_COMMUNICATION.items()
    ]


def table_4(jobs: Sequence[Job]) -> Rows:
    """Seconds of a transition; ours is the most, all weights and moments of the model."""
    moved = {f"ours, {job.setting.model}": MOVED_BYTES * sum(job.costs.trained) for job in jobs}
    ours = {name: round(size / CLUSTER["link"], 3) for name, size in moved.items()}
    return [
        {"K": name, "the paper": whole, "without CUDA contexts": round(whole - contexts, 1), **ours}
        for name, (whole, contexts) in PAPERS_TRANSITIONS.items()
    ]


@experiment("papers.json", minutes=3, quick_minutes=1, processes=1)
def papers(settings: Settings) -> dict[str, Any]:
    """Tables and figures of PipeTransformer and TeraPipe, simulated on the papers' machines."""
    from . import terapipe

    job_of = {name: fitted(setting) for name, setting in SETTINGS.items()}
    vit, bert = job_of["ImageNet"], job_of["SQuAD 1.1"]
    machines = [
        {"paper": paper, "what": name.replace("_", " "), "value": value, "source": source}
        for paper, values in MACHINES.items()
        for name, (value, source) in values.items()
    ]
    return {
        "machines": machines, **table_1(job_of, settings.quick), "Figure 9": figure_9(vit),
        "Figure 10a": figure_10a(vit), "Figure 10b": figure_10b(vit), "Figure 10c": figure_10c([vit, bert]),
        "Table 2": table_2(job_of), "Table 4": table_4([vit, bert]), **terapipe.figures(settings.quick),
    }  # fmt: skip
