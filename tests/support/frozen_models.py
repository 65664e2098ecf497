"""Small models with a part that a script froze, data for them, and runs beside plain Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    ConvBertConfig,
    ConvBertForTokenClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    DetrConfig,
    DetrForObjectDetection,
    Dinov2Config,
    Dinov2ForImageClassification,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    ResNetConfig,
    ResNetForImageClassification,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerMixin


NUM_SAMPLES = 12
_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
_IMAGES = {"image_size": 32, "patch_size": 8}
_TEXT = {**_LAYERS, "vocab_size": 100, "num_hidden_layers": 2, "num_key_value_heads": 4}
_IMAGE_TOKEN = 99

Rows = list[dict[str, Any]]
Collate = Callable[[Rows], dict[str, Any]]


def stack(rows: Rows) -> dict[str, Any]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def pad(rows: Rows) -> dict[str, Any]:
    length = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: torch.stack([nn.functional.pad(row[name], (0, length - len(row[name]))) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**padded, "labels": torch.stack([row["labels"] for row in rows])}


def _drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whisper() -> nn.Module:
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=100, num_mel_bins=20, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=50,
            max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        )
    )  # fmt: skip
    model.freeze_encoder()
    return model


def sounds() -> Rows:
    draw = _drawn()
    return [
        {"input_features": torch.randn(20, 100, generator=draw), "labels": torch.randint(4, 99, (8,), generator=draw)}
        for _ in range(NUM_SAMPLES)
    ]


def t5(dropout: float = 0.0) -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=100, dropout_rate=dropout, decoder_start_token_id=0, **sizes)
    )
    model.encoder.requires_grad_(False)
    return model


def texts() -> Rows:
    draw, rows = _drawn(), []
    for _ in range(NUM_SAMPLES):
        ids = torch.randint(4, 99, (int(torch.randint(4, 24, (), generator=draw)),), generator=draw)
        labels = torch.randint(4, 99, (6,), generator=draw)
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def images() -> Rows:
    draw = _drawn()
    return [{"pixel_values": torch.randn(3, 32, 32, generator=draw), "labels": i % 3} for i in range(NUM_SAMPLES)]


def with_adapters(model: nn.Module, targets: str) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))


def llava() -> nn.Module:
    vision = CLIPVisionConfig(num_hidden_layers=3, projection_dim=32, **_LAYERS, **_IMAGES)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**_TEXT), image_token_id=_IMAGE_TOKEN)
    return with_adapters(LlavaForConditionalGeneration(config), r".*language_model.*(q_proj|v_proj)")


def paligemma() -> nn.Module:
    vision = {"model_type": "siglip_vision_model", "num_hidden_layers": 3, "projection_dim": 32, **_LAYERS, **_IMAGES}
    text = {"model_type": "gemma", "head_dim": 8, **_TEXT}
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=_IMAGE_TOKEN, projection_dim=32)
    return with_adapters(PaliGemmaForConditionalGeneration(config), r".*language_model.*(q_proj|v_proj)")


def captions(with_types: bool = False) -> Rows:
    draw, rows = _drawn(1), []
    for row in images():
        ids = torch.cat([torch.full((16,), _IMAGE_TOKEN), torch.randint(4, 99, (8,), generator=draw)])
        labels = torch.where(ids == _IMAGE_TOKEN, -100, ids)
        one = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        types = {"token_type_ids": (labels != -100).long()} if with_types else {}
        rows.append({"pixel_values": row["pixel_values"], **one, **types})
    return rows


def smolvlm() -> nn.Module:
    config = SmolVLMConfig(
        vision_config={"num_hidden_layers": 3, **_LAYERS, **_IMAGES},
        text_config={"model_type": "llama", "pad_token_id": 0, **_TEXT},
        image_token_id=_IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=0,
    )
    return with_adapters(SmolVLMForConditionalGeneration(config), r".*text_model.*(q_proj|v_proj)")


def tiles() -> Rows:
    """One to three tiles a sample."""
    draw, rows = _drawn(), []
    for number in range(NUM_SAMPLES):
        count = 1 + number % 3
        pixels, mask = torch.zeros(3, 3, 32, 32), torch.zeros(3, 32, 32, dtype=torch.long)
        pixels[:count] = torch.randn(count, 3, 32, 32, generator=draw)
        mask[:count] = 1
        words = torch.randint(4, 99, (20 - 4 * count,), generator=draw)
        ids = torch.cat([torch.full((4 * count,), _IMAGE_TOKEN), words])
        labels = torch.where(ids == _IMAGE_TOKEN, -100, ids)
        one = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        rows.append({"pixel_values": pixels, "pixel_attention_mask": mask, **one})
    return rows


def clip() -> nn.Module:
    text = {"vocab_size": 100, "num_hidden_layers": 2, "max_position_embeddings": 20, "eos_token_id": 99, **_LAYERS}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={"num_hidden_layers": 3, **_LAYERS, **_IMAGES}, projection_dim=16)
    )
    model.vision_model.requires_grad_(False)
    return model


def pairs() -> Rows:
    draw = _drawn(1)
    ids = [torch.cat([torch.randint(4, 99, (11,), generator=draw), torch.tensor([99])]) for _ in range(NUM_SAMPLES)]
    return [{"pixel_values": row["pixel_values"], "input_ids": own} for row, own in zip(images(), ids, strict=True)]


def for_clip(rows: Rows) -> dict[str, Any]:
    return {**stack(rows), "return_loss": True}


def vision_encoder_decoder() -> nn.Module:
    encoder = ViTConfig(num_hidden_layers=3, **_LAYERS, **_IMAGES)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 20}
    decoder = GPT2Config(vocab_size=100, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config=config)
    model.encoder.requires_grad_(False)
    return model


def described() -> Rows:
    draw = _drawn(1)
    return [{**row, "labels": torch.randint(4, 99, (8,), generator=draw)} for row in images()]


def detr() -> nn.Module:
    backbone = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"])
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 5, "num_labels": 3}
    model = DetrForObjectDetection(
        DetrConfig(
            backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, d_model=32, dropout=0.0,
            **sizes, **heads,
        )
    )  # fmt: skip
    model.model.backbone.requires_grad_(False)
    return model


def boxes() -> Rows:
    label = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}
    mask = torch.ones(32, 32, dtype=torch.long)
    return [{"pixel_values": row["pixel_values"], "pixel_mask": mask, "labels": label} for row in images()]


def for_detr(rows: Rows) -> dict[str, Any]:
    labels = [dict(row["labels"]) for row in rows]
    return {**stack([{name: row[name] for name in ("pixel_values", "pixel_mask")} for row in rows]), "labels": labels}


def wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    model = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(num_hidden_layers=2, num_labels=3, vocab_size=20, **_LAYERS, **convolutions)
    )
    model.freeze_feature_encoder()
    return model


def waves() -> Rows:
    draw = _drawn()
    return [{"input_values": torch.randn(1000, generator=draw), "labels": i % 3} for i in range(NUM_SAMPLES)]


def resnet() -> nn.Module:
    """A backbone with batch normalization, which is in training mode under Trainer."""
    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3)
    )
    model.resnet.requires_grad_(False)
    return model


def vit_probe() -> nn.Module:
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=3, num_labels=3, **_LAYERS, **_IMAGES))
    model.base_model.requires_grad_(False)
    return model


def convnext_probe() -> nn.Module:
    """No stack of equal layers."""
    model = ConvNextForImageClassification(
        ConvNextConfig(num_stages=2, hidden_sizes=[32, 32], depths=[1, 1], num_labels=3)
    )
    model.convnext.requires_grad_(False)
    return model


def dinov2_probe() -> nn.Module:
    model = Dinov2ForImageClassification(
        Dinov2Config(num_hidden_layers=3, num_labels=3, mlp_ratio=2, **_IMAGES, hidden_size=32, num_attention_heads=4)
    )
    model.base_model.requires_grad_(False)
    return model


def bert_probe(dropout: float = 0.0) -> nn.Module:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=100, num_hidden_layers=3, num_labels=3, **_LAYERS, **rates)
    )
    model.base_model.requires_grad_(False)
    return model


def convbert_probe() -> nn.Module:
    """A classifier of tokens, whose convolutions see padding at the end of a text."""
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64, "embedding_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    model = ConvBertForTokenClassification(
        ConvBertConfig(vocab_size=100, num_hidden_layers=3, num_labels=3, head_ratio=2, **sizes, **rates)
    )
    model.base_model.requires_grad_(False)
    return model


def sentences() -> Rows:
    return [{**row, "labels": torch.tensor(i % 3)} for i, row in enumerate(texts())]


def wav2vec2_probe() -> nn.Module:
    """As `wav2vec2`, with all of the base frozen, and nothing drawn at random."""
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop")
    convolutions = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    model = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            num_hidden_layers=2, num_labels=3, vocab_size=20, apply_spec_augment=False, **_LAYERS, **convolutions,
            **dict.fromkeys(rates, 0.0),
        )
    )  # fmt: skip
    model.freeze_base_model()
    return model


def qwen2_vl() -> nn.Module:
    """Images of any size lie in one row of patches, with a grid of their sizes beside them."""
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    text = {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    ids = {
        "image_token_id": _IMAGE_TOKEN,
        "video_token_id": 98,
        "vision_start_token_id": 97,
        "vision_end_token_id": 96,
    }
    config = Qwen2VLConfig(vision_config=vision, text_config={**text, "pad_token_id": 0}, **ids)
    targets = r".*language_model.*(q_proj|v_proj)"
    return get_peft_model(Qwen2VLForConditionalGeneration(config), LoraConfig(r=4, target_modules=targets))


def patches() -> Rows:
    draw, rows = _drawn(1), []
    for i in range(NUM_SAMPLES):
        height, width = (4, 4 + 2 * (i % 3))
        count = height * width // 4
        image = torch.cat([torch.tensor([97]), torch.full((count,), _IMAGE_TOKEN), torch.tensor([96])])
        ids = torch.cat([image, torch.randint(4, 90, (14 - count,), generator=draw)])
        pixels = torch.randn(height * width, 3 * 2 * 4 * 4, generator=draw)
        rows.append({"input_ids": ids, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])})
    return rows


def for_qwen(rows: Rows) -> dict[str, Any]:
    found = {name: torch.cat([row[name] for row in rows]) for name in ("pixel_values", "image_grid_thw")}
    ids = torch.stack([row["input_ids"] for row in rows])
    kinds = (ids == _IMAGE_TOKEN).int()
    labels = ids.where(ids < 90, -100)
    return {
        **found,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
        "mm_token_type_ids": kinds,
    }


@dataclass(frozen=True)
class Case:
    """A model, its data, and the path of the part that is stored."""

    build: Callable[[], nn.Module]
    data: Callable[[], Rows]
    part: str
    collate: Collate = stack


CASES = {
    "whisper": Case(whisper, sounds, "model.encoder"),
    "t5": Case(t5, texts, "encoder", pad),
    "llava": Case(llava, captions, "model.vision_tower"),
    "paligemma": Case(paligemma, lambda: captions(with_types=True), "model.vision_tower"),
    "smolvlm": Case(smolvlm, tiles, "model.vision_model with model.connector"),
    "clip": Case(clip, pairs, "vision_model", for_clip),
    "vision encoder and decoder": Case(vision_encoder_decoder, described, "encoder"),
    "detr": Case(detr, boxes, "model.backbone", for_detr),
    "wav2vec2": Case(wav2vec2, waves, "wav2vec2.feature_extractor"),
    "qwen2-vl": Case(qwen2_vl, patches, "model.visual", for_qwen),
    "convnext probe": Case(convnext_probe, images, "convnext"),
}

PROBES = {
    "wav2vec2": Case(wav2vec2_probe, waves, "wav2vec2"),
    "vit": Case(vit_probe, images, "vit"),
    "dinov2": Case(dinov2_probe, images, "dinov2"),
    "bert": Case(bert_probe, sentences, "bert", pad),
}
"""Models with one stack of layers, all of them frozen: its cache stores what their heads get."""


def trainer_of(kind: type, case: Case, folder: Path, data: Any = None, **options: Any) -> Trainer:
    """Return a trainer of three epochs, plain or with a cache that stores whatever it may."""
    set_seed(1)
    is_ours = issubclass(kind, PipeTransformerMixin)
    model, ours = case.build(), {"activation_cache": "on"} if is_ours else {}
    make = PipeTransformerArguments if is_ours else TrainingArguments
    own = {name: value for name, value in options.items() if ours or not name.startswith(("activation_", "pipeline_"))}
    args = make(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 3, "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "use_cpu": True, "learning_rate": 1e-3, "disable_tqdm": True,
            "remove_unused_columns": False, **ours, **own,
        }
    )  # fmt: skip
    return kind(model, args, train_dataset=data or case.data(), data_collator=case.collate)


def logged(trainer: Trainer) -> list[tuple[float, float]]:
    """Train, and return loss and gradient norm of each step."""
    trainer.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
