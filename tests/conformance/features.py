"""The features of Trainer that are combined: what each changes in a run, and which of them exclude each other.

A factor is a choice that a script makes, its levels are features; the first level is what the others are compared
with. A row takes one level of every factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import nn

from tests.conformance import pieces
from tests.conformance.covering import Pair, covering_array
from tests.distributed.cases import GLOBAL_BATCH, GLOBAL_EVAL_BATCH
from tests.support.models import MODELS, Row


__all__ = ["FACTORS", "REFUSED", "Feature", "Refusal", "Setup", "all_rows", "exclusions", "features_of"]


@dataclass
class Setup:
    """A run in the making, which features change.

    Args:
        model: a key of `tests.support.models.MODELS`.
        options: of `TrainingArguments`.
        pipeline_options: of `PipeTransformerArguments` alone.
        trainer_arguments: of the trainer, beside those below.
        mixins: classes whose methods override the trainer's.
        callbacks: in the order in which they are called.
        change_row: changes to every sample.
        as_dataset: makes a data set of samples; the second argument says whether it is for training.
        change_model: what the script does to the model before it makes the trainer.
        through_model_init: give the trainer a function that makes the model.
        has_evaluation_sets: evaluate two data sets.
        loss_ignores_num_items: whether plain Trainer must be told that the loss is a mean.
    """

    model: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    pipeline_options: dict[str, Any] = field(default_factory=dict)
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    mixins: list[type] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    change_row: list[Callable[[int, Row], Row]] = field(default_factory=list)
    as_dataset: Callable[[list[Row], bool], Any] = pieces.arrow_dataset
    change_model: list[Callable[[nn.Module], None]] = field(default_factory=list)
    through_model_init: bool = False
    has_evaluation_sets: bool = False
    loss_ignores_num_items: bool = False


@dataclass(frozen=True)
class Feature:
    """One thing that a script may do.

    Args:
        name: unique within its factor.
        options: what it sets in `TrainingArguments`.
        pipeline_options: what it sets in `PipeTransformerArguments`, unknown to plain Trainer.
        change: anything else that it changes.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    pipeline_options: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Setup], None] | None = None

    def apply(self, setup: Setup) -> None:
        setup.options |= self.options
        setup.pipeline_options |= self.pipeline_options
        if self.change is not None:
            self.change(setup)


@dataclass(frozen=True)
class Refusal:
    """Two features that the library refuses together.

    Args:
        pair: the features, by factor.
        text: what the error must say.
        reason: why no other answer is possible.
    """

    pair: tuple[tuple[str, str], tuple[str, str]]
    text: str
    reason: str


def _model(name: str) -> Feature:
    def change(setup: Setup) -> None:
        setup.model = name
        setup.loss_ignores_num_items = not MODELS[name].loss_uses_num_items

    return Feature(name, change=change)


def _argument(name: str, **arguments: Any) -> Feature:
    """A feature that is an argument of the trainer."""
    return Feature(name, change=lambda setup: setup.trainer_arguments.update(arguments))


def _mixin(name: str, mixin: type) -> Feature:
    return Feature(name, change=lambda setup: setup.mixins.append(mixin))


def _callback(name: str, make: Callable[[], Any], **options: Any) -> Feature:
    return Feature(name, options, change=lambda setup: setup.callbacks.append(make()))


def _smoothed(setup: Setup) -> None:
    # Trainer's own label smoothing, which takes the place of the model's loss, honours `num_items_in_batch`.
    setup.loss_ignores_num_items = False


def _own_loss(setup: Setup) -> None:
    # What is not known of a loss is as Trainer takes it, who adds up the batches of a step.
    setup.mixins.append(pieces.FocalLoss)
    setup.loss_ignores_num_items = False


def _users_optimizer(setup: Setup) -> None:
    setup.trainer_arguments["optimizers"] = pieces.optimizer_and_scheduler


def _evaluation_sets(setup: Setup) -> None:
    setup.has_evaluation_sets = True


def _lengths(setup: Setup) -> None:
    setup.change_row.append(pieces.with_words)
    setup.trainer_arguments["data_collator"] = pieces.WithoutWords(setup.trainer_arguments["data_collator"])


