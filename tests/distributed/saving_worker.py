"""Train and save with a pipeline, load with plain tools, and weigh what each rank holds."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, ViTForImageClassification

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.options.arguments import RECOMPUTE_MODES
from hf_pipetransformer.runtime.ownership import is_whole
from tests.distributed.scenarios import RANK, WORLD_SIZE, scenario
from tests.gpu.runs import SavedBytes
from tests.support.models import NUM_LAYERS, build_model, collate, make_dataset, vit_config
from tests.support.trainings import our_arguments


MODELS = ["bert_sequence", "bert_masked", "vit"]
GATHERED = "bert_sequence"
"""Model that is whole on rank 0 while it is saved, as its trainer has code of its own there."""
NUM_STEPS = 6
EVAL_BATCH = 4
NUM_EVAL_SAMPLES = 13
NUM_VIT_LAYERS = 12


def evaluation_set(name: str):
    return make_dataset(name, NUM_EVAL_SAMPLES, seed=1)


def arguments(output: Path, num_stages: int, **changes: Any) -> PipeTransformerArguments:
    options = {
        "per_device_eval_batch_size": EVAL_BATCH // WORLD_SIZE,
        "learning_rate": 1e-3,
        "max_steps": NUM_STEPS,
        "pipeline_parallel_num_microbatches": 2,
    }
    return our_arguments(output, num_stages, **options | changes)


def trainer_of(model: PreTrainedModel, name: str, args: TrainingArguments, **changes: Any) -> PipeTransformerTrainer:
    return PipeTransformerTrainer(
        model=model, args=args, train_dataset=make_dataset(name, 29), data_collator=collate, **changes
    )


@torch.no_grad()
def logits_of(model: PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    """The model called directly, in the batches of an evaluation on one process."""
    model.eval()
    rows = list(evaluation_set(name))
    batches = [collate(rows[start : start + EVAL_BATCH]) for start in range(0, len(rows), EVAL_BATCH)]
    return {f"batch{index}": model(**batch).logits.clone() for index, batch in enumerate(batches)}


def unpadded(name: str, predictions: Any) -> dict[str, torch.Tensor]:
    """Predictions of a trainer cut into its batches again, without the padding between batches."""
    rows = list(evaluation_set(name))
    parts = {}
    for index, start in enumerate(range(0, len(rows), EVAL_BATCH)):
        part = torch.from_numpy(predictions[start : start + EVAL_BATCH].copy())
        if part.ndim == 3:
            part = part[:, : collate(rows[start : start + EVAL_BATCH])["input_ids"].shape[1]]
        parts[f"batch{index}"] = part.contiguous()
    return parts


class ReadWhole(TrainerCallback):
    """Reads the model at each checkpoint: through what it was not given for that, and as the whole one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trainer: PipeTransformerTrainer | None = None
        self.refusals: list[str] = []
        self.logits: dict[str, torch.Tensor] = {}

    def on_save(self, *_args: Any, **kwargs: Any) -> None:
        try:
            unseen = "model"  # Under a name, so that the code does not show it.
            kwargs[unseen].num_parameters()
        except ValueError as error:
            self.refusals.append(str(error))
        self.trainer.args.push_to_hub = True
        self.trainer.save_model(str(Path(self.trainer.args.output_dir) / "pushed"))
        self.trainer.args.push_to_hub = False
        with self.trainer.whole_model():
            self.logits = logits_of(self.trainer.model, self.name)


