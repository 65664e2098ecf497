"""Crops of the image script: boxes worked out by hand, draws that follow their seed, ImageNet's evaluation crop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from augmentation import augment, box_of, draw_box, middle_box, random_resized_crop
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from run_image_classification import ImageDataArguments, ImageTransform, with_center_crop
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_pipetransformer.data.rng import draws_from_now_on
from hf_pipetransformer.report.card import FACTS_FILE, render
from tests.distributed.launcher import launch


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_image_classification.py"
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


# --- random crops


def test_padding_and_cropping_keeps_the_size_and_follows_the_seed() -> None:
    image = noise(16, 8)

    def draw() -> list[bytes]:
        torch.manual_seed(0)
        return [augment(image).tobytes() for _ in range(8)]

    assert draw() == draw()
    assert len(set(draw())) > 1
    assert augment(image).size == image.size


@pytest.mark.parametrize(
    ("area_share", "ratio", "place", "expected"),
    [
        # 400 x 200: a quarter of 80,000 pixels is 20,000, as 200 x 100 at twice as wide as high
        (0.25, 2.0, (0.0, 0.0), (0, 0, 200, 100)),
        # 201 places across and 101 down: the last ones
        (0.25, 2.0, (0.9999, 0.9999), (200, 100, 400, 200)),
        (0.25, 2.0, (0.5, 0.5), (100, 50, 300, 150)),
        # 20,000 as a square is 141.4 wide and high
        (0.25, 1.0, (0.0, 0.9999), (0, 59, 141, 200)),
        # the whole image is its own box
        (1.0, 2.0, (0.7, 0.7), (0, 0, 400, 200)),
        # 80,000 as a square, 283 high, is higher than the image; 0.6 at four times as wide, 438, is wider
        (1.0, 1.0, (0.0, 0.0), None),
        (0.6, 4.0, (0.0, 0.0), None),
    ],
)
def test_a_box_has_its_area_shape_and_place(
    area_share: float, ratio: float, place: tuple[float, float], expected: tuple[int, ...] | None
) -> None:
    assert box_of((400, 200), area_share, ratio, place) == expected


def test_an_image_of_one_pixel_is_its_own_box() -> None:
    assert box_of((1, 1), 0.08, 1.0, (0.0, 0.0)) is None
    assert draw_box((1, 1), SCALE, RATIO) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1000, 90), (440, 0, 560, 90)),  # 4/3 of 90 is 120
        ((90, 1000), (0, 440, 90, 560)),  # 90 divided by 3/4 is 120
        ((110, 100), (0, 0, 110, 100)),  # its shape is allowed
    ],
)
def test_where_no_box_fits_the_largest_one_in_the_middle_is_taken(
    size: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert middle_box(size, RATIO) == expected


def test_boxes_are_inside_the_image_and_have_the_areas_and_shapes_asked_for() -> None:
    torch.manual_seed(0)
    width, height = 400, 300
    boxes = np.array([draw_box((width, height), SCALE, RATIO) for _ in range(2_000)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= width and boxes[:, 3].max() <= height
    shares, ratios = widths * heights / (width * height), widths / heights
    assert shares.min() == pytest.approx(0.08, abs=0.005) and shares.max() > 0.95
    assert ratios.min() == pytest.approx(3 / 4, abs=0.01) and ratios.max() == pytest.approx(4 / 3, abs=0.01)
    small = shares < 0.3  # all of these fit, so their shapes are as they were drawn: even on a logarithmic scale
    assert np.log(ratios[small]).mean() == pytest.approx(0, abs=0.03)
    assert np.log(ratios[small]).std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), rel=0.05)


def test_a_box_of_the_whole_image_is_that_image_resized_or_its_mirror_image() -> None:
    image = noise(40, 30)
    resized = image.resize((8, 8), Image.Resampling.BICUBIC)
    torch.manual_seed(0)
    found = [
        random_resized_crop(image, (8, 8), (1.0, 1.0), (4 / 3, 4 / 3), Image.Resampling.BICUBIC).tobytes()
        for _ in range(100)
    ]
    mirrored = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert set(found) == {resized.tobytes(), mirrored.tobytes()}
    assert 30 < found.count(mirrored.tobytes()) < 70


# --- draws of a sample


class Pictures:
    """A data set of images with the script's transform."""

    def __init__(self, **options: Any) -> None:
        self.image_column = "image"
        data_args = ImageDataArguments(train_dir="x", augmentation="random_resized_crop", **options)
        processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
        rows = {"image": [noise(40 + number, 30, number) for number in range(6)]}
        self.rows = Dataset.from_dict(rows).cast_column("image", ImageFeature())
        self.rows = self.rows.with_transform(ImageTransform(processor, data_args, is_training=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_random_crops_are_seen_as_random_and_evaluation_crops_are_not() -> None:
    def stack(rows: list[dict[str, Any]]) -> torch.Tensor:
        return torch.stack([row["pixel_values"] for row in rows])

    data = Pictures()
    has_drawn = draws_from_now_on(data)
    stack([data[0]])
    assert has_drawn()
    data_args = ImageDataArguments(train_dir="x", augmentation="random_resized_crop")
    processor = with_center_crop(ViTImageProcessorPil(size={"height": 16, "width": 16}), 0.875)
    data.rows = data.rows.with_transform(ImageTransform(processor, data_args, is_training=False))
    has_drawn = draws_from_now_on(data)
    stack([data[0]])
    assert not has_drawn()


def test_a_training_image_has_the_models_size_whatever_its_own() -> None:
    assert {tuple(Pictures()[number]["pixel_values"].shape) for number in range(6)} == {(3, 16, 16)}


# --- the evaluation crop


def pixels_of_evaluation(image: Image.Image, processor: Any, crop_pct: float) -> np.ndarray:
    """Height x width x 3 in 0..255, after the crop."""
    cropped = with_center_crop(processor, crop_pct)([image], return_tensors="np", do_normalize=False)["pixel_values"]
    return np.rint(cropped[0].transpose(1, 2, 0) * 255).astype(int)


@pytest.mark.parametrize(
    ("size", "box"),
    [
        # The shorter side, 400, becomes 70 / 0.875 = 80; of 96 x 80 the middle 70 x 70 are 13..83 and 5..75, which is
        # five times as much in the image.
        ((480, 400), (65, 25, 415, 375)),
        ((400, 480), (25, 65, 375, 415)),
        ((400, 400), (25, 25, 375, 375)),
    ],
)
def test_the_evaluation_crop_is_the_middle_of_the_resized_image(
    size: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    image = noise(*size)
    found = pixels_of_evaluation(image, ViTImageProcessorPil(size={"height": 70, "width": 70}), 0.875)
    expected = image.resize((70, 70), Image.Resampling.BILINEAR, box=box)
    assert (found == np.asarray(expected)).all()


def test_the_usual_crop_of_224_pixels_resizes_the_shorter_side_to_256(tmp_path: Path) -> None:
    with_center_crop(ViTImageProcessorPil(), 0.875).save_pretrained(tmp_path)
    saved = ViTImageProcessorPil.from_pretrained(tmp_path)  # a saved model evaluates like this everywhere
    assert (saved.size.shortest_edge, saved.size.height, saved.do_center_crop) == (256, None, True)
    assert (saved.crop_size.height, saved.crop_size.width) == (224, 224)


def test_image_processors_that_crop_by_themselves_crop_once() -> None:
    deit = with_center_crop(DeiTImageProcessorPil(), 0.7)
    assert (deit.size.shortest_edge, deit.crop_size.height) == (320, 224)
    convnext = with_center_crop(ConvNextImageProcessorPil(size={"shortest_edge": 70}), 0.7)
    assert (convnext.crop_pct, convnext.size.shortest_edge, convnext.do_center_crop) == (0.7, 70, None)
    assert pixels_of_evaluation(noise(90, 80), convnext, 0.7).shape == (70, 70, 3)


def test_nothing_is_cropped_unless_an_option_says_so() -> None:
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
    image = noise(40, 30)
    for augmentation in ("none", "standard"):
        data_args = ImageDataArguments(train_dir="x", augmentation=augmentation)
        assert data_args.crop_pct is None
        found = ImageTransform(processor, data_args, is_training=False)({"image": [image]})["pixel_values"][0]
        assert torch.equal(found, processor([image], return_tensors="pt")["pixel_values"][0])
    assert ImageDataArguments(train_dir="x", augmentation="random_resized_crop").crop_pct == 0.875
    assert ImageDataArguments(train_dir="x", augmentation="random_resized_crop", crop_pct=1.0).crop_pct == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_pct": 1.2}, "Found --crop_pct 1.2; expected a share above 0, of 1 at most"),
        ({"crop_pct": 0.0}, "Found --crop_pct 0.0"),
        ({"crop_scale": [0.5]}, "Found --crop_scale .0.5.; expected two numbers above 0, the smaller one first, 1 at"),
        ({"crop_scale": [0.5, 1.5]}, "Found --crop_scale"),
        (
            {"crop_ratio": [2.0, 1.0]},
            "Found --crop_ratio .2.0, 1.0.; expected two numbers above 0, the smaller one fi",
        ),
        ({"crop_scale": [0.5, 1.0], "augmentation": "none"}, "--crop_scale needs --augmentation random_resized_crop"),
    ],
)
def test_wrong_crops_say_what_to_change(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageDataArguments(**{"train_dir": "x", "augmentation": "random_resized_crop"} | options)


# --- a run


@pytest.mark.distributed
def test_an_image_tree_trains_with_random_crops(tmp_path: Path) -> None:
    """Images of many sizes in ImageNet's layout, dark and bright ones."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for number, name in enumerate(("n01440764", "n01443537")):
            folder = tmp_path / "tree" / split / name
            folder.mkdir(parents=True)
            for copy in range(count):
                shape = (*generator.integers(20, 60, 2), 3)
                pixels = 160 * number + generator.integers(0, 90, shape)
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{copy}.JPEG")
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    output = tmp_path / "output"
    launch(
        SCRIPT,
        [
            *("--model_name_or_path", str(tmp_path / "model"), "--dataset_name", str(tmp_path / "tree")),
            *("--augmentation", "random_resized_crop", "--crop_scale", "0.3", "1", "--do_train", "--do_eval"),
            *("--freeze_policy", "fixed", "--freeze_at", "0:1"),
            *("--pipeline_parallel_size", "2", "--num_train_epochs", "6", "--per_device_train_batch_size", "4"),
            *("--learning_rate", "1e-2", "--save_strategy", "no", "--use_cpu", "true", "--report_to", "none"),
            *("--output_dir", str(output), "--cache_dir", str(tmp_path / "data")),
        ],
        num_processes=2,
        timeout=240,
    )
    assert json.loads((output / "all_results.json").read_text())["eval_accuracy"] == 1.0
    assert AutoModelForImageClassification.from_pretrained(output).config.label2id == {"n01440764": 0, "n01443537": 1}
    saved = ViTImageProcessorPil.from_pretrained(output)
    assert (saved.size.shortest_edge, saved.crop_size.height) == (18, 16)  # 16 / 0.875 = 18.3
    card, facts = (output / "README.md").read_text(), json.loads((output / FACTS_FILE).read_text())
    assert card == render(facts, FACTS_FILE)
    assert "| eval_accuracy | 1 |" in card
    assert "--augmentation random_resized_crop --crop_scale 0.3 1" in " ".join(facts["command"])
    assert str(tmp_path) not in card
