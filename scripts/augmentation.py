"""Random crops and flips of training images.

All draw from torch's generator alone, which Trainer seeds, and which differs between the workers of a loader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image


AUGMENTATIONS = ("none", "standard", "random_resized_crop")

NUM_TRIES = 10
"""Boxes that are drawn for an image before the largest allowed one in its middle is taken."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom edge in pixels; the right and bottom ones are outside."""
Range = Sequence[float]


def flip_half(image: Image.Image) -> Image.Image:
    """Mirror half of all images left to right."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image


def augment(image: Image.Image) -> Image.Image:
    """Pad each side by an eighth, crop a random window of the first size, and flip half of the images."""
    width, height = image.size
    pad_x, pad_y = width // 8, height // 8
    left = int(torch.randint(-pad_x, pad_x + 1, ()))
    top = int(torch.randint(-pad_y, pad_y + 1, ()))
    return flip_half(image.crop((left, top, left + width, top + height)))  # what lies outside is black


def random_resized_crop(
    image: Image.Image, size: tuple[int, int], scale: Range, ratio: Range, resample: int
) -> Image.Image:
    """Crop a random part of an image, resize it to `size` (width, height), and flip half of the images."""
    box = draw_box(image.size, scale, ratio)
    return flip_half(image.resize(size, Image.Resampling(resample), box=box))


def draw_box(image_size: tuple[int, int], scale: Range, ratio: Range) -> Box:
    """Draw a box inside an image (width, height), as Inception's training does.

    Its share of the image's area is uniform in `scale`, the logarithm of its width / height in that of `ratio`, its
    place inside the image. Boxes that do not fit are drawn again.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(NUM_TRIES):
        share, shape, across, down = torch.rand(4, dtype=torch.float64).tolist()
        area_share = scale[0] + share * (scale[1] - scale[0])
        box = box_of(image_size, area_share, math.exp(low + shape * (high - low)), (across, down))
        if box is not None:
            return box
    return middle_box(image_size, ratio)


def box_of(image_size: tuple[int, int], area_share: float, ratio: float, place: tuple[float, float]) -> Box | None:
    """Return the box with this share of the area and this width / height; None if it is not inside the image.

    `place`, two numbers in [0, 1), goes from the leftmost and topmost place to the last one.
    """
    area = area_share * image_size[0] * image_size[1]
    width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
    spare_x, spare_y = image_size[0] - width, image_size[1] - height
    if min(width, height) < 1 or min(spare_x, spare_y) < 0:
        return None
    left, top = int(place[0] * (spare_x + 1)), int(place[1] * (spare_y + 1))
    return left, top, left + width, top + height


def middle_box(image_size: tuple[int, int], ratio: Range) -> Box:
    """Return the largest box in the middle of an image with a width / height inside `ratio`."""
    width, height = image_size
    shape = min(max(width / height, ratio[0]), ratio[1])
    width, height = min(width, max(1, round(height * shape))), min(height, max(1, round(width / shape)))
    left, top = (image_size[0] - width) // 2, (image_size[1] - height) // 2
    return left, top, left + width, top + height


def pixels_of(processor: Any) -> tuple[int, int]:
    """Return width and height of the images that a processor makes.

    Raises:
        ValueError: they depend on the image.
    """
    size = processor.crop_size if processor.do_center_crop else processor.size
    edge = size.get("shortest_edge")
    width, height = size.get("width") or edge, size.get("height") or edge
    if not width or not height:
        raise ValueError(f"The image processor resizes to {dict(size)}; expected a width and a height: --image_size.")
    return width, height
