"""A tiny BERT with a WordPiece tokenizer, made on the spot: scripts and tests need no download."""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, PreTrainedModel, PreTrainedTokenizerFast


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def make_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows `words` as one token each, and any other ASCII word as its letters."""
    letters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def make_bert(model_class: type[PreTrainedModel], vocab_size: int, seed: int = 0, **changes: int) -> PreTrainedModel:
    """A BERT of 2 layers x 16 with random weights, without dropout."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
        **changes,
    )
    return model_class(config)


def save_tiny_bert(folder: Path, model_class: type[PreTrainedModel], words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Write model and tokenizer as a folder for `from_pretrained`."""
    tokenizer = make_tokenizer(words)
    make_bert(model_class, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
