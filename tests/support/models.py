"""Tiny models and data sets, made on the spot and always alike.

Every model has four layers, so that four stages can be cut between its sublayers, and no dropout, so that two runs
can be compared number by number. Text has a changing length and is padded to the longest sample of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    BeitConfig,
    BeitForImageClassification,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForTokenClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForQuestionAnswering,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    SiglipConfig,
    SiglipForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    XLMRobertaConfig,
    XLMRobertaForTokenClassification,
)

from hf_pipetransformer.data.batches import SampleBatch, batch_size
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.startup.check import probe_model
from hf_pipetransformer.startup.model import ProbeTarget
from hf_pipetransformer.startup.twin import as_twin


__all__ = [
    "MODELS",
    "NUM_LAYERS",
    "TinyModel",
    "attention_implementations",
    "build_model",
    "collate",
    "enlarge_weights",
    "make_dataset",
    "real_positions",
    "vit_config",
]

NUM_LAYERS = 4
NUM_LABELS = 3
NUM_TOKEN_LABELS = 5

VOCABULARY = 64
PAD = 0
MASK = 3
FIRST_WORD = 5
SHORTEST = 3
LONGEST = 18
# The softmax of question answering runs over padding too, so every batch is padded to one length.
QA_LENGTH = 20
IGNORED = -100

IMAGE_SIZE = 16
PATCH_SIZE = 8

NUM_FRAMES = 24
NUM_MEL_BINS = 16

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """One row of `MODELS`.

    Args:
        family: the name of the model family, as its authors write it.
        build: makes the model with random weights.
        task: `sequence`, `question`, `token`, `masked`, `image` or `audio`: which data it takes.
        loss_uses_num_items: whether the model's loss honours `num_items_in_batch`. Where it does not, plain Trainer
            needs `model_accepts_loss_kwargs = False`, or it counts gradient accumulation twice.
    """

    family: str
    build: Callable[[], PreTrainedModel]
    task: str
    loss_uses_num_items: bool = False


def build_model(name: str, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """The model `name` of `MODELS`; the same seed gives the same weights.

    Args:
        attention: `sdpa` or `eager`; None leaves the choice to transformers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS[name].build()
        enlarge_weights(model)
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


def attention_implementations(model: PreTrainedModel) -> tuple[str, ...]:
    """The attention implementations of torch that a model's family has."""
    return ("sdpa", "eager") if model._supports_sdpa else ("eager",)


def make_dataset(name: str, num_samples: int, seed: int = 0) -> Dataset:
    """A data set for the model `name`; a prefix of a longer data set with the same seed."""
    return Dataset.from_list(list(make_rows(name, num_samples, seed)))


def make_rows(name: str, num_samples: int, seed: int = 0) -> list[Row]:
    """The rows of `make_dataset` as plain dicts."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [_ROW_MAKERS[MODELS[name].task](index, generator) for index in range(num_samples)]


def collate(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Pad text to the longest row, labels of tokens with -100; stack everything else.

    Rows without labels make a batch without labels.
    """
    longest = max((len(row["input_ids"]) for row in rows if "input_ids" in row), default=0)
    if "start_positions" in rows[0]:
        longest = QA_LENGTH
    padding = {"input_ids": PAD, "attention_mask": 0, "labels": IGNORED}
    batch = {}
    for key in rows[0]:
        values = [row[key] for row in rows]
        if key in padding and isinstance(values[0], Sequence):
            values = [[*value, *[padding[key]] * (longest - len(value))] for value in values]
        batch[key] = torch.tensor(values)
    return batch


def real_positions(name: str, num_samples: int, seed: int = 0) -> torch.Tensor | None:
    """Which predictions stand for a token, `(num_samples, longest)`; None if predictions are not per token."""
    if MODELS[name].task not in ("token", "masked"):
        return None
    return collate(make_rows(name, num_samples, seed))["attention_mask"].bool()


# A constant added to every key changes no attention weight, unless positions depend on the keys (DeBERTa).
_KEY_BIAS = re.compile(r"(key|k_proj|k_lin|attn\.k|c_attn|qkv_proj|query_key_value)\.bias$")
# Question answering takes its softmax over positions, so a constant added to every position changes nothing either.
_QA_CONSTANTS = re.compile(rf"(qa_outputs\.bias|layer\.{NUM_LAYERS - 1}\.output\.LayerNorm\.bias)$")


def is_key_bias(parameter: str) -> bool:
    """Whether a parameter is the bias of attention keys, or holds it among others."""
    return bool(_KEY_BIAS.search(parameter))


def has_zero_gradient(name: str, parameter: str) -> bool:
    """Whether the gradient of a parameter is zero by mathematics, so that its value after training is rounding noise.

    AdamW divides by the gradient's size and makes visible steps of the noise; they change no loss.
    """
    return is_key_bias(parameter) or (MODELS[name].task == "question" and bool(_QA_CONSTANTS.search(parameter)))


