"""A tiny encoder of sentences, and sentences for it."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast


WORDS = [f"word{number}" for number in range(50)]


def save_encoder(folder: str | Path) -> None:
    """Write a BERT of 2 layers, with its tokenizer."""
    Path(folder).mkdir(exist_ok=True)
    vocabulary = Path(folder, "vocab.txt")
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab_file=str(vocabulary)).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(WORDS) + 5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    BertModel(config).save_pretrained(folder)


def sentences(number: int, seed: int) -> list[str]:
    """Draw sentences of 3 to 8 words."""
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(3, 8))) for _ in range(number)]
