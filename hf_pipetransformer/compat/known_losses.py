"""Losses whose arithmetic is known, by class, configuration and release. Any other sees the whole batch at once.

Known are those of transformers' own classes for the tasks below, of Trainer's label smoother and of TRL's trainers.
`tests/startup/test_losses.py` holds each class against its own arithmetic.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import torch
import transformers
from transformers import Trainer
from transformers.models.auto import modeling_auto

import hf_pipetransformer
from hf_pipetransformer.compat import trainer_compat, trl_compat
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import config_value


class KnownLoss(Enum):
    """Arithmetic of a loss over its items, which `items_of` counts: label tokens, or samples."""

    MEAN = "mean"
    """Their mean, whatever `num_items_in_batch` says."""
    DIVIDED = "divided"
    """Their sum, divided by `num_items_in_batch`; their mean where that is not given."""


_NEXT_WORDS = "CAUSAL_LM"
_MEANS_OF_TASKS = (
    *("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MASKED_LM", "IMAGE_CLASSIFICATION"),
    *("VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR"),
    "NEXT_SENTENCE_PREDICTION",
)
"""Tasks, by the name of transformers' mapping, whose losses are means unless the class is listed below.

Not among them: pretraining (two means), CTC (its reduction), segmentation and masked images (padding and masks that
count), detection (boxes, class weights in buffers), contrastive losses, and encoders with a decoder or choices.
"""

_DIVIDED = {
    *("EsmcForMaskedLM", "EuroBertForMaskedLM", "ModernBertForMaskedLM", "NeoMMEForMaskedLM", "UltrabertForMaskedLM"),
    *("DeiTForImageClassification", "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"),
    *("IJepaForImageClassification", "SegformerForImageClassification", "SwinForImageClassification"),
    *("ViTForImageClassification", "ViTMSNForImageClassification"),
    *("ASTForAudioClassification", "VideoMAEForVideoClassification", "VideoPrismForVideoClassification"),
    *("VivitForVideoClassification", "Zamba2ForSequenceClassification"),
}
"""Classes of these tasks that read `num_items_in_batch`, of labels that are classes."""

_NEXT_WORDS_BESIDE_MEDIA = {"Mistral4ForCausalLM"} | {
    f"{family}ForConditionalGeneration"
    for family in (
        *("Aria", "AyaVision", "Cohere2Vision", "CohereCompass", "Cosmos3Omni", "DeepseekVL", "DeepseekVLHybrid"),
        *("Exaone4_5_", "Gemma3", "Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr", "GotOcr2", "HyperCLOVAXVisionV2"),
        *("Idefics2", "Idefics3", "InternVL", "Janus", "Kimi_K25", "Lfm2Vl", "LightOnOcr", "Llama4", "Llava"),
        *("LlavaNext", "LlavaNextVideo", "LlavaOnevision", "MiniMaxM3Sparse", "Mistral3", "MistralLarge4", "Ovis2"),
        *("PaddleOCRVL", "PaliGemma", "QianfanOCR", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5"),
        *("Qwen3_5Moe", "Qwen4Exp", "SmolVLM", "VideoLlama3", "VideoLlava", "VipLlava"),
    )
}
"""Classes that predict the next word after images and text, and whose layers stages can share."""

_MEANS_OF_NEXT_WORDS = {"Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "XLNetLMHeadModel"}
"""Classes that do not, as others do that predict the next word."""

_UNKNOWN = {
    # A mean over all labels, the first of each sequence too, which Trainer does not count.
    *("BartForCausalLM", "BigBirdPegasusForCausalLM", "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM"),
    *("CpmAntForCausalLM", "MBartForCausalLM", "MarianForCausalLM", "MvpForCausalLM", "PLBartForCausalLM"),
    *("PegasusForCausalLM", "ProphetNetForCausalLM", "TrOCRForCausalLM", "WhisperForCausalLM"),
    # Not compared: they take other inputs than labels and one of text, images or sound, or another package.
    *("DeiTForImageClassificationWithTeacher", "DinatForImageClassification", "Dots3NoteForCausalLM"),
    *("Gemma3nForConditionalGeneration", "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    *("GitForCausalLM", "LayoutLMv2ForQuestionAnswering", "LayoutLMv2ForSequenceClassification"),
    *("LayoutLMv2ForTokenClassification", "LevitForImageClassificationWithTeacher", "LxmertForQuestionAnswering"),
    *("MusicgenForCausalLM", "MusicgenMelodyForCausalLM", "Nemotron3DiarizationForAudioFrameClassification"),
    *("PPLCNetForImageClassification", "ShieldGemma2ForImageClassification", "TimmWrapperForImageClassification"),
}


_OF_TRL = {
    "SFTTrainer": KnownLoss.DIVIDED,
    "RewardTrainer": KnownLoss.MEAN,
    "DPOTrainer": KnownLoss.MEAN,
}
"""Losses that TRL's trainers compute of what the model returns: of tokens, or of pairs."""
_OF_BATCHES = {"sft", "aot", "aot_unpaired"}
"""Losses of DPOTrainer that are none of pairs: a mean over tokens of chosen texts, and two that sort a batch."""


