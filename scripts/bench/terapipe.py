"""Figures 5 to 7 of TeraPipe (Li et al., ICML 2021), simulated: slices of tokens beside whole sequences.

Times of slices come from operations and bandwidth, see `machines.json`. Without slices a batch is cut over its
sequences alone, at the best number of micro-batches (GPipe). Both run through the tables of the schedules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_pipetransformer.planning.simulator import Durations, simulate
from hf_pipetransformer.planning.slice_costs import plan_slices
from hf_pipetransformer.schedules import find_schedule

from .papers import against, machine_of


CLUSTER = machine_of("TeraPipe")
FLOPS = CLUSTER["utilization"] * CLUSTER["peak"]
GRANULE = 8
"""Tokens, as in the paper (section 4)."""


@dataclass(frozen=True)
class Setting:
    """A row of Table 1, and the speed-up that section 4.1 or 4.3 names for it."""

    layers: int
    hidden: int
    batch: int
    replicas: int
    stages: int
    tensor_parallel: int
    paper: float
    length: int = 2048
    slice_seconds: float = 0.0
    """Fixed seconds of a layer's pass over a slice, besides."""

    @property
    def reduction(self) -> float:
        """Seconds of an all-reduce of half-precision gradients; the devices of a node share its network."""
        size = 2 * 12 * self.hidden**2 * self.layers / self.stages / self.tensor_parallel
        return size * 2 * (1 - 1 / self.replicas) * CLUSTER["devices_per_node"] / CLUSTER["network"]

    @property
    def samples(self) -> int:
        """Sequences of a pipeline's batch."""
        return self.batch // self.replicas


SETTINGS = {
    "(1) GPT3-1B": Setting(24, 2048, 128, 8, 24, 1, 1.21), "(2) GPT3-1B": Setting(24, 2048, 72, 2, 12, 8, 1.0),
    "(3) GPT3-1B": Setting(24, 2048, 72, 1, 24, 8, 1.0), "(4) GPT3-13B": Setting(40, 5120, 32, 2, 20, 8, 1.40),
    "(5) GPT3-13B": Setting(40, 5120, 32, 1, 40, 8, 1.40), "(6) GPT3-44B": Setting(96, 6144, 8, 4, 96, 1, 1.88),
    "(7) GPT3-44B": Setting(96, 6144, 8, 2, 24, 8, 1.56), "(8) GPT3-44B": Setting(96, 6144, 8, 1, 48, 8, 2.40),
    "(9) GPT3-175B": Setting(96, 12288, 2, 1, 96, 4, 6.75), "(10) GPT3-175B": Setting(96, 12288, 2, 1, 48, 8, 5.02),
}  # fmt: skip
BY_LENGTH = {4096: (8, 2.76), 6144: (4, 4.97), 8192: (2, 7.83)}
"""Figure 7, setting (5): the batch and the speed-up."""
OVER_UNIFORM: dict[str, tuple[float, int]] = {"(8) GPT3-44B": (1.12, 16), "(9) GPT3-175B": (1.04, 128)}
"""Figure 6: the plan over the best equal slices, of which it tries so many at most."""


def slice_seconds(setting: Setting, sequences: int, tokens: Any, context: Any) -> Any:
    """Return the seconds of a slice on one stage, forward and backward, with its messages in and out."""
    h, shards = setting.hidden, setting.tensor_parallel
    # The paper's code computes all pairs with a mask: a slice of x tokens after L has x (L + x) of them.
    flops = sequences * (24 * tokens * h**2 + 4 * tokens * (context + tokens) * h) / shards
    weights = 2 * 12 * h**2 / shards / CLUSTER["memory_bandwidth"]
    least = CLUSTER["least_tokens"] * 24 * 2048**2 / FLOPS
    forward = np.maximum(flops / FLOPS, max(least, weights))
    volume = 2 * sequences * tokens * h
    # Two all-reduces each way.
    reduced = 2 * (2 * (shards - 1) / shards * volume / CLUSTER["link"] + CLUSTER["latency"] * (shards > 1))
    forward += setting.slice_seconds
    is_far = shards * setting.stages > CLUSTER["devices_per_node"]
    hop = CLUSTER["latency"] + volume / CLUSTER["network" if is_far else "link"]
    return setting.layers / setting.stages * (3 * forward + 2 * reduced) + 2 * hop


