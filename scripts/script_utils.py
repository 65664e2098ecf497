"""What the example scripts share: their options, their way of reading data, and train - evaluate - predict."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg

from hf_pipetransformer.report.card import read_comparison


FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
HIDDEN_LABEL = -1
Metric = Callable[[np.ndarray, np.ndarray], float]
"""Of labels and predictions, as scikit-learn's take them."""
PHASES = {"train": "train", "validation": "eval", "test": "predict"}
"""Split of the data -> what is done with it, as options name it."""


# ---- options ----


@dataclass
class ModelArguments:
    """Which pretrained model to fine-tune."""

    model_name_or_path: str = HfArg(help="A model of the hub, or a folder written by save_pretrained.")
    cache_dir: str | None = HfArg(default=None, help="Where models and data from the hub are kept.")
    model_revision: str = HfArg(default="main", help="Branch, tag or commit of the model.")
    ignore_mismatched_sizes: bool = HfArg(
        default=False, help="Give the head new weights if it was trained for another number of classes."
    )

    @property
    def hub_options(self) -> dict[str, Any]:
        """Keywords that every `from_pretrained` of a script receives."""
        return {"cache_dir": self.cache_dir, "revision": self.model_revision}


@dataclass
class DataArguments:
    """Where the data lies and how much of it is used."""

    dataset_name: str | None = HfArg(default=None, help="A data set of the hub.")
    dataset_config_name: str | None = HfArg(default=None, help="The data set's configuration.")
    train_file: str | None = HfArg(default=None, help="Training data: csv, json, jsonl or parquet.")
    validation_file: str | None = HfArg(default=None, help="Evaluation data, same formats.")
    test_file: str | None = HfArg(default=None, help="Data to predict, same formats; labels optional.")
    max_train_samples: int | None = HfArg(default=None, help="Use only the first so many samples.")
    max_eval_samples: int | None = HfArg(default=None, help="Use only the first so many samples.")
    max_predict_samples: int | None = HfArg(default=None, help="Use only the first so many samples.")
    compare_with: str | None = HfArg(
        default=None, help="Output folder or results file of another run, for its results in the model card."
    )

    sources: ClassVar[str] = "--dataset_name, or --train_file and --validation_file"

    def __post_init__(self) -> None:
        if self.dataset_name is None and not self.paths:
            raise ValueError(f"No data: pass {self.sources}.")

    @property
    def files(self) -> dict[str, str]:
        """The local files that were named, by split."""
        named = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
        return {split: file for split, file in named.items() if file}

    @property
    def paths(self) -> dict[str, str]:
        """Where each split lies, if it is not in a data set of the hub."""
        return self.files


@dataclass
class LabelledDataArguments(DataArguments):
    """Data whose samples have one label each."""

    label_column_name: str = HfArg(default="label", help="The column of labels.")
    metric_name: str | None = HfArg(default=None, help="A metric for evaluate.load (hub name or local script).")


@dataclass
class TextDataArguments(DataArguments):
    """Data that is tokenized before training."""

    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that tokenize.")

    @property
    def map_options(self) -> dict[str, Any]:
        """Keywords that every `Dataset.map` of a script receives."""
        return {"batched": True, "num_proc": self.preprocessing_num_workers}


def parse_arguments(*argument_classes: type, argv: list[str] | None = None) -> tuple[Any, ...]:
    """Read the options from the command line or a YAML or JSON file, whose values later options override, and seed.

    So `script.py --seed 1`, `script.py options.yaml` and `script.py options.yaml --seed 1` all work.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and Path(argv[0]).suffix in (".yaml", ".yml", ".json"):
        argv = _file_as_options(Path(argv[0])) + argv[1:]
    found = HfArgumentParser(argument_classes).parse_args_into_dataclasses(args=argv)
    for arguments in found:
        if getattr(arguments, "compare_with", None):
            read_comparison(Path(arguments.compare_with))  # Not only after the training
    # Before a model is made, whose new head is drawn.
    set_seed(found[-1].seed)
    return found


def _file_as_options(path: Path) -> list[str]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))  # Every JSON text is a YAML text.
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected one `option: value` a line.")
    options: list[str] = []
    for name, value in content.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            # Trainer reads options that are dicts, such as lr_scheduler_kwargs, as JSON.
            options += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return options


# ---- data ----


def load_data(data_args: DataArguments, cache_dir: str | None = None) -> DatasetDict:
    """Local files if any are named, else the named data set of the hub."""
    if data_args.files:
        return load_files(data_args.files, cache_dir)
    return load_dataset(data_args.dataset_name, data_args.dataset_config_name, cache_dir=cache_dir)


def load_files(files: dict[str, str], cache_dir: str | None) -> DatasetDict:
    """Load local files, one per split; all must have one format, told by the file name's ending."""
    formats = {FILE_FORMATS.get(Path(file).suffix) for file in files.values()}
    if len(formats) != 1 or None in formats:
        raise ValueError(
            f"Found data files {sorted(files.values())}; expected one format for all of them, of "
            f"{sorted(FILE_FORMATS)}. Rename or convert the files that differ."
        )
    return load_dataset(formats.pop(), data_files=files, cache_dir=cache_dir)


