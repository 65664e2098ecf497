"""Which weights the passes of asynchronous 1F1B see, against the mathematics of `async_simulation`."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES, find_weights
from tests.support.async_driver import drive, driven_stages, warm_up
from tests.support.async_simulation import make_stages, micro_batch_of_data, output_gradient, simulate


def groups(make, parameters, rate=0.05, **others):
    """Two groups with rates and decays of their own."""
    parameters, half = list(parameters), rate / 2
    first = {"params": parameters[::2], "lr": rate, "initial_lr": rate, **others}
    return make([first, {"params": parameters[1::2], "lr": half, "initial_lr": half, **others, "weight_decay": 0.3}])


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS = {
    "adamw": partial(groups, ADAMW),
    "sgd": partial(groups, SGD),
    "momentum": partial(groups, SGD, momentum=0.9),
    "momentum, dampened, maximized": partial(groups, SGD, rate=0.002, momentum=0.8, dampening=0.3, maximize=True),
    "nesterov": partial(groups, SGD, momentum=0.9, nesterov=True),
    "adam, maximized": partial(groups, ADAM, maximize=True),
    "adamw, fused": partial(groups, ADAMW, fused=True),
    "adamw, foreach, amsgrad": partial(groups, ADAMW, foreach=True, amsgrad=True),
    "rmsprop": partial(groups, torch.optim.RMSprop),
}


def largest_difference(kind, num_stages, micro_batches_per_step, optimizer, windows, dtype=torch.float32) -> float:
    """Between the stages that were driven and the simulated ones, over all weights."""
    expected = simulate(
        kind, make_stages(num_stages), OPTIMIZERS[optimizer], windows, micro_batches_per_step, warm_up, dtype
    )  # fmt: skip
    driven = driven_stages(kind, num_stages, micro_batches_per_step, OPTIMIZERS[optimizer])
    drive(driven, windows, dtype)
    found = [list(one.stage.parameters()) for one in driven]
    begun = [list(stage.parameters()) for stage in make_stages(num_stages)]
    assert all(not torch.equal(p, q) for ps, qs in zip(found, begun, strict=True) for p, q in zip(ps, qs, strict=True))
    return max(
        (p - q).abs().max().item() for ps, qs in zip(found, expected, strict=True) for p, q in zip(ps, qs, strict=True)
    )


def windows_of(micro_batches_per_step: int) -> list[list[int]]:
    """A window with a short step inside, and one after it."""
    short = max(1, micro_batches_per_step - 1)
    return [[micro_batches_per_step] * 3 + [short] + [micro_batches_per_step] * 3, [micro_batches_per_step] * 4]


def shapes(kind: str) -> list[tuple[int, int]]:
    """K and A: two buffers need more micro-batches a step."""
    return [(2, 1), (2, 2), (4, 3), (4, 4)] if kind == "double_buffer" else [(2, 1), (2, 2), (4, 1), (4, 2)]


SHAPES = [(kind, *shape) for kind in WEIGHTS_NAMES for shape in shapes(kind)]
LARGEST = {kind: (kind, 4, 3 if kind == "double_buffer" else 1) for kind in WEIGHTS_NAMES}
# Every kind, every shape, every optimizer; the rest of the product is slow.
QUICK = [
    *((shape, "adamw") for shape in SHAPES if shape[0] == "pipeoptim" or shape == LARGEST[shape[0]]),
    *((LARGEST["pipeoptim"], optimizer) for optimizer in OPTIMIZERS),
    *((LARGEST[kind], "momentum") for kind in ("stashing", "spectrain", "xpipe")),
]
CASES = [
    pytest.param(*shape, optimizer, marks=() if (shape, optimizer) in QUICK else pytest.mark.slow)
    for shape in SHAPES
    for optimizer in OPTIMIZERS
]


@pytest.mark.parametrize(("kind", "num_stages", "micro_batches_per_step", "optimizer"), CASES)
def test_a_window_is_the_simulation_to_the_last_bit(kind, num_stages, micro_batches_per_step, optimizer):
    windows = windows_of(micro_batches_per_step)
    assert largest_difference(kind, num_stages, micro_batches_per_step, optimizer, windows) == 0.0


@pytest.mark.parametrize("kind", WEIGHTS_NAMES)
def test_under_autocast_a_backward_sees_the_weights_it_is_meant_to_see(kind):
    """The casts that autograd saves in the forward do not freeze what it saw."""
    shape = LARGEST[kind]
    assert largest_difference(*shape, "adamw", windows_of(shape[2]), torch.bfloat16) == 0.0


def test_the_kinds_differ():
    """Else the comparisons above would not tell which weights were seen."""
    windows = windows_of(3)
    ends = [simulate(kind, make_stages(4), OPTIMIZERS["adamw"], windows, 3, warm_up)[0][1] for kind in WEIGHTS_NAMES]
    assert len({tuple(end.flatten().tolist()) for end in ends}) == len(WEIGHTS_NAMES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stage_holds_as_many_versions_as_its_kind_says(shape):
    kind, num_stages, micro_batches_per_step = shape
    driven = driven_stages(*shape, OPTIMIZERS["momentum" if kind != "xpipe" else "adamw"])
    drive(driven, [[micro_batches_per_step] * 8])
    for k, one in enumerate(driven):
        size = sum(4 * p.numel() for p in one.stage.parameters())
        assert one.most_held == (one.weights.kind.copies(k, num_stages, micro_batches_per_step) - 1) * size


def test_copies_are_those_of_the_papers_table():
    copies = {kind: [find_weights(kind).copies(k, 4, 1) for k in range(4)] for kind in WEIGHTS_NAMES}
    assert copies == {
        "pipeoptim": [2, 2, 2, 1],
        "vanilla": [1, 1, 1, 1],
        "stashing": [4, 3, 2, 1],
        "double_buffer": [2, 2, 2, 2],
        "spectrain": [2, 2, 2, 2],
        "xpipe": [2, 2, 2, 2],
    }


@pytest.mark.parametrize(("kind", "num_versions"), [("pipeoptim", 2), ("xpipe", 3)])
def test_what_else_a_prediction_needs_is_counted(kind, num_versions):
    """With plain SGD the weights before the last update, or Adam's moments for XPipe."""
    driven = driven_stages(kind, 2, 1, OPTIMIZERS["sgd"])
    drive(driven, [[1] * 5])
    size = sum(4 * p.numel() for p in driven[0].stage.parameters())
    assert [one.most_held for one in driven] == [num_versions * size, 0]


