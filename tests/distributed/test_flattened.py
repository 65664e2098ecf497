"""Batches whose samples stand in one row give in any pipeline what they give as one row in plain Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DataCollatorWithFlattening, Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from tests.distributed.launches import Layout, Outcome, Run, assert_trained_alike, launches_of, run_listed, slow_unless
from tests.distributed.scenarios import WORLD_SIZE, scenario
from tests.support.adapted import lora
from tests.support.comparison import far_tensors
from tests.support.decoders import make_decoder, make_rows
from tests.support.models import is_key_bias
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


# Four batches an epoch; the last one has one sample, so that a second replica has none.
NUM_ROWS, NUM_EVALUATED, GLOBAL_BATCH, STEPS = 25, 11, 8, 8
COLLATORS = {
    "positions": DataCollatorWithFlattening(),
    "everything": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
}


BY_LENGTHS = "by_lengths"


def attend_by_lengths(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Attend inside each sequence as the kernels of FlashAttention-2 for varying lengths do, from what they read."""
    assert attention_mask is None
    bounds, others = named["cu_seq_lens_q"], named["cu_seq_lens_k"]
    assert bounds.dtype is torch.int32
    assert bounds[0] == 0
    assert bounds[-1] == query.shape[2]
    assert torch.equal(bounds, others)
    assert named["max_length_q"] == named["max_length_k"] == int(bounds.diff().max())
    assert type(named["max_length_q"]) is int
    parts = [
        scaled_dot_product_attention(
            *(each[:, :, start:stop] for each in (query, key, value)),
            is_causal=True, scale=named["scaling"], enable_gqa=True,
        )
        for start, stop in pairwise(bounds.tolist())
    ]  # fmt: skip
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(BY_LENGTHS, attend_by_lengths)


@dataclass(frozen=True)
class FlattenedCase:
    """One training.

    Args:
        model: one of `DECODERS`.
        layout: K and R.
        options: of the pipeline.
        collator: one of `COLLATORS`.
        attention: implementation of it.
        has_adapters: LoRA is trained.
        accumulation: batches of a step.
        stops_at: step at which the run is interrupted and resumed.
        draws: samples are read at random, so that rank 0 reads for all.
    """

    model: str
    layout: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    collator: str = "positions"
    attention: str = "sdpa"
    has_adapters: bool = False
    accumulation: int = 1
    stops_at: int | None = None
    draws: bool = False

    @property
    def plain(self) -> FlattenedCase:
        """The same on one process as one row: by Trainer, or by the pipeline of one stage if layers freeze."""
        kept = {key: value for key, value in self.options.items() if key.startswith("freeze")}
        return replace(self, layout=(1, 1), options=kept, stops_at=None)

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


def in_parts(num: int, **options: Any) -> dict[str, Any]:
    return {"pipeline_parallel_num_microbatches": num, **options}


FROZEN = {"freeze_policy": "fixed", "freeze_at": "2:1,5:2"}

ON_ONE = {f"alone-{num}": FlattenedCase("llama", (1, 1), in_parts(num)) for num in (2, 5)}
ON_TWO = {
    "stages-3": FlattenedCase("llama", (2, 1), in_parts(3), "everything"),
    "stages-qwen2": FlattenedCase("qwen2", (2, 1), in_parts(5), accumulation=2),
    "replicas": FlattenedCase("llama", (1, 2), in_parts(2), "everything"),
    "adapters": FlattenedCase("llama", (2, 1), in_parts(4), has_adapters=True),
    "lengths": FlattenedCase("qwen2", (2, 1), in_parts(3), "everything", attention=BY_LENGTHS),
}
MANY = {
    **{f"stages-{num}": FlattenedCase("llama", (2, 1), in_parts(num)) for num in (1, 2, 4, 5, 6, 7, 8)},
    "replicas-qwen2": FlattenedCase("qwen2", (1, 2), in_parts(3), "everything", accumulation=2),
    "eager": FlattenedCase("llama", (2, 1), in_parts(3), attention="eager"),
    "gpt2": FlattenedCase("gpt2", (2, 1), in_parts(3)),
    "gemma2": FlattenedCase("gemma2", (2, 1), in_parts(3), attention="eager"),
    "recomputed": FlattenedCase("qwen2", (2, 1), in_parts(4, pipeline_checkpoint="always")),
    "zero-bubble": FlattenedCase("llama", (2, 1), in_parts(4, pipeline_schedule="zb_h1")),
    "frozen": FlattenedCase("qwen2", (2, 1), in_parts(4, **FROZEN)),
    "resumed": FlattenedCase("llama", (2, 1), in_parts(3), stops_at=3),
    "drawn": FlattenedCase("llama", (1, 2), in_parts(2), draws=True),
}
ON_FOUR = {
    "both": FlattenedCase("llama", (2, 2), in_parts(4), "everything"),
    "both-qwen2": FlattenedCase("qwen2", (2, 2), in_parts(3), accumulation=2),
    "long": FlattenedCase("llama", (4, 1), in_parts(8)),
    "long-frozen": FlattenedCase("qwen2", (4, 1), in_parts(8, **FROZEN)),
    "replicas-4": FlattenedCase("llama", (1, 4), in_parts(2)),
    "both-adapters": FlattenedCase("llama", (2, 2), in_parts(4), has_adapters=True),
    "both-resumed": FlattenedCase("qwen2", (2, 2), in_parts(4), stops_at=5),
    "both-drawn": FlattenedCase("llama", (2, 2), in_parts(3), draws=True),
}
OURS = ON_ONE | ON_TWO | MANY | ON_FOUR
CASES = OURS | {case.plain.name: case.plain for case in OURS.values()}


