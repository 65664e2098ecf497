"""Fine-tune a text classifier on a GLUE task, a data set of the hub or local files, with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_glue.py \
        --model_name_or_path bert-base-cased --task_name sst2 --do_train --do_eval \
        --pipeline_parallel_size 2 --output_dir outputs/sst2

On a machine without GPUs add `--use_cpu true`. The options of transformers' `run_glue.py` mean the same here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset
from metrics import CLASSIFICATION, GLUE, REGRESSION, predictions_from_logits
from script_utils import (
    HIDDEN_LABEL,
    LabelledDataArguments,
    ModelArguments,
    TextDataArguments,
    TextModelArguments,
    class_names,
    finish,
    label_ids,
    load_config,
    load_files,
    metric_function,
    parse_arguments,
    report,
    require_column,
    require_split,
    select_samples,
    start_logging,
    train,
    without_hidden_labels,
    write_predictions,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


logger = logging.getLogger("run_glue")

SENTENCE_COLUMNS = {
    "cola": ("sentence",),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence",),
    "stsb": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}


@dataclass
class GlueDataArguments(LabelledDataArguments, TextDataArguments):
    """Which task or data, and how sentences become tokens."""

    task_name: str | None = field(
        default=None,
        metadata={"help": f"A GLUE task: {', '.join(SENTENCE_COLUMNS)}. With --train_file: its columns and metrics."},
    )
    text_column_names: str | None = field(
        default=None, metadata={"help": "The column of sentences, or two separated by a comma for pairs."}
    )
    max_seq_length: int = field(default=128, metadata={"help": "Longer sentences are cut to so many tokens."})
    pad_to_max_length: bool = field(
        default=False, metadata={"help": "Pad all samples to --max_seq_length, not each batch to its longest."}
    )

    def __post_init__(self) -> None:
        if self.task_name is not None and self.task_name not in SENTENCE_COLUMNS:
            raise ValueError(f"Found --task_name {self.task_name}; expected one of {', '.join(SENTENCE_COLUMNS)}.")
        if self.task_name is None and self.dataset_name is None and not self.files:
            raise ValueError("No data: pass --task_name, --dataset_name, or --train_file and --validation_file.")


def load_data(data_args: GlueDataArguments, model_args: ModelArguments) -> DatasetDict:
    """Local files if any are named, else the named data set, else the GLUE task, from the hub."""
    if data_args.files:
        return load_files(data_args.files, model_args.cache_dir)
    name, config = data_args.dataset_name, data_args.dataset_config_name
    if name is None:
        name, config = "nyu-mll/glue", data_args.task_name
    return load_dataset(name, config, cache_dir=model_args.cache_dir, token=model_args.token)


def sentence_columns(data_args: GlueDataArguments, column_names: list[str]) -> tuple[str, ...]:
    """The one or two columns of text: as named, else the task's, else the data's columns that are not the label."""
    if data_args.text_column_names:
        return tuple(name.strip() for name in data_args.text_column_names.split(","))
    if data_args.task_name:
        return SENTENCE_COLUMNS[data_args.task_name]
    candidates = tuple(name for name in column_names if name not in (data_args.label_column_name, "idx", "id"))
    if not 1 <= len(candidates) <= 2:
        raise ValueError(
            f"Found columns {column_names}: which hold the text? Name one, or two separated by a comma, "
            "with --text_column_names."
        )
    return candidates


def label_names(data_args: GlueDataArguments, labelled: Dataset) -> list[str] | None:
    """Names of the classes, or None for a regression. A file of STS-B may hold its similarities as whole numbers."""
    return None if data_args.task_name == "stsb" else class_names(labelled, data_args.label_column_name)


def target_values(labels: Iterable[Any]) -> list[float]:
    """The targets of a regression; a hidden one (None) becomes -1."""
    return [float(HIDDEN_LABEL if value is None else value) for value in labels]


def tokenize(
    data: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: GlueDataArguments, ids: dict[str, int]
) -> DatasetDict:
    """Sentences to token ids, labels to the model's class ids (kept as they are for a regression)."""
    first = next(iter(data.values()))
    columns = sentence_columns(data_args, first.column_names)
    for column in columns:
        require_column(first, column, "--text_column_names")
    label = data_args.label_column_name

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return tokenizer(
            *(batch[column] for column in columns),
            padding="max_length" if data_args.pad_to_max_length else False,
            max_length=min(data_args.max_seq_length, tokenizer.model_max_length),
            truncation=True,
        )

    def encode_split(split: Dataset) -> Dataset:
        labels = None
        if label in split.column_names:
            labels = label_ids(split, label, ids) if ids else target_values(split[label])
        encoded = split.map(
            encode,
            batched=True,
            remove_columns=split.column_names,
            num_proc=data_args.preprocessing_num_workers,
            load_from_cache_file=not data_args.overwrite_cache,
            desc="Tokenizing",
        )
        return encoded if labels is None else encoded.add_column("label", labels)

    return DatasetDict({name: encode_split(split) for name, split in data.items()})


