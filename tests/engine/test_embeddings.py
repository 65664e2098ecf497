"""Embeddings whose gradients are kept back: the same gradient, made once for all micro-batches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.engine.embeddings import EmbeddingGradients, embeddings_of
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from tests.support.decoders import collate_tokens, make_decoder
from tests.support.decoders import make_rows as decoder_rows
from tests.support.one_process import ModelPipeline, whole_gradients


NUM_ROWS, HIDDEN = 50, 4


def make(**options: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(NUM_ROWS, HIDDEN, **options)


def micro_batches(count: int, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids, of which some repeat within and between micro-batches, and gradients of their rows."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 10, (2, size // 2), generator=generator), torch.randn(2, size // 2, HIDDEN))
        for _ in range(count)
    ]


def run(module: nn.Embedding, kept: EmbeddingGradients | None, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """All forwards, then all backwards, as GPipe has them."""
    outputs = []
    for ids, _ in parts:
        if kept is None:
            outputs.append(module(ids))
        else:
            with kept.keeping():
                outputs.append(module(ids))
    for output, (_, gradient) in zip(outputs, parts, strict=True):
        output.backward(gradient)
        if kept is not None:
            kept.add_if_many()


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}], ids=["plain", "padding"])
def test_the_gradient_is_that_of_autograd_and_comes_once(options: dict[str, Any]) -> None:
    module, plain, parts = make(**options), make(**options), micro_batches(4)
    kept, calls = EmbeddingGradients([module]), []
    module.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
    run(plain, None, parts)
    run(module, kept, parts)
    assert module.weight.grad is None, "nothing as large as the table before the last backward"
    kept.add()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    assert len(calls) == 1
    kept.add()
    assert len(calls) == 1, "nothing is left to be added"


def test_one_micro_batch_gives_the_same_bits() -> None:
    module, plain, parts = make(), make(), micro_batches(1)
    kept = EmbeddingGradients([module])
    run(plain, None, parts)
    run(module, kept, parts)
    kept.add()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_no_more_rows_are_kept_than_the_table_has() -> None:
    module, plain, parts = make(), make(), micro_batches(12)
    kept, calls = EmbeddingGradients([module]), []
    module.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    run(plain, None, parts)
    run(module, kept, parts)
    assert len(calls) == 1, "after the ninth of 12 micro-batches of 6 rows, beyond 50"
    kept.add()
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)
    assert len(calls) == 2


def test_a_micro_batch_with_more_rows_than_the_table_goes_its_usual_way() -> None:
    module, parts = make(), micro_batches(1, size=60)
    kept = EmbeddingGradients([module])
    run(module, kept, parts)
    assert module.weight.grad is not None


@pytest.mark.parametrize(
    "options",
    [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=lambda options: next(iter(options)),
)
def test_unusual_embeddings_are_left_alone(options: dict[str, Any]) -> None:
    module, plain, parts = make(**options), make(**options), micro_batches(2)
    kept = EmbeddingGradients([module])
    assert not kept.parameters
    for each, keeper in ((plain, None), (module, kept)):
        run(each, keeper, parts)
    kept.add()
    assert torch.equal(module.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_a_frozen_table_gets_none_and_no_graph() -> None:
    module = make()
    module.weight.requires_grad_(False)
    kept = EmbeddingGradients([module])
    with kept.keeping():
        assert not module(torch.tensor([1])).requires_grad
    assert not kept.parameters


def test_without_gradients_nothing_is_kept() -> None:
    module = make()
    kept = EmbeddingGradients([module])
    with torch.no_grad(), kept.keeping():
        assert not module(torch.tensor([1])).requires_grad
    kept.add()
    assert module.weight.grad is None


def test_what_is_kept_of_an_abandoned_run_is_dropped() -> None:
    module = make()
    kept = EmbeddingGradients([module])
    run(module, kept, micro_batches(1))
    kept.clear()
    kept.add()
    assert module.weight.grad is None


def test_half_precision_on_a_cpu_is_added_micro_batch_by_micro_batch() -> None:
    """There autograd adds rows in half precision, which loses what is far below the sum."""
    module = make(dtype=torch.bfloat16)
    kept = EmbeddingGradients([module])
    with kept.keeping():
        rows = module(torch.tensor([1, 1]))
    rows.sum().backward()
    assert module.weight.grad is not None


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("zb_h1", 1), ("zb_v", 2)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_pipeline_gives_the_gradients_of_the_model(name: str, schedule: str, num_chunks: int) -> None:
    """GPT-2's table is also its head's, which `zb_v` has on the rank of the embeddings."""
    model, batch = make_decoder(name).eval(), collate_tokens(decoder_rows(4))
    batch["labels"] = batch["input_ids"]  # As many of each sample: means over micro-batches add up.
    loss, expected = whole_gradients(copy.deepcopy(model), batch)
    found_schedule = find_schedule(schedule)
    placement = Placement(2, num_chunks, found_schedule.abilities.placement)
    num_blocks = 2 * model.config.num_hidden_layers + 2
    boundaries = [num_blocks * stage // placement.num_stages for stage in range(placement.num_stages + 1)]
    pipeline = ModelPipeline(model, boundaries, placement, batch, 4, splits=found_schedule.abilities.splits_backward)
    tables = [
        module
        for module in embeddings_of(pipeline.models[0], [])
        if module.num_embeddings > batch["input_ids"][0].numel()
    ]
    assert tables, "a table with more rows than a micro-batch"
    found = pipeline.run(found_schedule.table(2, 4, num_chunks))
    torch.testing.assert_close(found, loss)
    gradients = pipeline.gradients()
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-4, atol=1e-6)
