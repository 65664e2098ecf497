"""Ways to use a trainer, each run with Trainer and with ours."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import (
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    HubertConfig,
    HubertForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin
from tests.support.adapted import adapted
from tests.support.comparison import untimed
from tests.support.models import build_model, collate, make_dataset


# ---- models that are no Hugging Face encoders ----


class Line(nn.Module):
    """A line through points, with its loss first in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.slope * x + self.offset
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class LineOfDicts(Line):
    """The same, with a dictionary as output."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = super().forward(x, labels)
        return {"logits": output[0]} if labels is None else {"loss": output[0], "logits": output[1]}


class LineOfSeveral(Line):
    """The same, with a second output."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = super().forward(x, labels)
        return (*output, 2 * output[-1])


class SumOfItems(Line):
    """A loss that is divided by the items of the whole step."""

    accepts_loss_kwargs = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, num_items_in_batch: Any = None) -> Any:
        y = self.slope * x + self.offset
        loss = nn.functional.mse_loss(y, labels, reduction="sum")
        return loss / (len(x) if num_items_in_batch is None else num_items_in_batch), y


class RandomLine(Line):
    """A forward that draws random numbers."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(x + torch.rand_like(x), labels)


class UndefinedLine(Line):
    """A loss that is nan now and then."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        output = super().forward(x, labels)
        return (output[0] * (float("nan") if x.sum() > 2 else 1.0), output[1])


class NormalisedLine(nn.Module):
    """Batch normalisation, whose statistics run over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(1), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.line(self.norm(x[:, None]))[:, 0]
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class OwnNames(Line):
    """Inputs and labels under names of their own."""

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, target)


class OwnConfig(PreTrainedConfig):
    model_type = "line_of_a_test"


class OwnPreTrained(PreTrainedModel):
    """A model of transformers without layers."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.line = Line()
        self.post_init()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        return self.line(x, labels)


def t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0)
    )


def on_a_map() -> nn.Module:
    model = build_model("bert_sequence")
    model.hf_device_map = {"": "cpu"}
    return model


class Uninspected(BertForSequenceClassification):
    """Trains, and raises while it is looked at before the first step: on what the inspection does with it."""

    raises: str

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        rows, is_inspected = len(input_ids), self.training and not self.bert.training
        is_raised = {
            "always": True,
            "on rank 1": os.environ.get("RANK") == "1",
            "on parts of a batch": rows < 4,
        }[self.raises]
        if is_inspected and is_raised:
            raise KeyError("planted")
        return super().forward(input_ids, attention_mask, labels=labels)


def uninspected(raises: str) -> nn.Module:
    kind = type("Uninspected", (Uninspected,), {"raises": raises})
    return kind(build_model("bert_sequence").config)


class Rebuilding(BertForSequenceClassification):
    """Makes a module anew in its first forward, with drawn weights, as BigBird does for short texts."""

    is_rebuilt = False

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        if not self.is_rebuilt:
            self.is_rebuilt = True
            self.dropout = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3))
        if self.training and not self.bert.training:
            raise KeyError("planted")
        return super().forward(input_ids, attention_mask, labels=labels)


def with_layerdrop() -> nn.Module:
    """Audio whose layers are skipped at random."""
    config = HubertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8,), conv_stride=(4,), conv_kernel=(8,), num_feat_extract_layers=1, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, apply_spec_augment=False, classifier_proj_size=8, layerdrop=0.5,
    )  # fmt: skip
    return HubertForSequenceClassification(config)


def sounds(num: int = 22) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [{"input_values": torch.randn(64, generator=generator), "labels": i % 2} for i in range(num)]


def lora() -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], modules_to_save=["classifier"])


def with_adapters() -> nn.Module:
    """A model inside one of PEFT."""
    return get_peft_model(build_model("bert_sequence"), lora())


def with_added_adapter() -> nn.Module:
    """A model of transformers that carries an adapter."""
    model = build_model("bert_sequence")
    model.add_adapter(lora())
    return model


def with_prompts() -> nn.Module:
    """A model whose adapters stand before its layers."""
    return adapted("bert", "prompts")


def half_frozen() -> nn.Module:
    model = Line()
    model.offset.requires_grad_(False)
    return model


# ---- data ----


