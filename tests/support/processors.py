"""Processors of vision-language models from their classes, pictures of different sizes, and a collator over both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3Processor, Idefics3Processor, PreTrainedTokenizerFast, ProcessorMixin, Qwen2VLProcessor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.media_models import IMAGE, NUM_IMAGES, PAD, VIDEO, VISION_END, VISION_START, Rows


FIRST_WORD, NUM_WORDS = 10, 70
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ picture if part['type'] == 'image' else part['text'] }} {% endfor %}{% endfor %}"
)


def _tokenizer(special: dict[int, str], on_left: bool = False, **named: str) -> PreTrainedTokenizerFast:
    known = {PAD: "<pad>", 1: "<unk>", 2: "<eos>", **special}
    words = {FIRST_WORD + number: f"w{number}" for number in range(NUM_WORDS)}
    vocabulary = {known.get(i) or words.get(i) or f"<unused{i}>": i for i in range(100)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
        padding_side="left" if on_left else "right", extra_special_tokens=named,
    )  # fmt: skip
    found.add_special_tokens({"additional_special_tokens": [*special.values()]}, replace_extra_special_tokens=False)
    return found


class _WithoutVideos(Qwen2VLProcessor):
    """Qwen2-VL's processor as it is where torchvision is missing, which its videos alone need."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def qwen2_vl() -> ProcessorMixin:
    special = {VISION_START: "<|vision_start|>", VISION_END: "<|vision_end|>", IMAGE: "<|image_pad|>"}
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 64, "longest_edge": 1024})
    template = _TEMPLATE.replace("picture", "'<|vision_start|><|image_pad|><|vision_end|>'")
    return _WithoutVideos(images, _tokenizer({**special, VIDEO: "<|video_pad|>"}), None, chat_template=template)


def gemma3() -> ProcessorMixin:
    special = {VISION_START: "<boi>", VISION_END: "<eoi>", IMAGE: "<image>"}
    tokenizer = _tokenizer(special, boi_token="<boi>", eoi_token="<eoi>", image_token="<image>")
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=4)
    return Gemma3Processor(
        images, tokenizer, chat_template=_TEMPLATE.replace("picture", "'<boi>'"), image_seq_length=4
    )


def smolvlm() -> ProcessorMixin:
    """Processor of Idefics3, which SmolVLM comes with: a picture whole, and in up to four tiles beside it."""
    tiles = {82 + 2 * i + j: f"<row_{i + 1}_col_{j + 1}>" for i in range(2) for j in range(2)}
    around = {VISION_START: "<fake_token_around_image>", VISION_END: "<global-img>", IMAGE: "<image>"}
    tokenizer = _tokenizer({**tiles, **around, 95: "<end_of_utterance>"}, on_left=True)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=_TEMPLATE.replace("picture", "'<image>'")
    )


PROCESSORS: dict[str, Callable[[], ProcessorMixin]] = {"qwen2_vl": qwen2_vl, "gemma3": gemma3, "smolvlm": smolvlm}


def collator_of(processor: Any) -> Callable[[Rows], Any]:
    """Return a collator as recipes write it: conversations to text, and no loss on padding and pictures."""

    def collate(rows: Rows) -> Any:
        texts = [processor.apply_chat_template(row["messages"], tokenize=False) for row in rows]
        pictures = [row["images"] for row in rows]
        # Processors refuse lists without any picture.
        batch = processor(text=texts, images=pictures if any(pictures) else None, padding=True, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[(batch["attention_mask"] == 0) | (labels == IMAGE)] = -100
        batch["labels"] = labels
        return batch

    return collate


def make_conversations(num_rows: int, seed: int = 1) -> Rows:
    """Return questions about 0 to 3 pictures, with answers."""
    draw, rows = np.random.default_rng(seed), []

    def words() -> str:
        return " ".join(f"w{number}" for number in draw.integers(0, NUM_WORDS, draw.integers(3, 9)))

    for number in range(num_rows):
        sizes = [draw.integers(20, 64, 2) for _ in range(NUM_IMAGES[number % len(NUM_IMAGES)])]
        pictures = [Image.fromarray(draw.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
        asked = [*({"type": "image"} for _ in pictures), {"type": "text", "text": words()}]
        told = [{"type": "text", "text": f"{words()} <eos>"}]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        rows.append({"messages": turns, "images": pictures})
    return rows
