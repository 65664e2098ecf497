"""`DeferredBatchNorm`: micro-batches in, the running statistics of `nn.BatchNorm` with whole mini-batches out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_pipetransformer.pipe.batchnorm import DeferredBatchNorm
from hf_pipetransformer.pipe.recomputation import checkpointed


CHUNKS = 4
convert = DeferredBatchNorm.convert_deferred_batch_norm


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def drawn(size=8, dtype=torch.float32):
    """`(size, 3, 5, 5)`: mean and variance differ from channel to channel, the mean from sample to sample."""
    scale = torch.tensor([1, 10, 100]).view(1, 3, 1, 1)
    return (torch.randn(size, 3, 5, 5) * scale + 2.0 ** torch.arange(size).view(-1, 1, 1, 1)).to(dtype)


def run(module, value, chunks=CHUNKS):
    return torch.cat([module(part) for part in value.chunk(chunks)])


def pair(chunks=CHUNKS, **options):
    plain = nn.BatchNorm2d(3, **options)
    return plain, convert(copy.deepcopy(plain), chunks)


def assert_same_statistics(plain, deferred):
    for name, expected in plain.named_buffers():
        torch.testing.assert_close(deferred.get_buffer(name), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"momentum": 0.7, "affine": False}])
def test_running_statistics_are_those_of_whole_mini_batches(size, options):
    plain, deferred = pair(**options)
    for _ in range(3):
        value = drawn(size)
        plain(value)
        run(deferred, value)
        assert_same_statistics(plain, deferred)
    assert deferred.num_batches_tracked == 3


@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_outputs_and_gradients_are_those_of_each_micro_batch(chunks):
    plain, deferred = pair(chunks)
    found = []
    for module in (plain, deferred):
        value = drawn().requires_grad_()
        output = run(module, value, chunks)
        (output**3).sum().backward()
        found.append([output, value.grad, module.weight.grad, module.bias.grad])
        torch.manual_seed(0)
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


def test_outputs_of_evaluation_are_those_of_batch_norm():
    plain, deferred = pair()
    value = drawn()
    plain(value)
    run(deferred, value)
    plain.eval()
    deferred.eval()
    before = copy.deepcopy(deferred.state_dict())
    torch.testing.assert_close(deferred(value), plain(value))
    assert all(torch.equal(value, before[name]) for name, value in deferred.state_dict().items())


def test_statistics_change_only_at_the_end_of_a_mini_batch():
    _, deferred = pair()
    before = deferred.running_mean.clone()
    for part in drawn().chunk(CHUNKS)[:-1]:
        deferred(part)
        assert torch.equal(deferred.running_mean, before) and deferred.num_batches_tracked == 0


def test_a_mini_batch_may_have_fewer_micro_batches():
    plain, deferred = pair()
    for size in (3, 8, 2):
        value = drawn(size)
        plain(value)
        deferred.begin(min(size, CHUNKS))
        run(deferred, value)
        assert_same_statistics(plain, deferred)


def test_what_is_left_of_a_failed_mini_batch_is_dropped():
    plain, deferred = pair()
    deferred(drawn() + 1000)
    with pytest.raises(RuntimeError):
        deferred(torch.randn(2, 4, 5, 5))
    value = drawn()
    plain(value)
    deferred.begin(CHUNKS)
    run(deferred, value)
    assert_same_statistics(plain, deferred)


def test_a_recomputation_is_not_counted():
    plain, deferred = pair()
    value = drawn()
    plain(value)
    parts = [part.requires_grad_() for part in value.clone().chunk(CHUNKS)]
    outputs = [checkpointed(deferred, part) for part in parts]
    assert_same_statistics(plain, deferred)
    torch.cat(outputs).pow(2).sum().backward()
    assert_same_statistics(plain, deferred)
    assert torch.equal(deferred.sum, torch.zeros(3))


def test_a_large_mean_does_not_cancel_the_variance():
    plain, deferred = nn.BatchNorm1d(3, momentum=1.0), DeferredBatchNorm(3, momentum=1.0, chunks=CHUNKS)
    value = torch.randn(64, 3) + 1e4
    plain.double()(value.double())
    run(deferred, value)
    torch.testing.assert_close(deferred.running_var.double(), plain.running_var, rtol=1e-3, atol=0)


def test_half_precision_is_summed_in_float32():
    plain, deferred = pair(momentum=1.0)
    value = drawn(dtype=torch.bfloat16)
    plain.double()(value.double())
    run(deferred.bfloat16(), value)
    assert deferred.running_var.dtype == torch.bfloat16
    assert torch.equal(deferred.running_var, plain.running_var.bfloat16())
    # float32 statistics with bfloat16 inputs.
    mixed = pair(momentum=1.0)[1]
    run(mixed, value)
    torch.testing.assert_close(mixed.running_var.double(), plain.running_var, rtol=1e-5, atol=0)


def test_sums_of_the_mini_batch_under_way_have_no_gradient():
    deferred = DeferredBatchNorm(3, chunks=CHUNKS)
    value = drawn().requires_grad_()
    run(deferred, value[:4], 2)
    for found, expected in ((deferred.sum, value[:4]), (deferred.sum_squares, value[:4] ** 2)):
        assert not found.requires_grad and found.grad_fn is None
        torch.testing.assert_close(found, expected.sum(dim=(0, 2, 3)).detach())
    run(deferred, value[4:], 2)
    assert not deferred.sum.any() and not deferred.sum_squares.any()


def test_the_state_dict_is_that_of_batch_norm():
    plain, deferred = pair()
    assert list(deferred.state_dict()) == list(plain.state_dict())
    # That of torchgpipe has the sums too.
    deferred.load_state_dict({**plain.state_dict(), "sum": torch.ones(3), "sum_squares": torch.ones(3)})
    assert not deferred.sum.any()


# Conversion.


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_converted_module_has_the_same_parameters_and_buffers(kind):
    plain = kind(3, eps=0.5, momentum=0.25, dtype=torch.float64).eval()
    plain.weight.requires_grad_(False)
    deferred = convert(plain, chunks=2)
    assert type(deferred) is DeferredBatchNorm and deferred.chunks == 2
    assert (deferred.eps, deferred.momentum, deferred.training) == (0.5, 0.25, False)
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        assert getattr(deferred, name) is tensor
    assert deferred.bias.requires_grad and not deferred.weight.requires_grad


def test_nested_modules_are_converted_and_shared_ones_stay_shared():
    shared = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(shared, nn.ModuleDict({"last": shared})), shared)
    assert convert(model, chunks=CHUNKS) is model
    assert type(model[2]) is DeferredBatchNorm
    assert model[2] is model[1][0] is model[1][1]["last"]


class Scaled(nn.BatchNorm2d):
    def forward(self, value):
        return super().forward(value) * 2


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.SyncBatchNorm(3),
        nn.GroupNorm(1, 3),
        nn.InstanceNorm2d(3, track_running_stats=True),
        DeferredBatchNorm(3, chunks=CHUNKS),
        Scaled(3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_not_converted(module):
    assert convert(module, chunks=CHUNKS) is module
    model = nn.Sequential(module)
    assert convert(model, chunks=CHUNKS) is model and model[0] is module


def test_another_number_of_chunks_converts_again():
    deferred = DeferredBatchNorm(3, chunks=CHUNKS)
    again = convert(deferred, chunks=CHUNKS + 1)
    assert again is not deferred and again.chunks == CHUNKS + 1 and again.weight is deferred.weight


def test_a_lazy_module_is_refused():
    with pytest.raises(ValueError, match="0 is a LazyBatchNorm2d .* run one forward"):
        convert(nn.Sequential(nn.LazyBatchNorm2d()))


def test_no_micro_batch_is_refused():
    with pytest.raises(ValueError, match="chunks=0: expected at least one micro-batch"):
        DeferredBatchNorm(3, chunks=0)


def test_training_with_both_gives_the_same_statistics_of_a_first_layer():
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    deferred = convert(copy.deepcopy(plain), CHUNKS)
    for _ in range(3):
        value = drawn()
        for model, chunks in ((plain, 1), (deferred, CHUNKS)):
            run(model, value, chunks).sum().backward()
        assert_same_statistics(plain[0], deferred[0])