def wanted_splits(data: DatasetDict, args: TrainingArguments) -> DatasetDict:
    """The splits that the wanted phases need (MNLI has two of a kind); a phase without one raises ValueError."""
    wanted = DatasetDict()
    for split, phase in PHASES.items():
        if getattr(args, f"do_{phase}"):
            found = {name: rows for name, rows in data.items() if name.split("_")[0] == split}
            if not found:
                raise ValueError(
                    f"--do_{phase} needs a `{split}` split; found {sorted(data)}. Pass --{split}_file, or leave out "
                    f"--do_{phase}."
                )
            wanted.update(found)
    return wanted


def select_samples(data: DatasetDict, data_args: DataArguments, args: TrainingArguments) -> DatasetDict:
    """The splits that the wanted phases need, each cut to its `--max_..._samples`."""
    selected = wanted_splits(data, args)
    for name, rows in selected.items():
        count = getattr(data_args, f"max_{PHASES[name.split('_')[0]]}_samples")
        if count is not None:
            selected[name] = rows.select(range(min(count, len(rows))))
    return selected


def require_column(dataset: Dataset, column: str, option: str) -> None:
    """Raise ValueError when `column` is not in the data, naming the option that chooses it."""
    if column not in dataset.column_names:
        raise ValueError(f"Found columns {dataset.column_names}; expected `{column}`. Name yours with {option}.")


# ---- labels ----


def class_names(data: DatasetDict, column: str) -> list[str] | None:
    """Names of the training data's classes in order of their id, or None for real numbers (a regression)."""
    dataset = data["train"] if "train" in data else next(iter(data.values()))
    require_column(dataset, column, "--label_column_name")
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    if feature.dtype.startswith("float"):
        return None
    return [str(value) for value in sorted(value for value in dataset.unique(column) if not _is_hidden(value))]


def _is_hidden(label: Any) -> bool:
    return label is None or label == HIDDEN_LABEL


def label_ids(dataset: Dataset, column: str, ids: dict[str, int]) -> list[int]:
    """The model's class id of every row; a hidden label (None or -1) becomes -1."""
    feature = dataset.features[column]

    def to_id(value: Any) -> int:
        if _is_hidden(value):
            return HIDDEN_LABEL
        name = feature.int2str(value) if isinstance(feature, ClassLabel) else str(value)
        if name not in ids:
            raise ValueError(f"Found label {name!r}; expected one of {sorted(ids)}, the labels of the training data.")
        return ids[name]

    return [to_id(value) for value in dataset[column]]


def without_hidden_labels(dataset: Dataset) -> Dataset:
    """Drop the labels of a test set that hides them (as GLUE's do): they cannot be scored."""
    if "label" not in dataset.column_names:
        return dataset
    hidden = [_is_hidden(value) for value in dataset.unique("label")]
    # Of real numbers -1 may be one.
    is_hidden = all(hidden) if dataset.features["label"].dtype.startswith("float") else any(hidden)
    return dataset.remove_columns("label") if is_hidden else dataset


# ---- models ----


def load_tokenizer(model_args: ModelArguments) -> Any:
    """The tokenizer that comes with the model."""
    return AutoTokenizer.from_pretrained(model_args.model_name_or_path, **model_args.hub_options)


def class_ids(names: list[str], config: PreTrainedConfig) -> dict[str, int]:
    """Name -> id; a model that was trained on these very classes keeps its own order."""
    # Some models have the names of a data set's classes in capitals.
    known = {str(name).lower(): number for name, number in config.label2id.items()}
    if sorted(known) == sorted(name.lower() for name in names):
        return {name: known[name.lower()] for name in names}
    return {name: number for number, name in enumerate(names)}


def load_config(model_args: ModelArguments, names: list[str] | None) -> tuple[PreTrainedConfig, dict[str, int]]:
    """The model's configuration for these classes (None: a regression), and class name -> id."""
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, **model_args.hub_options)
    if names is None:
        # With one label the heads of transformers compute the loss of a regression.
        config.num_labels = 1
        return config, {}
    ids = class_ids(names, config)
    config.label2id = dict(sorted(ids.items(), key=lambda item: item[1]))
    config.id2label = {number: name for name, number in config.label2id.items()}
    return config, ids


