"""The example scripts: their options, their metrics, how they read data; and each of them once on two processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import run_clm
import run_glue
import run_image_classification
import script_utils
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    DataCollatorWithPadding,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.schedules.tables import find_schedule
from tests.distributed.launcher import accelerate_launch, launch
from tests.engine.test_trace import actions_of, check_lanes
from tests.support.decoders import make_decoder
from tests.support.sft import make_texts, make_tokenizer
from tests.support.tiny_bert import save_tiny_bert


SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ("negative", "positive")
GLUE_CLASSES = {
    "cola": ["unacceptable", "acceptable"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "mrpc": ["not_equivalent", "equivalent"],
    "qnli": ["entailment", "not_entailment"],
    "qqp": ["not_duplicate", "duplicate"],
    "rte": ["entailment", "not_entailment"],
    "sst2": ["negative", "positive"],
    "stsb": None,
    "wnli": ["not_entailment", "entailment"],
}
WORDS = ("good", "bad", "film", "fine", "dull", "long", "short", "story")


@pytest.fixture
def sentences() -> Dataset:
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=list(NAMES)), "idx": Value("int32")})
    rows = {"sentence": ["good", "bad", "a fine film"], "label": [1, 0, 1], "idx": [0, 1, 2]}
    return Dataset.from_dict(rows, features=features)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Twelve images of 10 x 8 pixels: four of each colour, one folder per colour."""
    for number, colour in enumerate(("red", "green", "blue")):
        folder = tmp_path / "pictures" / colour
        folder.mkdir(parents=True)
        pixel = tuple(255 if channel == number else 0 for channel in range(3))
        for copy in range(4):
            Image.new("RGB", (10, 8), pixel).save(folder / f"{copy}.png")
    return tmp_path / "pictures"


# --- options


def glue_options(*options: str) -> tuple:
    return script_utils.parse_arguments(
        script_utils.ModelArguments, run_glue.GlueDataArguments, PipeTransformerArguments, argv=list(options)
    )


def test_options_come_from_the_command_line(tmp_path: Path) -> None:
    model_args, data_args, args = glue_options(
        *("--model_name_or_path", "some/model", "--task_name", "sst2", "--max_train_samples", "7", "--do_train"),
        *("--pipeline_parallel_size", "2", "--output_dir", str(tmp_path), "--use_cpu", "true"),
    )
    assert (model_args.model_name_or_path, data_args.task_name, data_args.max_train_samples) == (
        "some/model",
        "sst2",
        7,
    )
    assert args.do_train
    assert not args.do_eval
    assert int(args.pipeline_parallel_size) == 2


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_options_of_a_file_are_overridden_by_the_command_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"options{suffix}"
    options = {
        "model_name_or_path": "some/model",
        "task_name": "mrpc",
        "learning_rate": "3e-5",
        "do_train": True,
        "do_eval": False,
        "seed": 1,
        "max_eval_samples": None,
        "use_cpu": True,
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "output_dir": str(tmp_path),
    }
    path.write_text(json.dumps(options))  # every JSON text is a YAML text
    _, data_args, args = glue_options(str(path), "--seed", "5")
    assert (data_args.task_name, data_args.max_eval_samples) == ("mrpc", None)
    assert (args.learning_rate, args.do_train, args.do_eval, args.seed) == (3e-5, True, False, 5)
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


def test_a_file_of_options_that_is_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("- task_name\n- sst2\n")
    with pytest.raises(ValueError, match="holds a list; expected one"):
        glue_options(str(tmp_path / "options.yaml"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: run_glue.GlueDataArguments(task_name="sst3"), "Found --task_name sst3; expected one of cola"),
        (lambda: run_glue.GlueDataArguments(), "No data: pass --task_name"),
        (lambda: run_image_classification.ImageDataArguments(), "No data: pass --dataset_name, --train_dir"),
        (
            lambda: run_image_classification.ImageDataArguments(train_dir="x", augmentation="strong"),
            "Found --augmentation strong; expected one of none, standard, random_resized_crop",
        ),
    ],
)
def test_wrong_data_options_say_what_to_change(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_every_example_options_file_parses(tmp_path: Path) -> None:
    model_args, _, args = glue_options(
        str(SCRIPTS / "configs" / "run_glue_sst2.yaml"), "--output_dir", str(tmp_path), "--use_cpu", "true"
    )
    assert model_args.model_name_or_path
    assert args.do_train


# --- metrics


def test_metrics_of_one_class_only_are_zero_not_nan() -> None:
    zeros, ones = np.zeros(4, dtype=int), np.ones(4, dtype=int)
    of_pairs, of_grammar, of_likeness = (run_glue.METRICS[name] for name in ("mrpc", "cola", "stsb"))
    assert of_pairs["f1"](zeros, zeros) == of_grammar["matthews_correlation"](ones, zeros) == 0
    for of in of_likeness.values():
        assert of(zeros, np.arange(4)) == 0
        assert of(np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0])) == pytest.approx(1)


