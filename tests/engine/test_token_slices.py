"""Slices of sequences as micro-batches: their order, what they compute, and how long they should be."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_pipetransformer.engine.program import MicroBatch, ModelProgram, TokenSpan
from hf_pipetransformer.engine.token_program import TokenSliceProgram
from hf_pipetransformer.engine.wrappers import RecomputingProgram
from hf_pipetransformer.planning.token_slices import plan_slices
from hf_pipetransformer.schedules.actions import COMPUTATIONS, Op, ScheduleError, Table
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import TOKEN, find_schedule
from hf_pipetransformer.splitters.base import CACHE_NAME
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.view import StageView
from tests.support.decoders import make_decoder
from tests.support.one_process import CPU, make_engines, run_table, trace, whole_gradients
from tests.support.schedule_checker import check_table


VOCABULARY, HIDDEN, LAYERS, LENGTH, BATCH = 50, 32, 4, 24, 4


# ---- order ----


def computed(table: Table) -> list[str]:
    return [" ".join(str(action) for action in row if action.op in COMPUTATIONS) for row in table]


def test_slices_go_forward_in_their_order_and_backward_in_the_reverse_one() -> None:
    assert computed(TOKEN.table(2, 1, num_token_slices=3)) == ["F0 F1 F2 B2 B1 B0"] * 2
    assert computed(TOKEN.table(2, 2, num_token_slices=2)) == [
        "F0 F1 F2 F3 B1 B0 B3 B2",
        "F0 F1 B1 B0 F2 F3 B3 B2",
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("num_slices", [1, 2, 5, 16])
def test_every_table_of_slices_ends(num_stages: int, num_slices: int) -> None:
    for count in (1, 2, 3, num_stages, 2 * num_stages):
        for first_active in range(num_stages):
            table = TOKEN.table(num_stages, count, 1, first_active, num_slices)
            check_table(table, count * num_slices, True, first_active, num_token_slices=num_slices)


def test_memory_is_that_of_few_batch_slices() -> None:
    held = {count: TOKEN.in_flight(4, count) for count in (4, 16)}
    assert held[16] == held[4] == (4, 3, 2, 1)


def test_a_table_with_slices_in_another_order_is_refused() -> None:
    (row,) = TOKEN.table(1, 1, num_token_slices=3)
    forwards = [action for action in row if action.op is Op.FORWARD]
    backwards = [action for action in row if action.op is Op.BACKWARD]
    with pytest.raises(ScheduleError, match="backward of slice 1 next after that of slice 0"):
        check_table(((*forwards, *reversed(backwards)),), 3, num_token_slices=3)
    with pytest.raises(ScheduleError, match="forward of slice 0 next after that of slice 2"):
        check_table(((forwards[2], *forwards[:2], *backwards),), 3, num_token_slices=3)


def test_other_schedules_cut_no_sequences() -> None:
    with pytest.raises(ValueError, match="gpipe cannot cut sequences into 2 slices"):
        find_schedule("gpipe").table(2, 2, num_token_slices=2)


# ---- what is computed ----


def decoder(name: str) -> nn.Module:
    torch.manual_seed(0)
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1} if "window" in name else {}
    # Large weights, so that attention hangs on what it reads.
    return make_decoder(
        name.removesuffix("_window"), vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        initializer_range=0.3, bos_token_id=0, eos_token_id=1, **window,
    )  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    """One sequence is shorter, and the first tokens of all have no label: the first slices have none at all."""
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, 20:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :9] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def slices_of(
    inputs: dict[str, torch.Tensor], num_batch_slices: int, cuts: list[int]
) -> Iterator[tuple[dict, TokenSpan]]:
    following = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    for number in range(num_batch_slices):
        rows = slice(BATCH * number // num_batch_slices, BATCH * (number + 1) // num_batch_slices)
        for start, stop in pairwise(cuts):
            part = {
                "input_ids": inputs["input_ids"][rows, start:stop],
                "attention_mask": inputs["attention_mask"][rows, :stop],
                "labels": inputs["labels"][rows, start:stop],
                "shift_labels": following[rows, start:stop].contiguous(),
            }
            yield part, TokenSpan(number, start, stop, LENGTH)


def run_sliced(
    model: nn.Module,
    size: int,
    num_batch_slices: int,
    cuts: list[int],
    recompute: str = "never",
    boundaries: list[int] | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and gradients of a model on `size` ranks, with as many layers each if no `boundaries` are given."""
    inputs = batch()
    models = [copy.deepcopy(model) for _ in range(size)]
    by_layer = recompute == "layers"
    views = [StageView(own, find_splitter(own), trace(own, inputs), recomputes_layers=by_layer) for own in models]
    if boundaries is None:
        boundaries = [
            0,
            *(1 + 2 * (LAYERS * stage // size) for stage in range(1, size)),
            views[0].structure.num_blocks,
        ]
    for stage, view in enumerate(views):
        view.install(range(boundaries[stage], boundaries[stage + 1]))

    def program_of(stage: int) -> TokenSliceProgram | RecomputingProgram:
        blocks = range(boundaries[stage], boundaries[stage + 1])
        program = TokenSliceProgram(ModelProgram(views[stage], blocks, torch.float32, stage > 0), LAYERS)
        return RecomputingProgram(program, "always", 0, CPU) if recompute == "always" else program

    num_labels = int((inputs["labels"][:, 1:] != -100).sum())
    micro_batches = [
        [
            MicroBatch(
                index,
                part,
                int((part["shift_labels"] != -100).sum()) / num_labels,
                (*part["input_ids"].shape, HIDDEN),
                lambda given, own=own: own(**given).loss,
                place=place,
            )
            for index, (part, place) in enumerate(slices_of(inputs, num_batch_slices, cuts))
        ]
        for own in models
    ]
    table = TOKEN.table(size, num_batch_slices, num_token_slices=len(cuts) - 1)
    loss = torch.stack(run_table(table, make_engines(Placement(size), program_of), micro_batches)).sum()
    sums: dict[str, torch.Tensor] = {}
    for own, view in zip(models, views, strict=True):
        view.remove()
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, 0) + parameter.grad
    return loss, sums


def assert_is_whole(model: nn.Module, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    whole_loss, expected = whole_gradients(model, batch())
    torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * max(float(gradient.norm()), 1e-3), name


def some_are_slow() -> list[Any]:
    """All combinations; in every run of CI those where much is cut."""
    cuts = {"whole": [0, 24], "even": [0, 8, 16, 24], "ragged": [0, 3, 10, 11, 24]}
    found = []
    for name, size, kind, count in product(("gpt2", "llama", "qwen2", "qwen2_window"), (1, 2, 4), cuts, (1, 2, 4)):
        is_slow = kind == "even" or (size, count) not in ((1, 4), (2, 2), (4, 1), (4, 4))
        marks = [pytest.mark.slow] if is_slow else []
        found.append(pytest.param(name, size, cuts[kind], count, id=f"{name}-{size}-{kind}-{count}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "size", "cuts", "num_batch_slices"), some_are_slow())
def test_slices_give_the_gradients_of_whole_sequences(
    name: str, size: int, cuts: list[int], num_batch_slices: int
) -> None:
    model = decoder(name)
    assert_is_whole(model, *run_sliced(model, size, num_batch_slices, cuts))


@pytest.mark.parametrize("recompute", ["always", "layers"])
def test_slices_may_be_recomputed(recompute: str) -> None:
    model = decoder("llama")
    assert_is_whole(model, *run_sliced(model, 2, 2, [0, 3, 10, 11, 24], recompute))


class _Peak(TorchDispatchMode):
    """Bytes of the tensors that are made inside, and are alive at one time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self._now)
        return output

    def _forget(self, address: int, size: int) -> None:
        self._known.remove(address)
        self._now -= size


def peak_of(num_layers: int, cuts: list[int], recompute: str) -> int:
    """Bytes of a step of one long sequence on one rank."""
    torch.manual_seed(0)
    model = make_decoder("llama", num_hidden_layers=num_layers, max_position_embeddings=cuts[-1])
    tokens = torch.randint(0, model.config.vocab_size, (1, cuts[-1]))
    structure = trace(model, {"input_ids": tokens, "labels": tokens})
    view = StageView(model, find_splitter(model), structure, recomputes_layers=recompute == "layers")
    view.install(range(structure.num_blocks))
    program = TokenSliceProgram(ModelProgram(view, range(structure.num_blocks), torch.float32, False), num_layers)
    (row,) = TOKEN.table(1, 1, num_token_slices=len(cuts) - 1)
    slices = [
        MicroBatch(
            index,
            dict.fromkeys(("input_ids", "labels", "shift_labels"), tokens[:, start:stop]),
            1 / (len(cuts) - 1),
            (),
            lambda given: model(**given).loss,
            place=TokenSpan(0, start, stop, cuts[-1]),
        )
        for index, (start, stop) in enumerate(pairwise(cuts))
    ]
    with _Peak() as peak:
        program.extend(row)
        for action in row:
            micro_batch = slices[action.micro_batch]
            if action.op is Op.FORWARD:
                program.forward(micro_batch, None)
            else:
                program.backward(micro_batch, None)
    return peak.most


def test_recomputed_slices_of_a_long_sequence_keep_next_to_nothing_of_a_layer() -> None:
    """The inputs of layers, keys and values; of activations only those of one layer of one slice."""
    length = 512
    whole, slices = [0, length], [0, 128, 256, 384, length]

    def a_layer(cuts: list[int], recompute: str) -> float:
        """Bytes that each layer more keeps, in multiples of an activation between layers."""
        more = peak_of(8, cuts, recompute) - peak_of(4, cuts, recompute)
        return more / 4 / (4 * length * 32)

    assert a_layer(whole, "never") > 10 and a_layer(slices, "never") > 10
    assert a_layer(whole, "layers") < 3 and a_layer(slices, "layers") < 4
    assert peak_of(4, slices, "layers") < peak_of(4, whole, "never") / 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("boundaries", [[0, 2, 4, 10], [0, 2, 3, 10]], ids=["inside layers", "one stage an MLP"])
@pytest.mark.parametrize("recompute", ["never", "always", pytest.param("layers", marks=pytest.mark.slow)])
def test_boundaries_inside_layers_give_the_gradients_of_whole_sequences(
    name: str, boundaries: list[int], recompute: str
) -> None:
    """Keys and values are kept by the stage that has a layer's attention, whoever has its MLP."""
    model = decoder(name)
    assert set(boundaries) <= set(trace(model, batch()).cut_positions())
    assert_is_whole(model, *run_sliced(model, 3, 2, [0, 3, 10, 11, 24], recompute, boundaries))


def test_the_comparison_sees_what_a_slice_reads_of_earlier_ones() -> None:
    """Without the gradients that go back through keys and values nothing would be equal."""
    model = decoder("llama")
    loss, gradients = run_sliced(model, 1, 1, [0, 12, 24])
    inputs = batch()
    own = copy.deepcopy(model)
    with torch.no_grad():
        past = own.model(inputs["input_ids"][:, :12], use_cache=True)[CACHE_NAME]
    labels = functional.pad(inputs["labels"], (0, 1), value=-100)[:, 13:].contiguous()
    own(inputs["input_ids"][:, 12:], attention_mask=inputs["attention_mask"], **{CACHE_NAME: past},
        labels=labels, shift_labels=labels).loss.backward()  # fmt: skip
    weight = "model.layers.0.self_attn.k_proj.weight"
    wrong = dict(own.named_parameters())[weight].grad
    assert (gradients[weight] - wrong).norm() > 0.05 * gradients[weight].norm()


# ---- lengths ----


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def seconds_of(times: np.ndarray, num_stages: int, lengths: tuple[int, ...]) -> float:
    """The sum of the slices' times, and K - 1 times the longest (Eq. 5)."""
    starts = np.cumsum([0, *lengths[:-1]])
    taken = [float(times[x - 1, start]) for x, start in zip(lengths, starts, strict=True)]
    return sum(taken) + (num_stages - 1) * max(taken)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_the_least_of_all(seed: int) -> None:
    generator = np.random.default_rng(seed)
    times = np.cumsum(generator.random((6, 6)), axis=0)
    num_stages = int(generator.integers(1, 9))
    lengths = plan_slices(times, num_stages, tolerance=0.0)
    least = min(seconds_of(times, num_stages, each) for each in compositions(6))
    assert sum(lengths) == 6
    assert seconds_of(times, num_stages, lengths) == pytest.approx(least, rel=1e-12)


def test_later_slices_are_shorter_and_long_pipelines_cut_more() -> None:
    granules = np.arange(1, 33.0)
    tokens, context = np.meshgrid(granules, granules - 1, indexing="ij")
    times = 2 + tokens + 0.05 * (2 * context * tokens + tokens**2)
    plans = {size: plan_slices(times, size) for size in (1, 4, 16)}
    assert plans[1] == (32,)
    assert len(plans[4]) < len(plans[16])
    assert plans[16][0] > plans[16][-1]
