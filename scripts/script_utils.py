"""What the example scripts share: their options, their way of reading data, and train - evaluate - predict."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from metrics import Metric, predictions_from_logits
from transformers import AutoConfig, EvalPrediction, HfArgumentParser, PreTrainedConfig, Trainer, TrainingArguments

from hf_pipetransformer.report.card import read_comparison


logger = logging.getLogger(__name__)

FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
HIDDEN_LABEL = -1


@dataclass
class ModelArguments:
    """Which pretrained model to fine-tune."""

    model_name_or_path: str = field(metadata={"help": "A model of the hub, or a folder written by save_pretrained."})
    config_name: str | None = field(
        default=None, metadata={"help": "Hub name or folder of the configuration, if not the model's own."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Changes to it, as in `hidden_dropout_prob=0.0,layer_norm_eps=1e-6`."}
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Where models and data from the hub are kept."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    token: str | None = field(default=None, metadata={"help": "Access token of the hub, if not logged in."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Give the head new weights if it was trained for another number of classes."}
    )

    @property
    def hub_options(self) -> dict[str, Any]:
        """Keywords that every `from_pretrained` of a script receives."""
        return {"cache_dir": self.cache_dir, "revision": self.model_revision, "token": self.token}


@dataclass
class TextModelArguments(ModelArguments):
    """Which model and tokenizer."""

    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Hub name or folder of the tokenizer, if not the model's own."}
    )


@dataclass
class DataArguments:
    """Where the data lies and how much of it is used."""

    dataset_name: str | None = field(default=None, metadata={"help": "A data set of the hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The data set's configuration."})
    train_file: str | None = field(default=None, metadata={"help": "Training data: csv, json, jsonl or parquet."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation data, same formats."})
    test_file: str | None = field(default=None, metadata={"help": "Data to predict, same formats; labels optional."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many samples."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use only the first so many samples."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Use only the first so many samples."})
    metric_name: str | None = field(
        default=None, metadata={"help": "A metric for evaluate.load (hub name or local script)."}
    )
    compare_with: str | None = field(
        default=None,
        metadata={"help": "Output folder or results file of another run, for its results in the model card."},
    )

    @property
    def files(self) -> dict[str, str]:
        """The local files that were named, by split."""
        named = {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}
        return {split: file for split, file in named.items() if file}


@dataclass
class LabelledDataArguments(DataArguments):
    """Data whose samples have one label each."""

    label_column_name: str = field(default="label", metadata={"help": "The column of labels."})


@dataclass
class TextDataArguments(DataArguments):
    """Data that is tokenized before training."""

    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize anew even if it was done before."})


def parse_arguments(*argument_classes: type, argv: list[str] | None = None) -> tuple[Any, ...]:
    """Read the options from the command line, or from a YAML or JSON file whose values later options override.

    So `script.py --seed 1`, `script.py options.yaml` and `script.py options.yaml --seed 1` all work.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and Path(argv[0]).suffix in (".yaml", ".yml", ".json"):
        argv = _file_as_options(Path(argv[0])) + argv[1:]
    found = tuple(HfArgumentParser(argument_classes).parse_args_into_dataclasses(args=argv))
    for arguments in found:
        compared = getattr(arguments, "compare_with", None)
        if compared is not None:
            read_comparison(Path(compared))  # Not only after the training
    return found


