"""Tiny models of families that are in no table, and what of them a generic cut has to cope with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CanineConfig,
    CanineForSequenceClassification,
    CLIPConfig,
    CLIPForImageClassification,
    CTRLConfig,
    CTRLForSequenceClassification,
    Data2VecAudioConfig,
    Data2VecAudioForSequenceClassification,
    DebertaConfig,
    DebertaForSequenceClassification,
    HubertConfig,
    HubertForCTC,
    LongformerConfig,
    LongformerForSequenceClassification,
    MarkupLMConfig,
    MarkupLMForSequenceClassification,
    NystromformerConfig,
    NystromformerForSequenceClassification,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    SEWConfig,
    SEWForSequenceClassification,
    SqueezeBertConfig,
    SqueezeBertForSequenceClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)


L, NUM_LABELS, VOCABULARY, SOUND = 4, 3, 64, 400
LONGEST = 16

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": NUM_LABELS,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": L,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "num_labels": NUM_LABELS,
    "pad_token_id": 0,
}
_AUDIO: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("feat_proj_dropout", "final_dropout", "mask_time_prob", "mask_feature_prob"), 0.0),
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": NUM_LABELS,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
}


def _clip() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": L, "num_attention_heads": 4}
    return CLIPForImageClassification(
        CLIPConfig(vision_config={**sizes, "image_size": 16, "patch_size": 8}, num_labels=NUM_LABELS)
    )


def _canine() -> PreTrainedModel:
    sizes = {key: value for key, value in _TEXT.items() if key != "vocab_size"}
    config = CanineConfig(
        **sizes, num_hash_buckets=64, downsampling_rate=2, upsampling_kernel_size=2, local_transformer_stride=8
    )
    return CanineForSequenceClassification(config)


def _markuplm() -> PreTrainedModel:
    config = MarkupLMConfig(
        **_TEXT, max_xpath_tag_block_embeddings=16, max_xpath_subs_block_embeddings=32, tag_pad_id=15, subs_pad_id=31,
        xpath_block_hidden_size=8, max_depth=L,
    )  # fmt: skip
    return MarkupLMForSequenceClassification(config)


def _squeezebert() -> PreTrainedModel:
    groups = dict.fromkeys(("q_groups", "k_groups", "v_groups", "intermediate_groups", "output_groups"), 2)
    return SqueezeBertForSequenceClassification(SqueezeBertConfig(**_TEXT, embedding_size=32, **groups))


def _deberta() -> PreTrainedModel:
    config = DebertaConfig(
        **_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False, type_vocab_size=0
    )
    return DebertaForSequenceClassification(config)


def _data2vec() -> PreTrainedModel:
    config = Data2VecAudioConfig(**{**_AUDIO, "num_conv_pos_embeddings": 2}, conv_pos_kernel_size=3)
    return Data2VecAudioForSequenceClassification(config)


def _nystromformer() -> PreTrainedModel:
    return NystromformerForSequenceClassification(
        NystromformerConfig(**_TEXT, num_landmarks=4, segment_means_seq_len=LONGEST)
    )


UNCOMMON: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    # Modules before the layers give tuples, outputs by name, or other lengths than the layers have.
    "wav2vec2": (lambda: Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**_AUDIO)), "audio"),
    "data2vec_audio": (_data2vec, "audio"),
    "sew": (lambda: SEWForSequenceClassification(SEWConfig(**_AUDIO, squeeze_factor=2)), "audio"),
    "canine": (_canine, "one length"),
    # A loss that switches cuDNN.
    "hubert_ctc": (lambda: HubertForCTC(HubertConfig(**_AUDIO, ctc_loss_reduction="mean")), "letters"),
    # Changes what a module before the layers gave where it lies.
    "ctrl": (lambda: CTRLForSequenceClassification(CTRLConfig(**_GPT, dff=64)), "text"),
    # Layers return lists.
    "openai_gpt": (lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(**_GPT, attn_pdrop=0.0)), "next words"),
    # Pads to multiples of a window, or takes one length only.
    "longformer": (lambda: LongformerForSequenceClassification(LongformerConfig(**_TEXT, attention_window=8)), "text"),
    "nystromformer": (_nystromformer, "one length"),
    # Gives a weight to a module.
    "deberta": (_deberta, "text"),
    # The number of layers stands in a config inside, or other lists are as long.
    "clip": (_clip, "image"),
    "markuplm": (_markuplm, "text"),
}

REFUSED = {"squeezebert": (_squeezebert, "text")}


def build(name: str) -> PreTrainedModel:
    """Return a model, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {**UNCOMMON, **REFUSED}[name][0]()


def rows(name: str, num: int = 24) -> list[dict[str, Any]]:
    """Return samples for a model."""
    task = {**UNCOMMON, **REFUSED}[name][1]
    generator = torch.Generator().manual_seed(7)

    def integers(low: int, high: int, num: int) -> list[int]:
        return torch.randint(low, high, (num,), generator=generator).tolist()

    def row() -> dict[str, Any]:
        [label] = integers(0, NUM_LABELS, 1)
        if task == "image":
            return {"pixel_values": torch.randn(3, 16, 16, generator=generator).tolist(), "labels": label}
        if task in ("audio", "letters"):
            labels = integers(1, 32, 4) if task == "letters" else label
            return {"input_values": torch.randn(SOUND, generator=generator).tolist(), "labels": labels}
        length = LONGEST if task == "one length" else integers(7, LONGEST + 3, 1)[0]
        words = integers(5, VOCABULARY, length)
        return {"input_ids": words, "attention_mask": [1] * length, "labels": words if task == "next words" else label}

    return [row() for _ in range(num)]
