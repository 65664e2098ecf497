"""Token slices beside whole sequences, on this machine.

    torchrun --standalone --nproc_per_node 2 scripts/benchmark_tokens.py --output benchmarks/tokens.json

A GPT-2 of 6 layers x 384 on K=world size stages, forward and backward of one batch, no optimizer, real computation.
Contenders: `1f1b` at each M that divides the batch, S equal slices, and the slices planned from times measured here.
They alternate round by round; medians and the spread are printed. Costs of slices are fitted with two formulas, ours
and the one of TeraPipe (section 3.3), to the same measurements, and their errors set side by side.

Two processes on two cores: the ideal is below 2; a longer pipeline needs more devices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from benchmark_pipeline import finish, machine, probe, report, summary, timed
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.batches import count_items
from hf_pipetransformer.engine.losses import LossRule
from hf_pipetransformer.engine.timing import StepMeter
from hf_pipetransformer.planning.planner import PipelineShape, plan_layout
from hf_pipetransformer.planning.slice_costs import SliceTime, TokenCosts
from hf_pipetransformer.planning.token_plans import SlicePlanner
from hf_pipetransformer.runtime.execution import LoaderBatch, StageRunner
from hf_pipetransformer.runtime.stage import Stage, StageSettings
from hf_pipetransformer.runtime.wiring import make_engine, start_stage
from hf_pipetransformer.schedules import find_schedule
from hf_pipetransformer.selftest.runs import SavedBytes
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.startup.costs import measure_slices, slice_times
from hf_pipetransformer.startup.model import ProbeTarget


VOCABULARY, HIDDEN = 5000, 384
EQUAL_SLICES = (2, 4, 8)


def gpt2(num_samples: int, length: int) -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=length, n_embd=HIDDEN, n_layer=6, n_head=6, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(5, VOCABULARY, (num_samples, length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def stage_of(model: GPT2LMHeadModel, found: Probe, topology: Topology) -> Stage:
    """This rank's part of as many stages as there are processes."""
    shape = PipelineShape(topology.world_size, 1, 1, "1f1b")
    layout = plan_layout(found.block_flops, found.structure.cut_positions(), shape)
    settings = StageSettings(found, topology, torch.device("cpu"), 300.0, "never", StepMeter(torch.device("cpu")))
    return start_stage(model, find_splitter(model), layout, settings, is_training=True)


