"""Try everything that cannot work with a pipeline, one after the other, and note how it was refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertForMultipleChoice,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    SwinConfig,
    SwinForImageClassification,
    TrainerCallback,
)
from transformers.distributed import DistributedConfig

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.freeze.policies import Schedule
from hf_pipetransformer.freeze.policy import DecisionClock
from hf_pipetransformer.splitters.families import BertSplitter
from tests.distributed.scenarios import RANK, note, scenario
from tests.support.models import build_model, collate, make_dataset


class CountSteps(TrainerCallback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.steps += 1


class Nothing(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def with_batch_norm():
    model = build_model("vit")
    model.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(model.config.hidden_size), model.classifier)
    return model


class WithPrototypes(BertForSequenceClassification):
    """Its output has a row for each class."""

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        output["prototypes"] = self.classifier.weight
        return output


def with_prototypes():
    return WithPrototypes(build_model("bert_sequence").config)


def evaluating(**given: Any) -> PipeTransformerTrainer:
    return PipeTransformerTrainer(**given, eval_dataset=given["train_dataset"], compute_metrics=lambda _: {})


def with_layerdrop():
    model = build_model("bert_sequence")
    model.config.layerdrop = 0.1
    return model


def multiple_choice():
    return BertForMultipleChoice(build_model("bert_sequence").config)


def choices():
    row = {"input_ids": [[5, 6, 7], [5, 8, 9]], "attention_mask": [[1, 1, 1], [1, 1, 1]], "labels": 0}
    return datasets.Dataset.from_list([row] * 20)


def with_adapter():
    model = build_model("bert_sequence")
    # What `model.add_adapter()` leaves behind, without the package peft.
    model._hf_peft_config_loaded = True
    model.peft_config = {"default": object()}
    return model


def with_device_map():
    model = build_model("bert_sequence")
    model.hf_device_map = {"bert": "cpu", "classifier": "disk"}
    return model


def loaded_in_parts(**sizes: Any):
    """A Llama of which transformers has loaded a part on this rank."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    weights = LlamaForCausalLM(config).state_dict()
    return LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, distributed_config=DistributedConfig(**sizes)
    )


def swin():
    return SwinForImageClassification(
        SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)
    )


def albert():
    return AlbertForSequenceClassification(
        AlbertConfig(
            vocab_size=64,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=3,
        )
    )


def undivided_optimizer(model):
    return torch.optim.LBFGS(model.parameters()), None


def foreign_optimizer(model):
    return torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.zeros(3))], lr=1e-3), None


def packed(rows):
    """All samples in one row."""
    words = [word for row in rows for word in row["input_ids"]]
    positions = [position for row in rows for position in range(len(row["input_ids"]))]
    values = {"input_ids": [words], "position_ids": [positions], "labels": [rows[0]["labels"]]}
    return {name: torch.tensor(value) for name, value in values.items()}


class LayerCuts(BertSplitter):
    """Cuts BERT between layers only."""

    cuts_inside_layers = False


class Blind(Schedule):
    """Cannot say what may freeze."""

    def due_steps(self, clock: DecisionClock) -> Iterable[int]:
        raise ValueError("planted: nobody knows")


def plan(line: str) -> Callable[[Path], str]:
    """Makes an events file with one line, the same on every rank, in a folder, and returns its path."""

    def write(folder: Path) -> str:
        path = folder / f"plan-{hashlib.sha256(line.encode()).hexdigest()[:8]}.jsonl"
        unfinished = path.with_suffix(f".{RANK}")
        unfinished.write_text(f"{line}\n")
        unfinished.rename(path)
        return str(path)

    return write


def plan_of(step: int = 0, **changes: Any) -> Callable[[Path], str]:
    """A plan of one layout that fits these two ranks and BERT, but for `changes`."""
    layout = {
        "num_layers": 4,
        "num_frozen_layers": 0,
        "num_stages": 2,
        "num_replicas": 1,
        "boundaries": [0, 5, 10],
        "num_microbatches": 2,
        "schedule": "1f1b",
    }
    return plan(json.dumps({"event": "run", "step": step, "layout": layout | changes}))


