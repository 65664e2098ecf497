"""Memory and time of the last stage of a Llama with many words, its head and loss in slices of the sequence."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from .measure import (
    RETURNS_FREED,
    PeakMemory,
    Settings,
    alternate,
    experiment,
    largest_difference,
    launch,
    launch_all,
    ratios,
    report,
    summary,
)
from .training import StepClock, losses_of, make_trainer


NUM_STAGES, NUM_TOKENS, BATCH, NUM_STEPS = 2, 64, 8, 4
SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 4}
MANY, FEW = 128_000, 256
"""Words of the vocabulary: logits of a micro-batch of 256 tokens take 131 MB in float32, and 0.3 MB."""
CONTENDERS = {"whole sequences": (MANY, 1), "4 slices": (MANY, 4), "8 slices": (MANY, 8), "few words": (FEW, 1)}
TIMED = ("whole sequences", "8 slices")


def run(words: int, slices: int, num_stages: int) -> dict[str, Any]:
    """Train a few steps; return the peak of the steps after the first beyond the stage's state, seconds and losses."""
    set_seed(0)
    tokens = torch.randint(FEW, (BATCH * NUM_STEPS, NUM_TOKENS))
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    state = StageState()
    memory = PeakMemory("start", state.bytes)
    clock = StepClock(memory)
    given = {"model": LlamaForCausalLM(LlamaConfig(vocab_size=words, **SHAPE)), "train_dataset": rows}
    trainer = make_trainer(
        {**given, "callbacks": [clock]}, BATCH, max_steps=NUM_STEPS, pipeline_parallel_size=num_stages,
        pipeline_parallel_num_microbatches=2, pipeline_head_slices=slices, pipeline_gather_at_end="never",
        activation_cache="off", logging_strategy="steps", logging_steps=1,
    )  # fmt: skip
    state.trainer = trainer
    trainer.add_callback(state)
    trainer.train()
    memory.end()
    return {
        "peak": memory.peaks["training"],
        "seconds": statistics.median(clock.seconds),
        "losses": losses_of(trainer),
    }


class StageState(TrainerCallback):
    """Bytes of the weights, gradients and optimizer state of this rank's stage; none before the first step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self._parameters: list[torch.nn.Parameter] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._parameters = [p for p in self.trainer.model.parameters() if not p.is_meta]

    def bytes(self) -> int:
        """Count them."""
        states = list(self.trainer.optimizer.state.values()) if self._parameters else []
        tensors = [*self._parameters, *(p.grad for p in self._parameters if p.grad is not None)]
        tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


def last_rank(name: str) -> dict[str, Any]:
    """What the rank with the head has measured, and the losses that the first rank has logged."""
    ranks = launch_all(run, NUM_STAGES, *CONTENDERS[name], NUM_STAGES, environment=RETURNS_FREED)
    return {**ranks[-1], "losses": ranks[0]["losses"]}


def times(rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Let whole sequences and slices take turns on one stage."""
    return alternate({name: partial(run, *CONTENDERS[name], 1) for name in TIMED}, rounds)


@experiment("head_slices.json", minutes=10, quick_minutes=4)
def head_slices(settings: Settings) -> dict[str, Any]:
    """Peak memory of the last of two stages of a Llama with 128,000 words, and time of a step, in slices."""
    found = {name: last_rank(name) for name in CONTENDERS}
    timed = launch(times, 1, settings.of(5, 1))
    whole, sliced = ([each["seconds"] for each in timed[name]] for name in TIMED)
    peaks = {name: each["peak"] for name, each in found.items()}
    results: dict[str, Any] = {
        name: {
            "peak beyond the state, MB": round(peak / 1e6, 1),
            "of the stage with few words": round(peak / peaks["few words"], 2),
            "largest relative difference of the losses": None
            if name == "few words"
            else largest_difference(found[name]["losses"], found["whole sequences"]["losses"]),
        }
        for name, peak in peaks.items()
    }
    results["time of a step on one stage, 8 slices over whole sequences"] = summary(ratios(sliced, whole))
    report("head in slices", results)
    return results