def test_every_glue_task_has_columns_and_metrics() -> None:
    assert set(run_glue.METRICS) == set(run_glue.SENTENCE_COLUMNS)


def test_compute_metrics_takes_logits_and_the_tuple_of_models_with_more_outputs() -> None:
    logits, labels = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]), np.array([1, 0, 0])
    compute = script_utils.metric_function(run_glue.METRICS["mrpc"], False, None, rank=0)
    for outputs in (logits, (logits, np.zeros(3))):
        metrics = compute(script_utils.EvalPrediction(predictions=outputs, label_ids=labels))
        assert metrics == pytest.approx({"accuracy": 2 / 3, "f1": 2 / 3})
    assert script_utils.predictions_from_logits(np.array([[1.5], [2.5]]), is_regression=True).tolist() == [1.5, 2.5]


def test_a_local_metric_script_replaces_the_built_in_metrics(tmp_path: Path) -> None:
    script = tmp_path / "share_of_ones.py"
    script.write_text(
        "import datasets\n"
        "import evaluate\n"
        "class ShareOfOnes(evaluate.Metric):\n"
        "    def _info(self):\n"
        "        columns = {'predictions': datasets.Value('int64'), 'references': datasets.Value('int64')}\n"
        "        return evaluate.MetricInfo(description='', citation='', features=datasets.Features(columns))\n"
        "    def _compute(self, predictions, references):\n"
        "        return {'share': sum(predictions) / len(predictions)}\n"
    )
    compute = script_utils.metric_function(run_glue.METRICS["sst2"], False, str(script), rank=0)
    prediction = script_utils.EvalPrediction(predictions=np.eye(2)[[1, 1, 0, 1]], label_ids=np.array([0, 0, 0, 0]))
    assert compute(prediction) == {"share": 0.75}


# --- data


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
def test_local_files_of_every_format_load(tmp_path: Path, sentences: Dataset, suffix: str) -> None:
    path = str(tmp_path / f"data{suffix}")
    write = {".csv": sentences.to_csv, ".parquet": sentences.to_parquet}.get(suffix, sentences.to_json)
    write(path)
    data = script_utils.load_files({"train": path}, cache_dir=str(tmp_path / "cache"))
    assert data["train"]["sentence"] == sentences["sentence"]


def test_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one format for all of them"):
        script_utils.load_files({"train": "a.csv", "test": "b.parquet"}, cache_dir=str(tmp_path))


def test_sentence_columns_are_named_or_the_tasks_or_what_is_left() -> None:
    columns = ["idx", "premise", "hypothesis", "label"]
    named = run_glue.GlueDataArguments(task_name="sst2", text_column_names="hypothesis, premise")
    assert run_glue.sentence_columns(named, columns) == ("hypothesis", "premise")
    assert run_glue.sentence_columns(run_glue.GlueDataArguments(task_name="sst2"), columns) == ("sentence",)
    files = run_glue.GlueDataArguments(train_file="a.csv")
    assert run_glue.sentence_columns(files, columns) == ("premise", "hypothesis")
    with pytest.raises(ValueError, match="which hold the text"):
        run_glue.sentence_columns(files, [*columns, "source"])


def test_a_missing_column_is_named_with_the_option_that_chooses_it(sentences: Dataset) -> None:
    with pytest.raises(ValueError, match="expected `text`. Name yours with --text_column_names"):
        script_utils.require_column(sentences, "text", "--text_column_names")


