"""Fine-tune an image classifier on folders of images, parquet files or a data set of the hub, with pipeline stages.

    accelerate launch --multi_gpu --num_processes 4 scripts/run_image_classification.py \
        --model_name_or_path google/vit-base-patch16-224-in21k --train_dir images/train --validation_dir images/val \
        --do_train --do_eval --pipeline_parallel_size 2 --output_dir outputs/images

With folders that lie as ImageNet does (`train/CLASS/...`, `val/CLASS/...`), `--dataset_name` may name the folder above
them; `--augmentation random_resized_crop` crops their images as is usual for ImageNet, in training and in evaluation.
On a machine without GPUs add `--use_cpu true`. Options are named as in transformers' `run_image_classification.py`;
unlike there, nothing is cropped unless an option says so. Images need Pillow; torchvision is not needed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import script_utils
from augmentation import AUGMENTATIONS, augment, pixels_of, random_resized_crop
from datasets import Dataset, DatasetDict, Image, load_dataset
from PIL import Image as PillowImage
from script_utils import LabelledDataArguments, ModelArguments
from sklearn.metrics import accuracy_score
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedConfig, default_data_collator
from transformers.hf_argparser import HfArg
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer


logger = logging.getLogger("run_image_classification")

CROP_PCT = 0.875
CROP_SCALE = [0.08, 1.0]
CROP_RATIO = [3 / 4, 4 / 3]
SPLIT_FOLDERS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}


@dataclass
class ImageModelArguments(ModelArguments):
    """Which model, and how its image processor is changed."""

    image_size: int | None = HfArg(default=None, help="Pixels of a side, if not the image processor's or model's.")
    image_mean: list[float] | None = HfArg(default=None, help="Mean of each channel, of pixels in 0..1.")
    image_std: list[float] | None = HfArg(default=None, help="Deviation of each channel, likewise.")


@dataclass
class ImageDataArguments(LabelledDataArguments):
    """Which images, and how they are augmented."""

    train_dir: str | None = HfArg(default=None, help="Training images, one folder per class.")
    validation_dir: str | None = HfArg(default=None, help="Evaluation images, one folder per class.")
    test_dir: str | None = HfArg(default=None, help="Images to predict.")
    train_val_split: float = HfArg(default=0.15, help="Share of the training images that are evaluated on by default.")
    image_column_name: str = HfArg(default="image", help="The column of images.")
    augmentation: str = HfArg(
        default="none",
        help="`none`; `standard`: random crop after padding, and random flip; `random_resized_crop`: a random part of "
        "the image, resized, and random flip.",
    )
    crop_scale: list[float] | None = HfArg(default=None, help="Range of a random resized crop's area; 0.08 to 1.")
    crop_ratio: list[float] | None = HfArg(default=None, help="Range of its width / height; by default 3/4 to 4/3.")
    crop_pct: float | None = HfArg(
        default=None,
        help="Crop images without a random resized crop in the middle, once their shorter side is the model's size "
        f"divided by this share. Default: {CROP_PCT} with random resized crops, else as the image processor does.",
    )

    sources = "--dataset_name, --train_dir and --validation_dir, or --train_file"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.augmentation not in AUGMENTATIONS:
            raise ValueError(f"Found --augmentation {self.augmentation}; expected one of {', '.join(AUGMENTATIONS)}.")
        for name, most in (("crop_scale", 1.0), ("crop_ratio", math.inf)):
            found = getattr(self, name)
            if found is None:
                continue
            if len(found) != 2 or not 0 < found[0] <= found[1] <= most:
                raise ValueError(
                    f"Found --{name} {found}; expected two numbers above 0, the smaller one first, {most:g} at most."
                )
            if self.augmentation != "random_resized_crop":
                raise ValueError(f"--{name} needs --augmentation random_resized_crop, found {self.augmentation}.")
        if self.augmentation == "random_resized_crop":
            self.crop_scale, self.crop_ratio = self.crop_scale or CROP_SCALE, self.crop_ratio or CROP_RATIO
            self.crop_pct = CROP_PCT if self.crop_pct is None else self.crop_pct
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ValueError(f"Found --crop_pct {self.crop_pct}; expected a share above 0, of 1 at most.")

    @property
    def folders(self) -> dict[str, str]:
        """The folders of images by split: those named, else those in `dataset_name` if it is laid out as ImageNet."""
        named = {"train": self.train_dir, "validation": self.validation_dir, "test": self.test_dir}
        if any(named.values()):
            return {split: folder for split, folder in named.items() if folder}
        root = Path(self.dataset_name or "")
        if not self.dataset_name or not any(entry.is_dir() for entry in root.glob("train/*")):
            return {}
        places = [(split, root / name) for split, names in SPLIT_FOLDERS.items() for name in names]
        return {split: str(folder) for split, folder in places if folder.is_dir()}

    @property
    def paths(self) -> dict[str, str]:
        return self.folders or self.files


@dataclass
class ImageTransform:
    """Images of a batch to `pixel_values` `(channels, height, width)`, augmented if `data_args` say so."""

    processor: Any
    data_args: ImageDataArguments
    is_training: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        args, options = self.data_args, {}
        images = [image.convert("RGB") for image in batch.pop(args.image_column_name)]
        if self.is_training and args.augmentation == "standard":
            images = [augment(image) for image in images]
        elif self.is_training and args.augmentation == "random_resized_crop":
            resample = self.processor.resample
            resample = PillowImage.Resampling.BILINEAR if resample is None else resample
            crop = pixels_of(self.processor), args.crop_scale, args.crop_ratio, resample
            images = [random_resized_crop(image, *crop) for image in images]
            options = {"do_resize": False, "do_center_crop": False}  # They have the model's size already.
        return {**batch, "pixel_values": list(self.processor(images, return_tensors="pt", **options)["pixel_values"])}


def load_image_processor(model_args: ImageModelArguments, config: PreTrainedConfig) -> Any:
    """The model's image processor, changed as the options say; a plain one if the model comes without."""
    size = model_args.image_size
    wanted = {"image_mean": model_args.image_mean, "image_std": model_args.image_std}
    wanted |= dict.fromkeys(("size", "crop_size"), {"height": size, "width": size} if size else None)
    changes = {name: value for name, value in wanted.items() if value}
    try:
        return AutoImageProcessor.from_pretrained(model_args.model_name_or_path, **model_args.hub_options, **changes)
    except OSError:
        side = size or getattr(config, "image_size", None)
        if side is None:
            raise ValueError(
                "No image processor and no config.image_size: how large are images? --image_size."
            ) from None
        height, width = (side, side) if isinstance(side, int) else side
        # The one that works with Pillow alone, without torchvision.
        processor = ViTImageProcessorPil(**changes | {"size": {"height": height, "width": width}})
        logger.warning(
            "%s has no image processor: images become %s, with mean %s and deviation %s. Change that with "
            "--image_size, --image_mean and --image_std.",
            model_args.model_name_or_path,
            dict(processor.size),
            processor.image_mean,
            processor.image_std,
        )
        return processor


