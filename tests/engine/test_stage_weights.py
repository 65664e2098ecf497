"""The laws of one stage's weights: what a pass sees, what comes back, what is kept and what is measured."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from hf_pipetransformer.engine.weights.directions import Moments, adam_move
from hf_pipetransformer.engine.weights.rates import MEASURED_EVERY, SAMPLED_WEIGHTS, ErrorMeter, coming_rates
from hf_pipetransformer.engine.weights.rows import cast_parameter
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.schedules.weight_kinds import WEIGHTS_NAMES, find_weights
from tests.support.async_driver import bytes_held


def one_weight(kind="pipeoptim", stage=0, num_stages=2, shape=(3,)):
    """A stage of one parameter of ones, its weights, and a call that updates it with momentum and rate 0.5."""
    parameter = torch.nn.Parameter(torch.ones(shape))
    optimizer = partial(SGD, momentum=0.9)([parameter], lr=0.5)
    weights = StageWeights(find_weights(kind), stage, num_stages, optimizer, coming_rates(None, optimizer))

    def update(gradient: float = 1.0) -> None:
        parameter.grad = torch.full_like(parameter, gradient)
        weights.before_update()
        optimizer.step()
        weights.after_update()

    return parameter, weights, update


def test_the_current_weights_come_back_also_after_a_fault():
    parameter, weights, update = one_weight()
    update()
    assert parameter.tolist() == [0.5] * 3

    def faulty_forward() -> None:
        with weights.forward(1, 2):
            assert parameter.tolist() == [0.0] * 3
            raise RuntimeError("fault")

    with pytest.raises(RuntimeError, match="fault"):
        faulty_forward()
    assert parameter.tolist() == [0.5] * 3
    weights.end()
    assert bytes_held(weights) == 0


def test_a_kept_version_goes_after_its_last_micro_batch():
    parameter, weights, update = one_weight("stashing", num_stages=3)
    for micro_batch in range(3):
        with weights.forward(micro_batch, micro_batch):
            pass
    with weights.backward(0, 0):
        pass
    update()
    for micro_batch in (1, 2):
        assert bytes_held(weights) == 12
        with weights.backward(micro_batch, micro_batch):
            assert parameter.tolist() == [1.0] * 3
        assert parameter.tolist() == [0.5] * 3


def test_an_update_does_not_refuse_backwards_of_forwards_before_it():
    """Of torch's optimizers only the fused ones leave the version counters alone."""
    parameter, weights, update = one_weight("vanilla")
    for micro_batch in range(2):
        with weights.forward(micro_batch, micro_batch):
            output = (parameter * parameter).sum()
    version = parameter._version
    with weights.backward(0, 0):
        pass
    update()
    assert parameter._version == version
    parameter.grad = None
    with weights.backward(1, 1):
        output.backward()
    assert parameter.grad.tolist() == [1.0] * 3  # 2 * 0.5


def test_a_micro_batch_of_a_step_that_is_done_is_refused():
    _, weights, update = one_weight()
    update()
    with pytest.raises(ValueError, match="Micro-batch 0 belongs to step 0, but 1 updates"), weights.forward(0, 0):
        pass


def test_errors_are_measured_against_the_weights_at_the_backward():
    parameter, weights, update = one_weight()
    assert weights.take_errors() is None
    update()  # The buffer is 1, the weights 0.5.
    with weights.forward(1, 2):
        pass
    update(0.6)  # The buffer is 1.5, the weights -0.25; 0 was predicted.
    assert parameter.tolist() == [-0.25] * 3
    with weights.backward(1, 2):
        pass
    errors = weights.take_errors()
    assert (errors.num_micro_batches, errors.s) == (1, 1.0)
    assert errors.error == pytest.approx(1.0)
    assert errors.error_unpredicted == pytest.approx(3.0)
    assert weights.take_errors() is None


def test_every_so_manieth_micro_batch_is_measured_and_only_with_updates_ahead():
    _, weights, update = one_weight("vanilla")
    for step in range(2 * MEASURED_EVERY):
        for ahead in (0, 1):
            with weights.forward(2 * step + ahead, step + ahead):
                pass
        for ahead in (0, 1):
            with weights.backward(2 * step + ahead, step + ahead):
                pass
        update()
    assert weights.take_errors().num_micro_batches == 2


