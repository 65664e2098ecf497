"""Fine-tune an image classifier on folders of images, parquet files or a data set of the hub, with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_image_classification.py \
        --model_name_or_path google/vit-base-patch16-224-in21k --train_dir images/train --validation_dir images/val \
        --do_train --do_eval --pipeline_parallel_size 2 --output_dir outputs/images

With folders that lie as ImageNet does (`train/CLASS/...`, `val/CLASS/...`), `--dataset_name` may name the folder above
them; `--augmentation random_resized_crop` crops their images as is usual for ImageNet, in training and in evaluation.
On a machine without GPUs add `--use_cpu true`. The options of transformers' `run_image_classification.py` mean the
same here; unlike there, nothing is cropped unless an option says so. Images need Pillow; torchvision is not needed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from augmentation import AUGMENTATIONS, augmentation_of, pixels_of
from datasets import Dataset, DatasetDict, Image, load_dataset
from metrics import CLASSIFICATION, predictions_from_logits
from script_utils import (
    LabelledDataArguments,
    ModelArguments,
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
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedConfig, set_seed
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


logger = logging.getLogger("run_image_classification")

CROP_PCT = 0.875
CROP_SCALE = [0.08, 1.0]
CROP_RATIO = [3 / 4, 4 / 3]
SPLIT_FOLDERS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}


@dataclass
class ImageModelArguments(ModelArguments):
    """Which model and image processor."""

    image_processor_name: str | None = field(
        default=None, metadata={"help": "Hub name or folder of the image processor, if not the model's own."}
    )
    image_size: int | None = field(
        default=None, metadata={"help": "Pixels of a side; by default the image processor's, else the model's."}
    )
    image_mean: list[float] | None = field(default=None, metadata={"help": "Mean of each channel, of pixels in 0..1."})
    image_std: list[float] | None = field(default=None, metadata={"help": "Deviation of each channel, likewise."})


@dataclass
class ImageDataArguments(LabelledDataArguments):
    """Which images, and how they are augmented."""

    train_dir: str | None = field(default=None, metadata={"help": "Training images, one folder per class."})
    validation_dir: str | None = field(default=None, metadata={"help": "Evaluation images, one folder per class."})
    test_dir: str | None = field(default=None, metadata={"help": "Images to predict."})
    train_val_split: float | None = field(
        default=0.15, metadata={"help": "Share of the training images to evaluate on if no others are named."}
    )
    image_column_name: str = field(default="image", metadata={"help": "The column of images."})
    augmentation: str = field(
        default="none",
        metadata={
            "help": "`none`; `standard`: random crop after padding, and random flip; `random_resized_crop`: a random "
            "part of the image, resized, and random flip."
        },
    )
    crop_scale: list[float] | None = field(
        default=None,
        metadata={"help": "Smallest and largest share of the area in a random resized crop, 0.08 and 1 by default."},
    )
    crop_ratio: list[float] | None = field(
        default=None, metadata={"help": "Smallest and largest width / height of one, 3/4 and 4/3 by default."}
    )
    crop_pct: float | None = field(
        default=None,
        metadata={
            "help": "Images without a random resized crop are resized until their shorter side is the model's size "
            f"divided by this share, and cropped in the middle. {CROP_PCT} by default with a random resized crop; "
            "otherwise by default the image processor decides, most resize the whole image."
        },
    )

    def __post_init__(self) -> None:
        if self.augmentation not in AUGMENTATIONS:
            raise ValueError(f"Found --augmentation {self.augmentation}; expected one of {', '.join(AUGMENTATIONS)}.")
        if self.augmentation == "random_resized_crop":
            self.crop_pct = CROP_PCT if self.crop_pct is None else self.crop_pct
        for name, most in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
            self._check_range(name, most)
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ValueError(f"Found --crop_pct {self.crop_pct}; expected a share above 0, of 1 at most.")
        if self.dataset_name is None and not self.files and not self.folders:
            raise ValueError("No images: pass --dataset_name, --train_dir and --validation_dir, or --train_file.")

    def _check_range(self, name: str, most: float) -> None:
        found = getattr(self, name)
        if found is None:
            return
        if len(found) != 2 or not 0 < found[0] <= found[1] <= most:
            limit = "" if most == float("inf") else f", {most:g} at most"
            raise ValueError(f"Found --{name} {found}; expected two numbers above 0, the smaller one first{limit}.")
        if self.augmentation != "random_resized_crop":
            raise ValueError(f"--{name} needs --augmentation random_resized_crop, found {self.augmentation}.")

    @property
    def folders(self) -> dict[str, str]:
        """The folders of images that were named, by split; those inside `dataset_name` if it is such a folder."""
        named = {"train": self.train_dir, "validation": self.validation_dir, "test": self.test_dir}
        named = {split: folder for split, folder in named.items() if folder}
        return named or (split_folders(Path(self.dataset_name)) if self.dataset_name else {})


def split_folders(root: Path) -> dict[str, str]:
    """The splits of a folder laid out as ImageNet is, `train/CLASS/...` and `val/CLASS/...`; empty for others."""
    if not any(entry.is_dir() for entry in root.glob("train/*")):
        return {}
    found = {split: root / name for split, names in SPLIT_FOLDERS.items() for name in names if (root / name).is_dir()}
    return {split: str(folder) for split, folder in found.items()}


class ImageTransform:
    """Images of a batch to `pixel_values` `(channels, height, width)`, augmented if `data_args` say so."""

    def __init__(self, processor: Any, data_args: ImageDataArguments, is_training: bool):
        self.processor = processor
        self.image_column = data_args.image_column_name
        name = data_args.augmentation if is_training else "none"
        scale, ratio = data_args.crop_scale or CROP_SCALE, data_args.crop_ratio or CROP_RATIO
        self.augment = augmentation_of(name, processor, tuple(scale), tuple(ratio))
        # A random resized crop has the model's size already.
        self.options = dict.fromkeys(("do_resize", "do_center_crop"), False) if name == "random_resized_crop" else {}

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [self.augment(image.convert("RGB")) for image in batch.pop(self.image_column)]
        pixels = self.processor(images, return_tensors="pt", **self.options)["pixel_values"]
        return {**batch, "pixel_values": list(pixels)}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack `pixel_values` `(batch, channels, height, width)` and `labels` `(batch,)`; predictions have no labels."""
    batch = {"pixel_values": torch.stack([sample["pixel_values"] for sample in samples])}
    if "label" in samples[0]:
        batch["labels"] = torch.tensor([sample["label"] for sample in samples])
    return batch