def with_center_crop(processor: Any, crop_pct: float) -> Any:
    """Return the image processor with ImageNet's usual evaluation crop, which is saved with the model."""
    changes: dict[str, Any] = {"crop_pct": crop_pct}
    if not hasattr(processor, "crop_pct"):  # ConvNeXT's, for one, crops like this by itself
        width, height = pixels_of(processor)
        size, crop = {"shortest_edge": round(max(width, height) / crop_pct)}, {"height": height, "width": width}
        changes = {"do_resize": True, "size": size, "do_center_crop": True, "crop_size": crop}
    return type(processor).from_dict(processor.to_dict() | changes)


def load_data(data_args: ImageDataArguments, model_args: ModelArguments) -> DatasetDict:
    """Folders or files if any are named, else the hub's data; a validation split is cut off if there is none."""
    data = DatasetDict()
    # Split by split: read together, splits at different depths, or one without classes, would all lose their labels.
    for split, folder in data_args.folders.items():
        # Each image gets the name of its folder as its label. Found by itself are two classes or more; an evaluation
        # may have one, and those to predict may lie in one folder.
        drops_labels = False if split == "validation" else None
        options = {"data_files": {split: f"{folder}/**"}, "split": split, "cache_dir": model_args.cache_dir}
        data[split] = load_dataset("imagefolder", drop_labels=drops_labels, **options)
    if not data:
        data = script_utils.load_data(data_args, model_args.cache_dir)
    if "train" in data and "validation" not in data and data_args.train_val_split:
        # By a seed of its own, so that runs with other seeds are evaluated on the same images.
        halves = data["train"].train_test_split(data_args.train_val_split, seed=0)
        data["train"], data["validation"] = halves["train"], halves["test"]
    return data


def prepare(data: DatasetDict, data_args: ImageDataArguments, ids: dict[str, int], processor: Any) -> DatasetDict:
    """Reduce each split to an image and a `label` (the model's class id), decoded and augmented when it is read."""
    image_column, label_column = data_args.image_column_name, data_args.label_column_name
    prepared = DatasetDict()
    for name, split in data.items():
        script_utils.require_column(split, image_column, "--image_column_name")
        rows: Dataset = split.select_columns([image_column]).cast_column(image_column, Image())
        if label_column in split.column_names:
            rows = rows.add_column("label", script_utils.label_ids(split, label_column, ids))
        prepared[name] = rows.with_transform(ImageTransform(processor, data_args, is_training=name == "train"))
    return prepared


def main(argv: list[str] | None = None) -> None:
    """Run the phases that were asked for."""
    model_args, data_args, args = script_utils.parse_arguments(
        ImageModelArguments, ImageDataArguments, PipeTransformerArguments, argv=argv
    )
    args.remove_unused_columns = False  # the transform needs the image column, which no model takes
    with args.main_process_first(desc="loading images"):
        data = load_data(data_args, model_args)
    names = script_utils.class_names(data, data_args.label_column_name)
    if names is None:
        raise ValueError(f"--label_column_name {data_args.label_column_name} holds real numbers; expected classes.")
    config, ids = script_utils.load_config(model_args, names)
    processor = load_image_processor(model_args, config)
    if data_args.crop_pct:
        processor = with_center_crop(processor, data_args.crop_pct)
    data = prepare(script_utils.select_samples(data, data_args, args), data_args, ids, processor)

    trainer = PipeTransformerTrainer(
        model=script_utils.load_model(AutoModelForImageClassification, model_args, config=config),
        args=args,
        train_dataset=data.get("train"),
        eval_dataset=data.get("validation"),
        processing_class=processor,
        data_collator=default_data_collator,
        compute_metrics=script_utils.metric_function(
            {"accuracy": accuracy_score}, False, data_args.metric_name, args.process_index
        ),
    )
    script_utils.train(trainer)
    if args.do_eval:
        script_utils.report(trainer, "eval", trainer.evaluate() | {"eval_samples": len(data["validation"])})
    if args.do_predict:
        script_utils.predict(trainer, data["test"], config.id2label)
    script_utils.finish(trainer, data_args, tasks="image-classification", tags=["hf-pipetransformer", "vision"])


if __name__ == "__main__":
    main()