def evaluation_splits(data: DatasetDict, base: str) -> dict[str, Dataset]:
    """`{"": validation}`, or both halves of MNLI's under the suffixes that transformers' script gives them."""
    if f"{base}_matched" in data:
        return {"": data[f"{base}_matched"], "_mm": data[f"{base}_mismatched"]}
    return {"": require_split(data, base, "do_eval" if base == "validation" else "do_predict")}


def evaluate_all(trainer: PipeTransformerTrainer, splits: dict[str, Dataset]) -> None:
    """Evaluate every split; the metrics of all of them go to one file."""
    collected: dict[str, Any] = {}
    for suffix, split in splits.items():
        metrics = trainer.evaluate(eval_dataset=split) | {"eval_samples": len(split)}
        collected |= {f"{name}{suffix}": value for name, value in metrics.items()}
    report(trainer, "eval", collected)


def predict_all(trainer: PipeTransformerTrainer, splits: dict[str, Dataset], names: list[str] | None) -> None:
    """Predict every split into a file of its own, with metrics where labels are known."""
    for suffix, split in splits.items():
        output = trainer.predict(without_hidden_labels(split, "label"), metric_key_prefix=f"predict{suffix}")
        report(trainer, f"predict{suffix}", output.metrics | {f"predict{suffix}_samples": len(split)})
        predictions = predictions_from_logits(output.predictions, is_regression=names is None)
        write_predictions(trainer, f"predict_results{suffix}.txt", predictions, names)


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = parse_arguments(
        TextModelArguments, GlueDataArguments, PipeTransformerArguments, argv=argv
    )
    start_logging(args)
    set_seed(args.seed)

    with args.main_process_first(desc="loading data"):
        data = load_data(data_args, model_args)
    labelled = data["train"] if "train" in data else next(iter(data.values()))
    require_column(labelled, data_args.label_column_name, "--label_column_name")
    names = label_names(data_args, labelled)
    config, ids = load_config(model_args, names)
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.tokenizer_name or model_args.model_name_or_path, **model_args.hub_options
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **model_args.hub_options,
    )
    data = select_samples(data, data_args, args)
    with args.main_process_first(desc="tokenizing"):
        data = tokenize(data, tokenizer, data_args, ids)

    metrics = GLUE[data_args.task_name] if data_args.task_name else CLASSIFICATION if names else REGRESSION
    trainer = PipeTransformerTrainer(
        model=model,
        args=args,
        train_dataset=require_split(data, "train", "do_train") if args.do_train else None,
        eval_dataset=evaluation_splits(data, "validation")[""] if args.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.fp16 else None),
        compute_metrics=metric_function(metrics, names is None, data_args.metric_name, args.process_index),
    )
    if args.do_train:
        train(trainer)
    if args.do_eval:
        evaluate_all(trainer, evaluation_splits(data, "validation"))
    if args.do_predict:
        in_order = [config.id2label[number] for number in sorted(config.id2label)] if names else None
        predict_all(trainer, evaluation_splits(data, "test"), in_order)
    finish(trainer, data_args, tasks="text-classification", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