class Processing:
    """What is saved after the model, and notes whether all weights are on this rank then."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.was_whole: list[bool] = []

    def save_pretrained(self, _folder: str) -> None:
        self.was_whole.append(is_whole(self.model))


class Pushes(PipeTransformerTrainer):
    """Saves twice where Trainer pushes: a push saves the model again, inside of the call that saves it."""

    def push_to_hub(self, *_args: Any, **_kwargs: Any) -> None:
        self.save_model(_internal_call=True)


class SavesMore(Pushes):
    """With code of its own where weights are saved, on one rank alone."""

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self.args.should_save:
            super()._save(*args, **kwargs)


@scenario
def train(folder: Path, num_stages: int) -> None:
    for name in MODELS:
        args = arguments(folder / name, num_stages, save_strategy="steps", save_steps=3)
        read, model = ReadWhole(name), build_model(name, seed=5)
        processing = Processing(model)
        kind = SavesMore if name == GATHERED else Pushes
        trainer = kind(
            model=model, args=args, train_dataset=make_dataset(name, 29), data_collator=collate, callbacks=[read],
            processing_class=processing,
        )  # fmt: skip
        read.trainer = trainer
        trainer.train()
        if RANK == 0:
            (folder / name / "was_whole.json").write_text(json.dumps(processing.was_whole))
        save_file(read.logits, folder / name / f"logits_in_training.rank{RANK}.safetensors")
        (folder / name / f"refusals.rank{RANK}.json").write_text(json.dumps(read.refusals))
        trainer.save_model(str(folder / name / "saved"))
        logits = logits_of(trainer.model, name)
        if RANK == 0:
            save_file(logits, folder / name / "logits_after_training.safetensors")


@scenario
def load(folder: Path) -> None:
    for name in MODELS:
        found = {}
        for source in ("saved", f"checkpoint-{NUM_STEPS}", "checkpoint-3"):
            model, information = type(build_model(name)).from_pretrained(
                folder / name / source, output_loading_info=True
            )
            found[source] = {key: sorted(map(str, value)) for key, value in information.items()}
            save_file(
                {key: value.detach().clone() for key, value in model.named_parameters()},
                folder / name / f"weights_{source}.safetensors",
            )
        (folder / name / "loading.json").write_text(json.dumps(found))

        fresh = type(model).from_pretrained(folder / name / "saved")
        save_file(logits_of(fresh, name), folder / name / "logits_loaded.safetensors")

        plain_args = TrainingArguments(
            str(folder / name / "plain"), per_device_eval_batch_size=EVAL_BATCH, report_to="none", use_cpu=True
        )
        plain = Trainer(model=fresh, args=plain_args, data_collator=collate).predict(evaluation_set(name))
        save_file(unpadded(name, plain.predictions), folder / name / "logits_plain_trainer.safetensors")

        args = arguments(folder / name / "ours", 1, pipeline_parallel_num_microbatches=1)
        ours = trainer_of(type(model).from_pretrained(folder / name / "saved"), name, args)
        predicted = ours.predict(evaluation_set(name)).predictions
        save_file(unpadded(name, predicted), folder / name / "logits_pipeline_trainer.safetensors")


class Weigh(TrainerCallback):
    """Weighs a rank between optimizer step and zero_grad, when parameters, gradients and state all exist."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, int]] = {}
        self.trainer: Trainer | None = None

    def on_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        named = {
            name: parameter
            for name, parameter in self.trainer.model.named_parameters()
            if parameter.device.type != "meta" and parameter.numel()
        }
        gradients = [parameter.grad for parameter in named.values() if parameter.grad is not None]
        states = [
            value
            for state in self.trainer.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        ]
        self.found = {
            "parameters": {name: num_bytes([parameter]) for name, parameter in named.items()},
            "totals": {
                # Every parameter that lives in this process, whoever holds it.
                "parameters": num_bytes(living_parameters()),
                "gradients": num_bytes(gradients),
                "optimizer": num_bytes(states),
            },
        }


def living_parameters() -> list[nn.Parameter]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is nn.Parameter and found.device.type != "meta"]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind some tensors, each storage counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def even_plan(folder: Path, num_layers: int, num_stages: int, num_microbatches: int, schedule: str) -> str:
    """A plan of one layout, its stages equally long: where they are cut must not hang on the clock."""
    num_blocks = 2 * num_layers + 2
    layout = {
        "num_layers": num_layers,
        "num_frozen_layers": 0,
        "num_stages": num_stages,
        "num_replicas": 1,
        "boundaries": [round(stage * num_blocks / num_stages) for stage in range(num_stages + 1)],
        "num_microbatches": num_microbatches,
        "schedule": schedule,
    }
    path = folder / f"plan-{num_layers}-{schedule}.jsonl"
    unfinished = path.with_suffix(f".rank{RANK}")
    unfinished.write_text(json.dumps({"event": "run", "step": 0, "layout": layout}) + "\n")
    return str(unfinished.rename(path))


@scenario
def memory(folder: Path, num_stages: int) -> None:
    # One after the other, so that no model is in memory while another is weighed.
    builders: dict[str, Callable[[], PreTrainedModel]] = {
        "vit": lambda: ViTForImageClassification(vit_config(NUM_VIT_LAYERS)),
        "bert_masked": lambda: build_model("bert_masked"),
    }
    for name, build in builders.items():
        model = build()
        whole = {key: num_bytes([value]) for key, value in model.named_parameters()}
        weigh = Weigh()
        plan = even_plan(folder, model.config.num_hidden_layers, num_stages, 2, "1f1b")
        args = arguments(folder / f"{name}-output", num_stages, max_steps=2, layout_plan=plan)
        trainer = trainer_of(model, name, args, callbacks=[weigh])
        weigh.trainer = trainer
        del model
        trainer.train()
        layout = trainer.layout
        record = {
            **weigh.found,
            "whole": whole,
            "blocks": [list(layout.blocks_of(stage)) for stage in range(layout.num_stages)],
            "whole_again": {key: num_bytes([value]) for key, value in trainer.model.named_parameters()},
        }
        (folder / f"{name}.rank{RANK}.json").write_text(json.dumps(record))
        del trainer, weigh


@scenario
def recomputation(folder: Path, num_stages: int) -> None:
    """What a stage keeps for the backward under each mode, with four micro-batches."""
    for schedule in ("gpipe", "1f1b"):
        for mode in RECOMPUTE_MODES:
            plan = even_plan(folder, NUM_LAYERS, num_stages, 4, schedule)
            args = arguments(
                folder / "output",
                num_stages,
                max_steps=2,
                layout_plan=plan,
                pipeline_schedule=schedule,
                pipeline_checkpoint=mode,
            )
            trainer = trainer_of(build_model("vit"), "vit", args)
            count = SavedBytes(trainer)
            with count.hooks():
                trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            record = {"peak": count.most, "left": count.now, "losses": losses}
            (folder / f"{schedule}-{mode}.rank{RANK}.json").write_text(json.dumps(record))
