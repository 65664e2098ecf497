"""The planner of token slices: its time beside the paper's algorithm as written, and the paper's settings simulated.

    python scripts/benchmark_slices.py --output benchmarks/token_plans.json

The settings are those of Table 1 of TeraPipe (Li et al., ICML 2021): GPT-3 of 1B to 175B parameters on 48 nodes of 8
V100. Times of slices come from FLOPs and bandwidth; what is assumed stands in `ASSUMED`, and goes into the results.
Without slices a batch is cut over its sequences alone, at the best number of micro-batches (GPipe's tables). Both are
run through the tables of the schedules.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_pipeline import machine, summary

from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.planning.slice_costs import Times, pipeline_seconds, plan_slices
from hf_pipetransformer.planning.token_plans import MOST_GRANULES
from hf_pipetransformer.schedules import Op, Table, find_schedule


GRANULE = 8
"""Tokens, as in the paper (section 4)."""
FEWEST_SECONDS = 1e-4
"""Bounds on the slowest slice that lie nearer together than this are tried once (section 3.3)."""
LENGTH = 2048
REPEATS = 7
MOST_EQUAL = 512
"""Slices of a batch that are tried with equal lengths."""


@dataclass(frozen=True)
class Assumed:
    """What the simulation takes for true of one V100 and its node.

    Args:
        flops: a second in half precision that a layer reaches.
        least_seconds: of a layer's forward, however few tokens: what 256 tokens take at a hidden size of 2,048, up to
            where the paper's Fig. 3 is flat.
        memory: bytes a second, at which a layer's weights are read for each slice.
        network: bytes a second between nodes (p3.16xlarge has 25 Gbit/s).
        nvlink: bytes a second inside a node.
        latency: seconds of a message between nodes.
    """

    flops: float = 60e12
    least_seconds: float = 256 * 24 * 2048**2 / 60e12
    memory: float = 900e9
    network: float = 25e9 / 8
    nvlink: float = 120e9
    latency: float = 5e-5


ASSUMED = Assumed()


@dataclass(frozen=True)
class Setting:
    """A row of Table 1, and the speed-up that Fig. 5 shows for it."""

    name: str
    layers: int
    hidden: int
    batch: int
    replicas: int
    stages: int
    tensor_parallel: int
    papers: float


SETTINGS = (
    Setting("(1) GPT3-1B", 24, 2048, 128, 8, 24, 1, 1.21),
    Setting("(2) GPT3-1B", 24, 2048, 72, 2, 12, 8, 1.0),
    Setting("(3) GPT3-1B", 24, 2048, 72, 1, 24, 8, 1.0),
    Setting("(4) GPT3-13B", 40, 5120, 32, 2, 20, 8, 1.40),
    Setting("(5) GPT3-13B", 40, 5120, 32, 1, 40, 8, 1.40),
    Setting("(6) GPT3-44B", 96, 6144, 8, 4, 96, 1, 1.88),
    Setting("(7) GPT3-44B", 96, 6144, 8, 2, 24, 8, 1.56),
    Setting("(8) GPT3-44B", 96, 6144, 8, 1, 48, 8, 2.40),
    Setting("(9) GPT3-175B", 96, 12288, 2, 1, 96, 4, 6.75),
    Setting("(10) GPT3-175B", 96, 12288, 2, 1, 48, 8, 5.02),
)


def slice_seconds(setting: Setting, sequences: int, tokens: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Seconds of a slice on one stage, forward and backward, with its messages in and out (as in the paper)."""
    h, shards = setting.hidden, setting.tensor_parallel
    # The paper's code computes all pairs with a mask: a slice of x tokens after L has x (L + x) of them.
    flops = sequences * (24 * tokens * h**2 + 4 * tokens * (context + tokens) * h) / shards
    weights = 2 * 12 * h**2 / shards / ASSUMED.memory
    forward = np.maximum(flops / ASSUMED.flops, max(ASSUMED.least_seconds, weights))
    volume = 2 * sequences * tokens * h
    reduced = 2 * 2 * (shards - 1) / shards * volume / ASSUMED.nvlink  # Two all-reduces each way.
    crosses = shards * setting.stages > 8
    hop = ASSUMED.latency + volume / (ASSUMED.network if crosses else ASSUMED.nvlink)
    return setting.layers / setting.stages * (3 * forward + 2 * reduced) + 2 * hop


def times_of(setting: Setting, sequences: int, granule: int = GRANULE) -> Times:
    """For batch slices of so many sequences, as `plan_slices` takes them."""
    count = LENGTH // granule
    tokens, context = np.meshgrid(np.arange(1, count + 1) * granule, np.arange(count) * granule, indexing="ij")
    return slice_seconds(setting, sequences, tokens, context)[None]


def simulated(setting: Setting, num_microbatches: int, lengths: list[int]) -> tuple[float, int]:
    """Seconds of a step by the schedule's table, and the slices that the first stage keeps at once."""
    size = setting.batch // setting.replicas // num_microbatches
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    seconds = [float(slice_seconds(setting, size, *map(np.array, pair))) for pair in zip(lengths, starts, strict=True)]
    table = find_schedule("token").table(setting.stages, num_microbatches, num_token_slices=len(lengths))
    forward, backward = (1 / 3,) * setting.stages, (2 / 3,) * setting.stages
    timeline = simulate(table, Durations(forward, backward, 0.0, factors=tuple(seconds * num_microbatches)))
    return timeline.end, most_kept(table)