def enlarge_weights(model: nn.Module) -> None:
    """Let every part matter: with the usual 0.02 a tiny model's attention is uniform and its mask changes nothing."""
    for parameter in model.parameters():
        # Biases, and the zeros that position embeddings of images and position biases start from.
        if parameter.ndim == 1 or not parameter.any():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        elif parameter.std() < 0.1:
            parameter.data.mul_(6)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "intermediate_size": 64,
}
_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TEXT: dict[str, Any] = {
    **_SIZES,
    **_NO_DROPOUT,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
}
# For RoBERTa and its kin, whose positions start behind the padding index.
_SHIFTED_TEXT = {**_TEXT, "max_position_embeddings": 40}
_IMAGE: dict[str, Any] = {
    **_SIZES,
    **_NO_DROPOUT,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
    "num_attention_heads": 2,
    "num_labels": NUM_LABELS,
}
_DINOV2 = {**{name: size for name, size in _IMAGE.items() if name != "intermediate_size"}, "mlp_ratio": 2}


def vit_config(num_layers: int) -> ViTConfig:
    """The ViT of `MODELS` with another number of layers."""
    return ViTConfig(**{**_IMAGE, "num_hidden_layers": num_layers})


def _distilbert() -> PreTrainedModel:
    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=NUM_LAYERS,
        n_heads=4,
        hidden_dim=64,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=PAD,
    )
    return DistilBertForMaskedLM(config)


def _deberta() -> PreTrainedModel:
    # Attention as in DeBERTa-v3; with so few buckets, far positions share one.
    config = DebertaV2Config(
        **_TEXT,
        num_labels=NUM_LABELS,
        relative_attention=True,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=0,
    )
    return DebertaV2ForSequenceClassification(config)


def _modernbert() -> PreTrainedModel:
    # The first and the last layer see the whole text, the two between them four words to either side.
    config = ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        local_attention=8,
        pad_token_id=PAD,
        bos_token_id=1,
        cls_token_id=1,
        eos_token_id=2,
        sep_token_id=2,
    )
    return ModernBertForMaskedLM(config)


def _beit() -> PreTrainedModel:
    # Both position biases at once: one of each layer, one that all layers share.
    config = BeitConfig(
        **_IMAGE,
        use_relative_position_bias=True,
        use_shared_relative_position_bias=True,
        drop_path_rate=0.0,
    )
    return BeitForImageClassification(config)


def _siglip() -> PreTrainedModel:
    vision = {name: _IMAGE[name] for name in (*_SIZES, "image_size", "patch_size", "num_attention_heads")}
    return SiglipForImageClassification(SiglipConfig(vision_config=vision, num_labels=NUM_LABELS))


def _ast() -> PreTrainedModel:
    sizes = {name: size for name, size in _IMAGE.items() if name != "image_size"}
    frames = {"max_length": NUM_FRAMES, "num_mel_bins": NUM_MEL_BINS}
    config = ASTConfig(**sizes, **frames, frequency_stride=PATCH_SIZE, time_stride=PATCH_SIZE)
    return ASTForAudioClassification(config)


def _of(model: Any, config: Any, sizes: dict[str, Any], **changes: Any) -> Callable[[], PreTrainedModel]:
    """Return a function that makes the model of a config with these sizes."""
    return lambda: model(config(**sizes, **changes))


