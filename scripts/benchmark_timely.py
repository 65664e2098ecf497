"""How long a step of freeze_policy='timely' takes, beside what its own linear programme predicts; two processes.

    torchrun --standalone --nproc_per_node 2 scripts/benchmark_timely.py --output benchmarks/timely.json

A ViT of three layers that is cut between layers only, so that one stage has one layer and the other two. A first run
measures and decides; a second one replays its shares and, in turns of some steps, none: K=2, for each schedule. The
seconds of a step run from the end of the step before to its own end; the first of each turn is left out.

With `--emulated` the model is tiny and its linear layers sleep, in the forward and for the gradients of input and of
weights, in proportion to their elements: what is measured hangs less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from benchmark_cache import merge
from benchmark_pipeline import summary
from torch import nn
from transformers import PrinterCallback, TrainerCallback, ViTConfig, ViTForImageClassification

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.report.events import EVENTS_FILE, read_events
from hf_pipetransformer.splitters.vit import ViTSplitter


BATCH, NUM_MICROBATCHES, STEPS_TO_DECIDE, TURN = 32, 8, 40, 7
SECONDS_PER_ELEMENT = 0.0004 / 48**2


class WholeLayers(ViTSplitter):
    """Cuts between layers only."""

    cuts_inside_layers = False


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def slow_down(model: nn.Module) -> None:
    """Let linear layers sleep instead of multiplying."""

    def forward(layer: nn.Linear, _given: Any, output: torch.Tensor) -> None:
        seconds = layer.weight.numel() * SECONDS_PER_ELEMENT
        time.sleep(seconds)
        if output.requires_grad:
            output.register_hook(lambda _gradient: time.sleep(seconds))

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(forward)
            layer.weight.register_post_accumulate_grad_hook(lambda p: time.sleep(p.numel() * SECONDS_PER_ELEMENT))


def train(folder: Path, schedule: str, steps: int, is_emulated: bool, **options: Any) -> list[float]:
    """Seconds of all steps but the first."""
    torch.manual_seed(0)
    hidden = 48 if is_emulated else 192
    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=hidden, num_hidden_layers=3, num_attention_heads=3,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    samples = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 10} for i in range(2 * BATCH)]
    args = PipeTransformerArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH // 2, max_steps=steps, learning_rate=1e-4,
        save_strategy="no", logging_steps=1000, report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, pipeline_parallel_size="2", pipeline_schedule=schedule,
        pipeline_parallel_num_microbatches=str(NUM_MICROBATCHES), **options,
    )  # fmt: skip
    clock, model = Clock(), ViTForImageClassification(config)
    if is_emulated:
        slow_down(model)
    trainer = PipeTransformerTrainer(
        model, args, train_dataset=samples, callbacks=[clock], splitter=WholeLayers()
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]


def benchmark(folder: Path, schedule: str, rounds: int, max_ratio: float, is_emulated: bool) -> dict[str, Any]:
    """Predicted and measured steps under one schedule."""
    first = folder / schedule
    train(
        first,
        schedule,
        STEPS_TO_DECIDE,
        is_emulated,
        freeze_policy="timely",
        freeze_warmup=0.2,
        freeze_max_ratio=max_ratio,
    )
    plan = first / "turns.jsonl"
    if dist.get_rank() == 0:
        events = read_events(str(first / EVENTS_FILE))
        chosen = next(event for event in events if event.get("what") == "skip")
        turns = [
            {**chosen, "step": number * TURN, "shares": chosen["shares"] if number % 2 else []}
            for number in range(2 * rounds + 2)
        ]
        plan.write_text("".join(json.dumps(event) + "\n" for event in [events[0], *turns]))
    dist.barrier()
    seconds = train(
        folder / f"{schedule} in turns", schedule, (2 * rounds + 2) * TURN, is_emulated, layout_plan=str(plan)
    )
    if dist.get_rank() != 0:
        return {}
    # The first two turns warm up; step 0 is not timed.
    found = [
        [seconds[at - 1] for at in range(number * TURN + 1, (number + 1) * TURN)]
        for number in range(2, 2 * rounds + 2)
    ]
    table: dict[str, Any] = {"layout": events[0]["layout"], "programme": chosen}
    for name, key, turns_of in (
        ("nothing skipped", "unskipped_step_s", found[::2]),
        ("shares skipped", "predicted_step_s", found[1::2]),
    ):
        medians, predicted = [statistics.median(turn) for turn in turns_of], chosen[key]
        measured = statistics.median(medians)
        table[name] = {
            "predicted s": round(predicted, 4),
            "measured s, medians of turns": summary(medians),
            "predicted over measured": round(predicted / measured, 4),
        }
    ratios = [
        statistics.median(plain) / statistics.median(skips)
        for plain, skips in zip(found[::2], found[1::2], strict=True)
    ]
    table["steps without skipping over steps with"] = {
        "measured": summary(ratios), "predicted": round(chosen["unskipped_step_s"] / chosen["predicted_step_s"], 4)
    }  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file; other pieces in it stay")
    parser.add_argument("--rounds", type=int, default=7, help="turns with skipping, and as many without")
    parser.add_argument("--freeze_max_ratio", type=float, default=0.5)
    parser.add_argument("--emulated", action="store_true", help="layers sleep")
    parser.add_argument("--only", nargs="*", default=["1f1b", "zb_h1"], help="schedules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = PartialState()
    with tempfile.TemporaryDirectory() as own:
        places: list[Any] = [own]
        dist.broadcast_object_list(places)
        for schedule in options.only:
            found = benchmark(Path(places[0]), schedule, options.rounds, options.freeze_max_ratio, options.emulated)
            if state.is_main_process:
                found["transformers"] = transformers.__version__
                merge(options.output, f"{schedule}{', emulated' * options.emulated}", found, state.num_processes)
                print(f"{schedule}: {json.dumps(found)}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