def _file_as_options(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected one `option: value` a line.")
    options: list[str] = []
    for name, value in content.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        options += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return options


def load_files(files: dict[str, str], cache_dir: str | None) -> DatasetDict:
    """Load local files, one per split; all must have one format, told by the file name's ending."""
    formats = {FILE_FORMATS.get(Path(file).suffix) for file in files.values()}
    if len(formats) != 1 or None in formats:
        raise ValueError(
            f"Found data files {sorted(files.values())}; expected one format for all of them, of "
            f"{sorted(FILE_FORMATS)}. Rename or convert the files that differ."
        )
    return load_dataset(formats.pop(), data_files=files, cache_dir=cache_dir)


def require_column(dataset: Dataset, column: str, option: str) -> None:
    """Raise ValueError when `column` is not in the data, naming the option that chooses it."""
    if column not in dataset.column_names:
        raise ValueError(f"Found columns {dataset.column_names}; expected `{column}`. Name yours with {option}.")


def require_split(data: DatasetDict, split: str, phase: str) -> Dataset:
    """Return a split of the data, or raise ValueError naming what `phase` lacks."""
    if split not in data:
        raise ValueError(
            f"--{phase} needs a `{split}` split; found {sorted(data)}. Pass --{split}_file, or leave out --{phase}."
        )
    return data[split]


def class_names(dataset: Dataset, column: str) -> list[str] | None:
    """Names of the classes in order of their id, or None when the labels are real numbers (a regression)."""
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    if feature.dtype in ("float16", "float32", "float64"):
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


def class_ids(names: list[str], config: PreTrainedConfig) -> dict[str, int]:
    """Name -> id; a model that was trained on these very classes keeps its own order."""
    known = {str(name).lower(): number for name, number in config.label2id.items()}
    if sorted(known) == sorted(name.lower() for name in names):
        return {name: known[name.lower()] for name in names}
    return {name: number for number, name in enumerate(names)}


def read_config(model_args: ModelArguments) -> PreTrainedConfig:
    """The model's configuration with the changes that the options ask for."""
    source = model_args.config_name or model_args.model_name_or_path
    config = AutoConfig.from_pretrained(source, **model_args.hub_options)
    if model_args.config_overrides:
        config.update_from_string(model_args.config_overrides)
    return config


def load_config(model_args: ModelArguments, names: list[str] | None) -> tuple[PreTrainedConfig, dict[str, int]]:
    """The model's configuration for these classes (None: a regression), and class name -> id."""
    config = read_config(model_args)
    if names is None:
        config.num_labels = 1
        return config, {}
    ids = class_ids(names, config)
    config.label2id = dict(sorted(ids.items(), key=lambda item: item[1]))
    config.id2label = {number: name for name, number in config.label2id.items()}
    return config, ids


def without_hidden_labels(dataset: Dataset, column: str) -> Dataset:
    """Drop the labels of a test set that hides them (as GLUE's do): they cannot be scored."""
    if column not in dataset.column_names:
        return dataset
    values = dataset.unique(column)
    is_regression = any(isinstance(value, float) for value in values)
    hidden = all(map(_is_hidden, values)) if is_regression else any(map(_is_hidden, values))
    return dataset.remove_columns(column) if hidden else dataset


def select_samples(data: DatasetDict, data_args: DataArguments, args: TrainingArguments) -> DatasetDict:
    """The splits that the wanted phases need, each cut to its `--max_..._samples`."""
    wanted = {
        "train": (args.do_train, data_args.max_train_samples),
        "validation": (args.do_eval, data_args.max_eval_samples),
        "test": (args.do_predict, data_args.max_predict_samples),
    }
    selected = {}
    for name, split in data.items():
        is_wanted, count = wanted.get(name.split("_")[0], (False, None))
        if is_wanted:
            selected[name] = split if count is None else split.select(range(min(count, len(split))))
    return DatasetDict(selected)


def load_metric(name: str | None, rank: int) -> Any:
    """A metric of `evaluate`, which only those install who ask for one; None without a name."""
    if name is None:
        return None
    try:
        import evaluate
    except ModuleNotFoundError:
        raise SystemExit(f"--metric_name {name} needs `evaluate`: pip install evaluate, or leave it out.") from None
    return evaluate.load(name, experiment_id=f"rank{rank}")


def metric_function(metrics: dict[str, Metric], is_regression: bool, metric_name: str | None, rank: int) -> Any:
    """A `compute_metrics` for Trainer; `metric_name` chooses a metric of `evaluate` over the built-in ones."""
    loaded = load_metric(metric_name, rank)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        predicted = predictions_from_logits(prediction.predictions, is_regression)
        labels = np.asarray(prediction.label_ids).reshape(-1)
        if loaded is not None:
            return dict(loaded.compute(predictions=predicted, references=labels))
        return {name: metric(predicted, labels) for name, metric in metrics.items()}

    return compute_metrics


def start_logging(args: TrainingArguments) -> None:
    """Messages of level INFO from the first process, warnings from the others."""
    is_first = args.process_index == 0
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if is_first else logging.WARNING,
    )
    for noisy in ("httpx", "datasets", "evaluate", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def train(trainer: Trainer) -> None:
    """Train, then save the model, the trainer's state and the metrics."""
    result = trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
    report(trainer, "train", result.metrics | {"train_samples": len(trainer.train_dataset)})


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
    names = (data_args.dataset_name, data_args.dataset_config_name, getattr(data_args, "task_name", None))
    folders = getattr(data_args, "folders", {})
    counts = {"train": data_args.max_train_samples, "validation": data_args.max_eval_samples}
    parts = [f"`{name}`" for name in names if name and not folders]
    for split in ("train", "validation"):
        path, count = (folders or data_args.files).get(split), counts[split]
        rows = (
            "" if count is None else f" the first {count:,} rows" if path is None else f" (its first {count:,} rows)"
        )
        if path is not None or count is not None:
            parts.append(f"{split}:{'' if path is None else f' `{Path(path).name}`'}{rows}")
    return ", ".join(parts)


def report(trainer: Trainer, split: str, metrics: dict[str, Any]) -> None:
    """Print metrics and write them to `<split>_results.json` and `all_results.json` (first process only)."""
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def write_predictions(trainer: Trainer, file_name: str, predictions: np.ndarray, names: list[str] | None) -> None:
    """Write one `index<TAB>prediction` line per sample, in the order of the data (first process only)."""
    if not trainer.is_world_process_zero():
        return
    path = Path(trainer.args.output_dir, file_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write("index\tprediction\n")
        for index, value in enumerate(predictions):
            file.write(f"{index}\t{f'{value:.3f}' if names is None else names[value]}\n")
    logger.info("Predictions are in %s", path)