@cache
def _tasks() -> dict[str, str]:
    """Return the tasks of classes by name; one that several tasks list counts for the first of them."""
    found = dict.fromkeys(_NEXT_WORDS_BESIDE_MEDIA, _NEXT_WORDS)
    for task in (*_MEANS_OF_TASKS, _NEXT_WORDS):
        for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, task)
    return found


def known_loss_of_model(model: Any, labels: Any = None) -> KnownLoss | None:
    """Return what a model's own loss of `labels` is; None for a class that is not transformers', or not compared."""
    name, is_changed = type(model).__name__, "_loss_function" in vars(model)
    if not type(model).__module__.startswith("transformers.models.") or is_changed:
        return None
    task = None if name in _UNKNOWN else _tasks().get(name)
    if task is None or not hf_pipetransformer.is_tested("transformers", transformers.__version__):
        return None
    if task == _NEXT_WORDS:
        return KnownLoss.MEAN if name in _MEANS_OF_NEXT_WORDS else KnownLoss.DIVIDED
    # Losses of numbers and of several labels at once are means in every class.
    is_of_numbers = config_value(model, "problem_type") in ("regression", "multi_label_classification")
    is_of_numbers |= config_value(model, "num_labels") == 1 and task.endswith("_CLASSIFICATION")
    is_of_numbers |= isinstance(labels, torch.Tensor) and labels.is_floating_point()
    return KnownLoss.DIVIDED if name in _DIVIDED and not is_of_numbers else KnownLoss.MEAN


def known_loss(trainer: Trainer, labels: Any = None) -> KnownLoss | None:
    """Return what a trainer's loss of `labels` is; None if nothing but the whole batch gives it."""
    is_given = trainer.compute_loss_func is not None or "compute_loss" in vars(trainer)
    if is_given or not trainer_compat.has_known_loss(trainer):
        return None
    kind, model = trainer_compat.kind_with(trainer, "compute_loss"), bare_model(trainer.model)
    if kind is not Trainer:
        sees_batch = _OF_BATCHES & {*getattr(trainer, "loss_types", ())}
        found = None if sees_batch or not trl_compat.is_trls(kind) else _OF_TRL.get(kind.__name__)
        predicts_next = found is KnownLoss.DIVIDED
    else:
        found = known_loss_of_model(model, labels) if trainer.label_smoother is None else KnownLoss.DIVIDED
        predicts_next = _tasks().get(type(model).__name__) == _NEXT_WORDS
    # The mean of a class that predicts the next word leaves out the first label of each sequence. Trainer, which goes
    # by names of classes, may count it.
    is_miscounted = predicts_next and not trainer_compat.shifts_labels(trainer)
    return found if found is KnownLoss.MEAN or not is_miscounted or trainer_compat.takes_num_items(trainer) else None