def most_kept(table: Table) -> int:
    """Slices whose forward has run on the first stage and whose backward has not, at most."""
    kept = most = 0
    for action in table[0]:
        kept += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
        most = max(most, kept)
    return most


def counts_of(setting: Setting) -> list[int]:
    """Numbers of equal batch slices of a pipeline's batch: powers of two, and single sequences."""
    samples = setting.batch // setting.replicas
    return [
        count
        for count in range(1, samples + 1)
        if samples % count == 0 and (count & (count - 1) == 0 or count == samples)
    ]


def one_setting(setting: Setting) -> dict[str, Any]:
    """The best step without and with token slices."""
    samples = setting.batch // setting.replicas
    whole = {count: simulated(setting, count, [LENGTH])[0] for count in counts_of(setting)}
    best = min(whole, key=whole.__getitem__)
    plans: dict[float, dict[str, Any]] = {}
    for count in counts_of(setting):
        times = times_of(setting, samples // count)
        (_, granules), *_ = plan_slices(times, 1 + (setting.stages - 1) / count, 1).slices
        lengths = [GRANULE * each for each in granules]
        seconds, kept = simulated(setting, count, lengths)
        plans[seconds] = {
            "batch slices": count, "token slices": len(lengths), "longest": max(lengths), "shortest": min(lengths),
            "slices kept, of all": [kept, count * len(lengths)],
        }  # fmt: skip
    count = plans[min(plans)]["batch slices"]
    numbers = [number for number in (1, 2, 4, 8, 16, 32, 64, 128) if number * count <= MOST_EQUAL]
    uniform = min(simulated(setting, count, [LENGTH // number] * number)[0] for number in numbers)
    return {
        "seconds without slices": round(whole[best], 4), "at micro-batches": best,
        "seconds with slices": round(min(plans), 4), **plans[min(plans)],
        "over the best equal slices": round(uniform / min(plans), 3),
        "speed-up": round(whole[best] / min(plans), 2), "the paper's": setting.papers,
    }  # fmt: skip


def as_the_paper_writes_it(times: Times, num_stages: int) -> tuple[float, list[int]]:
    """The algorithm of section 3.3 as it stands: every bound from below, a table over prefixes for each."""
    (of_slices,) = times.tolist()
    length = len(of_slices)
    every = sorted({of_slices[k - 1][c] for k in range(1, length + 1) for c in range(length - k + 1)})
    bounds = every[:1]
    for value in every:
        if value >= bounds[-1] + FEWEST_SECONDS:
            bounds.append(value)
    best, found = float("inf"), [0]
    for bound in bounds:
        if (num_stages - 1) * bound >= best:
            break
        sums, lasts = [0.0], [0]
        for end in range(1, length + 1):
            least, chosen = float("inf"), 0
            for k in range(1, end + 1):
                own = of_slices[k - 1][end - k]
                if own <= bound and sums[end - k] + own < least:
                    least, chosen = sums[end - k] + own, k
            sums.append(least)
            lasts.append(chosen)
        if sums[-1] == float("inf"):
            continue
        end, lengths = length, []
        while end:
            lengths.append(lasts[end])
            end -= lasts[end]
        lengths.reverse()
        starts = [sum(lengths[:number]) for number in range(len(lengths))]
        total = pipeline_seconds([of_slices[k - 1][c] for k, c in zip(lengths, starts, strict=True)], num_stages)
        if total < best:
            best, found = total, lengths
    return best, found


def planning(setting: Setting, repeats: int) -> dict[str, Any]:
    """Time of a plan for one sequence of 2,048 tokens, ours and the paper's side by side, alternating.

    The paper's makes slices of multiples of 8 tokens, ours of so many as a run plans with.
    """
    times = times_of(setting, 1)
    ours: list[float] = []
    papers: list[float] = []
    coarse = times_of(setting, 1, LENGTH // MOST_GRANULES)
    for _ in range(repeats):
        start = time.perf_counter()
        plan = plan_slices(coarse, setting.stages, 1)
        middle = time.perf_counter()
        found, _ = as_the_paper_writes_it(times, setting.stages)
        ours.append(middle - start)
        papers.append(time.perf_counter() - middle)
    return {
        "ours": summary(ours), "the paper's": summary(papers),
        "the paper's over ours": round(statistics.median(papers) / statistics.median(ours), 1),
        "a step of ours over the paper's, by Eq. 5": round(plan.seconds / found, 5),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="plans of each kind that are timed")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(1), "assumed": asdict(ASSUMED), "Table 1": {}, "planning": {}}
    for setting in SETTINGS:
        results["Table 1"][setting.name] = one_setting(setting)
        print(f"{setting.name}: {json.dumps(results['Table 1'][setting.name])}", flush=True)
    for stages in (2, 8, 40, 96):
        name = f"GPT3-13B, {stages} stages"
        results["planning"][name] = planning(replace(SETTINGS[4], layers=stages, stages=stages), options.repeats)
        print(f"planning, {name}: {json.dumps(results['planning'][name])}", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