def load_model(auto_class: Any, model_args: ModelArguments, **options: Any) -> Any:
    """The pretrained model with the head of `auto_class`; `options` are the configuration, or changes to it."""
    options |= {"ignore_mismatched_sizes": model_args.ignore_mismatched_sizes, **model_args.hub_options}
    return auto_class.from_pretrained(model_args.model_name_or_path, **options)


# ---- phases ----


def load_metric(name: str | None, rank: int) -> Any:
    """A metric of `evaluate`, which only those install who ask for one; None without a name."""
    if name is None:
        return None
    try:
        import evaluate
    except ModuleNotFoundError:
        raise SystemExit(f"--metric_name {name} needs `evaluate`: pip install evaluate, or leave it out.") from None
    # Ranks of a machine share a folder, in which each writes a file of its own.
    return evaluate.load(name, experiment_id=f"rank{rank}")


def metric_function(
    metrics: dict[str, Metric], is_regression: bool, metric_name: str | None, rank: int
) -> Callable[[EvalPrediction], dict[str, float]]:
    """A `compute_metrics` for Trainer; `metric_name` chooses a metric of `evaluate` over the built-in ones."""
    loaded = load_metric(metric_name, rank)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predicted = predictions_from_logits(prediction.predictions, is_regression)
        labels = np.asarray(prediction.label_ids).reshape(-1)
        if loaded is not None:
            return dict(loaded.compute(predictions=predicted, references=labels))
        return {name: float(metric(labels, predicted)) for name, metric in metrics.items()}

    return compute_metrics


def predictions_from_logits(logits: np.ndarray | tuple[np.ndarray, ...], is_regression: bool) -> np.ndarray:
    """Logits `(samples, classes)` to class ids `(samples,)`, or to values `(samples,)` for a regression."""
    # Some models give more than logits, which come first.
    scores = logits[0] if isinstance(logits, tuple) else logits
    return scores.reshape(-1) if is_regression else scores.argmax(axis=-1)


def report(trainer: Trainer, split: str, metrics: dict[str, Any]) -> None:
    """Print metrics and write them to `<split>_results.json` and `all_results.json` (first process only)."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def train(trainer: Trainer) -> None:
    """Train if that is asked for; then save the model, the trainer's state and the metrics."""
    if not trainer.args.do_train:
        return
    result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    report(trainer, "train", result.metrics | {"train_samples": len(trainer.train_dataset)})


def predict(trainer: Trainer, dataset: Dataset, names: dict[int, str] | None, suffix: str = "") -> None:
    """Predict classes by name, or values if there are no names; with metrics where labels are known.

    They go to `predict_results<suffix>.txt`, one `index<TAB>prediction` line per sample in the order of the data.
    """
    key = f"predict{suffix}"
    output = trainer.predict(without_hidden_labels(dataset), metric_key_prefix=key)
    report(trainer, key, output.metrics | {f"{key}_samples": len(dataset)})
    if trainer.is_world_process_zero():
        predicted = predictions_from_logits(output.predictions, is_regression=names is None)
        texts = [f"{value:.3f}" if names is None else names[value] for value in predicted]
        lines = ["index\tprediction", *(f"{index}\t{text}" for index, text in enumerate(texts))]
        text = "\n".join(lines) + "\n"
        Path(trainer.args.output_dir, f"predict_results{suffix}.txt").write_text(text, encoding="utf-8")


def finish(trainer: Trainer, data_args: DataArguments, **card: Any) -> None:
    """Write the model card of what was trained (and push it all, with `--push_to_hub`); leave the process group."""
    card |= {"data": describe(data_args), "comparison": data_args.compare_with}
    if trainer.args.push_to_hub:
        trainer.push_to_hub(**card)
    elif trainer.args.do_train:
        trainer.create_model_card(**card)
    trainer.end()


def describe(data_args: DataArguments) -> str:
    """The data as a model card names it: where it comes from, and which of its rows were used."""
    paths = data_args.paths
    parts = [f"`{name}`" for name in (data_args.dataset_name, data_args.dataset_config_name) if name and not paths]
    for split, count in (("train", data_args.max_train_samples), ("validation", data_args.max_eval_samples)):
        file = f" `{Path(paths[split]).name}`" if split in paths else ""
        rows = f"first {count:,} rows" if count is not None else ""
        if file or rows:
            parts.append(f"{split}:{file}" + (f" (its {rows})" if file and rows else f" the {rows}" if rows else ""))
    return ", ".join(parts)