def test_a_sample_is_bounded_and_the_same_each_time():
    meter = ErrorMeter()
    meter.watch([torch.randn(size) for size in [(3, SAMPLED_WEIGHTS), (7,), (SAMPLED_WEIGHTS // 2,)]])
    sample = meter.sample()
    assert SAMPLED_WEIGHTS / 2 < len(sample) <= SAMPLED_WEIGHTS
    assert torch.equal(sample, meter.sample())
    meter.watch([torch.arange(5.0), torch.ones(2)])
    assert meter.sample().tolist() == [0, 1, 2, 3, 4, 1, 1]


def test_rates_come_from_the_schedule():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = SGD([{"params": parameters[:1], "lr": 1.0}, {"params": parameters[1:], "lr": 10.0}])
    scheduler = LambdaLR(optimizer, lambda step: step / 4)
    rates = coming_rates(scheduler, optimizer)
    assert rates(3) == [[0.0, 0.25, 0.5], [0.0, 2.5, 5.0]]
    optimizer.step()
    scheduler.step()
    assert rates(2) == [[0.25, 0.5], [2.5, 5.0]]
    assert rates(0) == [[], []]


def test_nothing_moves_behind_the_last_update_of_a_run():
    """SpecTrain and XPipe look further than a run goes, and its schedule may be a table that ends there."""
    optimizer, table = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), [0.5, 0.25, 0.125]
    scheduler = LambdaLR(optimizer, table.__getitem__)
    rates = coming_rates(scheduler, optimizer, num_left=lambda: 2 - scheduler.last_epoch)
    assert rates(4) == [[0.5, 0.25, 0.0, 0.0]]
    for expected in ([[0.25, 0.0]], [[0.0, 0.0]]):
        optimizer.step()
        scheduler.step()
        assert rates(2) == expected


def test_rates_stay_where_no_schedule_tells():
    optimizer = Adam([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    rates = coming_rates(ReduceLROnPlateau(optimizer), optimizer)
    assert rates(2) == [[0.5, 0.5]]
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert rates(1) == [[0.25]]


def test_counts_on_the_device_predict_the_same():
    """As fused and capturable optimizers keep them."""
    torch.manual_seed(0)
    first, second = [torch.randn(5), torch.randn(2, 3)], [torch.rand(5), torch.rand(2, 3)]
    moved = [[torch.ones(5), torch.ones(2, 3)] for _ in range(2)]
    for values, counts in zip(moved, ([3.0, 2.0], [torch.tensor(3.0), torch.tensor(2.0)]), strict=True):
        adam_move(values, Moments(first, second, counts), (0.9, 0.999), 1e-8, 0.1)
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other)


def test_views_of_a_cast_are_recognised_and_nothing_else():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    known = {id(weight): weight}
    cast = weight.to(torch.bfloat16)
    for tensor in (cast, cast.t(), cast[0], cast.view(3, 2).transpose(0, 1)):
        assert cast_parameter(tensor, known) is weight
    for tensor in (weight, weight.t(), weight.t().to(torch.bfloat16), cast * 2, cast.float(), torch.ones(1)):
        assert cast_parameter(tensor, known) is None
    assert cast_parameter(cast, {}) is None


def test_casts_of_predicted_weights_do_not_outlive_their_forward():
    """Autocast keeps casts of parameters as long as its block lasts, past updates too."""
    parameter, weights, update = one_weight(shape=(1, 3))
    hidden = torch.eye(3)
    update()
    with torch.autocast("cpu", torch.bfloat16):
        seen = [torch.nn.functional.linear(hidden, parameter)]
        with weights.forward(1, 2):
            seen.append(torch.nn.functional.linear(hidden, parameter))
        seen.append(torch.nn.functional.linear(hidden, parameter))
        update(0.1)
        seen.append(torch.nn.functional.linear(hidden, parameter))
    assert [found[0].item() for found in seen] == [0.5, 0.0, 0.5, 0.0]  # The buffer is 1, then again 0.9 + 0.1.


@pytest.mark.parametrize("kind", WEIGHTS_NAMES)
@pytest.mark.parametrize("make", [SGD, partial(SGD, momentum=0.9), AdamW])
def test_a_stage_without_trained_weights_has_nothing_to_do(kind: str, make):
    optimizer, said = make([{"params": []}], lr=0.1), []
    weights = StageWeights(find_weights(kind), 0, 2, optimizer, coming_rates(None, optimizer), say=said.append)
    for micro_batch in range(2):
        with weights.forward(micro_batch, micro_batch), weights.backward(micro_batch, micro_batch):
            pass
        weights.before_update()
        weights.after_update()
    assert weights.take_errors() is None


@pytest.mark.parametrize(("casts", "seen"), [(True, 1.5), (False, 3.0)])
def test_a_pass_that_enters_autocast_itself_is_to_be_told(casts: bool, seen: float):
    """As the stages of a run do. Without, the backward of a linear layer reads the cast that its forward made."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 3.0)
    optimizer = SGD(layer.parameters(), lr=1.0)
    weights = StageWeights(find_weights("vanilla"), 0, 2, optimizer, coming_rates(None, optimizer), casts=casts)
    given = torch.ones(1, 1, requires_grad=True)
    with weights.forward(0, 1), torch.autocast("cpu", torch.bfloat16):
        output = layer(given)
    layer.weight.grad = torch.full((1, 1), 1.5)
    weights.before_update()
    optimizer.step()
    weights.after_update()
    with weights.backward(0, 1):
        output.sum().backward()
    assert given.grad.item() == seen
