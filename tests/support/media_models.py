"""Small language models that take images beside text, and data for them: rows with 0 to 3 images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    set_seed,
)


IMAGE, VIDEO, VISION_START, VISION_END, PAD = 99, 98, 97, 96, 0
NUM_IMAGES = (2, 0, 1, 0, 3, 1, 0, 0, 1, 2)
"""Images of the rows, in turn."""

_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {**_LAYERS, "vocab_size": 100, "num_hidden_layers": 4, "num_key_value_heads": 4, "pad_token_id": PAD}
_IMAGES = {"image_size": 32, "patch_size": 8}
_TOWER = {**_LAYERS, **_IMAGES, "num_hidden_layers": 2}

Rows = list[dict[str, Any]]
Collate = Callable[[Rows], dict[str, Any]]


@dataclass(frozen=True)
class MediaModel:
    """A family.

    Args:
        build: makes the model.
        tokens: of an image, by the number of images of its row and the row's images.
        collate: puts rows together as the family's processor does.
        draw: makes an image.
        tower: begins the names of the parameters that encode images.
    """

    build: Callable[[], PreTrainedModel]
    tokens: Callable[[int, torch.Tensor], int]
    collate: Collate
    tower: tuple[str, ...]
    draw: Callable[[torch.Generator], torch.Tensor] = lambda draw: torch.randn(3, 32, 32, generator=draw)


# ---- models ----


def llava() -> PreTrainedModel:
    vision = CLIPVisionConfig(projection_dim=32, **_TOWER)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_TEXT), image_token_id=IMAGE)
    return LlavaForConditionalGeneration(config)


def _of_idefics(config: type, model: type) -> PreTrainedModel:
    """Its own `pad_token_id` is that of the first release, which lies beyond the words of a smaller model."""
    text = {"model_type": "llama", **_TEXT}
    return model(config(vision_config=_TOWER, text_config=text, image_token_id=IMAGE, scale_factor=2))


def gemma3() -> PreTrainedModel:
    text = {**_TEXT, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
    vision = {"model_type": "siglip_vision_model", **_TOWER}
    config = Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4, image_token_id=IMAGE)
    model = Gemma3ForConditionalGeneration(config)
    # Zeros would hide the images.
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    return model


def gemma4(width_by_layer: int = 0) -> PreTrainedModel:
    """As in the larger ones, layers are given nothing of their own beside the activation.

    Args:
        width_by_layer: of what each layer is given in the smaller ones.
    """
    text = {
        **_TEXT, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8, "attention_k_eq_v": True,
        "num_global_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": width_by_layer,
        "vocab_size_per_layer_input": 100,
    }  # fmt: skip
    vision = {
        **_LAYERS, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4,
        "pooling_kernel_size": 2, "position_embedding_size": 16,
    }  # fmt: skip
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 95}
    model = Gemma4ForConditionalGeneration(Gemma4Config(vision_config=vision, text_config=text, **ids))
    for name, parameter in model.named_parameters():
        # What others divide scores by is in these weights: with ones attention is so sharp that 1e-7 of the weights
        # change 1e-2 of the gradient norm in six steps of plain Trainer, in float64 too.
        if name.endswith("q_norm.weight"):
            nn.init.constant_(parameter, 8**-0.5)
    return model


def paligemma() -> PreTrainedModel:
    vision = {"model_type": "siglip_vision_model", "projection_dim": 32, **_TOWER}
    text = {"model_type": "gemma", "head_dim": 8, **_TEXT}
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, projection_dim=32)
    return PaliGemmaForConditionalGeneration(config)


def internvl() -> PreTrainedModel:
    vision = {**_TOWER, "image_size": [32, 32], "patch_size": [8, 8]}
    config = InternVLConfig(
        vision_config=vision, text_config={"model_type": "qwen2", **_TEXT}, image_token_id=IMAGE, image_seq_length=4
    )
    return InternVLForConditionalGeneration(config)


def llava_onevision() -> PreTrainedModel:
    config = LlavaOnevisionConfig(
        vision_config={"model_type": "siglip_vision_model", **_TOWER},
        text_config={"model_type": "qwen2", **_TEXT},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_grid_pinpoints=[[32, 32]],
    )
    return LlavaOnevisionForConditionalGeneration(config)


def llama4() -> PreTrainedModel:
    """No model inside that of the task takes its images."""
    vision = {
        **_TOWER, "intermediate_size": 128, "projector_input_dim": 32, "projector_output_dim": 32,
        "vision_output_dim": 32,
    }  # fmt: skip
    text = {
        **_TEXT, "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
    }  # fmt: skip
    return Llama4ForConditionalGeneration(
        Llama4Config(vision_config=vision, text_config=text, image_token_index=IMAGE)
    )


_VISION_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}


def qwen2_vl() -> PreTrainedModel:
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    config = Qwen2VLConfig(vision_config=vision, text_config={**_TEXT, "rope_parameters": _ROPE}, **_VISION_IDS)
    return Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> PreTrainedModel:
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 4, "out_hidden_size": 32,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(vision_config=vision, text_config={**_TEXT, "rope_parameters": _ROPE}, **_VISION_IDS)
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl(num_layers: int = 6) -> PreTrainedModel:
    """What its tower finds enters behind the first two of its layers, too."""
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 4, "out_hidden_size": 32,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    text = {**_TEXT, "num_hidden_layers": num_layers, "head_dim": 8, "rope_parameters": _ROPE}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=vision, text_config=text, **_VISION_IDS))


def qwen3_5() -> PreTrainedModel:
    """Layers of two kinds, of which one carries a state along the tokens."""
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "patch_size": 4, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    text = {
        **_TEXT, "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4,
        "linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0},
    }  # fmt: skip
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(vision_config=vision, text_config=text, **_VISION_IDS))


# ---- data ----


def patches(draw: torch.Generator) -> torch.Tensor:
    """An image as Qwen's processor gives it: one row of patches, height and width in front of them."""
    height, width = 4, int(torch.randint(2, 5, (), generator=draw)) * 2
    pixels = torch.randn(height * width, 3 * 2 * 4 * 4, generator=draw)
    size = torch.zeros(1, pixels.shape[1])
    size[0, :2] = torch.tensor([height, width])
    return torch.cat([size, pixels])