def search(trainer: PipeTransformerTrainer) -> None:
    trainer.hyperparameter_search(hp_space=lambda trial: {}, n_trials=1)


def resume(where: Any) -> Callable[[PipeTransformerTrainer], Any]:
    return lambda trainer: trainer.train(resume_from_checkpoint=where)


# Name of the attempt to what is different in it. `options` go to the arguments; `model`, `train_dataset` and `act`
# (in place of `train()`) are called, functions among the options with the folder.
ATTEMPTS: dict[str, dict[str, Any]] = {
    "output_without_rows": {
        "options": {"pipeline_parallel_size": 1, "eval_strategy": "steps", "eval_steps": 1},
        "model": with_prototypes,
        "trainer": evaluating,
    },
    "fsdp": {"options": {"fsdp": "full_shard"}},
    "deepspeed": {"options": {"deepspeed": {"zero_optimization": {"stage": 1}}}},
    "parallelism_config": {"options": {"parallelism_config": lambda _: ParallelismConfig(tp_size=2)}},
    "auto_find_batch_size": {"options": {"auto_find_batch_size": True}},
    "compiled_graphs": {"options": {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}},
    "compiled_split_backward": {"options": {"torch_compile": True, "pipeline_schedule": "zb_h1"}},
    "lomo": {"options": {"optim": "lomo"}},
    "adalomo": {"options": {"optim": "adalomo"}},
    "galore": {"options": {"optim": "galore_adamw", "optim_target_modules": ["attention"]}},
    "peft": {"model": with_adapter},
    "device_map": {"model": with_device_map},
    "transformers_pipeline": {"model": partial(loaded_in_parts, pp_size=2)},
    "tensor_parallel": {"model": partial(loaded_in_parts, tp_plan="auto")},
    "swin": {"model": swin, "train_dataset": lambda: make_dataset("vit", 20)},
    "albert": {"model": albert},
    "hyperparameter_search": {"act": search},
    "resume_from_last_checkpoint": {"act": resume(True)},
    "resume_from_a_checkpoint": {"act": resume("checkpoint-3")},
    "no_dataset": {"train_dataset": lambda: iter(make_dataset("bert_sequence", 20)), "options": {"max_steps": 2}},
    "empty_stream": {"train_dataset": Nothing},
    "packed_samples": {"collator": packed},
    "empty_dataset": {"train_dataset": lambda: make_dataset("bert_sequence", 1).select([])},
    "undivided_optimizer": {"optimizers": undivided_optimizer},
    "foreign_optimizer": {"optimizers": foreign_optimizer},
    "no_divisor": {"options": {"pipeline_parallel_size": 3}},
    "no_stages": {"options": {"pipeline_parallel_size": 0}},
    "stages_in_words": {"options": {"pipeline_parallel_size": "two"}},
    "no_microbatches": {"options": {"pipeline_parallel_num_microbatches": 0}},
    "unknown_schedule": {"options": {"pipeline_schedule": "zigzag"}},
    "unknown_checkpoint": {"options": {"pipeline_checkpoint": "sometimes"}},
    "checkpoint_twice": {"options": {"pipeline_checkpoint": "always", "activation_checkpointing": True}},
    "no_timeout": {"options": {"pipeline_timeout": 0}},
    "batch_norm": {"model": with_batch_norm, "train_dataset": lambda: make_dataset("vit", 20)},
    "layerdrop": {"model": with_layerdrop},
    "layerdrop_and_freezing": {
        "model": with_layerdrop,
        "options": {
            "pipeline_parallel_size": "auto",
            "pipeline_parallel_num_microbatches": "auto",
            "freeze_policy": "gradient_norm",
        },
    },
    "multiple_choice": {"model": multiple_choice, "train_dataset": choices},
    "no_train_dataset": {"train_dataset": lambda: None},
    "split_batches": {"options": {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 5}},
    "unseeded_order": {"options": {"accelerator_config": {"use_seedable_sampler": False}}},
    "gather_object": {"options": {"eval_use_gather_object": True}},
    "save_on_each_node": {"options": {"save_on_each_node": True}},
    "debug": {"options": {"debug": "underflow_overflow"}},
    "unknown_policy": {"options": {"freeze_policy": "unfreeze"}},
    "unknown_rule": {"options": {"freeze_rule": "neither"}},
    "unknown_compression": {"options": {"pipeline_compression": "zip"}},
    "no_alpha": {"options": {"freeze_alpha": 0.0}},
    "alpha_of_one": {"options": {"freeze_alpha": 1.0}},
    "interval_in_words": {"options": {"freeze_interval": "month"}},
    "no_interval": {"options": {"freeze_interval": 0}},
    "interval_of_more_than_the_run": {"options": {"freeze_interval": 1.5}},
    "warmup_of_the_whole_run": {"options": {"freeze_warmup": 1.0}},
    "negative_warmup": {"options": {"freeze_warmup": -0.1}},
    "negative_min_active": {"options": {"freeze_min_active_layers": -1}},
    "fixed_without_table": {"options": {"freeze_policy": "fixed"}},
    "table_without_fixed": {"options": {"freeze_at": "2:1"}},
    "malformed_table": {"options": {"freeze_policy": "fixed", "freeze_at": "2=1"}},
    "missing_plan": {"options": {"layout_plan": "no/such/events.jsonl"}},
    "foreign_plan": {"options": {"layout_plan": plan('{"loss": 0.5}')}},
    "plan_without_json": {"options": {"layout_plan": plan("step loss")}},
    "empty_plan": {"options": {"layout_plan": plan("")}},
    "plan_of_another_world": {"options": {"layout_plan": plan_of(num_replicas=2)}},
    "plan_of_another_model": {"options": {"layout_plan": plan_of(num_layers=12, boundaries=[0, 12, 26])}},
    "plan_off_the_cuts": {
        "options": {"layout_plan": plan_of(num_layers=4, boundaries=[0, 4, 10])},
        "splitter": LayerCuts,
    },
    "plan_with_a_gap": {"options": {"layout_plan": plan_of(boundaries=[0, 5, 9])}},
    "plan_of_another_schedule": {"options": {"layout_plan": plan_of(schedule="zb_h1")}},
    "plan_from_the_middle": {"options": {"layout_plan": plan_of(step=5)}},
    "policy_that_refuses_to_foresee": {"policy": lambda: Blind(0.5)},
}