def _dataset(name: str, as_dataset: Callable[[list[Row], bool], Any], **options: Any) -> Feature:
    def change(setup: Setup) -> None:
        setup.as_dataset = as_dataset

    return Feature(name, options, change=change)


def _more_columns(setup: Setup) -> None:
    setup.change_row.append(pieces.with_more_columns)


def _library_collator(setup: Setup) -> None:
    setup.trainer_arguments |= pieces.library_collator(setup.model)


def _no_collator(setup: Setup) -> None:
    setup.trainer_arguments |= pieces.only_tokenizer(setup.model)


def _metrics(name: str, preprocess: Callable[..., Any] | None = None, **options: Any) -> Feature:
    def change(setup: Setup) -> None:
        setup.trainer_arguments |= {
            "compute_metrics": pieces.Scores(),
            "preprocess_logits_for_metrics": preprocess,
        }

    return Feature(name, options, change=change)


def _frozen(name: str, is_frozen: Callable[[str], bool]) -> Feature:
    def change(setup: Setup) -> None:
        setup.change_model.append(lambda model: pieces.freeze(model, is_frozen))

    return Feature(name, change=change)


def _model_init(setup: Setup) -> None:
    setup.through_model_init = True


# The loss falls: as a thing to be maximised it gets worse, so that the first evaluation is the best.
_WORSE_IS_BETTER = {"metric_for_best_model": "eval_loss", "greater_is_better": True}

# Trainer looks for the column after it has removed those that the model does not take.
_BY_A_COLUMN = {
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "num_words",
    "remove_unused_columns": False,
}