def points(num: int = 22, **names: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x, noise = torch.randn(num, generator=generator), torch.randn(num, generator=generator)
    labels = names.get("labels", "labels")
    return [{"x": x[i], labels: 2 * x[i] + 0.1 * noise[i]} for i in range(num)]


class Stream(IterableDataset):
    """Points without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(points())


def tokens(num: int = 10) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(1, 32, (num, 6), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def columns(num: int = 22) -> datasets.Dataset:
    rows = points(num)
    return datasets.Dataset.from_dict({name: [float(row[name]) for row in rows] for name in ("x", "labels")})


def as_user_dict(rows: Sequence[Mapping[str, torch.Tensor]]) -> UserDict[str, torch.Tensor]:
    return UserDict({name: torch.stack([row[name] for row in rows]) for name in rows[0]})


# ---- what scripts define ----


def with_own_loaders(base: type) -> type:
    class OwnLoaders(base):
        def get_train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.train_dataset, batch_size=5, shuffle=False)

        def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
            return DataLoader(self.eval_dataset, batch_size=3)

    return OwnLoaders


def with_own_sampler(base: type) -> type:
    class OwnSampler(base):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return OwnSampler


def with_own_loss(base: type) -> type:
    class OwnLoss(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            output = model(inputs["x"])
            loss = (output[0] - inputs["labels"]).abs().max()
            return (loss, output) if return_outputs else loss

    return OwnLoss


def with_own_steps(base: type) -> type:
    """Steps of a trainer's own, below the mixin."""

    class OwnSteps(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 2 * super().training_step(*args, **kwargs)

    if base is Trainer:
        return OwnSteps

    class Both(PipeTransformerMixin, OwnSteps):
        pass

    return Both


def with_own_optimizer(base: type) -> type:
    class OwnOptimizer(base):
        def create_optimizer(self, *args: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    return OwnOptimizer


def with_own_log(base: type) -> type:
    class OwnLog(base):
        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log({**logs, "twice": 2.0}, *args)

    return OwnLog


class Stops(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= 3


class Doubles(TrainerCallback):
    """Changes the model, as callbacks may."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            model.slope.mul_(2)


def largest(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    return {"largest": float((logits[0] if isinstance(logits, tuple) else logits).max())}


class BatchMetrics:
    """Metrics that are told of one batch after the other."""

    def __init__(self) -> None:
        self.largest = float("-inf")

    def __call__(self, prediction: Any, compute_result: bool) -> dict[str, float]:
        self.largest = max(self.largest, float(prediction.predictions.max()))
        return {"largest": self.largest} if compute_result else {}


def squared(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return (outputs[0] - labels).square().sum() / (num_items_in_batch or len(labels))


@dataclass(frozen=True)
class Usage:
    """One way to use a trainer.

    Args:
        options: arguments.
        model: makes the model.
        data: of training and evaluation.
        given: what else the trainer takes.
        subclass: makes the script's own class.
        act: what a script does with its trainer; its result is compared.
    """

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Line
    data: Callable[[], Any] = points
    given: Callable[[], dict[str, Any]] = dict
    subclass: Callable[[type], type] = lambda base: base
    act: Callable[[Any], Any] = lambda trainer: trainer.train().metrics


def train_and_evaluate(trainer: Any) -> Any:
    trainer.train()
    return trainer.evaluate()


def train_and_predict(trainer: Any) -> Any:
    trainer.train()
    output = trainer.predict(trainer.eval_dataset)
    return [torch.as_tensor(output.predictions), torch.as_tensor(output.label_ids), output.metrics]


def evaluate(trainer: Any) -> Any:
    return trainer.evaluate()


def predict(trainer: Any) -> Any:
    output = trainer.predict(trainer.eval_dataset)
    return [torch.as_tensor(output.predictions), output.metrics]


def look_at_loaders(trainer: Any) -> Any:
    train, test = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    assert isinstance(train, DataLoader)
    return [len(train), len(test), type(train.sampler).__name__, [batch["x"] for batch in test]]


def train_twice(trainer: Any) -> Any:
    trainer.train()
    return trainer.train().metrics


def resume(trainer: Any) -> Any:
    trainer.train()
    return trainer.train(resume_from_checkpoint=True).metrics


def resume_early(trainer: Any) -> Any:
    trainer.train()
    return trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-2")).metrics


def save_and_load(trainer: Any) -> Any:
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return sorted(path.name for path in Path(trainer.args.output_dir).iterdir())


def files_of_adapters(trainer: Any) -> Any:
    """Names and adapters of what is saved, at the end and on the way."""
    folder = Path(trainer.args.output_dir)
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()  # All processes meet in it: what one has saved is there.
    adapters = {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("adapter_model.safetensors")}
    assert len(adapters) > 1
    return [adapters, sorted(str(path.relative_to(folder)) for path in folder.rglob("*")), metrics]


def evaluate_two(trainer: Any) -> Any:
    trainer.train()
    return trainer.evaluate({"first": points(5), "second": points(7)})


STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
BERT: dict[str, Any] = {
    "model": lambda: build_model("bert_sequence"),
    "data": lambda: make_dataset("bert_sequence", 10),
    "given": lambda: {"data_collator": collate},
}

USAGES = {
    # models
    "a tuple with the loss first": Usage(),
    "a dictionary as output": Usage(model=LineOfDicts, act=train_and_evaluate),
    "several outputs": Usage(model=LineOfSeveral, act=train_and_evaluate),
    "a loss divided by the items of the step": Usage(model=SumOfItems, options={"gradient_accumulation_steps": 2}),
    "a random forward": Usage(model=RandomLine, act=train_and_evaluate),
    "a loss that is nan now and then": Usage(model=UndefinedLine, options={"max_steps": 6}),
    "nan shown": Usage(model=UndefinedLine, options={"max_steps": 6, "logging_nan_inf_filter": False}),
    "batch normalisation": Usage(model=NormalisedLine, act=train_and_evaluate),
    "labels under another name": Usage(
        {"label_names": ["target"]}, OwnNames, lambda: points(labels="target"), act=train_and_evaluate
    ),
    "a model of transformers without layers": Usage(model=lambda: OwnPreTrained(OwnConfig()), act=train_and_evaluate),
    "T5": Usage(model=t5, data=tokens, act=train_and_evaluate),
    "GPT-2": Usage(model=gpt2, data=tokens, act=train_and_evaluate),
    "BERT": Usage(**BERT, act=train_and_evaluate),
    **{
        f"a model that raises when it is inspected, {when}": Usage(**{**BERT, "model": partial(uninspected, when)})
        for when in ("always", "on rank 1", "on parts of a batch")
    },
    "a module made anew in the first forward": Usage(
        **{**BERT, "model": lambda: Rebuilding(build_model("bert_sequence").config)}
    ),
    "layers skipped at random": Usage(
        {"max_steps": 3, "ddp_find_unused_parameters": True}, with_layerdrop, sounds
    ),
    "a device map": Usage(**{**BERT, "model": on_a_map}),
    "adapters": Usage({"save_steps": 2}, **{**BERT, "model": with_adapters}, act=files_of_adapters),
    "an added adapter": Usage({"save_steps": 2}, **{**BERT, "model": with_added_adapter}, act=files_of_adapters),
    "prompts": Usage({"save_steps": 2}, **{**BERT, "model": with_prompts}, act=files_of_adapters),
    "adapters gone on with": Usage(**{**BERT, "model": with_adapters}, options=STEPS, act=resume_early),
    "a frozen parameter": Usage(model=half_frozen),
    "made by a function": Usage(given=lambda: {"model_init": Line}, model=lambda: None),  # type: ignore[arg-type, return-value]
    # data and loaders
    "columns of datasets": Usage(data=columns, act=train_and_evaluate),
    "a stream": Usage({"max_steps": 7}, data=Stream, given=lambda: {"eval_dataset": points(7)}),
    "a collator of user dictionaries": Usage(given=lambda: {"data_collator": as_user_dict}),
    "loaders of its own": Usage(subclass=with_own_loaders, act=train_and_evaluate),
    "a sampler of its own": Usage(subclass=with_own_sampler),
    "a look at the loaders": Usage(act=look_at_loaders),
    "split batches": Usage({"accelerator_config": {"split_batches": True}}),
    "dispatched batches": Usage(
        {"accelerator_config": {"dispatch_batches": True}, "max_steps": 3}, data=Stream, act=train_and_evaluate
    ),
    "uneven batches": Usage({"accelerator_config": {"even_batches": False}}),
    "another sampler's seed": Usage({"accelerator_config": {"use_seedable_sampler": False}}),
    "the last batch dropped": Usage({"dataloader_drop_last": True}),
    "workers": Usage({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, act=train_and_evaluate),
    "a seed for the data": Usage({"data_seed": 7}),
    "all columns kept": Usage({"remove_unused_columns": False}),
    "grouped by length": Usage({"train_sampling_strategy": "group_by_length"}, **BERT),
    # options
    "a batch size that is found": Usage({"auto_find_batch_size": True}),
    "accumulation": Usage({"gradient_accumulation_steps": 3}),
    "no clipping": Usage({"max_grad_norm": 0.0}),
    "smoothed labels": Usage({"label_smoothing_factor": 0.1}, **BERT),
    "noisy embeddings": Usage({"neftune_noise_alpha": 5.0}, **BERT),
    "layers recomputed": Usage({"activation_checkpointing": True}, **BERT),
    "bfloat16": Usage({"bf16": True}, act=train_and_evaluate),
    "evaluated in bfloat16": Usage({"bf16_full_eval": True}, act=evaluate),
    "SGD": Usage({"optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "Adafactor": Usage({"optim": "adafactor"}),
    "checkpoints on a signal": Usage({"enable_jit_checkpoint": True}),
    "the best model at the end": Usage({**STEPS, "load_best_model_at_end": True}),
    "few checkpoints": Usage({**STEPS, "save_total_limit": 1}, act=save_and_load),
    "evaluated first": Usage({**STEPS, "eval_on_start": True}),
    "evaluated by epochs": Usage({"eval_strategy": "epoch", "num_train_epochs": 1.5}),
    "tokens counted": Usage({"include_num_input_tokens_seen": "all"}, **BERT),
    "predictions brought home in parts": Usage({"eval_accumulation_steps": 1}, act=train_and_evaluate),
    "predictions gathered as objects": Usage({"eval_use_gather_object": True}, act=evaluate),
    "losses alone": Usage({"prediction_loss_only": True}, act=evaluate),
    "metrics by batches": Usage(
        {"batch_eval_metrics": True}, given=lambda: {"compute_metrics": BatchMetrics()}, act=evaluate
    ),
    "metrics that see inputs": Usage(
        {"include_for_metrics": ["inputs", "loss"]},
        **{**BERT, "given": lambda: {"data_collator": collate, "compute_metrics": largest}},
        act=evaluate,
    ),
    # what a trainer takes, and what is done with it
    "an optimizer of its own class": Usage(subclass=with_own_optimizer),
    "a class of optimizers": Usage(given=lambda: {"optimizer_cls_and_kwargs": (torch.optim.Adagrad, {"lr": 0.1})}),
    "a loss function": Usage(given=lambda: {"compute_loss_func": squared}),
    "a loss of its own class": Usage(subclass=with_own_loss, act=train_and_evaluate),
    "steps of its own class": Usage(subclass=with_own_steps),
    "a log of its own class": Usage(subclass=with_own_log),
    "a callback that stops": Usage(given=lambda: {"callbacks": [Stops()]}),
    "a callback that changes the model": Usage(given=lambda: {"callbacks": [Doubles()]}),
    "stopped early": Usage(
        {**STEPS, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.0},
        given=lambda: {"callbacks": [EarlyStoppingCallback(1)]},
    ),
    "logits looked at first": Usage(
        given=lambda: {"preprocess_logits_for_metrics": lambda logits, _: logits.abs(), "compute_metrics": largest},
        act=evaluate,
    ),
    "evaluation alone": Usage(act=evaluate),
    "prediction alone": Usage(act=predict),
    "prediction after training": Usage(act=train_and_predict),
    "two evaluation sets": Usage(act=evaluate_two),
    "trained twice": Usage(act=train_twice),
    "gone on with": Usage(STEPS, act=resume),
    "gone on with from the start": Usage(STEPS, act=resume_early),
    "gone on with on other data": Usage({**STEPS, "ignore_data_skip": True}, act=resume_early),
}  # fmt: skip


def outcome(usage: Usage, base: type, more: dict[str, Any], folder: Path) -> dict[str, Any]:
    set_seed(5)
    kind = TrainingArguments if base is Trainer else PipeTransformerArguments
    args = kind(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3,
            "num_train_epochs": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "learning_rate": 0.1, "save_strategy": "steps" if "save_steps" in usage.options else "no", **usage.options,
            **more,
        }
    )  # fmt: skip
    data = usage.data()
    given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data, **usage.given()}
    trainer = usage.subclass(base)(usage.model(), args, **given)
    result = usage.act(trainer)
    left = getattr(getattr(trainer, "pipeline_run", None), "is_left_to_trainer", None)
    return {
        "is_left": left,
        "result": untimed(result),
        "log": [untimed(entry) for entry in trainer.state.log_history],
        "state": {name: value.clone() for name, value in trainer.model.state_dict().items()},
    }


def assert_same(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for part in ("log", "result", "state"):
        assert same(ours[part], plain[part]), f"{part}: {ours[part]} instead of {plain[part]}"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(one.nan_to_num(), other.nan_to_num()) and torch.equal(one.isnan(), other.isnan())
    return one == other or (one != one and other != other)