def test_two_buffers_need_micro_batches_enough():
    kind = find_weights("double_buffer")
    kind.check(4, 3)
    with pytest.raises(ValueError, match="with 2 micro-batches an optimizer step on 4 stages .* at least 3"):
        kind.check(4, 2)
    for name in set(WEIGHTS_NAMES) - {"double_buffer"}:
        find_weights(name).check(4, 1)


def test_an_unknown_kind_is_named():
    with pytest.raises(ValueError, match="'pipedream': expected one of"):
        find_weights("pipedream")


@pytest.mark.parametrize("kind", WEIGHTS_NAMES)
def test_without_a_learning_rate_nothing_changes_and_nothing_is_predicted(kind):
    shape = LARGEST[kind]
    driven = driven_stages(*shape, partial(groups, ADAMW, rate=0.0))
    drive(driven, [[shape[2]] * 5])
    for one, begun in zip(driven, make_stages(4), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.stage.parameters(), begun.parameters(), strict=True))
        if kind in ("pipeoptim", "spectrain", "xpipe"):
            assert one.most_held == 0


@pytest.mark.parametrize("kind", sorted({*WEIGHTS_NAMES} - {"double_buffer"}))
def test_one_stage_trains_as_without_any_of_it(kind):
    plain = make_stages(1)[0]
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    scheduler = LambdaLR(optimizer, warm_up)
    for micro_batch in range(6):
        tokens, target = micro_batch_of_data(micro_batch)
        output = plain(tokens)
        output.backward(output_gradient(output, target))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    driven = driven_stages(kind, 1, 1, OPTIMIZERS["adamw"])
    drive(driven, [[1] * 6])
    found = driven[0].stage.parameters()
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), found, strict=True))
    assert driven[0].most_held == 0


def test_no_prediction_without_an_update_is_said_once():
    driven = driven_stages("pipeoptim", 4, 1, OPTIMIZERS["sgd"])
    drive(driven, [[1] * 6, [1] * 6])
    assert [len(one.said) for one in driven] == [1, 1, 1, 0]
    assert driven[0].said[0].startswith("Stage 0: the first forwards see the weights as they are")