_FACTORS: dict[str, list[Feature]] = {
    # First: others ask for the model's task.
    "model": [_model(name) for name in ("bert_sequence", "bert_token", "vit", "bert_question", "bert_masked")],
    "loss": [
        Feature("of the model"),
        Feature("label smoothing", {"label_smoothing_factor": 0.1}, change=_smoothed),
        Feature("compute_loss overridden", change=_own_loss),
        _argument("compute_loss_func", compute_loss_func=pieces.summed_loss),
    ],
    "optimizer": [
        Feature("AdamW"),
        Feature("SGD", {"optim": "sgd", "learning_rate": 1e-2}),
        Feature("Adafactor", {"optim": "adafactor"}),
        _argument("optimizer_cls_and_kwargs", optimizer_cls_and_kwargs=pieces.OPTIMIZER_CLASS),
        Feature("optimizers", change=_users_optimizer),
        _mixin("create_optimizer overridden", pieces.LayerwiseRates),
    ],
    "learning rate": [
        Feature("linear"),
        Feature("warmup and cosine", {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
        Feature(
            "reduced on a plateau",
            {
                "lr_scheduler_type": "reduce_lr_on_plateau",
                "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
                **_WORSE_IS_BETTER,
            },
        ),
    ],
    "clipping": [Feature("0.5"), Feature("off", {"max_grad_norm": 0.0})],
    "weight decay": [Feature("0.1"), Feature("off", {"weight_decay": 0.0})],
    "accumulation": [Feature("1"), Feature("2", {"gradient_accumulation_steps": 2, "num_train_epochs": 3})],
    "end": [
        Feature("epochs"),
        Feature("max_steps", {"max_steps": 7}),
        _callback("a callback stops", lambda: pieces.StopAt(5)),
        _callback("early stopping", pieces.early_stopping, **_WORSE_IS_BETTER, num_train_epochs=4),
    ],
    "evaluation": [
        Feature("each epoch", {"eval_strategy": "epoch"}),
        Feature("never"),
        Feature("every two steps", {"eval_strategy": "steps", "eval_steps": 2}),
        Feature("several sets", {"eval_strategy": "epoch"}, change=_evaluation_sets),
        _callback("a callback asks", lambda: pieces.EvaluateAt(3)),
    ],
    "evaluation on start": [Feature("no"), Feature("yes", {"eval_on_start": True})],
    "saving": [
        Feature("never"),
        Feature("weights every two steps", {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}),
        Feature("last checkpoint", {"save_strategy": "epoch", "save_total_limit": 1}),
        Feature(
            "load_best_model_at_end",
            {
                "save_strategy": "best",
                "save_only_model": True,
                "load_best_model_at_end": True,
                **_WORSE_IS_BETTER,
            },
        ),
    ],
    # No signal comes; the ranks ask each other after each step.
    "enable_jit_checkpoint": [Feature("no"), Feature("yes", pipeline_options={"enable_jit_checkpoint": True})],
    "data_seed": [Feature("none"), Feature("5", {"data_seed": 5})],
    "data set": [
        _dataset("datasets.Dataset", pieces.arrow_dataset),
        _dataset("set_transform", pieces.transformed_dataset),
        _dataset("torch.utils.data.Dataset", pieces.TorchDataset),
        Feature("more columns", change=_more_columns),
        _dataset("IterableDataset", pieces.Stream, max_steps=7),
    ],
    "collator": [
        _argument("function", data_collator=pieces.collate),
        _argument("class that returns BatchEncoding", data_collator=pieces.EncodingCollator()),
        Feature("of transformers", change=_library_collator),
        Feature("none given", change=_no_collator),
    ],
    # Behind the collator, which one of them changes.
    "order": [
        Feature("random"),
        Feature("sequential", {"train_sampling_strategy": "sequential"}),
        Feature("grouped by length", {"train_sampling_strategy": "group_by_length"}),
        Feature("grouped by a column", _BY_A_COLUMN, change=_lengths),
        _mixin("_get_train_sampler overridden", pieces.LastFirst),
    ],
    "workers": [
        Feature("none"),
        Feature("2", {"dataloader_num_workers": 2}),
        Feature(
            "1 that stays and reads ahead",
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "dataloader_prefetch_factor": 4},
        ),
    ],
    "dataloader_drop_last": [Feature("no"), Feature("yes", {"dataloader_drop_last": True})],
    # Both are another way to say the same batches to one process; to several, `split` gives sizes for all of them.
    "batches": [
        Feature("read by each process"),
        Feature(
            "split",
            pipeline_options={
                "accelerator_config": {"split_batches": True},
                "per_device_train_batch_size": GLOBAL_BATCH,
                "per_device_eval_batch_size": GLOBAL_EVAL_BATCH,
            },
        ),
        Feature("dispatched", pipeline_options={"accelerator_config": {"dispatch_batches": True}}),
    ],
    "remove_unused_columns": [Feature("yes"), Feature("no", {"remove_unused_columns": False})],
    "metrics": [
        Feature("none"),
        _metrics("of logits"),
        _metrics("of classes", pieces.classes_of),
        _metrics("of inputs and losses", include_for_metrics=["inputs", "loss"]),
        _metrics("batch by batch", batch_eval_metrics=True),
        Feature("prediction_loss_only", {"prediction_loss_only": True}),
    ],
    "gathering": [
        Feature("at once"),
        Feature("eval_accumulation_steps", {"eval_accumulation_steps": 2}),
        Feature("batches apart", {"eval_do_concat_batches": False}),
    ],
    "logging": [
        Feature("every step", {"logging_steps": 1}),
        Feature("the first and every three", {"logging_steps": 3, "logging_first_step": True}),
        Feature("every epoch", {"logging_strategy": "epoch"}),
    ],
    "tokens seen": [Feature("not counted"), Feature("counted", {"include_num_input_tokens_seen": "non_padding"})],
    "average_tokens_across_devices": [Feature("yes"), Feature("no", {"average_tokens_across_devices": False})],
    "frozen by the script": [
        Feature("nothing"),
        _frozen("embeddings and first layer", pieces.is_in_first_layers),
        _frozen("a middle layer", pieces.is_in_middle_layer),
        _frozen("all but the head", pieces.is_below_head),
    ],
    "model given as": [Feature("model"), Feature("model_init", change=_model_init)],
    "reports": [Feature("none"), Feature("tensorboard", pieces.tensorboard_options())],
    "weights averaged by a callback": [Feature("no"), _callback("yes", pieces.AverageWeights)],
    "activation_checkpointing": [Feature("no"), Feature("yes", {"activation_checkpointing": True})],
    # What plain Trainer does not know.
    "schedule": [
        Feature("1f1b", pipeline_options={"pipeline_schedule": "1f1b"}),
        Feature("gpipe", pipeline_options={"pipeline_schedule": "gpipe"}),
    ],
    "micro-batches": [
        Feature(str(count), pipeline_options={"pipeline_parallel_num_microbatches": count}) for count in (4, 1, 3)
    ],
    "activation_cache": [Feature(mode, pipeline_options={"activation_cache": mode}) for mode in ("off", "on")],
    "pipeline_checkpoint": [
        Feature(mode, pipeline_options={"pipeline_checkpoint": mode})
        for mode in ("never", "always", "except_last", "layers")
    ],
}

FACTORS: dict[str, dict[str, Feature]] = {
    factor: {feature.name: feature for feature in features} for factor, features in _FACTORS.items()
}

_QUESTION = ("model", "bert_question")
_IMAGES = ("model", "vit")
_STREAM = ("data set", "IterableDataset")
_SETS = ("evaluation", "several sets")
_NO_EVALUATION = ("evaluation", "never")
_EARLY_STOP = ("end", "early stopping")
_PLATEAU = ("learning rate", "reduced on a plateau")
_BEST = ("saving", "load_best_model_at_end")
_OWN_OPTIMIZER = ("optimizer", "optimizers")
_BY_COLUMN = ("order", "grouped by a column")

_EXCLUDED: list[tuple[list[tuple[str, str]], list[tuple[str, str]], str]] = [
    (
        [_QUESTION],
        [("loss", "label smoothing"), ("loss", "compute_loss overridden"), ("loss", "compute_loss_func")],
        "answers have no column `labels`: Trainer smooths nothing, and these losses need one",
    ),
    (
        [("model", "bert_token"), ("model", "bert_masked")],
        [("collator", "none given")],
        "Trainer's choice, DataCollatorWithPadding, does not pad labels of tokens",
    ),
    ([_IMAGES], [("order", "grouped by length")], "images have no length, and no column says one"),
    (
        [_SETS],
        [_EARLY_STOP, _PLATEAU, _BEST],
        "each set has a metric of its own, and there is no `eval_loss`",
    ),
    (
        [_NO_EVALUATION, ("evaluation", "a callback asks")],
        [_EARLY_STOP, _PLATEAU],
        "Trainer demands an eval_strategy",
    ),
    ([_NO_EVALUATION], [_BEST], "without an evaluation there is no best"),
    (
        [_OWN_OPTIMIZER],
        [("learning rate", "warmup and cosine"), _PLATEAU],
        "the script brings its scheduler, these options have no effect",
    ),
    ([_OWN_OPTIMIZER], [("model given as", "model_init")], "Trainer refuses it: the optimizer is of another model"),
    (
        [_STREAM],
        [("order", level.name) for level in _FACTORS["order"][1:]],
        "a stream has an order of its own",
    ),
    (
        [_STREAM],
        [("metrics", "of inputs and losses")],
        "Trainer hands the loss of a short batch out as often as that of a full one, ours once a sample",
    ),
    (
        [_BY_COLUMN],
        [("data set", "set_transform"), ("data set", "torch.utils.data.Dataset")],
        "the transform would be asked for this column alone; only a datasets.Dataset has columns",
    ),
    ([_BY_COLUMN], [("collator", "none given")], "Trainer's choice would put the column into the batch"),
    (
        [_BY_COLUMN, ("remove_unused_columns", "no")],
        [("data set", "more columns")],
        "no collator here leaves these columns out",
    ),
]

REFUSED: list[Refusal] = [
    Refusal(
        (("activation_checkpointing", "yes"), ("pipeline_checkpoint", mode)),
        "say the same thing twice",
        "both ask for recomputation, and may ask for different ones",
    )
    for mode in ("always", "except_last", "layers")
]


def exclusions() -> dict[Pair, str]:
    """Pairs of features that no row holds, each with the reason."""
    found = {frozenset(pair): reason for ones, others, reason in _EXCLUDED for pair in product(ones, others)}
    return found | {frozenset(refusal.pair): refusal.reason for refusal in REFUSED}


def all_rows() -> list[dict[str, str]]:
    """The rows of the covering array, factor to name of feature."""
    return covering_array({factor: list(levels) for factor, levels in FACTORS.items()}, list(exclusions()))


def features_of(row: Mapping[str, str]) -> list[Feature]:
    """The features of a row, in the order of the factors."""
    return [levels[row[factor]] for factor, levels in FACTORS.items()]
