"""Every class of transformers for text, images or sound that trains on labels, tiny and with random weights.

Classes that take images beside text are tried with them (`images_beside_text`), named after class and configuration.

The classes come from the mappings of transformers' own `Auto` classes. A configuration is shrunk by the names of its
fields; `_FIELDS` says where that does not give a model. Everything random is off in `build(subject)`, so that two runs
can be compared number by number; `build(subject, as_released=True)` leaves dropout and layer drop as they are.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.support.images_beside_text import OF_IMAGES, TYPES, rows_with_images
from tests.support.models import enlarge_weights


__all__ = ["LEFT_OUT", "Subject", "build", "collate", "every_subject", "rows"]

NUM_LAYERS = 4
NUM_LABELS = 3
VOCABULARY = 128
# Special tokens lie below the first word, and above the last.
FIRST_WORD, LAST_WORD = 8, 100
SHORTEST, LONGEST = 9, 16
IMAGE_SIZE = 32
NUM_FRAMES = 4
NUM_SAMPLES = 1600
"""Of a waveform."""
NUM_SPECTRA, NUM_BINS = 64, 16
IGNORED = -100

TASKS = {
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "masked words": "MASKED_LM",
    "next words": "CAUSAL_LM",
    "multiple choice": "MULTIPLE_CHOICE",
    "next sentence": "NEXT_SENTENCE_PREDICTION",
    "text to text": "SEQ_TO_SEQ_CAUSAL_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "masked images": "MASKED_IMAGE_MODELING",
    "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "video classification": "VIDEO_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "audio frame classification": "AUDIO_FRAME_CLASSIFICATION",
    "speaker verification": "AUDIO_XVECTOR",
    "speech recognition (CTC)": "CTC",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "images beside text": "IMAGE_TEXT_TO_TEXT",
}
"""What a class is for, and the middle of the name of its mapping."""

_OF_BOTH = "takes text together with images or sound"
_NO_LABELS = "takes no labels"
_DRAFTS = "drafts for another model, whose hidden states it takes"

LEFT_OUT = {
    **dict.fromkeys(
        ["DeiTForImageClassificationWithTeacher", "LevitForImageClassificationWithTeacher"]
        + ["PPLCNetForImageClassification"],
        _NO_LABELS,
    ),
    **dict.fromkeys(["Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"], _DRAFTS),
    **dict.fromkeys(
        ["DiaForConditionalGeneration", "FunAsrNanoForConditionalGeneration", "GitForCausalLM"]
        + ["KyutaiSpeechToTextForConditionalGeneration", "LxmertForQuestionAnswering", "MusicgenForCausalLM"]
        + ["MusicgenMelodyForCausalLM", "Nemotron3DiarizationForAudioFrameClassification"]
        + ["Nemotron3_5TranscribeForConditionalGeneration", "ShieldGemma2ForImageClassification"]
        + ["VibeVoiceForConditionalGeneration"]
        + ["VoxtralRealtimeForConditionalGeneration"],
        _OF_BOTH,
    ),
    **dict.fromkeys(
        ["Dots3NoteForCausalLM-dots3_note", "Dots3NoteForCausalLM-dots3_note_text"]
        + ["VibeVoiceAsrForConditionalGeneration"],
        "cannot be made tiny: 76 million weights or more",
    ),
}
"""Classes that the loop leaves out, each with its reason."""


@dataclass(frozen=True)
class Subject:
    """A class to train.

    Args:
        name: class and configuration; unique.
        class_name: of the model.
        model_type: of its configuration.
        task: a key of `TASKS`.
    """

    name: str
    class_name: str
    model_type: str
    task: str


@cache
def every_subject() -> tuple[Subject, ...]:
    """All classes, sorted by name; one that several tasks list counts for the first of them, and with images anew."""
    found: dict[tuple[str, str], Subject] = {}
    with_images = []
    for task, middle in TASKS.items():
        mapping: Mapping[str, str | Sequence[str]] = getattr(modeling_auto, f"MODEL_FOR_{middle}_MAPPING_NAMES")
        for model_type, names in mapping.items():
            for class_name in (names,) if isinstance(names, str) else names:
                key = (class_name, model_type)
                if task == "images beside text":
                    with_images.append(Subject(f"{class_name}-{model_type}-images", class_name, model_type, task))
                    continue
                found.setdefault(key, Subject(class_name, class_name, model_type, task))
    types: dict[str, set[str]] = {}
    for class_name, model_type in found:
        types.setdefault(class_name, set()).add(model_type)
    named = []
    for (class_name, model_type), subject in found.items():
        name = class_name if len(types[class_name]) == 1 else f"{class_name}-{model_type}"
        named.append(Subject(name, class_name, model_type, subject.task))
    return tuple(sorted([*named, *with_images], key=lambda subject: subject.name))


def build(subject: Subject, as_released: bool = False, seed: int = 0) -> PreTrainedModel:
    """A tiny model; the same seed gives the same weights.

    Args:
        as_released: leave dropout, layer drop and the like at the values that the configuration has by default.
    """
    kind = getattr(transformers, subject.class_name)
    config = _config(subject, kind, as_released)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config)
        if subject.model_type not in _AS_INITIALISED:
            enlarge_weights(model)
    if not as_released:
        for module in model.modules():  # Some take no rate from their configuration.
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                module.p = 0.0
    return model


_AS_INITIALISED = ("mobilebert", "qwen3_5_moe")
"""Types that larger weights make a poor measure: MobileBERT has no normalisation, so that Trainer alone gives other
numbers in float32 than in float64. In Qwen3.5 with experts 1e-7 of the larger weights changes 1e-4 of Trainer's
gradient norm, and 2e-2 where a token gets another expert. That is rounding: four micro-batches give a norm that is off
by 3e-5 in float32, and by 4e-14 if all that the model computes in float32 is computed in float64, like its weights."""


def rows(subject: Subject, model: PreTrainedModel, num_samples: int) -> list[dict[str, Any]]:
    """Samples that fit a model, always alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(subject.name.encode()))
    if subject.task == "images beside text":
        return rows_with_images(model, num_samples, generator, collate)
    make = _ROWS[subject.task]
    taken = inspect.signature(model.forward).parameters
    made = [make(model, index, generator) for index in range(num_samples)]
    labels = {"labels", "start_positions", "end_positions"}
    return [{key: value for key, value in row.items() if key in taken or key in labels} for row in made]