def kept_bytes(topology: Topology, samples: int = 8, length: int = 512, num_slices: int = 4) -> dict[str, Any]:
    """What the first stage keeps for the backward at most, by batch slices; a single one keeps everything."""
    model, inputs = gpt2(samples, length)
    found = probe(model, {key: value[:, :32] for key, value in inputs.items()})
    stage = stage_of(model, found, topology)
    most = {}
    for count in (1, 2, 4, 8):
        step = step_of(stage, model, found, inputs, count, (length // num_slices,) * num_slices)
        saved = SavedBytes(SimpleNamespace(model=model, add_callback=lambda _: None))  # type: ignore[arg-type]
        with stage.active():
            step()
            saved.on_step_begin(None, None, None)
            with saved.hooks():
                step()
        most[f"{count} batch slices of {num_slices}"] = round(saved.most / 2**20, 1)
    return {"first stage, MiB": most}


def step_of(
    stage: Stage, model: GPT2LMHeadModel, found: Probe, inputs: dict[str, Any], m: int, lengths: tuple[int, ...]
) -> Callable[[], Any]:
    """One forward and backward of a batch, cut into `m` batch slices of token slices of these lengths."""
    is_sliced = len(lengths) > 1
    layout = replace(
        stage.layout, schedule="token" if is_sliced else "1f1b", num_microbatches=m,
        token_slices=(lengths,) if is_sliced else (),
    )  # fmt: skip
    engine = make_engine(stage.view, layout, stage.groups, stage.settings)
    runner = StageRunner(replace(stage, layout=layout, engine=engine), found.activation, LossRule.MEAN, True)
    num_items = count_items(inputs, shifts_labels=True)
    batch = LoaderBatch(inputs, lambda part: model(**part).loss, num_items)

    def step() -> torch.Tensor:
        model.zero_grad()
        return runner.train(batch, is_last_batch=False)

    return step


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


def errors(times: list[SliceTime], costs: TokenCosts) -> dict[str, float]:
    return {"ours": round(costs.error, 4), "paper's": round(error_of_the_papers_formula(times), 4)}


def one_setting(samples: int, length: int, rounds: int, topology: Topology) -> dict[str, Any]:
    world = topology.world_size
    model, inputs = gpt2(samples, length)
    found = probe(model, {key: value[:, :32] for key, value in inputs.items()})
    target = ProbeTarget(
        model, find_splitter(model), inputs, lambda given, _: model(**given).loss,
        lambda given: count_items(given, shifts_labels=True),
    )  # fmt: skip
    costs = TokenCosts(**topology.decide(lambda: measure_slices(target, found.structure, LossRule.MEAN).as_event()))
    times = slice_times(target, found.structure, LossRule.MEAN) if topology.rank == 0 else []
    stage = stage_of(model, found, topology)
    start = time.perf_counter()
    plan = topology.decide(lambda: list(_planned(costs, length, samples, world)))
    planning = time.perf_counter() - start
    cuts = {f"1f1b M={m}": (m, (length,)) for m in range(1, samples + 1) if samples % m == 0}
    counts = sorted({1, samples}) if samples <= world else [samples]
    cuts |= {f"S={s} M={m}": (m, (length // s,) * s) for s in EQUAL_SLICES for m in counts}
    cuts["planned"] = (int(plan[0]), tuple(plan[1]))
    planner = SlicePlanner(find_schedule("token"), costs, samples, world)
    predicted = {name: planner.seconds(lengths, -(-samples // m), m) for name, (m, lengths) in cuts.items()}
    contenders = {name: step_of(stage, model, found, inputs, *cut) for name, cut in cuts.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with stage.active():
        losses = [float(step()) for step in contenders.values()]
    if stage.groups.is_last:
        assert max(losses) - min(losses) <= 1e-5 * max(losses), f"the contenders compute different losses: {losses}"
    for index in range(rounds):
        names = list(contenders)
        for name in names if index % 2 else reversed(names):
            with stage.active():
                seconds[name].append(timed(contenders[name], 1))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    whole = min((name for name in medians if name.startswith("1f1b")), key=medians.__getitem__)
    equal = min((name for name in medians if name.startswith("S=")), key=medians.__getitem__)
    return {
        "planned": {
            "M": cuts["planned"][0],
            "slices": list(cuts["planned"][1]),
            "seconds to plan": round(planning, 4),
        },
        "predicted seconds": {name: round(each, 4) for name, each in predicted.items()},
        "seconds": {name: summary(values) for name, values in seconds.items()},
        f"planned over {whole}": summary([a / b for a, b in zip(seconds[whole], seconds["planned"], strict=True)]),
        f"planned over {equal}": summary([a / b for a, b in zip(seconds[equal], seconds["planned"], strict=True)]),
        "largest error of the costs": errors(times, costs) if times else {},
    }


def _planned(costs: TokenCosts, length: int, samples: int, world: int) -> tuple[int, list[int]]:
    plan = SlicePlanner(find_schedule("token"), costs, samples, world).choose(length)
    return plan.num_microbatches, list(plan.lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of alternating contenders")
    parser.add_argument(
        "--settings", nargs="+", default=["1x1024", "2x1024", "1x2048", "8x1024", "2x2048"],
        help="sequences of a batch x tokens of a sequence",
    )  # fmt: skip
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerate.PartialState()
    topology = Topology(timeout=300, local_world_size=dist.get_world_size())
    results: dict[str, Any] = {"machine": machine(), "memory": kept_bytes(topology)}
    report("memory", results["memory"])
    for setting in options.settings:
        samples, length = map(int, setting.split("x"))
        name = f"batch {samples}, {length} tokens"
        results[name] = one_setting(samples, length, options.rounds, topology)
        report(name, results[name])
    finish(options.output, results)


if __name__ == "__main__":
    main()