def load_image_processor(model_args: ImageModelArguments, config: PreTrainedConfig) -> Any:
    """The model's image processor, changed as the options say; a plain one if the model comes without."""
    source = model_args.image_processor_name or model_args.model_name_or_path
    changes: dict[str, Any] = {}
    if model_args.image_mean:
        changes["image_mean"] = model_args.image_mean
    if model_args.image_std:
        changes["image_std"] = model_args.image_std
    if model_args.image_size:
        changes["size"] = {"height": model_args.image_size, "width": model_args.image_size}
        changes["crop_size"] = changes["size"]
    try:
        return AutoImageProcessor.from_pretrained(source, **model_args.hub_options, **changes)
    except OSError:
        size = changes.get("size") or image_size_of(config)
        processor = ViTImageProcessorPil(**changes | {"size": size})
        logger.info(
            "%s has no image processor: images become %s, with mean %s and deviation %s. "
            "Change that with --image_size, --image_mean, --image_std or --image_processor_name.",
            source,
            size,
            processor.image_mean,
            processor.image_std,
        )
        return processor


def with_center_crop(processor: Any, crop_pct: float) -> Any:
    """Return the image processor with ImageNet's usual evaluation crop, which is saved with the model."""
    if hasattr(processor, "crop_pct"):  # ConvNeXT's, for one, crops like this by itself
        return type(processor).from_dict(processor.to_dict(), crop_pct=crop_pct)
    width, height = pixels_of(processor)
    changes = {
        "do_resize": True,
        "size": {"shortest_edge": round(max(width, height) / crop_pct)},
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
    }
    return type(processor).from_dict(processor.to_dict() | changes)


def image_size_of(config: PreTrainedConfig) -> dict[str, int]:
    """Height and width that the model was made for."""
    size = getattr(config, "image_size", None)
    if size is None:
        raise ValueError("Neither an image processor nor config.image_size says how large images are: --image_size.")
    height, width = (size, size) if isinstance(size, int) else size
    return {"height": height, "width": width}