_CLASSES: dict[str, Any] = {"num_labels": NUM_LABELS}
_TAGS: dict[str, Any] = {"num_labels": NUM_TOKEN_LABELS}
_DINOV2_REGISTERS = _of(
    Dinov2WithRegistersForImageClassification, Dinov2WithRegistersConfig, _DINOV2, num_register_tokens=2
)
MODELS: dict[str, TinyModel] = {
    "bert_sequence": TinyModel("BERT", _of(BertForSequenceClassification, BertConfig, _TEXT, **_CLASSES), "sequence"),
    "bert_question": TinyModel("BERT", _of(BertForQuestionAnswering, BertConfig, _TEXT), "question"),
    "bert_token": TinyModel("BERT", _of(BertForTokenClassification, BertConfig, _TEXT, **_TAGS), "token"),
    "bert_masked": TinyModel("BERT", _of(BertForMaskedLM, BertConfig, _TEXT, tie_word_embeddings=True), "masked"),
    "roberta_sequence": TinyModel(
        "RoBERTa",
        _of(RobertaForSequenceClassification, RobertaConfig, _SHIFTED_TEXT, **_CLASSES, type_vocab_size=1),
        "sequence",
    ),
    "xlm_roberta_token": TinyModel(
        "XLM-RoBERTa",
        _of(XLMRobertaForTokenClassification, XLMRobertaConfig, _SHIFTED_TEXT, **_TAGS, type_vocab_size=1),
        "token",
    ),
    "distilbert_masked": TinyModel("DistilBERT", _distilbert, "masked"),
    # As in the small ELECTRA, the embeddings are narrower than the layers.
    "electra_token": TinyModel(
        "ELECTRA", _of(ElectraForTokenClassification, ElectraConfig, _TEXT, **_TAGS, embedding_size=16), "token"
    ),
    "mpnet_question": TinyModel("MPNet", _of(MPNetForQuestionAnswering, MPNetConfig, _SHIFTED_TEXT), "question"),
    "deberta_sequence": TinyModel("DeBERTa-v2, v3", _deberta, "sequence"),
    "modernbert_masked": TinyModel("ModernBERT", _modernbert, "masked", True),
    "vit": TinyModel("ViT", _of(ViTForImageClassification, ViTConfig, _IMAGE), "image", True),
    "deit": TinyModel("DeiT", _of(DeiTForImageClassification, DeiTConfig, _IMAGE), "image", True),
    "dinov2": TinyModel("DINOv2", _of(Dinov2ForImageClassification, Dinov2Config, _DINOV2), "image", True),
    "dinov2_with_registers": TinyModel("DINOv2 with registers", _DINOV2_REGISTERS, "image", True),
    "beit": TinyModel("BEiT", _beit, "image"),
    "siglip": TinyModel("SigLIP (vision)", _siglip, "image"),
    "ast": TinyModel("AST", _ast, "audio", True),
}


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


def _text(generator: torch.Generator) -> Row:
    length = _integer(SHORTEST, LONGEST + 1, generator)
    words = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
    return {"input_ids": words.tolist(), "attention_mask": [1] * length}


def _sequence_row(index: int, generator: torch.Generator) -> Row:
    row = _text(generator)
    # The first word decides the label nine times out of ten, so that there is something to learn.
    label = row["input_ids"][0] if _integer(0, 10, generator) else _integer(0, NUM_LABELS, generator)
    return {**row, "labels": label % NUM_LABELS}


def _question_row(index: int, generator: torch.Generator) -> Row:
    row = _text(generator)
    start = _integer(0, len(row["input_ids"]), generator)
    end = _integer(start, len(row["input_ids"]), generator)
    return {**row, "start_positions": start, "end_positions": end}


def _token_row(index: int, generator: torch.Generator) -> Row:
    row = _text(generator)
    labels = [word % NUM_TOKEN_LABELS for word in row["input_ids"]]
    # As where a word has several tokens: only its first one has a label. Every sixth sample has none at all, so
    # some micro-batches and some replicas have nothing that counts.
    skipped = torch.rand(len(labels), generator=generator) < (2 if index % 6 == 5 else 0.3)
    return {**row, "labels": [IGNORED if skip else label for label, skip in zip(labels, skipped, strict=True)]}


def _masked_row(index: int, generator: torch.Generator) -> Row:
    row = _text(generator)
    words = row["input_ids"]
    masked = torch.rand(len(words), generator=generator) < (0 if index % 6 == 5 else 0.3)
    return {
        "input_ids": [MASK if hide else word for word, hide in zip(words, masked, strict=True)],
        "attention_mask": row["attention_mask"],
        "labels": [word if hide else IGNORED for word, hide in zip(words, masked, strict=True)],
    }


def _image_row(index: int, generator: torch.Generator) -> Row:
    label = _integer(0, NUM_LABELS, generator)
    pixels = torch.randn(3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    pixels[label] += 0.5
    return {"pixel_values": pixels.tolist(), "labels": label}


def _audio_row(index: int, generator: torch.Generator) -> Row:
    label = _integer(0, NUM_LABELS, generator)
    spectrogram = torch.randn(NUM_FRAMES, NUM_MEL_BINS, generator=generator)
    spectrogram[:, label::NUM_LABELS] += 0.5
    return {"input_values": spectrogram.tolist(), "labels": label}


_ROW_MAKERS: dict[str, Callable[[int, torch.Generator], Row]] = {
    "sequence": _sequence_row,
    "question": _question_row,
    "token": _token_row,
    "masked": _masked_row,
    "image": _image_row,
    "audio": _audio_row,
}


def probed_with(
    model: nn.Module, splitter: Splitter, loss: Callable[[dict[str, Any]], torch.Tensor], inputs: dict[str, Any]
) -> Probe:
    """The start-up check of a split model, with a loss that divides by nothing."""
    with as_twin(model, splitter) as twin:
        batch = SampleBatch(inputs)
        return probe_model(ProbeTarget(model, splitter, batch, lambda given, _: loss(given), batch_size, twin))