def test_a_missing_split_is_named_with_the_phase_that_needs_it(tmp_path: Path, sentences: Dataset) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), do_predict=True, use_cpu=True)
    with pytest.raises(ValueError, match="--do_predict needs a `test` split; found .'train'."):
        script_utils.wanted_splits(DatasetDict({"train": sentences}), args)


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["b", "a", "b"], ["a", "b"]), ([10, 2, 2], ["2", "10"]), ([0.5, 1.0, 2.0], None), ([0, -1, None], ["0"])],
)
def test_class_names_of_columns_without_names(labels: list, names: list[str] | None) -> None:
    data = DatasetDict({"train": Dataset.from_dict({"label": labels})})
    assert script_utils.class_names(data, "label") == names


def test_a_model_trained_on_the_same_classes_keeps_their_order(sentences: Dataset) -> None:
    names = script_utils.class_names(DatasetDict({"test": sentences}), "label")
    trained = BertConfig(label2id={"POSITIVE": 0, "NEGATIVE": 1}, id2label={0: "POSITIVE", 1: "NEGATIVE"})
    assert script_utils.class_ids(names, BertConfig()) == {"negative": 0, "positive": 1}
    ids = script_utils.class_ids(names, trained)
    assert ids == {"negative": 1, "positive": 0}
    assert script_utils.label_ids(sentences, "label", ids) == [0, 1, 0]


def test_an_unknown_label_is_named() -> None:
    with pytest.raises(ValueError, match="Found label 'c'; expected one of .'a', 'b'."):
        script_utils.label_ids(Dataset.from_dict({"label": ["a", "c"]}), "label", {"a": 0, "b": 1})


@pytest.mark.parametrize(
    ("labels", "is_kept"),
    [([0, 1], True), ([-1, -1], False), ([0, -1], False), ([0.0, -1.0], True), ([-1.0, -1.0], False)],
)
def test_hidden_labels_are_dropped_before_prediction(labels: list, is_kept: bool) -> None:
    data = script_utils.without_hidden_labels(Dataset.from_dict({"label": labels, "x": labels}))
    assert ("label" in data.column_names) is is_kept


def test_only_the_splits_of_wanted_phases_are_kept_and_cut(tmp_path: Path, sentences: Dataset) -> None:
    data = DatasetDict(dict.fromkeys(("train", "validation_matched", "validation_mismatched", "test"), sentences))
    data_args = script_utils.DataArguments(train_file="x", max_train_samples=5, max_eval_samples=2)
    args = TrainingArguments(output_dir=str(tmp_path), do_train=True, do_eval=True, use_cpu=True)
    selected = script_utils.select_samples(data, data_args, args)
    expected = {"train": 3, "validation_matched": 2, "validation_mismatched": 2}
    assert {name: len(split) for name, split in selected.items()} == expected
    assert list(run_glue.by_suffix(selected, "validation")) == ["", "_mm"]


def glue_split(task: str, count: int, hides_labels: bool = False) -> Dataset:
    """Made-up rows with the columns and the type of labels that the hub's data of this task have."""
    names = GLUE_CLASSES[task]
    columns = run_glue.SENTENCE_COLUMNS[task]
    rows: dict[str, list] = {
        column: [f"{WORDS[(row + place) % 8]} {WORDS[row * 3 % 8]}" for row in range(count)]
        for place, column in enumerate(columns)
    }
    known = [row % len(names) if names else 0.5 * (row % 7) for row in range(count)]
    rows |= {"label": [-1] * count if hides_labels else known, "idx": list(range(count))}
    label = ClassLabel(names=names) if names else Value("float32")
    texts = {column: Value("string") for column in columns}
    return Dataset.from_dict(rows, features=Features({**texts, "label": label, "idx": Value("int32")}))


def glue_data(task: str) -> DatasetDict:
    """All splits of a task: MNLI has two sets for evaluation, and test sets hide their labels."""
    suffixes = ("_matched", "_mismatched") if task == "mnli" else ("",)
    splits = {"train": glue_split(task, 12)}
    splits |= {f"validation{suffix}": glue_split(task, 6 + place) for place, suffix in enumerate(suffixes)}
    splits |= {f"test{suffix}": glue_split(task, 4 + place, True) for place, suffix in enumerate(suffixes)}
    return DatasetDict(splits)