class Drawing(torch.utils.data.Dataset[Any]):
    """Rows that end at a random place."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        stop = int(torch.randint(5, len(self.rows[index]["input_ids"]), ()))
        return {name: values[:stop] for name, values in self.rows[index].items()}


class Stop(TrainerCallback):
    """Ends a training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def count_right(prediction: Any) -> dict[str, float]:
    """Return the share of tokens that are told right, and how many there are."""
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    told, wanted = logits[:, :-1].argmax(-1), labels[:, 1:]
    counted = wanted != -100
    return {"right": float((told == wanted)[counted].double().mean()), "tokens": float(counted.sum())}


def next_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return what is told of each token but the first, as losses do: one value less, zero where none is told."""
    return torch.where(labels[:, 1:] == -100, 0, logits[:, :-1].argmax(-1)).float()


def make_trainer(case: FlattenedCase, output: Path) -> Trainer:
    torch.manual_seed(0)
    model, rows = make_decoder(case.model, attn_implementation=case.attention), make_rows(NUM_ROWS)
    if case.has_adapters:
        model = get_peft_model(model, lora("llama"))
    options = {
        "max_steps": STEPS, "per_device_eval_batch_size": GLOBAL_BATCH // WORLD_SIZE, "learning_rate": 1e-3, "seed": 3,
        "gradient_accumulation_steps": case.accumulation,
        "save_strategy": "no" if case.stops_at is None else "steps", "save_steps": case.stops_at or 1,
    }  # fmt: skip
    data = {
        "train_dataset": Drawing(rows) if case.draws else rows,
        "eval_dataset": make_rows(NUM_EVALUATED),
        "data_collator": COLLATORS[case.collator],
        "compute_metrics": count_right,
    }
    if case.layout == (1, 1) and not case.options:
        plain = Trainer(model, plain_arguments(output, **options), **data)
        plain.model_accepts_loss_kwargs = True  # A PeftModel hides that its model does.
        return plain
    args = our_arguments(output, case.layout[0], **options, **{"activation_cache": "off", **case.options})
    return PipeTransformerTrainer(model, args, **data)


def train(name: str, _layout: Layout | None, output: Path) -> End:
    case = CASES[name]
    make = partial(make_trainer, case, output)
    trainer = make()
    if case.stops_at is not None:
        trainer.add_callback(Stop(case.stops_at))
        trainer.train()
        trainer = make()
    trainer.train(resume_from_checkpoint=case.stops_at is not None)
    names = ("eval_loss", "eval_right", "eval_tokens")
    metrics = {name: value for name, value in trainer.evaluate().items() if name in names}
    values, tensors = end_of(trainer, metrics=metrics)
    predicted = trainer.predict(make_rows(NUM_EVALUATED))
    tensors["predictions"] = torch.as_tensor(predicted.predictions).clone()
    tensors["labels"] = torch.as_tensor(predicted.label_ids).clone()
    trainer.preprocess_logits_for_metrics, trainer.compute_metrics = next_tokens, None
    tensors["next tokens"] = torch.as_tensor(trainer.predict(make_rows(NUM_EVALUATED)).predictions).clone()
    return values, tensors


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)


TOLERANCE = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

launches = launches_of(run_all)


def runs() -> list[Any]:
    named = {name: Run(name, case.layout, case.plain.name) for name, case in OURS.items()}
    return [slow_unless(name in ON_ONE | ON_TWO, run) for name, run in named.items()]


@pytest.mark.parametrize("run", runs())
def test_a_row_cut_into_parts_gives_what_it_gives_whole(ours: Outcome, plain: Outcome, run: Run) -> None:
    case = OURS[run.case]
    assert len(ours.logged("loss")) == STEPS
    assert_trained_alike(ours, plain, TOLERANCE, ignored=is_key_bias)
    assert ours.ranks[0]["metrics"] == pytest.approx(plain.ranks[0]["metrics"], rel=TOLERANCE)
    if "freeze_policy" not in case.options:
        layout = ours.ranks[0]["layout"]
        assert (layout["num_stages"], layout["num_replicas"]) == case.layout
        assert layout["num_microbatches"] == case.options["pipeline_parallel_num_microbatches"]
    names = ("predictions", "labels", "next tokens")
    found, expected = ({name: outcome.tensors[name] for name in names} for outcome in (ours, plain))
    for name, value in expected.items():
        # What stands for padding is no number to compare.
        assert torch.equal(found[name] == -100, value == -100), name
    found, expected = ({n: v.where(v != -100, 0) for n, v in tensors.items()} for tensors in (found, expected))
    assert far_tensors(found, expected, TOLERANCE) == {}