def load_folder(folder: str, split: str, cache_dir: str | None) -> Dataset:
    """The images of one split, each labelled with the name of its folder; those to predict may lie in one folder.

    Split by split: read together, splits at different depths, or one without classes, would leave all without labels.
    """
    # Found by itself are two classes or more; an evaluation may have one.
    drops_labels = False if split == "validation" else None
    files = {split: f"{folder}/**"}
    return load_dataset("imagefolder", data_files=files, split=split, drop_labels=drops_labels, cache_dir=cache_dir)


def load_data(data_args: ImageDataArguments, model_args: ModelArguments) -> DatasetDict:
    """Folders or files if any are named, else the hub's data; a validation split is cut off if there is none."""
    if data_args.folders:
        folders = data_args.folders.items()
        data = DatasetDict({split: load_folder(folder, split, model_args.cache_dir) for split, folder in folders})
    elif data_args.files:
        data = load_files(data_args.files, model_args.cache_dir)
    else:
        data = load_dataset(
            data_args.dataset_name,
            data_args.dataset_config_name,
            cache_dir=model_args.cache_dir,
            token=model_args.token,
        )
    if "train" in data and "validation" not in data and data_args.train_val_split:
        halves = data["train"].train_test_split(data_args.train_val_split, seed=0)
        data["train"], data["validation"] = halves["train"], halves["test"]
    return data


def prepare(data: DatasetDict, data_args: ImageDataArguments, ids: dict[str, int], processor: Any) -> DatasetDict:
    """Reduce each split to an image and a `label` (the model's class id), decoded and augmented when it is read."""
    image_column, label_column = data_args.image_column_name, data_args.label_column_name

    def prepare_split(name: str, split: Dataset) -> Dataset:
        require_column(split, image_column, "--image_column_name")
        labels = label_ids(split, label_column, ids) if label_column in split.column_names else None
        images = split.select_columns([image_column]).cast_column(image_column, Image())
        prepared = images if labels is None else images.add_column("label", labels)
        if name == "test":
            prepared = without_hidden_labels(prepared, "label")
        return prepared.with_transform(ImageTransform(processor, data_args, is_training=name == "train"))

    return DatasetDict({name: prepare_split(name, split) for name, split in data.items()})


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = parse_arguments(
        ImageModelArguments, ImageDataArguments, PipeTransformerArguments, argv=argv
    )
    args.remove_unused_columns = False  # the transform needs the image column, which no model takes
    start_logging(args)
    set_seed(args.seed)

    with args.main_process_first(desc="loading images"):
        data = load_data(data_args, model_args)
    labelled = data["train"] if "train" in data else next(iter(data.values()))
    require_column(labelled, data_args.label_column_name, "--label_column_name")
    names = class_names(labelled, data_args.label_column_name)
    if names is None:
        raise ValueError(f"--label_column_name {data_args.label_column_name} holds real numbers; expected classes.")
    config, ids = load_config(model_args, names)
    processor = load_image_processor(model_args, config)
    if data_args.crop_pct:
        processor = with_center_crop(processor, data_args.crop_pct)
    model = AutoModelForImageClassification.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **model_args.hub_options,
    )
    data = prepare(select_samples(data, data_args, args), data_args, ids, processor)

    trainer = PipeTransformerTrainer(
        model=model,
        args=args,
        train_dataset=require_split(data, "train", "do_train") if args.do_train else None,
        eval_dataset=require_split(data, "validation", "do_eval") if args.do_eval else None,
        processing_class=processor,
        data_collator=collate,
        compute_metrics=metric_function(CLASSIFICATION, False, data_args.metric_name, args.process_index),
    )
    if args.do_train:
        train(trainer)
    if args.do_eval:
        report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(data["validation"])})
    if args.do_predict:
        test = require_split(data, "test", "do_predict")
        output = trainer.predict(test, metric_key_prefix="predict")
        report(trainer, "predict", output.metrics | {"predict_samples": len(test)})
        in_order = [config.id2label[number] for number in sorted(config.id2label)]
        predictions = predictions_from_logits(output.predictions, is_regression=False)
        write_predictions(trainer, "predict_results.txt", predictions, in_order)
    finish(trainer, data_args, tasks="image-classification", tags=["hf-pipetransformer", "vision"])


if __name__ == "__main__":
    main()