def simulated(setting: Setting, num_microbatches: int, lengths: list[int]) -> float:
    """Return the seconds of a step by the schedule's table, with the reduction over replicas."""
    size, starts = setting.samples // num_microbatches, np.cumsum([0, *lengths[:-1]])
    seconds = slice_seconds(setting, size, np.array(lengths), starts).tolist()
    table = find_schedule("token").table(setting.stages, num_microbatches, num_token_slices=len(lengths))
    forward, backward = (1 / 3,) * setting.stages, (2 / 3,) * setting.stages
    durations = Durations(forward, backward, factors=tuple(seconds * num_microbatches))
    return simulate(table, durations).end + setting.reduction


def compare(setting: Setting) -> tuple[float, float, tuple[int, list[int]]]:
    """Return the seconds of the best step without and with token slices, and its batch slices and token slices."""
    samples, granules = setting.samples, np.arange(setting.length // GRANULE) * GRANULE
    tokens, context = np.meshgrid(granules + GRANULE, granules, indexing="ij")
    counts = [n for n in range(1, samples + 1) if samples % n == 0 and (n & (n - 1) == 0 or n == samples)]
    plans = {}
    for count in counts:
        times = slice_seconds(setting, samples // count, tokens, context)[None]
        (_, found), *_ = plan_slices(times, 1 + (setting.stages - 1) / count, 1).slices
        lengths = [GRANULE * each for each in found]
        plans[simulated(setting, count, lengths)] = count, lengths
    whole = min(simulated(setting, count, [setting.length]) for count in counts)
    sliced, plan = min(plans.items())
    return whole, sliced, plan


def fitted_seconds() -> float:
    """Return the fixed seconds of a pass over a slice and layer that bring Figure 5 nearest to the paper's."""

    def distance(seconds: float) -> float:
        settings = [replace(each, slice_seconds=seconds) for each in SETTINGS.values()]
        times = [(*compare(each)[:2], each.paper) for each in settings]
        return float(sum(np.log(whole / sliced / paper) ** 2 for whole, sliced, paper in times))

    return min((2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3), key=distance)


def beside(name: str, setting: Setting, fixed: float) -> dict[str, Any]:
    """Return a row: the speed-up with slices that cost their operations alone, and with the fitted cost besides."""
    whole, sliced, (count, lengths) = compare(setting)
    whole_fitted, sliced_fitted, _ = compare(replace(setting, slice_seconds=fixed))
    return {
        "setting": name, "whole sequences, s": round(whole, 2), "slices, s": round(sliced, 2),
        "batch x token slices": f"{count} x {len(lengths)}", **against(setting.paper, ours=whole / sliced),
        "fitted": round(whole_fitted / sliced_fitted, 2),
        "fitted over it": round(whole_fitted / sliced_fitted / setting.paper, 2),
    }  # fmt: skip


def uniform(name: str, setting: Setting) -> dict[str, Any]:
    """Return a row: the best number of equal slices of single sequences, and the plan beside (Figure 6)."""
    paper, most = OVER_UNIFORM[name]
    numbers = [2**power for power in range(8) if 2**power <= most]
    seconds = {n: simulated(setting, setting.samples, [setting.length // n] * n) for n in numbers}
    over = min(seconds.values()) / compare(setting)[1]
    shown = ", ".join(f"{n}: {each:.2f}" for n, each in seconds.items())
    fixed = round(1e3 * setting.slice_seconds, 1)
    return {"setting": name, "fixed ms of a slice and layer": fixed, "s by number": shown, **against(paper, ours=over)}


def figures(quick: bool) -> dict[str, Any]:
    """Figures 5, 6 and 7; two settings of each with `quick`."""
    number, fixed = (2, 1.6e-3) if quick else (len(SETTINGS), fitted_seconds())
    lengths = {
        f"{length} tokens": replace(SETTINGS["(5) GPT3-13B"], length=length, batch=batch, paper=paper)
        for length, (batch, paper) in BY_LENGTH.items()
    }
    names = () if quick else OVER_UNIFORM
    return {
        "fixed seconds of a slice and layer, fitted": fixed,
        "Figure 5": [beside(name, each, fixed) for name, each in list(SETTINGS.items())[-number:]],
        "Figure 6": [uniform(n, replace(SETTINGS[n], slice_seconds=each)) for each in (0.0, fixed) for n in names],
        "Figure 7": [beside(name, each, fixed) for name, each in list(lengths.items())[-number:]],
    }
