"""Host memory of a step by micro-batches in flight, and of an evaluation by micro-batches and samples.

Llamas with 32,000 words and random weights, two processes, one stage each; anonymous memory, the most of the two ranks
where not said otherwise. Under bf16 autocast with GPipe all micro-batches are in flight before the first backward:
growth up to there is counted in bfloat16 copies of the weights of the stage's matrix products. An evaluation of a tiny
Llama has micro-batches of 2 x 128 tokens, whose float32 logits have 31 MiB; a small one comes first.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from .measure import RETURNS_FREED, PeakMemory, Settings, anonymous_bytes, experiment, launch_all, report
from .memory import MODELS, NUM_WORDS, kept, revision
from .training import Timed, make_trainer


ASKED = {
    "bfloat16 copies in flight": (1, 2, 4), "evaluation, losses only, MiB": (1, 4, 16),
    "evaluation with metrics, MiB": (8, 16, 32),
}  # fmt: skip
"""Numbers of micro-batches, with metrics of samples."""


def rows_of(num_samples: int, num_tokens: int) -> list[dict[str, torch.Tensor]]:
    """Samples of so many tokens."""
    words = torch.arange(num_samples * num_tokens).view(num_samples, num_tokens) % NUM_WORDS
    return [{"input_ids": row, "labels": row} for row in words]


def trainer_of(model: str, batch: int, num_microbatches: int, given: dict[str, Any], **options: Any) -> Any:
    """A trainer of two stages under GPipe."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=NUM_WORDS, **MODELS[model]))
    return make_trainer(
        {"model": llama, **given}, batch, Timed, pipeline_parallel_size=2, pipeline_schedule="gpipe",
        activation_cache="off", pipeline_parallel_num_microbatches=num_microbatches, **options,
    )  # fmt: skip


class Products(TrainerCallback):
    """Memory at the matrix products of the second step, of which GPipe runs all forwards before the first backward."""

    def __init__(self) -> None:
        self.first = self.most = 0
        self.layers: set[nn.Linear] = set()
        self._is_on = False
        nn.modules.module.register_module_forward_pre_hook(self._before)
        nn.modules.module.register_module_forward_hook(self._after)

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        self._is_on = state.global_step == 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._is_on = False

    def _before(self, layer: nn.Module, given: Any) -> None:
        if self._is_on and isinstance(layer, nn.Linear) and not self.first:
            self.first = anonymous_bytes()

    def _after(self, layer: nn.Module, given: Any, product: Any) -> None:
        if self._is_on and isinstance(layer, nn.Linear):
            self.layers.add(layer)
            self.most = max(self.most, anonymous_bytes())


def copies_in_flight(num_microbatches: int) -> float:
    """Growth up to the first backward with micro-batches of eight tokens, one rank's."""
    products = Products()
    # A batch has at least one sample of each process, and all micro-batches have the same number of tokens.
    batch = max(num_microbatches, 2)
    given = {"train_dataset": rows_of(64, 8 * num_microbatches // batch), "callbacks": [products]}
    trainer_of("120M", batch, num_microbatches, given, max_steps=2, bf16=True).train()
    copy = 2 * sum(layer.weight.numel() for layer in products.layers)
    return round((products.most - products.first) / copy, 3)


def added_by_evaluation(num_samples: int, num_microbatches: int, has_metrics: bool) -> int:
    """MiB at the most of a second evaluation beyond what there was before it, micro-batches of two samples."""
    metrics = (lambda given: {"rows": len(given.label_ids)}) if has_metrics else None
    data = rows_of(num_samples, 128)
    trainer = trainer_of("tiny", 2 * num_microbatches, num_microbatches, {"compute_metrics": metrics})
    trainer.evaluate(data[:2])
    memory = PeakMemory("evaluation")
    trainer.evaluate(data)
    memory.end()
    return round(memory.peaks["evaluation"] / 2**20)


@experiment("batch_memory.json", minutes=6, quick_minutes=2)
def batch_memory(settings: Settings) -> dict[str, Any]:
    """Host memory of a step by micro-batches in flight, and of an evaluation by micro-batches and samples, K=2."""
    found: dict[str, Any] = {name: {} for name in ASKED}
    for name, numbers in ASKED.items():
        for number in settings.of(numbers, numbers[-1:]):
            if name.startswith("bfloat16"):
                ranks = launch_all(copies_in_flight, 2, number, environment=RETURNS_FREED)
            else:
                sizes = (number, 2, True) if "metrics" in name else (2 * number, number, False)
                ranks = launch_all(added_by_evaluation, 2, *sizes, environment=RETURNS_FREED)
            found[name][str(number)] = ranks if "metrics" in name else max(ranks)
            report(name, found[name])
    return {**kept("batch_memory.json"), "new": {**found, "revision": revision()}}