def _padded(rows: Rows, on_left: bool = False) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)

    def padded(values: torch.Tensor, fill: int) -> torch.Tensor:
        missing = length - len(values)
        return nn.functional.pad(values, (missing, 0) if on_left else (0, missing), value=fill)

    ids = torch.stack([padded(row["input_ids"], PAD) for row in rows])
    mask = torch.stack([padded(torch.ones_like(row["input_ids"]), 0) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where((ids < VISION_END) & (mask == 1), -100)}


def _images(rows: Rows) -> list[torch.Tensor]:
    return [image for row in rows for image in row["images"]]


def one_after_another(rows: Rows) -> dict[str, Any]:
    found, images = _padded(rows), _images(rows)
    return {**found, "pixel_values": torch.stack(images)} if images else found


def padded_on_the_left(rows: Rows) -> dict[str, Any]:
    return {**one_after_another(rows), **_padded(rows, on_left=True)}


def with_types(rows: Rows) -> dict[str, Any]:
    found = one_after_another(rows)
    return {**found, "token_type_ids": (found["input_ids"] == IMAGE).long()}


def with_suffix(rows: Rows) -> dict[str, Any]:
    """Types of PaliGemma: what is told is 1, and sees no later token."""
    found = one_after_another(rows)
    return {**found, "token_type_ids": (found["labels"] != -100).long()}


def in_rows(rows: Rows) -> dict[str, Any]:
    """As many places for images in each row as the row with most of them has."""
    found, most = _padded(rows), max(len(row["images"]) for row in rows)
    if not most:
        return found
    pixels, mask = torch.zeros(len(rows), most, 3, 32, 32), torch.zeros(len(rows), most, 32, 32, dtype=torch.long)
    for i, row in enumerate(rows):
        for j, image in enumerate(row["images"]):
            pixels[i, j], mask[i, j] = image, 1
    return {**found, "pixel_values": pixels, "pixel_attention_mask": mask}


def in_tiles(rows: Rows) -> dict[str, Any]:
    """Each image whole, and once more as a tile, which counts where it is the only one of its row."""
    found, images = _padded(rows), _images(rows)
    counts = torch.tensor([len(row["images"]) for row in rows if row["images"]])
    if not images:
        return found
    pixels = torch.stack([torch.stack([image, image.flip(-1)]) for image in images])
    sizes = torch.tensor([[32, 32]] * len(images))
    return {**found, "pixel_values": pixels, "image_sizes": sizes, "batch_num_images": counts}


def in_patches(rows: Rows) -> dict[str, Any]:
    found, images = _padded(rows), _images(rows)
    found["mm_token_type_ids"] = (found["input_ids"] == IMAGE).int()
    if not images:
        return found
    grids = torch.stack([torch.tensor([1, *image[0, :2].long().tolist()]) for image in images])
    return {**found, "pixel_values": torch.cat([image[1:] for image in images]), "image_grid_thw": grids}


def in_places(rows: Rows) -> dict[str, Any]:
    """Patches of each image with their places in it, padded to as many for all images."""
    found, images, most = _padded(rows), _images(rows), 4 * 8
    found["mm_token_type_ids"] = (found["input_ids"] == IMAGE).int()
    if not images:
        return found
    pixels, places = torch.zeros(len(images), most, 3 * 4 * 4), torch.full((len(images), most, 2), -1)
    for i, image in enumerate(images):
        height, width = image[0, :2].long().tolist()
        pixels[i, : height * width] = image[1:, : pixels.shape[-1]]
        places[i, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    return {**found, "pixel_values": pixels, "image_position_ids": places}


def _of_patches(_count: int, image: torch.Tensor) -> int:
    return (len(image) - 1) // 4


_VISION = ("model.visual.",)
_PROJECTED = ("model.vision_tower.", "model.multi_modal_projector.")
_QWEN = {"tokens": _of_patches, "collate": in_patches, "draw": patches, "tower": _VISION}
_IDEFICS = {"tokens": lambda *_: 4, "collate": in_rows, "tower": ("model.vision_model.", "model.connector.")}

MODELS = {
    "llava": MediaModel(llava, lambda *_: 16, one_after_another, _PROJECTED),
    "llava_left": MediaModel(llava, lambda *_: 16, padded_on_the_left, _PROJECTED),
    "smolvlm": MediaModel(lambda: _of_idefics(SmolVLMConfig, SmolVLMForConditionalGeneration), **_IDEFICS),
    "idefics3": MediaModel(lambda: _of_idefics(Idefics3Config, Idefics3ForConditionalGeneration), **_IDEFICS),
    "qwen2_vl": MediaModel(qwen2_vl, **_QWEN),
    "qwen2_5_vl": MediaModel(qwen2_5_vl, **_QWEN),
    "qwen3_vl": MediaModel(qwen3_vl, **_QWEN),
    "llama4": MediaModel(llama4, lambda *_: 4, one_after_another, ("vision_model.", "multi_modal_projector.")),
    "qwen3_5": MediaModel(qwen3_5, **_QWEN),
    "gemma3": MediaModel(gemma3, lambda *_: 4, with_types, _PROJECTED),
    "gemma4": MediaModel(gemma4, _of_patches, in_places, ("model.vision_tower.", "model.embed_vision."), patches),
    "internvl": MediaModel(internvl, lambda *_: 4, one_after_another, _PROJECTED),
    "paligemma": MediaModel(paligemma, lambda *_: 16, with_suffix, _PROJECTED),
    "llava_onevision": MediaModel(
        llava_onevision, lambda count, _: 36 if count == 1 else 17, in_tiles, (*_PROJECTED, "model.image_newline")
    ),
}


def make_rows(model: MediaModel, num_rows: int, seed: int = 1) -> Rows:
    """Return rows of some words, with images before and between them."""
    draw, rows = torch.Generator().manual_seed(seed), []
    for number in range(num_rows):
        images = [model.draw(draw) for _ in range(NUM_IMAGES[number % len(NUM_IMAGES)])]
        parts = [torch.randint(4, 90, (int(torch.randint(3, 9, (), generator=draw)),), generator=draw)]
        for image in images:
            count = model.tokens(len(images), image)
            token = [torch.tensor([VISION_START]), torch.full((count,), IMAGE), torch.tensor([VISION_END])]
            parts += [torch.cat(token), torch.randint(4, 90, (3,), generator=draw)]
        rows.append({"input_ids": torch.cat(parts), "images": images})
    return rows


def build(name: str, seed: int = 11) -> PreTrainedModel:
    set_seed(seed)
    return MODELS[name].build()
