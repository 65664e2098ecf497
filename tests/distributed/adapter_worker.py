"""Models with adapters in pipelines, beside plain Trainer or one stage of ours on one process.

Beside what it logs, a run notes whether saved adapters give the same logits, and of every rank what it keeps for the
training (see `Holdings`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.planning.blocks import trained_elements
from hf_pipetransformer.splitters.quantized import prepare_quantized
from tests.distributed.launches import Layout, run_listed
from tests.distributed.scenarios import scenario
from tests.support.adapted import METHODS, adapted, base_of, data_of
from tests.support.trainings import End, end_of, our_arguments, plain_arguments


STEPS, SAVED_AT = 6, 4


@dataclass(frozen=True)
class AdapterCase:
    """One training.

    Args:
        family: of the model.
        method: of the adapters.
        options: of the pipeline.
        training: other options.
        is_added: the adapter is added to the model, not around it.
        layouts: K and R.
    """

    family: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    is_added: bool = False
    layouts: tuple[tuple[int, int], ...] = ((2, 1),)

    @property
    def freezes(self) -> bool:
        """Whether layers freeze, which plain Trainer does not do."""
        return "freeze_policy" in self.options


FROZEN = {"freeze_policy": "fixed", "freeze_at": "2:1,4:3", "activation_cache": "on", "elastic": True}
EVERYWHERE = ((2, 1), (2, 2), (4, 1))
ON_EVERY_CHANGE = {
    "gpt2-dora": AdapterCase("gpt2", "dora", training={"gradient_accumulation_steps": 2}, layouts=EVERYWHERE),
    "bert-lora": AdapterCase("bert", "lora", layouts=EVERYWHERE),
    "gpt2-frozen": AdapterCase("gpt2", "lora", FROZEN, layouts=EVERYWHERE),
    "nf4": AdapterCase("llama-nf4", "lora", layouts=EVERYWHERE),
    "nf4-frozen": AdapterCase("llama-nf4", "lora", FROZEN, layouts=EVERYWHERE),
    "int8-frozen": AdapterCase("llama-int8", "lora", FROZEN, layouts=EVERYWHERE),
}
OTHERS = {
    "bert-added": AdapterCase("bert", "lora", is_added=True),
    "bert-zero-bubble": AdapterCase("bert", "dora", {"pipeline_schedule": "zb_h1"}),
    "bert-recomputed": AdapterCase("bert", "lora", {"pipeline_checkpoint": "always"}),
    "llama-smoothed": AdapterCase("llama", "lora", training={"label_smoothing_factor": 0.1}),
    "llama-slices": AdapterCase("llama", "lora", {"pipeline_schedule": "token", "pipeline_token_slices": "4"}),
    "llama-upper-stored": AdapterCase("llama", "upper", {"activation_cache": "on"}),
    "gpt2-ends": AdapterCase("gpt2", "ends", layouts=EVERYWHERE),
    "gpt2-whole-ends": AdapterCase("gpt2", "whole-ends"),
    "fp4-upper-stored": AdapterCase("llama-fp4", "upper", {"activation_cache": "on"}),
    # One micro-batch: in bfloat16 products of parts of a batch differ.
    "qwen2-nf4": AdapterCase("qwen2-nf4", "lora", {"pipeline_parallel_num_microbatches": 1}, layouts=((2, 1), (4, 1))),
    "qwen2-float32": AdapterCase("qwen2-float32", "lora", layouts=EVERYWHERE),
    "qwen2-float32-frozen": AdapterCase("qwen2-float32", "lora", FROZEN, layouts=EVERYWHERE),
    "int8": AdapterCase("llama-int8", "lora", layouts=EVERYWHERE),
    "int8-upper-stored": AdapterCase("llama-int8", "upper", {"activation_cache": "on"}),
    "qwen2-int8": AdapterCase("qwen2-int8", "biases", {"pipeline_parallel_num_microbatches": 1}, {"bf16": True}),
    **{f"llama-{method}": AdapterCase("llama", method) for method in METHODS},
}
CASES = ON_EVERY_CHANGE | OTHERS


class Holdings(TrainerCallback):
    """Notes at the end of a step what a rank keeps beside the weights: elements of gradients and optimizer state."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.found: dict[str, Any] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        store = self.trainer.pipeline_run.pipelined.pipeline.stage.store
        self.found["gradients"] = sum(p.grad.numel() for p in store.held().values() if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        pipeline = self.trainer.pipeline_run.pipelined.pipeline
        stage, costs = pipeline.stage, pipeline.start_up.plans.costs.blocks
        states = optimizer.optimizer.state.values()
        self.found |= {
            "moments": sum(value.numel() for state in states for value in state.values() if value.dim()),
            "reduced": sum(view.numel() for bucket in stage.reducer.buckets for view in bucket.views),
            "has_replicas": stage.groups.num_replicas > 1,
            "weights": sum(p.numel() for p in stage.store.held().values()),
            "planned": trained_elements(stage.layout, costs)[stage.groups.position],
            "adapters": sum(
                p.numel() for name, p in stage.store.held().items() if p.requires_grad and stage.owns_state_of(name)
            ),
        }


def note_what_is_held(trainer: Any, held: list[int]) -> None:
    """When rank 0 saves: weights of the model that lie there then, in elements."""
    save = trainer.model.save_pretrained

    @wraps(save)
    def noting(*args: Any, **kwargs: Any) -> None:
        held.append(sum(p.numel() for p in trainer.model.parameters() if not p.is_meta))
        save(*args, **kwargs)

    trainer.model.save_pretrained = noting


def make_trainer(case: AdapterCase, output: Path, layout: Layout | None, is_plain: bool = False) -> Any:
    options = {
        "max_steps": STEPS, "learning_rate": 1e-2, "seed": 3, "save_strategy": "steps", "save_steps": SAVED_AT,
        **case.training,
    }  # fmt: skip
    model, data = adapted(case.family, case.method, case.is_added), data_of(case.family)
    if is_plain:
        trainer = Trainer(model, plain_arguments(output, **options), **data)
        if case.family == "bert":
            trainer.model_accepts_loss_kwargs = False  # transformers#47688
        return trainer
    own = {"activation_cache": "off", **case.options}
    args = our_arguments(output, 1 if layout is None else layout[0], **options, **own)
    return PipeTransformerTrainer(model, args, **data)


def loaded(case: AdapterCase, folder: Path) -> Any:
    """What PEFT, or transformers, makes of saved adapters."""
    model = base_of(case.family)
    if not case.is_added:
        return PeftModel.from_pretrained(model, folder)
    model.load_adapter(str(folder))
    return model


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    # As the trained model is: in inference bitsandbytes would multiply in bfloat16 on some CPUs.
    prepare_quantized(model)
    with torch.no_grad():
        return model.eval()(**batch).logits


def train(name: str, layout: Layout | None, output: Path) -> End:
    case = CASES[name]
    trainer = make_trainer(case, output, layout, is_plain=layout is None and not case.freezes)
    holdings = Holdings(trainer)
    if layout is not None:
        trainer.add_callback(holdings)
    held: list[int] = []
    note_what_is_held(trainer, held)
    trainer.train()
    trainer.save_model()
    values, _ = end_of(trainer, held_at_saves=held, kept=holdings.found)
    if trainer.is_world_process_zero():
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        values["loads"] = torch.equal(logits(loaded(case, output), batch), logits(trainer.model, batch))
    return values, {}  # The weights that train are in the saved adapters.


@scenario
def run_all(folder: Path, listed: str) -> None:
    run_listed(folder, listed, train)