def collate(rows: Sequence[Mapping[str, Any]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Pad text to the longest row, its labels with -100; stack everything else, but images beside text."""
    longest = max((len(row["input_ids"]) for row in rows if "input_ids" in row), default=0)
    batch = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [torch.as_tensor(row[key]) for row in rows if key in row]
        if longest and key in OF_IMAGES:
            batch[key] = torch.cat(values)
            continue
        if key in ("input_ids", "attention_mask", "bbox", *TYPES) or (key == "labels" and values[0].dim() == 1):
            filler = pad if key == "input_ids" else IGNORED if key == "labels" else 0
            length = max(longest, *map(len, values))
            values = [_padded(value, length, filler) for value in values]
        batch[key] = torch.stack(values)
    return batch


def _padded(value: torch.Tensor, length: int, filler: int) -> torch.Tensor:
    return torch.cat([value, value.new_full((length - len(value), *value.shape[1:]), filler)])


# ---- configurations ----

_WIDTH, _HEADS, _HEAD, _INNER, _EXPERTS = 32, 4, 8, 48, 4

_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "emb_dim", "dim", "word_embed_proj_dim", "embedding_size"]
        + ["output_hidden_size", "attention_hidden_size", "feature_size", "pooler_output_size", "pooler_hidden_size"]
        + ["prediction_head_size", "decoder_hidden_size", "classifier_proj_size", "embedding_dim", "projection_dim"]
        + ["hidden_size_global", "bottleneck_dim", "out_hidden_size", "text_hidden_size", "projection_hidden_size"],
        _WIDTH,
    ),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"]
        + ["num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers"]
        + ["speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"],
        NUM_LAYERS,
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "attention_heads"]
        + ["decoder_attention_heads", "decoder_num_attention_heads", "encoder_num_attention_heads"]
        + ["speech_encoder_attention_heads", "t2u_encoder_attention_heads", "t2u_decoder_attention_heads"],
        _HEADS,
    ),
    **dict.fromkeys(["head_dim", "d_kv", "attention_head_size", "d_head", "kv_channels"], _HEAD),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"], _HEAD),
    **dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank", "qk_head_dim"], 2 * _HEAD),
    **dict.fromkeys(["index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], _HEAD),
    **dict.fromkeys(["index_n_heads", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"], _HEADS),
    "index_topk": 8,
    **dict.fromkeys(
        ["intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size"]
        + ["dff", "n_inner", "hidden_dim", "dim_ff", "shared_intermediate_size", "shared_expert_intermediate_size"]
        + ["shared_experts_intermediate_size", "intermediate_size_mlp", "speech_encoder_intermediate_size"]
        + ["t2u_encoder_ffn_dim", "t2u_decoder_ffn_dim", "moe_shared_expert_intermediate_size", "feed_forward_size"],
        _INNER,
    ),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size", "expert_ffn_size"], 16),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], _EXPERTS),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token"], 2),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group"], 1),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "entity_vocab_size": 16,
    "entity_emb_size": 16,
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 64),
    **dict.fromkeys(["max_encoder_position_embeddings", "max_decoder_position_embeddings"], 64),
    **dict.fromkeys(["max_source_positions", "max_target_positions"], NUM_SPECTRA // 2),
    **dict.fromkeys(["sliding_window", "local_attention", "attention_window", "sliding_window_size"], 8),
    **dict.fromkeys(["attention_chunk_size"], 8),
    "original_max_position_embeddings": 32,
    "image_size": IMAGE_SIZE,
    "num_frames": NUM_FRAMES,
    "num_mel_bins": NUM_BINS,
    "feature_projection_input_dim": NUM_BINS,
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size"], 8),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"], 8),
    **dict.fromkeys(["mamba_chunk_size", "chunk_size"], 8),
    **dict.fromkeys(["time_step_rank", "mamba_dt_rank"], 4),
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "tdnn_dim": (16, 16, 16, 16, 24),
    "xvector_output_dim": 16,
    "num_codevectors_per_group": 8,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
    "fusion_hidden_size": 16,
    "mm_tokens_per_image": 4,
}
"""Fields of configurations and the values that they get, where they have a number by default."""

_SEQUENCES = ("conv_dim", "conv_stride", "conv_kernel", "tdnn_dim")
"""Fields that mean something else where they are no sequence."""

_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "jitter_noise", "apply_spec_augment")
"""Parts of the names of fields that make a forward random."""

_RANDOM_UNLESS_NONE = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Fields whose values are ranges to draw from."""

_WIDTHS = ("hidden_sizes", "embed_dim", "neck_hidden_sizes", "embed_dims", "encoder_hidden_size", "stem_channels")
"""Fields with a width for each of several stages, an eighth of which is taken."""

_SWIN = {"embed_dim": 8, "depths": [1, 1, 1], "num_heads": [1, 2, 4], "encoder_stride": 16}
_MAMBA_AND_ATTENTION = ["linear_attention", "full_attention"] * 2

_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}

_FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm46v_text", "glm_ocr_text"]
        + ["paddleocr_vl_text"],
        {"rope_parameters": _MROPE},
    ),
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "mrope_section": [0, 1, 1], "partial_rotary_factor": 0.5}},
    "aria": {"projector_patch_to_query_dict": {(IMAGE_SIZE // 8) ** 2: 4}},
    "audio-spectrogram-transformer": {"max_length": NUM_SPECTRA, "frequency_stride": 8, "time_stride": 8},
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "beit": {"out_indices": [0, 1, 2, 3]},
    "bit": {"num_groups": 8, "embedding_size": 8},
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": 64},
    "bros": {"hidden_size": 64},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "data2vec-vision": {"out_indices": [0, 1, 2, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": _INNER, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
    },
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deit": {"encoder_stride": 8},
    "donut-swin": _SWIN,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"ple_layer_ids": []},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "falcon_mamba": {"conv_kernel": 4, "time_step_rank": 4},
    "focalnet": {"embed_dim": 8, "hidden_sizes": [16, 32, 32, 32]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * NUM_LAYERS},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granite_speech5_encoder": {"context_size": 32, "num_mel_bins": NUM_BINS // 4},
    "granitemoehybrid": {"layer_types": _MAMBA_AND_ATTENTION},
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 16, 32],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 16, 32, 32],
        "hidden_sizes": [16, 16, 32, 32],
        "stage_numb_of_layers": [1, 1, 1, 1],
    },
    "hiera": {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)},
    "hunyuan_v1_dense": {"head_dim": _HEAD},
    "hunyuan_v1_moe": {"head_dim": _HEAD},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32, "num_embeddings": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _MAMBA_AND_ATTENTION},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": IMAGE_SIZE},
    "levit": {
        "image_size": 64,
        "patch_size": 16,
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [1, 2, 3],
        "key_dim": [8, 8, 8],
        "depths": [1, 1, 1],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lilt": {"hidden_size": 48},
    "llama4_vision_model": {
        "intermediate_size": 4 * _WIDTH,
        "projector_input_dim": _WIDTH,
        "projector_output_dim": _WIDTH,
        "vision_output_dim": _WIDTH,
    },
    **dict.fromkeys(
        ["granite4_vision", "llava_next", "llava_next_video", "llava_onevision"],
        {"image_grid_pinpoints": [[IMAGE_SIZE, IMAGE_SIZE]]},
    ),
    "mamba": {"conv_kernel": 4, "time_step_rank": 4},
    "mamba2": {"conv_kernel": 4, "num_heads": 8, "n_groups": 1},
    "ministral": {"head_dim": _HEAD},
    "mobilevitv2": {"image_size": 64, "width_multiplier": 0.125},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"head_dim": _HEAD, "num_key_value_heads": 2},
    "neomme": {"rope_parameters": None, "head_dim": 16},
    "perceiver": {
        "num_latents": 8,
        "d_latents": 16,
        "num_self_attends_per_block": NUM_LAYERS,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 1,
        "output_num_channels": 8,
        "max_position_embeddings": LONGEST,
    },
    "qwen2_vl_vision": {"depth": 2, "embed_dim": _WIDTH, "num_heads": _HEADS, "hidden_size": _WIDTH},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": _HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 8,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "axial_pos_embds": False,
        "hash_seed": 0,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "attn_layers": ["local", "lsh"] * 2,
    },
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "sapiens2_head": {
        "upsample_out_channels": [8, 8],
        "upsample_kernel_sizes": [4, 4],
        "conv_out_channels": [8],
        "conv_kernel_sizes": [1],
    },
    "speech_to_text": {"input_feat_per_channel": NUM_BINS, "conv_channels": 16},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "textnet": {"stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 16]},
    "upernet": {
        "backbone_config": {
            "model_type": "convnext",
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "hidden_size": 16,
        "auxiliary_channels": 16,
        "auxiliary_in_channels": 16,
        "pool_scales": [1, 2],
    },
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "vit": {"encoder_stride": 8},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "xlstm": {"chunk_size": LONGEST, "qk_dim_factor": 1.0, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a `model_type` needs beside."""


def _config(subject: Subject, kind: type[PreTrainedModel], as_released: bool) -> PreTrainedConfig:
    config = _shrunk(CONFIG_MAPPING[subject.model_type], as_released)
    own = kind.config_class
    if own is not None and not isinstance(config, own):
        # Of a model with several parts the class takes one.
        parts = (getattr(config, name, None) for name in type(config).sub_configs)
        config = next((part for part in parts if isinstance(part, own)), config)
    if subject.task == "images beside text" and getattr(config, "image_token_id", 0) is None:
        config.image_token_id = VOCABULARY - 1
    if subject.task in ("masked words", "next words") and hasattr(config, "is_decoder"):
        config.is_decoder = subject.task == "next words"
    for part in [config, *(getattr(config, name, None) for name in type(config).sub_configs)]:
        if isinstance(part, PreTrainedConfig):
            part.num_labels = 2 if subject.task == "question answering" else NUM_LABELS
            if getattr(part, "pad_token_id", None) is None:
                part.pad_token_id = 0
            if part.is_encoder_decoder and getattr(part, "decoder_start_token_id", None) is None:
                part.decoder_start_token_id = 0
    return config


def _shrunk(kind: type[PreTrainedConfig], as_released: bool) -> PreTrainedConfig:
    known = {field.name: _default(field) for field in fields(kind)}  # type: ignore[arg-type]
    own = _FIELDS.get(kind.model_type, {})
    values: dict[str, Any] = {}
    too_large = 0
    for name, default in known.items():
        if any(part in name for part in _RANDOM):
            value = default if as_released else _off(default)
        elif name in _RANDOM_UNLESS_NONE:
            value = default if as_released else None
        elif name.endswith(("_id", "_token_index")) and isinstance(default, int) and default >= VOCABULARY:
            too_large += 1
            value = VOCABULARY - too_large
        else:
            value = _small(name, default, known)
        if value is not default:
            values[name] = value
    for name, part in kind.sub_configs.items():
        sub = _sub_kind(kind, name, part)
        if sub is not None and name not in own:
            values[name] = _shrunk(sub, as_released)
    return kind(**{**values, **own})


def _off(default: Any) -> Any:
    """The value of a field that makes a forward random at which it does not."""
    if isinstance(default, list | tuple):
        return type(default)(0.0 for _ in default)
    return type(default)(0) if isinstance(default, bool | int | float) else default


def _small(name: str, default: Any, known: Mapping[str, Any]) -> Any:
    """A small value for a field; what it is by default, if nothing is known of the field or it has no number."""
    is_sequence = isinstance(default, list | tuple)
    if default is None or isinstance(default, str | dict):
        return default
    if name in ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"):
        heads = next((known[key] for key in ("num_attention_heads", "num_heads", "n_heads") if key in known), 0)
        return default if default <= 1 else _HEADS if default == heads else 2
    if name in _WIDTHS and is_sequence:
        return type(default)(max(8, width // 64 * 8) for width in default)
    if name == "patch_size":
        return type(default)(min(size, 8) for size in default) if is_sequence else min(default, 8)
    if name == "depth" and not is_sequence:
        return 2
    if name == "window_size":
        return 2 if default == 7 else default
    if name not in _BY_NAME or (name in _SEQUENCES and not is_sequence):
        return default
    value = _BY_NAME[name]
    return type(default)(value for _ in default) if is_sequence and isinstance(value, int) else value


def _sub_kind(kind: type[PreTrainedConfig], name: str, part: Any) -> type[PreTrainedConfig] | None:
    if kind.model_type == "dbrx":
        return None
    if isinstance(part, type) and issubclass(part, PreTrainedConfig):
        return part
    default = getattr(kind(), name, None)
    return type(default) if isinstance(default, PreTrainedConfig) else None


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


# ---- samples ----

Row = dict[str, Any]


def _integer(low: int, high: int, generator: torch.Generator) -> int:
    return int(torch.randint(low, high, (), generator=generator))


_ONE_LENGTH = ("perceiver", "reformer", "xlstm")
"""Types that train on text of one length, or of multiples of a length."""


def _words(model: PreTrainedModel, generator: torch.Generator) -> Row:
    length = LONGEST if model.config.model_type in _ONE_LENGTH else _integer(SHORTEST, LONGEST + 1, generator)
    words = torch.randint(FIRST_WORD, LAST_WORD, (length,), generator=generator)
    if model.config.is_encoder_decoder and isinstance(getattr(model.config, "eos_token_id", None), int):
        words[-1] = model.config.eos_token_id
    row = {"input_ids": words, "attention_mask": torch.ones(length, dtype=torch.long)}
    if model.config.model_type == "bros":
        row["bbox"] = torch.rand(length, 4, generator=generator)
    return row


def _sequence(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    return {**_words(model, generator), "labels": _integer(0, NUM_LABELS, generator)}


def _tokens(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    row = _words(model, generator)
    labels = row["input_ids"] % NUM_LABELS
    labels[torch.rand(len(labels), generator=generator) < 0.3] = IGNORED
    return {**row, "labels": labels}


def _question(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    row = _words(model, generator)
    if model.config.model_type == "longformer":
        row["input_ids"][[3, 5, -1]] = model.config.sep_token_id
    start = _integer(0, len(row["input_ids"]), generator)
    return {**row, "start_positions": start, "end_positions": _integer(start, len(row["input_ids"]), generator)}


def _masked(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    row = _words(model, generator)
    hidden = torch.rand(len(row["input_ids"]), generator=generator) < 0.4
    labels = torch.where(hidden, row["input_ids"], IGNORED)
    row["input_ids"] = torch.where(hidden, 4, row["input_ids"])
    return {**row, "labels": labels}


def _next(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    row = _words(model, generator)
    return {**row, "labels": row["input_ids"].clone()}


def _choices(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    words = torch.randint(FIRST_WORD, LAST_WORD, (2, LONGEST), generator=generator)
    if model.config.model_type == "longformer":
        words[:, [5, 9, -1]] = model.config.sep_token_id
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": _integer(0, 2, generator)}


def _two(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    return {**_words(model, generator), "labels": _integer(0, 2, generator)}


def _text_to_text(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    if not model.config.is_encoder_decoder:
        return _next(model, index, generator)
    row = _words(model, generator)
    return {**row, "labels": row["input_ids"].flip(0)}


def _pixels(model: PreTrainedModel, generator: torch.Generator) -> torch.Tensor:
    channels = getattr(model.config, "num_channels", 3)
    size = getattr(model.config, "image_size", IMAGE_SIZE)
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(channels, height, width, generator=generator)


def _image(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    label = _integer(0, NUM_LABELS, generator)
    if model.config.model_type == "siglip2":
        patches = torch.randn(16, 3 * 8 * 8, generator=generator)
        mask = torch.ones(16, dtype=torch.long)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([4, 4]),
            "labels": label,
        }
    if model.config.model_type == "imagegpt":
        return {"input_ids": torch.randint(FIRST_WORD, LAST_WORD, (LONGEST,), generator=generator), "labels": label}
    return {"pixel_values": _pixels(model, generator), "labels": label}


def _masked_image(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    patch = model.config.patch_size
    mask = torch.rand((IMAGE_SIZE // patch) ** 2, generator=generator) < 0.5
    return {"pixel_values": _pixels(model, generator), "bool_masked_pos": mask}


def _segments(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    labels = torch.randint(0, NUM_LABELS, (IMAGE_SIZE, IMAGE_SIZE), generator=generator)
    return {"pixel_values": _pixels(model, generator), "labels": labels}


def _video(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    frames = torch.stack([_pixels(model, generator) for _ in range(NUM_FRAMES)])
    return {"pixel_values": frames, "pixel_values_videos": frames, "labels": _integer(0, NUM_LABELS, generator)}


def _sound(model: PreTrainedModel, generator: torch.Generator) -> Row:
    taken = inspect.signature(model.forward).parameters
    if "input_features" in taken and model.config.model_type != "speech-encoder-decoder":
        shape = (NUM_SPECTRA, 32 if model.config.model_type == "pop2piano" else NUM_BINS)
        if model.config.model_type in _BINS_FIRST:
            shape = shape[::-1]
        spectra = torch.randn(shape, generator=generator)
        return {"input_features": spectra, "attention_mask": torch.ones(NUM_SPECTRA, dtype=torch.long)}
    if model.config.model_type in _SPECTRA_AS_VALUES:
        return {"input_values": torch.randn(NUM_SPECTRA, NUM_BINS, generator=generator)}
    return {"input_values": torch.randn(NUM_SAMPLES, generator=generator)}


_BINS_FIRST: set[str] = {"whisper"}
"""Types whose spectrograms are `(bins, frames)`."""
_SPECTRA_AS_VALUES = {"audio-spectrogram-transformer"}


def _audio(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    return {**_sound(model, generator), "labels": _integer(0, NUM_LABELS, generator)}


def _frames(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    row = _sound(model, generator)
    with torch.no_grad():
        single = {key: value[None] for key, value in row.items()}
        frames = model.eval()(**single).logits.shape[1]
        model.train()
    labels = torch.randint(0, NUM_LABELS, (frames,), generator=generator)
    return {**row, "labels": torch.nn.functional.one_hot(labels, NUM_LABELS)}


def _speech(model: PreTrainedModel, index: int, generator: torch.Generator) -> Row:
    return {**_sound(model, generator), "labels": torch.randint(FIRST_WORD, 20, (3,), generator=generator)}


_ROWS: dict[str, Callable[[PreTrainedModel, int, torch.Generator], Row]] = {
    "sequence classification": _sequence,
    "token classification": _tokens,
    "question answering": _question,
    "masked words": _masked,
    "next words": _next,
    "multiple choice": _choices,
    "next sentence": _two,
    "text to text": _text_to_text,
    "image classification": _image,
    "masked images": _masked_image,
    "semantic segmentation": _segments,
    "video classification": _video,
    "audio classification": _audio,
    "audio frame classification": _frames,
    "speaker verification": _audio,
    "speech recognition (CTC)": _speech,
    "speech to text": _speech,
}
