"""Fine-tune a text classifier on a GLUE task, a data set of the hub or local files, with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_glue.py \
        --model_name_or_path bert-base-cased --task_name sst2 --do_train --do_eval \
        --pipeline_parallel_size 2 --output_dir outputs/sst2

On a machine without GPUs add `--use_cpu true`. Options are named as in transformers' `run_glue.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import script_utils
from datasets import Dataset, DatasetDict
from scipy.stats import pearsonr, spearmanr
from script_utils import HIDDEN_LABEL, LabelledDataArguments, Metric, ModelArguments, TextDataArguments
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


SENTENCE_COLUMNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cola", "sst2"), ("sentence",)),
    **dict.fromkeys(("mrpc", "rte", "stsb", "wnli"), ("sentence1", "sentence2")),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
}


def _correlation(of: Any) -> Metric:
    return lambda labels, predicted: np.nan_to_num(of(labels, predicted).statistic)  # 0 if either side is constant


ACCURACY: dict[str, Metric] = {"accuracy": accuracy_score}
METRICS: dict[str, dict[str, Metric]] = {
    **dict.fromkeys(SENTENCE_COLUMNS, ACCURACY),
    **dict.fromkeys(("mrpc", "qqp"), ACCURACY | {"f1": partial(f1_score, zero_division=0)}),
    "cola": {"matthews_correlation": matthews_corrcoef},
    "stsb": {"pearson": _correlation(pearsonr), "spearmanr": _correlation(spearmanr)},
}


@dataclass
class GlueDataArguments(LabelledDataArguments, TextDataArguments):
    """Which task or data, and how sentences become tokens."""

    task_name: str | None = HfArg(
        default=None, help=f"A GLUE task: {', '.join(SENTENCE_COLUMNS)}. With --train_file: its columns and metrics."
    )
    text_column_names: str | None = HfArg(default=None, help="The column of sentences, or two with a comma for pairs.")
    max_seq_length: int = HfArg(default=128, help="Longer sentences are cut to so many tokens.")
    pad_to_max_length: bool = HfArg(default=False, help="Pad to --max_seq_length, not each batch to its longest.")

    sources = f"--task_name, {LabelledDataArguments.sources}"

    def __post_init__(self) -> None:
        if self.task_name is not None and self.task_name not in SENTENCE_COLUMNS:
            raise ValueError(f"Found --task_name {self.task_name}; expected one of {', '.join(SENTENCE_COLUMNS)}.")
        if self.task_name and not self.dataset_name and not self.files:
            self.dataset_name, self.dataset_config_name = "nyu-mll/glue", self.task_name
        super().__post_init__()


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


def label_names(data_args: GlueDataArguments, data: DatasetDict) -> list[str] | None:
    """Names of the classes, or None for a regression. A file of STS-B may hold its similarities as whole numbers."""
    names = script_utils.class_names(data, data_args.label_column_name)
    return None if data_args.task_name == "stsb" else names


def tokenize(
    data: DatasetDict, tokenizer: PreTrainedTokenizerBase, data_args: GlueDataArguments, ids: dict[str, int]
) -> DatasetDict:
    """Sentences to token ids, labels to the model's class ids (kept as they are for a regression)."""
    first = next(iter(data.values()))
    columns = sentence_columns(data_args, first.column_names)
    for column in columns:
        script_utils.require_column(first, column, "--text_column_names")

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return tokenizer(
            *(batch[column] for column in columns),
            padding="max_length" if data_args.pad_to_max_length else False,
            max_length=min(data_args.max_seq_length, tokenizer.model_max_length),
            truncation=True,
        )

    def encode_split(split: Dataset) -> Dataset:
        encoded = split.map(encode, remove_columns=split.column_names, desc="Tokenizing", **data_args.map_options)
        label = data_args.label_column_name
        if label not in split.column_names:
            return encoded
        if ids:
            return encoded.add_column("label", script_utils.label_ids(split, label, ids))
        # Floats also of whole numbers: the loss of a regression takes no integers.
        targets = [float(HIDDEN_LABEL if value is None else value) for value in split[label]]
        return encoded.add_column("label", targets)

    return DatasetDict({name: encode_split(split) for name, split in data.items()})


def by_suffix(data: DatasetDict, split: str) -> dict[str, Dataset]:
    """`{"": validation}`, or both halves of MNLI's under the suffixes that transformers' script gives them."""
    suffixes = {split: "", f"{split}_matched": "", f"{split}_mismatched": "_mm"}
    return {suffixes[name]: data[name] for name in suffixes if name in data}


def evaluate(trainer: PipeTransformerTrainer, splits: dict[str, Dataset]) -> None:
    """Evaluate every split; the metrics of all of them go to one file."""
    collected: dict[str, Any] = {}
    for suffix, split in splits.items():
        metrics = trainer.evaluate(eval_dataset=split) | {"eval_samples": len(split)}
        collected |= {f"{name}{suffix}": value for name, value in metrics.items()}
    script_utils.report(trainer, "eval", collected)


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        ModelArguments, GlueDataArguments, PipeTransformerArguments, argv=argv
    )
    # The others find what it has prepared in the cache of `datasets`.
    with args.main_process_first(desc="loading data"):
        data = script_utils.load_data(data_args, model_args.cache_dir)
    names = label_names(data_args, data)
    config, ids = script_utils.load_config(model_args, names)
    tokenizer = script_utils.load_tokenizer(model_args)
    with args.main_process_first(desc="tokenizing"):
        data = tokenize(script_utils.select_samples(data, data_args, args), tokenizer, data_args, ids)
    evaluated = by_suffix(data, "validation")

    metrics = ACCURACY if names else {"mse": mean_squared_error}
    trainer = PipeTransformerTrainer(
        model=script_utils.load_model(AutoModelForSequenceClassification, model_args, config=config),
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=evaluated.get(""),
        processing_class=tokenizer,
        # Tensor cores multiply numbers of 16 bits in blocks of eight.
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if args.fp16 else None),
        compute_metrics=script_utils.metric_function(
            METRICS.get(data_args.task_name, metrics), names is None, data_args.metric_name, args.process_index
        ),
    )
    script_utils.train(trainer)
    if args.do_eval:
        evaluate(trainer, evaluated)
    for suffix, split in by_suffix(data, "test").items():
        script_utils.predict(trainer, split, config.id2label if names else None, suffix)
    script_utils.finish(trainer, data_args, tasks="text-classification", tags=["hf-pipetransformer"])


if __name__ == "__main__":
    main()