@pytest.mark.parametrize("task", sorted(run_glue.SENTENCE_COLUMNS))
def test_every_glue_task_goes_from_the_hubs_columns_to_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    asked_for = []

    def load_dataset(*names: str, **options: str | None) -> DatasetDict:
        asked_for.append(names)
        return glue_data(task)

    monkeypatch.setattr(script_utils, "load_dataset", load_dataset)
    tokenizer = save_tiny_bert(tmp_path / "model", BertModel, WORDS)
    model_args = script_utils.ModelArguments(model_name_or_path=str(tmp_path / "model"))
    data_args = run_glue.GlueDataArguments(task_name=task)
    data = script_utils.load_data(data_args)
    assert asked_for == [("nyu-mll/glue", task)]
    names = run_glue.label_names(data_args, data)
    assert names == GLUE_CLASSES[task]
    config, ids = script_utils.load_config(model_args, names)
    assert config.num_labels == (len(names) if names else 1)
    encoded = run_glue.tokenize(data, tokenizer, data_args, ids)
    is_pair = len(run_glue.SENTENCE_COLUMNS[task]) == 2
    assert all((1 in kinds) is is_pair for kinds in encoded["train"]["token_type_ids"])

    evaluated = run_glue.by_suffix(encoded, "validation")
    assert {suffix: len(split) for suffix, split in evaluated.items()} == (
        {"": 6, "_mm": 7} if task == "mnli" else {"": 6}
    )
    compute = script_utils.metric_function(run_glue.METRICS[task], names is None, None, rank=0)
    for split in evaluated.values():
        batch = DataCollatorWithPadding(tokenizer)([split[row] for row in range(len(split))])
        assert batch["labels"].dtype == (torch.int64 if names else torch.float32)
        labels = batch["labels"].numpy()
        right = np.eye(len(names))[labels] if names else labels[:, None]
        metrics = compute(script_utils.EvalPrediction(predictions=right, label_ids=labels))
        assert metrics == pytest.approx(dict.fromkeys(run_glue.METRICS[task], 1.0))
    for split in run_glue.by_suffix(encoded, "test").values():
        assert "label" not in script_utils.without_hidden_labels(split).column_names


def test_similarities_in_whole_numbers_are_targets_of_a_regression(tmp_path: Path) -> None:
    tokenizer = save_tiny_bert(tmp_path / "model", BertModel, WORDS)
    rows = {"sentence1": ["good", "bad"], "sentence2": ["fine", "dull"], "label": [5, None]}
    data_args = run_glue.GlueDataArguments(task_name="stsb", train_file="a.csv")
    data = DatasetDict({"train": Dataset.from_dict(rows)})
    assert run_glue.label_names(data_args, data) is None
    encoded = run_glue.tokenize(data, tokenizer, data_args, {})
    assert encoded["train"]["label"][:] == [5.0, -1.0]


# --- images


def test_a_model_without_an_image_processor_gets_one_of_its_size(tmp_path: Path) -> None:
    model_args = run_image_classification.ImageModelArguments(model_name_or_path=str(tmp_path), image_mean=[0.5] * 3)
    processor = run_image_classification.load_image_processor(model_args, ViTConfig(image_size=12))
    pixels = processor([Image.new("RGB", (20, 30), (255, 255, 255))], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 12, 12)
    assert pixels.unique().tolist() == [1.0]  # (1 - 0.5) / 0.5


def test_a_model_of_unknown_image_size_asks_for_it(tmp_path: Path) -> None:
    model_args = run_image_classification.ImageModelArguments(model_name_or_path=str(tmp_path))
    with pytest.raises(ValueError, match="--image_size"):
        run_image_classification.load_image_processor(model_args, BertConfig())


def test_the_options_change_a_saved_image_processor(tmp_path: Path) -> None:
    ViTImageProcessorPil(size={"height": 4, "width": 4}).save_pretrained(tmp_path)
    model_args = run_image_classification.ImageModelArguments(model_name_or_path=str(tmp_path), image_size=6)
    processor = run_image_classification.load_image_processor(model_args, ViTConfig())
    pixels = processor([Image.new("RGB", (5, 5))], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 6, 6)


