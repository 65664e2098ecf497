"""Tables of the PipeTransformer paper, simulated on its machine by the library's own planner.

Facts of the machines and what is assumed of them stand in `machines.json`, each with its source. Blocks take the time
of their operations; layouts, stages, freezing and the cache are those that a run would plan. The global batch is
constant, as in this library: with R replicas a pipeline has an R-th of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True)
class Job:
    """A data set on the paper's cluster; `utilization` is the share of the peak that a device reaches."""

    setting: Setting
    utilization: float = CLUSTER["utilization"]
    longest: int = LONGEST

    @cached_property
    def planner(self) -> Any:
        """The library's planner from the config alone."""
        args = PipeTransformerArguments(output_dir="planned", pipeline_schedule="gpipe", use_cpu=True, report_to=[])
        rates = (CLUSTER["memory"], LONGEST, self.utilization * CLUSTER["peak"], CLUSTER["link"])
        machine = Machine(NUM_DEVICES, *rates, CLUSTER["memory_bandwidth"], node_bandwidth=CLUSTER["network"])
        with TemporaryDirectory() as folder:
            MODELS[self.setting.model].save_pretrained(folder)
            model = build_on_meta(folder, None)
        return estimate(model, batch_on_meta(model, LENGTH), args, machine)

    @property
    def costs(self) -> BlockCosts:
        return self.planner.costs.blocks

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
        freezing, _ = freezing_of(Schedule(alpha), args, self.num_layers, 0, length)
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
            layout = job.following(layout, span.num_frozen, level, parts)
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


# ---- the paper's tables and figures ----


def table_1(quick: bool) -> dict[str, Any]:
    """Hours with the utilization that the paper's baseline implies, and speed-ups at an assumed one beside."""
    found = {}
    for name, setting in SETTINGS.items():
        job = fitted(setting)
        runs = {rule: simulate_run(job, job.spans(1 / 3), Parts(rule=rule)) for rule in ("throughput", "memory")}
        hours = baseline_hours(job)
        others = () if quick else (0.5, 0.25)
        found[name] = {
            "utilization": round(job.utilization, 3), "baseline h": round(hours, 3),
            "h": {rule: round(run.seconds / 3600, 3) for rule, run in runs.items()},
            "speedup": {rule: round(3600 * hours / run.seconds, 2) for rule, run in runs.items()},
            "at half of the peak": round(speedup(Job(setting)), 2),
            "decisions by share of an epoch": {
                str(each): round(speedup(job, interval=str(each / setting.epochs)), 2) for each in others
            },
            "spans": runs["throughput"].spans, "spans by Eq. 2": runs["memory"].spans,
            "paper h": setting.hours, "paper speedup": setting.speedup,
            "paper hours ratio": round(setting.hours[0] / setting.hours[1], 2),
        }  # fmt: skip
    return found


def figure_9() -> dict[str, Any]:
    """Speed-up of each combination of mechanisms, ViT on ImageNet, by both rules for K."""
    job = fitted(SETTINGS["ImageNet"])
    parts = dict(
        zip(PAPERS_PARTS, ((False, False), (True, False), (True, False), (True, True), (True, True)), strict=True)
    )
    return {
        name: {
            rule: round(speedup(job, parts=Parts(*flags, "auto" if "AutoCache" in name else "off", rule)), 3)
            for rule in ("throughput", "memory")
        } | {"paper": PAPERS_PARTS[name]}
        for name, flags in parts.items()
    }  # fmt: skip


def figure_10() -> dict[str, Any]:
    """Alpha, pipeline length and micro-batches, and the frozen layers from which reading records pays."""
    vit, bert = fitted(SETTINGS["ImageNet"]), fitted(SETTINGS["SQuAD 1.1"])
    alphas = {}
    for name, alpha in (("1/5", 1 / 5), ("1/3", 1 / 3), ("2/5", 2 / 5), ("1/2", 1 / 2)):
        frozen = [(span.num_steps, span.num_frozen) for span in vit.spans(alpha)]
        share = sum(steps * layers for steps, layers in frozen) / (sum(steps for steps, _ in frozen) * vit.num_layers)
        alphas[name] = {"speedup": round(speedup(vit, alpha), 2), "share of layer steps frozen": round(share, 3)}
    alphas["1/5"]["paper"], alphas["1/3"]["paper"] = 2.04, 2.83
    lengths, by_m = {}, {}
    for k in (8, 4, 2):
        job = Job(vit.setting, vit.utilization, k)
        layout = replace(job.start, num_microbatches=1)
        rates = {
            m: round(job.global_batch / job.step(replace(layout, num_microbatches=m)).seconds, 1)
            for m in (k, 2 * k, 3 * k, 4 * k, 6 * k)
        }
        by_m[f"K={k}"] = {"samples a second by M": rates, "best M": max(rates, key=lambda m: rates[m])}
        lengths[f"K={k}"] = {"static, h": round(baseline_hours(job), 2), "speedup": round(speedup(job), 2)}
    cache: dict[str, Any] = {}
    for job in (vit, bert):
        costs = job.cache_costs()
        record = costs.read * CLUSTER["cache_read"]
        starts = {
            f"{rate} GB/s": next((f for f, own in enumerate(costs.prefix) if f and record / rate / 1e9 < own), None)
            for rate in (0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
        }
        paper = PAPERS_CACHE_STARTS[job.setting.model]
        implied = [round(record / costs.prefix[f] / 1e9, 3) for f in (paper - 1, paper)]
        cache[job.setting.model] = {
            "first F by rate": starts,
            "paper F": paper,
            "GB/s that the paper's F implies": implied,
        }
    return {"a": alphas, "b": by_m, "length at the start": lengths, "c": cache}


def table_2() -> dict[str, Any]:
    """Share of all-reduces in the time of a run, by both rules for K."""
    found = {}
    for name, paper in PAPERS_COMMUNICATION.items():
        job = fitted(SETTINGS[name])
        runs = {rule: simulate_run(job, job.spans(1 / 3), Parts(rule=rule)) for rule in ("throughput", "memory")}
        found[name] = {rule: round(run.communication / run.seconds, 4) for rule, run in runs.items()} | {
            "paper": paper
        }
    return found


def table_4() -> dict[str, Any]:
    """Seconds of a transition at most: all of the model's weights and moments move between devices of a node."""
    seconds = {
        setting.model: round(move_seconds(job, job.start), 3)
        for setting in SETTINGS.values()
        for job in [Job(setting)]
    }
    papers = {
        name: {"paper s": whole, "without CUDA contexts": round(whole - contexts, 1)}
        for name, (whole, contexts) in PAPERS_TRANSITIONS.items()
    }
    return {"moving, s": seconds, "paper": papers}


@experiment("papers.json", minutes=3, quick_minutes=0.5, processes=1)
def papers(settings: Settings) -> dict[str, Any]:
    """Tables and figures of PipeTransformer and TeraPipe, simulated on the papers' machines."""
    from . import terapipe

    return {
        "machines": MACHINES, "Table 1": table_1(settings.quick), "Figure 9": figure_9(), "Figure 10": figure_10(),
        "Table 2": table_2(), "Table 4": table_4(), "TeraPipe": terapipe.figures(settings.quick),
    }  # fmt: skip
