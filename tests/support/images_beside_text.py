"""Rows with and without an image for any model that takes images beside text, found out from the model.

What a processor would make of an image follows from the names that `forward` takes and the sizes in the configuration;
of several ways the first is taken that the model trains on. The model itself says how many tokens an image has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel


__all__ = ["OF_IMAGES", "TYPES", "rows_with_images"]

TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
OF_IMAGES = (
    "pixel_values", "high_res_pixel_values", "pixel_attention_mask", "pixel_mask", "image_position_ids", "image_sizes",
    "image_grid_thw", "image_merge_sizes", "spatial_shapes", "target_sizes", "batch_num_images",
)  # fmt: skip
"""Inputs that lie one after another for all images of a batch."""

_FIRST_WORD, _LAST_WORD = 8, 100
_PERIOD = 3
"""Of so many rows one has an image."""

Row = dict[str, torch.Tensor]


def rows_with_images(
    model: PreTrainedModel, num_rows: int, generator: torch.Generator, collate: Callable[[list[Row]], Row]
) -> list[Row]:
    """Return rows of words, some with an image between them; all, if the model takes no row without.

    Raises:
        ValueError: the model trains on none of the ways in which an image is given.
    """
    taken, tried = inspect.signature(model.forward).parameters, []

    def images() -> list[Row]:
        return [{key: image[key] for key in image if key in taken} for image in _images(model, generator)]

    def row(image: Row | None) -> Row:
        return {key: value for key, value in _row(model, image, generator).items() if key in taken}

    def train(images: list[Row | None]) -> None:
        model(**collate([row(image) for image in images])).loss.backward()
        model.zero_grad()

    for number, image in enumerate(images()):
        try:
            train([image, images()[number]])
        except Exception as error:  # Anything may be raised on what is for other families.
            tried.append(f"{type(error).__name__}: {error}")
            continue
        try:
            train([None, image])
            train([None])
            period = _PERIOD
        except Exception:
            period = 1
        return [row(None if index % period else images()[number]) for index in range(num_rows)]
    raise ValueError(f"no image is taken: {' | '.join(one[:100] for one in dict.fromkeys(tried))}")


def _row(model: PreTrainedModel, image: Row | None, generator: torch.Generator) -> Row:
    length = int(torch.randint(9, 17, (), generator=generator))
    ids = torch.randint(_FIRST_WORD, _LAST_WORD, (length,), generator=generator)
    token = _value(model.config, "image_token_id", "image_token_index", "image_patch_id") or -1
    ids[ids == token] += 1
    if image is not None:
        start = _value(model.config, "vision_start_token_id", "image_start_token_id", "boi_token_id")
        end = _value(model.config, "vision_end_token_id", "image_end_token_id", "eoi_token_id")
        between = [[start], [token] * _num_tokens(model, image), [end]]
        tokens = [value for part in between for value in part if value is not None]
        ids = torch.cat([ids[:4], torch.tensor(tokens, dtype=torch.long), ids[4:]])
    of_image = (ids == token).long()
    labels = ids.where((of_image == 0) & (ids < _LAST_WORD), -100)
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return {**row, **dict.fromkeys(TYPES, of_image), **(image or {})}


def _num_tokens(model: PreTrainedModel, image: Row) -> int:
    encoders = [each for each in model.modules() if hasattr(each, "get_image_features")]
    if not encoders:  # Images enter by attention, or before the text.
        return 0
    encoder = encoders[-1]
    taken = inspect.signature(encoder.get_image_features).parameters
    is_open = "args" in taken  # A decorated method hides what it takes.
    with torch.no_grad():
        found = encoder.get_image_features(**{key: value for key, value in image.items() if key in taken or is_open})
    features = getattr(found, "pooler_output", found)
    if features is None:
        features = found.last_hidden_state
    parts = features if isinstance(features, list | tuple) else [features]
    return sum(part.numel() for part in parts) // model.config.get_text_config().hidden_size


def _images(model: PreTrainedModel, generator: torch.Generator) -> Iterator[Row]:
    """Draw an image in those forms of processors that fit the names which a model takes."""
    config, taken = model.config, inspect.signature(model.forward).parameters
    channels = _value(config, "in_channels", "num_channels", "in_chans") or 3
    patch = _number(_value(config, "patch_size")) or 8
    merge = _number(_value(config, "spatial_merge_size", "merge_size", "pooling_kernel_size")) or 2
    depth = _value(config, "temporal_patch_size") or 1
    size = _number(_value(config, "image_size")) or 32

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if "image_grid_thw" in taken:
        height, width = 2 * merge, merge * int(torch.randint(1, 4, (), generator=generator))
        grid = {"image_grid_thw": torch.tensor([[1, height, width]]), "image_merge_sizes": torch.tensor([merge])}
        yield {"pixel_values": pixels(height * width, channels * depth * patch**2), **grid}
        yield {"pixel_values": pixels(height * width, channels * 2 * patch**2), **grid}
        yield {"pixel_values": pixels(height * width, channels, patch, patch), **grid}
    side = 2 * merge
    if not taken.keys().isdisjoint(("spatial_shapes", "target_sizes", "image_position_ids")):
        shape = torch.tensor([[side, side]])
        of_patches = {
            "spatial_shapes": shape, "target_sizes": shape,
            "image_position_ids": torch.cartesian_prod(torch.arange(side), torch.arange(side))[None],
            "pixel_attention_mask": torch.ones(1, side**2, dtype=torch.long),
        }  # fmt: skip
        yield {"pixel_values": pixels(1, side**2, channels * patch**2), **of_patches}
        yield {"pixel_values": pixels(1, channels, patch, side**2 * patch), "target_sizes": shape}
    mask = torch.ones(1, size, size, dtype=torch.bool)
    sizes = {"image_sizes": torch.tensor([[size, size]]), "batch_num_images": torch.tensor([1])}
    fine = {"high_res_pixel_values": pixels(1, channels, size, size)}
    yield {"pixel_values": pixels(1, channels, size, size), "pixel_mask": mask, **fine}
    yield {"pixel_values": pixels(1, channels, size, size), **sizes}
    yield {"pixel_values": pixels(1, 1, channels, size, size), "pixel_attention_mask": mask[None], **sizes}
    # An image whole, and as one tile.
    yield {"pixel_values": pixels(1, 2, channels, size, size), **sizes}


def _value(config: PreTrainedConfig, *names: str) -> Any:
    """Return what the configuration, or that of its part for images, has under the first of some names."""
    parts = [getattr(config, part) for part in type(config).sub_configs if "vis" in part or "image" in part]
    found = (getattr(part, name, None) for name in names for part in [config, *parts])
    return next((value for value in found if value is not None), None)


def _number(value: Any) -> int:
    return int(value[0]) if isinstance(value, list | tuple) else int(value or 0)