def test_folders_of_images_become_pixels_and_class_ids(tmp_path: Path, pictures: Path) -> None:
    data_args = run_image_classification.ImageDataArguments(train_dir=str(pictures), train_val_split=0.25)
    model_args = script_utils.ModelArguments(model_name_or_path="", cache_dir=str(tmp_path / "cache"))
    data = run_image_classification.load_data(data_args, model_args)
    assert {name: len(split) for name, split in data.items()} == {"train": 9, "validation": 3}
    ids = script_utils.class_ids(script_utils.class_names(data, "label"), ViTConfig())
    assert ids == {"blue": 0, "green": 1, "red": 2}
    prepared = run_image_classification.prepare(
        data, data_args, ids, ViTImageProcessorPil(size={"height": 4, "width": 4})
    )
    batch = default_data_collator([prepared["train"][row] for row in range(9)])
    assert batch["pixel_values"].shape == (9, 3, 4, 4)
    brightest_channel = batch["pixel_values"].mean(dim=(2, 3)).argmax(dim=1)
    assert torch.equal(2 - brightest_channel, batch["labels"])


def paint(folder: Path, names: dict[str, int], suffix: str) -> Path:
    """Folders of images, by class: how many."""
    for number, (name, count) in enumerate(names.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for copy in range(count):
            Image.new("RGB", (8, 8), (80 * number, copy, 0)).save(folder / name / f"{copy}.{suffix}")
    return folder


def labels_of(split: Dataset) -> list[str]:
    return [split.features["label"].int2str(label) for label in split["label"]]


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_a_folder_laid_out_as_imagenet_is_read_by_its_splits(tmp_path: Path, validation: str) -> None:
    root = tmp_path / "imagenet"
    paint(root / "train", {"n01440764": 3, "n01443537": 2}, "JPEG")
    paint(root / validation, {"n01440764": 1, "n01443537": 1}, "JPEG")
    paint(root / "test", {"": 4}, "JPEG")
    model_args = script_utils.ModelArguments(model_name_or_path="", cache_dir=str(tmp_path / "cache"))
    by_root = run_image_classification.ImageDataArguments(dataset_name=str(root))
    by_folder = run_image_classification.ImageDataArguments(
        train_dir=str(root / "train"), validation_dir=str(root / validation), test_dir=str(root / "test")
    )
    assert by_root.folders == by_folder.folders
    data = run_image_classification.load_data(by_root, model_args)
    assert labels_of(data["train"]) == ["n01440764"] * 3 + ["n01443537"] * 2
    assert labels_of(data["validation"]) == ["n01440764", "n01443537"]
    assert data["test"].column_names == ["image"]
    assert len(data["test"]) == 4


def test_folders_at_other_depths_or_with_fewer_classes_keep_their_labels(tmp_path: Path) -> None:
    train = paint(tmp_path / "train", {"cat": 2, "dog": 2}, "png")
    validation = paint(tmp_path / "far" / "away", {"dog": 3}, "png")
    data_args = run_image_classification.ImageDataArguments(train_dir=str(train), validation_dir=str(validation))
    model_args = script_utils.ModelArguments(model_name_or_path="", cache_dir=str(tmp_path / "cache"))
    data = run_image_classification.load_data(data_args, model_args)
    ids = script_utils.class_ids(script_utils.class_names(data, "label"), ViTConfig())
    prepared = run_image_classification.prepare(
        data, data_args, ids, ViTImageProcessorPil(size={"height": 4, "width": 4})
    )
    assert [row["label"] for row in prepared["validation"]] == [ids["dog"]] * 3


def test_other_data_sets_of_the_hub_or_of_a_folder_are_no_folders_of_images(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.parquet").touch()
    for name in (str(tmp_path), "uoft-cs/cifar10"):
        assert run_image_classification.ImageDataArguments(dataset_name=name).folders == {}


@pytest.mark.parametrize("label", ["label", "fine_label"])
def test_parquet_files_with_the_columns_of_cifar_become_pixels_and_class_ids(tmp_path: Path, label: str) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 255, 0), (255, 0, 0)]
    features = Features({"img": ImageFeature(), label: ClassLabel(names=["red", "green"]), "coarse": Value("int64")})
    rows = {"img": [Image.new("RGB", (32, 32), colour) for colour in colours], label: [0, 1, 1, 0], "coarse": [7] * 4}
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "images.parquet"))
    data_args = run_image_classification.ImageDataArguments(
        train_file=str(tmp_path / "images.parquet"),
        validation_file=str(tmp_path / "images.parquet"),
        image_column_name="img",
        label_column_name=label,
    )
    model_args = script_utils.ModelArguments(model_name_or_path="", cache_dir=str(tmp_path / "cache"))
    data = run_image_classification.load_data(data_args, model_args)
    names = script_utils.class_names(data, label)
    ids = script_utils.class_ids(names, ViTConfig())
    processor = ViTImageProcessorPil(size={"height": 4, "width": 4})
    prepared = run_image_classification.prepare(data, data_args, ids, processor)
    batch = default_data_collator([prepared["validation"][row] for row in range(4)])
    assert batch["labels"].tolist() == [ids[name] for name in ("red", "green", "green", "red")]
    assert torch.equal(batch["pixel_values"].mean(dim=(2, 3)).argmax(dim=1), torch.tensor([0, 1, 1, 0]))
    unnamed = run_image_classification.ImageDataArguments(train_file="x", label_column_name=label)
    with pytest.raises(ValueError, match="expected `image`. Name yours with --image_column_name"):
        run_image_classification.prepare(data, unnamed, ids, processor)


