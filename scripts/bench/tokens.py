"""Token slices beside whole sequences: GPT-2 of 6 layers x 384 on two stages, forward and backward of one batch.

Contenders: `1f1b` at each M that divides the batch, S equal slices, and the slices that are planned from times
measured here. Costs of slices are fitted with two formulas, ours and the one of TeraPipe (section 3.3), to the same
measurements, and their errors are set side by side.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import count_items
from hf_pipetransformer.engine.losses import LossRule
from hf_pipetransformer.planning.slice_costs import SliceTime, TokenCosts
from hf_pipetransformer.planning.token_plans import SlicePlanner
from hf_pipetransformer.runtime.execution import LoaderBatch, StageRunner
from hf_pipetransformer.runtime.wiring import make_engine
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.selftest.runs import SavedBytes
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Structure
from hf_pipetransformer.startup.costs import measure_slices, slice_times
from hf_pipetransformer.startup.model import ProbeTarget

from .measure import Settings, alternate, experiment, launch, ratios, report, seconds_of, summary
from .models import gpt2
from .stages import Split, check_model, make_topology, require_equal_losses, split_model


SETTINGS = ((1, 512), (1, 1024), (1, 2048), (4, 512), (4, 1024))
"""Sequences of a batch, and tokens of a sequence."""
EQUAL_SLICES = (2, 4, 8)
Cut = tuple[int, tuple[int, ...]]
"""Batch slices, and the lengths of the token slices of each."""
PLANNED = "planned"

count_targets = partial(count_items, shifts_labels=True)


def step_of(split: Split, inputs: dict[str, Any], cut: Cut) -> Callable[[], Any]:
    """One forward and backward of a batch that is cut so."""
    (stage, model, found), (m, lengths) = split, cut
    is_sliced = len(lengths) > 1
    layout = replace(
        stage.layout, schedule="token" if is_sliced else "1f1b", num_microbatches=m,
        token_slices=(lengths,) if is_sliced else (),
    )  # fmt: skip
    engine = make_engine(stage.view, layout, stage.groups, stage.settings)
    runner = StageRunner(replace(stage, layout=layout, engine=engine), found.activation, LossRule.MEAN, True)
    batch = LoaderBatch(inputs, lambda part: model(**part).loss, count_targets(inputs))

    def step() -> torch.Tensor:
        model.zero_grad()
        with stage.active():
            return runner.train(batch, is_last_batch=False)

    return step


def kept_bytes() -> dict[str, float]:
    """What the first stage keeps for the backward at most, by batch slices; a single one keeps everything."""
    model, inputs = gpt2(8, 512)
    split, most = split_model(model, check_model(model, inputs), make_topology()), {}
    for count in (1, 2, 4, 8):
        step = step_of(split, inputs, (count, (128,) * 4))
        saved = SavedBytes(SimpleNamespace(model=model, add_callback=lambda _: None))  # type: ignore[arg-type]
        step()
        saved.on_step_begin(None, None, None)
        with saved.hooks():
            step()
        most[f"{count} batch slices of 4"] = round(saved.most / 2**20, 1)
    return most


def error_of_the_papers_formula(times: list[SliceTime]) -> float:
    """Largest relative error of `t(x, 0)` as measured plus `a0 + a1 x + a2 L + a3 x L` for the context."""
    alone = {(each.sequences, each.tokens): each.seconds for each in times if not each.context}
    later = [each for each in times if each.context]
    rows = np.array([[1.0, each.tokens, each.context, each.tokens * each.context] for each in later])
    rows *= np.array([[each.sequences] for each in later])
    rest = np.array([each.seconds - alone[each.sequences, each.tokens] for each in later])
    seconds = np.array([each.seconds for each in later])
    rates, *_ = np.linalg.lstsq(rows / seconds[:, None], rest / seconds, rcond=None)
    return float(np.max(np.abs((rows @ rates - rest) / seconds)))


def measure_costs(
    model: nn.Module, structure: Structure, inputs: dict[str, Any], topology: Topology
) -> tuple[TokenCosts, dict[str, float]]:
    """Costs of slices of the whole model, and the largest relative errors of both formulas on rank 0."""
    target = ProbeTarget(model, find_splitter(model), inputs, lambda given, _: model(**given).loss, count_targets)
    costs = TokenCosts(**topology.decide(lambda: measure_slices(target, structure, LossRule.MEAN).as_event()))
    if topology.rank != 0:
        return costs, {}
    papers = error_of_the_papers_formula(slice_times(target, structure, LossRule.MEAN))
    return costs, {"ours": round(costs.error, 4), "paper's": round(papers, 4)}


def cuts_of(samples: int, length: int, num_stages: int, planned: Cut) -> dict[str, Cut]:
    """All contenders."""
    counts = sorted({1, samples}) if samples <= num_stages else [samples]
    return {
        **{f"1f1b M={m}": (m, (length,)) for m in range(1, samples + 1) if samples % m == 0},
        **{f"S={s} M={m}": (m, (length // s,) * s) for s in EQUAL_SLICES for m in counts},
        PLANNED: planned,
    }


def compare(samples: int, length: int, rounds: int) -> dict[str, Any]:
    """One setting: all contenders in turns."""
    topology, (model, inputs) = make_topology(), gpt2(samples, length)
    found = check_model(model, inputs)
    costs, errors = measure_costs(model, found.structure, inputs, topology)
    split = split_model(model, found, topology)
    planner = SlicePlanner(find_schedule("token"), costs, samples, topology.world_size)
    start = time.perf_counter()
    plan = planner.choose(length)
    planning = time.perf_counter() - start
    cuts = cuts_of(samples, length, topology.world_size, (plan.num_microbatches, tuple(plan.lengths)))
    steps = {name: step_of(split, inputs, cut) for name, cut in cuts.items()}
    require_equal_losses(split.stage, {name: step() for name, step in steps.items()})
    seconds = alternate({name: partial(seconds_of, step) for name, step in steps.items()}, rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    predicted = {name: planner.seconds(lengths, -(-samples // m), m) for name, (m, lengths) in cuts.items()}
    result = {
        "planned": {"M": plan.num_microbatches, "slices": list(plan.lengths), "seconds to plan": round(planning, 4)},
        "predicted seconds": {name: round(each, 4) for name, each in predicted.items()},
        "seconds": {name: summary(values) for name, values in seconds.items()},
        "largest error of the costs": errors,
    }
    for kind in ("1f1b", "S="):
        best = min((name for name in medians if name.startswith(kind)), key=medians.__getitem__)
        result[f"planned over {best}"] = summary(ratios(seconds[best], seconds[PLANNED]))
    return result


@experiment("tokens.json", minutes=10, quick_minutes=3)
def tokens(settings: Settings) -> dict[str, Any]:
    """Token slices, equal and planned, beside whole sequences, by batch and length (TeraPipe's Figures 5 to 9)."""
    results: dict[str, Any] = {"memory": {"first stage, MiB": launch(kept_bytes, 2)}}
    for samples, length in settings.of(SETTINGS, SETTINGS[:1]):
        name = f"batch {samples}, {length} tokens"
        results[name] = launch(compare, 2, samples, length, settings.of(5, 1))
        report(name, results[name])
    return results
