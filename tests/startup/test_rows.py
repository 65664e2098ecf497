"""Models that let samples of one row see each other are told from those that keep them apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, DataCollatorWithFlattening

from hf_pipetransformer.data.batches import SampleBatch, count_items, note_samples, take_sequences
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import trace_structure
from hf_pipetransformer.startup.model import ProbeTarget
from hf_pipetransformer.startup.rows import why_mixed
from tests.support.decoders import DECODERS, make_decoder, make_rows


def make_encoder() -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
        )
    )  # fmt: skip


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("name", [*DECODERS, "bert"])
def test_what_a_sample_sees_of_others_shows_in_gradients(name: str, num_samples: int) -> None:
    """Families whose masks do not come from position_ids mix them, as in plain Trainer."""
    torch.manual_seed(0)
    model: Any = make_encoder() if name == "bert" else make_decoder(name)
    model.eval().config.use_cache = False  # As Trainer sets it.
    rows = make_rows(4)
    batch = take_sequences(note_samples(DataCollatorWithFlattening()(rows), 4), range(num_samples))

    def compute(inputs: dict[str, Any], _num_items: int) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs).loss
        return loss

    target = ProbeTarget(model, find_splitter(model), batch, compute, partial(count_items, shifts_labels=True))
    structure = trace_structure(model, target.splitter, lambda: target.loss(batch), numbers_vary=True)
    why = why_mixed(target, structure)
    assert (why is not None) == (name in ("opt", "bert"))
    assert why is None or "lets the samples of a row see each other" in why
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_of_one_sample_each_are_not_asked() -> None:
    model = make_decoder("opt")
    inputs = SampleBatch({"input_ids": torch.ones(2, 4).long(), "labels": torch.ones(2, 4).long()})
    target = ProbeTarget(model, find_splitter(model), inputs, lambda *_: torch.zeros(()), count_items)
    assert why_mixed(target, None) is None  # type: ignore[arg-type]