PIPELINE_OPTIONS = {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2, "freeze_policy": "none"}


def attempt(change: dict[str, Any], output: Path, counter: CountSteps) -> None:
    options = {
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **({} if "arguments" in change else PIPELINE_OPTIONS),
    }
    changed = {
        key: value(output.parent) if callable(value) else value for key, value in change.get("options", {}).items()
    }
    args = change.get("arguments", PipeTransformerArguments)(**(options | changed))
    model = change.get("model", lambda: build_model("bert_sequence"))()
    extra = {"optimizers": change["optimizers"](model)} if "optimizers" in change else {}
    extra |= {name: change[name]() for name in ("splitter", "policy") if name in change}
    trainer = change.get("trainer", PipeTransformerTrainer)(
        model=model,
        args=args,
        train_dataset=change.get("train_dataset", lambda: make_dataset("bert_sequence", 20))(),
        data_collator=change.get("collator", collate),
        callbacks=[counter],
        **extra,
    )
    change.get("act", lambda trainer: trainer.train())(trainer)


@scenario
def attempt_all(folder: Path) -> None:
    """Note after each attempt its error's class, bases and text, and the steps begun: what hangs is missing."""
    datasets.disable_progress_bars()
    found = {}
    for name, change in ATTEMPTS.items():
        print(f"attempt {name}", flush=True)
        environment = dict(os.environ)
        counter = CountSteps()
        try:
            attempt(change, folder / "output", counter)
            found[name] = {"error": None, "bases": [], "text": "", "steps": counter.steps}
        except Exception as error:
            bases = [base.__name__ for base in type(error).__mro__]
            found[name] = {"error": bases[0], "bases": bases, "text": str(error), "steps": counter.steps}
        # Options such as fsdp leave their mark in the environment and in accelerate's state.
        os.environ.clear()
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=False)
        note(folder, "record", found)