# --- whole runs on two processes


@pytest.mark.distributed
@pytest.mark.shared_data
def test_run_glue_trains_evaluates_and_predicts_with_two_stages(
    tmp_path: Path, minilm: Path, shared_data: Path
) -> None:
    output = tmp_path / "output"
    launch(
        SCRIPTS / "run_glue.py",
        [
            *("--model_name_or_path", str(minilm), "--task_name", "sst2", "--max_seq_length", "48"),
            *("--train_file", str(shared_data / "sst2_train.parquet"), "--max_train_samples", "48"),
            *("--validation_file", str(shared_data / "sst2_dev.parquet"), "--max_eval_samples", "21"),
            *("--test_file", str(shared_data / "sst2_dev.parquet"), "--max_predict_samples", "13"),
            *("--do_train", "--do_eval", "--do_predict", "--pipeline_parallel_size", "2", "--num_train_epochs", "1"),
            *("--learning_rate", "1e-4", "--save_strategy", "no", "--use_cpu", "true"),
            *("--output_dir", str(output), "--cache_dir", str(tmp_path / "cache")),
        ],
        num_processes=2,
        timeout=240,
    )
    results = json.loads((output / "all_results.json").read_text())
    assert (results["train_samples"], results["eval_samples"], results["predict_samples"]) == (48, 21, 13)
    assert 0 <= results["eval_accuracy"] <= 1
    lines = (output / "predict_results.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["index", *map(str, range(13))]

    saved = AutoModelForSequenceClassification.from_pretrained(output).eval()
    tokenizer = AutoTokenizer.from_pretrained(output)
    data = Dataset.from_parquet(str(shared_data / "sst2_dev.parquet"), cache_dir=str(tmp_path / "cache"))
    with torch.no_grad():
        batch = tokenizer(data[:13]["sentence"], return_tensors="pt", padding=True, truncation=True, max_length=48)
        predicted = saved(**batch).logits.argmax(dim=-1).tolist()
    assert [line.split("\t")[1] for line in lines[1:]] == [saved.config.id2label[number] for number in predicted]


@pytest.mark.distributed
def test_run_glue_evaluates_and_predicts_both_sets_of_mnli_with_two_stages(tmp_path: Path) -> None:
    save_tiny_bert(tmp_path / "model", BertModel, WORDS)
    (tmp_path / "mnli" / "data").mkdir(parents=True)
    for name, split in glue_data("mnli").items():
        split.to_parquet(str(tmp_path / "mnli" / "data" / f"{name}-00000-of-00001.parquet"))
    output = tmp_path / "output"
    launch(
        SCRIPTS / "run_glue.py",
        [
            *("--model_name_or_path", str(tmp_path / "model"), "--task_name", "mnli"),
            *("--dataset_name", str(tmp_path / "mnli"), "--do_train", "--do_eval", "--do_predict"),
            *("--pipeline_parallel_size", "2", "--num_train_epochs", "1", "--save_strategy", "no"),
            *("--use_cpu", "true", "--output_dir", str(output), "--cache_dir", str(tmp_path / "cache")),
        ],
        num_processes=2,
        timeout=240,
    )
    results = json.loads((output / "all_results.json").read_text())
    assert (results["eval_samples"], results["eval_samples_mm"]) == (6, 7)
    for name, count in (("eval_accuracy", 6), ("eval_accuracy_mm", 7)):
        assert results[name] * count == pytest.approx(round(results[name] * count))
    for suffix, count in (("", 4), ("_mm", 5)):
        lines = (output / f"predict_results{suffix}.txt").read_text().splitlines()[1:]
        assert len(lines) == count
        assert {line.split("\t")[1] for line in lines} <= set(GLUE_CLASSES["mnli"])


@pytest.mark.distributed
def test_run_glue_learns_similarities_from_csv_files_with_two_stages(tmp_path: Path) -> None:
    save_tiny_bert(tmp_path / "model", BertModel, WORDS)
    for name, count in (("train", 12), ("validation", 6), ("test", 5)):
        split = glue_split("stsb", count).remove_columns("idx")
        split = split.remove_columns("label") if name == "test" else split
        split.to_csv(str(tmp_path / f"{name}.csv"))
    output = tmp_path / "output"
    launch(
        SCRIPTS / "run_glue.py",
        [
            *("--model_name_or_path", str(tmp_path / "model"), "--task_name", "stsb"),
            *(f"--{name}_file={tmp_path / name}.csv" for name in ("train", "validation", "test")),
            *("--do_train", "--do_eval", "--do_predict", "--pipeline_parallel_size", "2", "--num_train_epochs", "1"),
            *("--learning_rate", "1e-3", "--save_strategy", "no", "--use_cpu", "true"),
            *("--output_dir", str(output), "--cache_dir", str(tmp_path / "cache")),
        ],
        num_processes=2,
        timeout=240,
    )
    results = json.loads((output / "all_results.json").read_text())
    assert {"eval_pearson", "eval_spearmanr", "eval_loss"} <= results.keys()
    saved = AutoModelForSequenceClassification.from_pretrained(output).eval()
    assert saved.config.num_labels == 1
    rows = glue_split("stsb", 5)
    with torch.no_grad():
        batch = AutoTokenizer.from_pretrained(output)(
            rows["sentence1"][:], rows["sentence2"][:], return_tensors="pt", padding=True
        )
        expected = saved(**batch).logits[:, 0].tolist()
    lines = (output / "predict_results.txt").read_text().splitlines()[1:]
    assert [float(line.split("\t")[1]) for line in lines] == pytest.approx(expected, abs=1e-3)


@pytest.mark.distributed
def test_run_image_classification_learns_three_colours_with_two_stages(tmp_path: Path, pictures: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    output = tmp_path / "output"
    launch(
        SCRIPTS / "run_image_classification.py",
        [
            *("--model_name_or_path", str(tmp_path / "model"), "--ignore_mismatched_sizes"),
            *("--train_dir", str(pictures), "--validation_dir", str(pictures), "--augmentation", "standard"),
            *("--do_train", "--do_eval", "--pipeline_parallel_size", "2", "--num_train_epochs", "20"),
            *("--per_device_train_batch_size", "3", "--learning_rate", "1e-2", "--save_strategy", "no"),
            *("--use_cpu", "true", "--output_dir", str(output), "--cache_dir", str(tmp_path / "cache")),
        ],
        num_processes=2,
        timeout=240,
    )
    assert json.loads((output / "all_results.json").read_text())["eval_accuracy"] == 1.0
    saved = AutoModelForImageClassification.from_pretrained(output)
    assert saved.config.label2id == {"blue": 0, "green": 1, "red": 2}


@pytest.mark.distributed
@pytest.mark.slow
def test_the_demo_reaches_its_accuracy_with_two_stages(tmp_path: Path) -> None:
    result = launch(SCRIPTS / "demo.py", ["--output_dir", str(tmp_path)], num_processes=2, timeout=280)
    assert "2 stages x 1 replica" in result.output
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_accuracy"] >= 0.95
    report = tmp_path / "report.html"
    assert str(report.resolve()) in result.output
    assert "Not recorded" not in report.read_text(encoding="utf-8")
    events = json.loads((tmp_path / "trace_step_100.json").read_text())["traceEvents"]
    table = find_schedule("1f1b").table(2, 2, 1, 0)
    for rank, actions in enumerate(table):
        check_lanes([event for event in events if event["pid"] == rank])
        assert actions_of([event for event in events if event["pid"] == rank]) == [str(action) for action in actions]


@pytest.mark.distributed
def test_the_quick_start_runs_as_the_pages_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells it that there are no GPUs."""
    monkeypatch.chdir(tmp_path)
    result = accelerate_launch(SCRIPTS / "quick_start.py", timeout=200, env={"ACCELERATE_USE_CPU": None})
    assert "'eval_loss'" in result.output
    # Both ranks print the layout, and the line breaks of both may come last.
    assert "1 stage x 2 replicas" in result.output.rstrip().splitlines()[-1]


# --- causal language models


def test_texts_become_blocks_of_equal_length() -> None:
    found = run_clm.in_blocks({"input_ids": [[1, 2, 3], [4, 5], [6, 7, 8]]}, 3)
    assert found == {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]}
    assert run_clm.in_blocks({"input_ids": [[1]]}, 3)["input_ids"] == []


def test_a_block_longer_than_the_model_takes_is_refused() -> None:
    tokenizer, config = make_tokenizer(), make_decoder("gpt2").config
    assert run_clm.block_size_of(run_clm.CausalDataArguments(train_file="x"), tokenizer, config) == 128
    with pytest.raises(ValueError, match="--block_size 129 is more than the 128 tokens"):
        run_clm.block_size_of(run_clm.CausalDataArguments(train_file="x", block_size=129), tokenizer, config)


@pytest.fixture
def causal_options(tmp_path: Path) -> list[str]:
    make_decoder("gpt2").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    for name, num in (("train", 60), ("dev", 12)):
        make_texts(num).to_parquet(tmp_path / f"{name}.parquet")
    return [
        *("--model_name_or_path", str(tmp_path / "model"), "--train_file", str(tmp_path / "train.parquet")),
        *("--validation_file", str(tmp_path / "dev.parquet"), "--do_train", "--do_eval", "--use_cpu", "true"),
        *("--pipeline_parallel_size", "2", "--freeze_policy", "none", "--max_steps", "3", "--report_to", "none"),
        *("--disable_tqdm", "true", "--output_dir", str(tmp_path / "out")),
    ]


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_run_clm_trains_and_evaluates_slices_in_two_stages(causal_options: list[str], tmp_path: Path) -> None:
    options = [*causal_options, "--block_size", "32", "--pipeline_schedule", "token"]
    launch(SCRIPTS / "run_clm.py", options, num_processes=2, timeout=200)
    found = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert found["perplexity"] == pytest.approx(np.exp(found["eval_loss"]))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.n_layer == 4


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_run_sft_trains_and_evaluates_in_two_stages(causal_options: list[str], tmp_path: Path) -> None:
    launch(SCRIPTS / "run_sft.py", [*causal_options, "--bf16", "false"], num_processes=2, timeout=200)
    found = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert 0 <= found["eval_mean_token_accuracy"] <= 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bits", ["4", "8"])
def test_run_sft_trains_adapters_over_a_quantized_model(bits: str, causal_options: list[str], tmp_path: Path) -> None:
    make_decoder("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    options = [*causal_options, "--bf16", "false", f"--load_in_{bits}bit", "--use_peft", "--dtype", "float32"]
    options += ["--lora_target_modules", "q_proj", "v_proj"]
    launch(SCRIPTS / "run_sft.py", options, num_processes=2, timeout=200)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
