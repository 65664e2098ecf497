"""How a Sequential is cut by what its children cost, and put on devices. Seconds are those of a clock of the tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_pipetransformer.pipe import balance as child_costs
from hf_pipetransformer.pipe.balance import balance_by_size, balance_by_time, partition_model
from hf_pipetransformer.pipe.micro_batches import NoChunk
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.pipe.skip import pop, skippable, stash


class Clock:
    """Stands until a child moves it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def __deepcopy__(self, memo):
        return self


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(child_costs, "perf_counter", clock)
    return clock


class Delay(nn.Module):
    """Takes `seconds`; the first time a hundred more, as a first kernel does."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds, self.runs = clock, seconds, 0

    def forward(self, value):
        self.clock.now += self.seconds + (0 if self.runs else 100)
        self.runs += 1
        return value


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds
        return gradient, None, None


class DelayBackward(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock, self.seconds = clock, seconds

    def forward(self, value):
        self.clock.now += 0.01
        return SlowGradient.apply(value * self.weight, self.clock, self.seconds)


class Expand(nn.Module):
    """Makes `times` tensors as large as its input that its backward needs."""

    def __init__(self, times, keep="saved"):
        super().__init__()
        self.times, self.keep = times, keep

    def forward(self, value):
        for _ in range(self.times):
            value = value.exp() if self.keep == "saved" else value + torch.rand_like(value).requires_grad_()
        return value


class Two(nn.Module):
    """A tuple for `Pipe`'s next module."""

    def forward(self, value):
        return value, value + 1


class AddSeveral(nn.Module):
    def forward(self, left, right):
        return left + right


class AddTuple(nn.Module):
    def forward(self, values):
        return values[0] + values[1]


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, value):
        yield stash("skip", value.exp())
        return value


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, value):
        return value * (yield pop("skip"))


# Seconds.


@pytest.mark.parametrize(("seconds", "balance"), [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 1, 1, 1, 1, 1], [1, 5])])
def test_times_are_balanced_and_the_first_run_left_out(clock, seconds, balance):
    model = nn.Sequential(*(Delay(clock, each) for each in seconds))
    assert balance_by_time(2, model, torch.rand(1), device="cpu") == balance


def test_backward_counts(clock):
    model = nn.Sequential(*(DelayBackward(clock, each) for each in (5, 1, 1, 1, 1, 1)))
    assert balance_by_time(2, model, torch.rand(1), device="cpu") == [1, 5]


def test_the_timeout_is_shared(clock):
    model = nn.Sequential(Delay(clock, 0.25), Delay(clock, 0.5))
    model[0].runs = model[1].runs = 1
    assert balance_by_time(2, model, torch.rand(1), timeout=2.0, device="cpu") == [1, 1]
    assert clock.now == 2.0 + 0.25 + 0.5  # A run each for the values of the next child.


def test_the_next_child_gets_what_the_model_gives():
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 10))
    assert sum(balance_by_time(2, model, torch.rand(10, 3, 8, 8), timeout=0, device="cpu")) == 3


def test_the_model_stays_as_it_was():
    class Watched(nn.Module):
        def forward(self, value):
            assert self.training and torch.is_grad_enabled()
            return torch.nn.functional.relu_(value)

    model = nn.Sequential(nn.Linear(3, 3), Watched(), nn.BatchNorm1d(3), nn.Dropout()).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sample = torch.randn(4, 3)
    kept, random_state = sample.clone(), torch.get_rng_state()
    with torch.no_grad():
        balance_by_time(2, model, sample, timeout=0, device="cpu")
        balance_by_size(2, model, sample, device="cpu")
    assert torch.equal(torch.get_rng_state(), random_state) and torch.equal(sample, kept)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_module_may_change_its_input_in_place():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True))
    sample = torch.randn(4, 3).requires_grad_()
    kept = sample.detach().clone()
    balance_by_time(2, model, sample, timeout=0, device="cpu")
    assert torch.equal(sample.detach(), kept) and sample.grad is None


def test_a_gradient_of_the_sample_stays_what_it_was():
    """Each run measures with copies: nothing is added to what the caller holds, and nothing is reset."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    for function in (balance_by_time, balance_by_size):
        options = {"timeout": 0.05} if function is balance_by_time else {"chunks": 2}
        fresh, held = torch.randn(4, 3).requires_grad_(), torch.randn(4, 3).requires_grad_()
        held.grad = expected = torch.randn(4, 3)
        kept = expected.clone()
        for sample in (fresh, held):
            function(2, model, sample, device="cpu", **options)
        assert fresh.grad is None
        assert held.grad is expected and torch.equal(expected, kept)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert fresh.is_leaf and fresh.grad_fn is None and fresh._backward_hooks is None


def test_gradients_of_parameters_are_kept_where_none_are_computed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model(torch.rand(4, 3)).sum().backward()
    held = [parameter.grad for parameter in model.parameters()]
    kept = [gradient.clone() for gradient in held]
    assert sum(balance_by_size(2, model, torch.rand(4, 3), device="cpu")) == 2
    assert all(parameter.grad is own for parameter, own in zip(model.parameters(), held, strict=True))
    assert all(map(torch.equal, held, kept))


def test_each_run_begins_without_the_gradients_of_the_last():
    """Else the times and the memory of adding up would be measured too."""
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, value):
            # A run gets a copy, which it may change in place; gradients arrive at what was copied.
            ((copied, _),) = value.grad_fn.next_functions
            seen.append((self.weight.grad, copied.variable.grad))
            return value * self.weight

    model = nn.Sequential(Watched(), Watched())
    balance_by_time(2, model, torch.rand(4, 3).requires_grad_(), timeout=0, device="cpu")
    assert seen[:2] == [(None, None)] * 2 and seen[3:5] == [(None, None)] * 2
    assert len(seen) == 6  # The third run of each is for the values of the next child.


def test_a_gradient_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model(torch.rand(1, 3, 4, 4)).norm().backward()
    with pytest.raises(ValueError, match="some parameter already has gradient: '0.weight'"):
        balance_by_time(1, model, torch.rand(1, 3, 4, 4), device="cpu")


# Bytes.


@pytest.mark.parametrize("keep", ["saved", "leaf"])
@pytest.mark.parametrize(("times", "balance"), [([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])])
def test_what_the_backward_needs_is_balanced(times, balance, keep):
    model = nn.Sequential(*(Expand(each, keep) for each in times))
    sample = torch.rand(10, 100).requires_grad_()
    assert balance_by_size(2, model, sample, device="cpu") == balance


@pytest.mark.parametrize("reverse", [False, True])
def test_parameters_are_balanced(reverse):
    layers = [nn.Linear(size + 1, size + 2) for size in range(6)]
    if reverse:
        layers = [nn.Linear(size + 2, size + 1) for size in reversed(range(6))]
    balance = balance_by_size(2, nn.Sequential(*layers), torch.rand(7, layers[0].in_features), param_scale=100)
    assert balance == ([2, 4] if reverse else [4, 2])


def test_param_scale_weighs_parameters_against_activations():
    model = nn.Sequential(Expand(4), Expand(1), nn.Linear(16, 16))
    sample = torch.rand(4, 16).requires_grad_()
    # In outputs: 4, 1 and 1, and the parameters are 4.25.
    assert balance_by_size(2, model, sample, param_scale=0, device="cpu") == [1, 2]
    assert balance_by_size(2, model, sample, device="cpu") == [2, 1]


@pytest.mark.parametrize(
    ("child", "expected"),
    [
        (nn.Linear(8, 8), 4 * 8 * 4),  # Its output; the input is that of the child before.
        (nn.Linear(8, 8, dtype=torch.float64), 4 * 8 * 8),
        (nn.Identity(), 0),
        (nn.Flatten(), 0),  # A view.
        (nn.ReLU(inplace=True), 0),
        (nn.ReLU(), 4 * 8 * 4),  # Output and saved tensor are one.
        (nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)), 4 * (2 + 2 + 8) * 4 - 4 * 2 * 4),
        (nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Tanh()), 4 * (2 + 2) * 4),
    ],
)
def test_bytes_of_a_child(child, expected):
    sample = torch.rand(4, 8, dtype=next((p.dtype for p in child.parameters()), torch.float32)).requires_grad_()
    assert child_costs.bytes_of_children(nn.Sequential(child), sample, 0, device="cpu") == [expected]
    held = sum(parameter.nbytes for parameter in child.parameters())
    assert child_costs.bytes_of_children(nn.Sequential(child), sample, 3, device="cpu") == [expected + 3 * held]


def test_one_micro_batch_is_measured():
    sizes = []

    class Note(nn.Module):
        def forward(self, value, factor, whole):
            sizes.append((len(value), factor, len(whole)))
            return value

    sample = (torch.rand(10, 2), 3, NoChunk(torch.rand(5)))
    balance_by_size(1, nn.Sequential(Note()), sample, chunks=4, device="cpu")
    assert set(sizes) == {(3, 3, 5)}


def test_a_stashed_tensor_counts_where_it_is_made():
    sample = torch.rand(10, 10)
    costs = child_costs.bytes_of_children(nn.Sequential(Stash(), nn.Identity(), Pop()), sample, 2, device="cpu")
    assert costs == [400, 0, 400]


# What both share.


@pytest.mark.parametrize("last", [AddSeveral, AddTuple])
def test_a_tuple_goes_to_the_next_child_as_it_takes_it(last):
    assert balance_by_size(2, nn.Sequential(Two(), last()), torch.rand(3), device="cpu") == [1, 1]
    pair = (torch.rand(3), torch.rand(3))
    assert balance_by_time(1, nn.Sequential(last(), nn.Identity()), pair, timeout=0, device="cpu") == [2]


def test_unpack_decides_for_a_forward_that_takes_both():
    seen = []

    class Either(nn.Module):
        def forward(self, *values):
            seen.append(len(values))
            return values[0]

    pair = (torch.rand(3), torch.rand(3))
    for unpack in (None, True, False):
        seen.clear()
        balance_by_size(1, nn.Sequential(Either()), pair, device="cpu", unpack=unpack)
        assert set(seen) == {1 if unpack is False else 2}


def test_skip_connections_are_measured():
    model = nn.Sequential(nn.Linear(3, 3), Stash(), nn.Linear(3, 3), Pop(), nn.Linear(3, 3))
    assert sum(balance_by_time(3, model, torch.rand(2, 3), timeout=0, device="cpu")) == 5
    assert sum(balance_by_size(3, model, torch.rand(2, 3), device="cpu")) == 5


@pytest.mark.parametrize("function", [balance_by_time, balance_by_size])
def test_what_cannot_be_cut_is_refused(function):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for partitions in (0, -1, 3):
        words = f"2 children into {partitions} partitions: expected 1 to 2. A stage has at least one child"
        with pytest.raises(ValueError, match=words):
            function(partitions, model, torch.rand(1, 1))
    with pytest.raises(TypeError, match="Found a Linear: expected an nn.Sequential"):
        function(1, model[0], torch.rand(1, 1))


def test_a_sequential_without_children_is_refused():
    for function in (balance_by_time, balance_by_size):
        with pytest.raises(ValueError, match="The nn.Sequential has no children to cut into 1 partitions"):
            function(1, nn.Sequential(), torch.rand(1, 1))


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_what_is_no_measure_is_refused(value):
    """Measuring for ever would never end."""
    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=f"timeout={value}: expected a number of seconds, 0 or more"):
        balance_by_time(1, model, torch.rand(1, 1), timeout=value, device="cpu")
    with pytest.raises(ValueError, match=f"param_scale={value}: expected a number, 0 or more"):
        balance_by_size(1, model, torch.rand(1, 1), param_scale=value, device="cpu")


@pytest.mark.parametrize(
    ("sample", "error"),
    [
        (3, "The input must have at least one tensor, found int"),
        (torch.tensor(1.0), "Input 0 is a tensor without dimensions, which no batch can be cut from"),
    ],
)
def test_an_input_that_no_pipeline_cuts_is_refused(sample, error):
    with pytest.raises((TypeError, ValueError), match=error):
        balance_by_size(1, nn.Sequential(nn.Identity()), sample, chunks=2, device="cpu")


def test_no_micro_batch_is_refused():
    with pytest.raises(ValueError, match="chunks=0: expected at least one micro-batch"):
        balance_by_size(1, nn.Sequential(nn.Linear(1, 1)), torch.rand(1, 1), chunks=0)


# Putting children on devices.


def test_children_fall_into_stages():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    parts = partition_model(model, [1, 2], devices=["cpu", "cpu"])
    assert [[*part] for part in parts] == [[model[0]], [model[1], model[2]]]
    assert list(parts.state_dict()) == ["0.0.weight", "0.0.bias", "1.1.weight", "1.1.bias"]
    sample = torch.rand(5, 2)
    assert torch.equal(parts(sample), model(sample))
    pipe = Pipe(parts, chunks=2)
    assert len(pipe) == 2
    torch.testing.assert_close(torch.as_tensor(pipe(sample)), model(sample))


def test_children_go_to_their_devices():
    parts = partition_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=["meta", "cpu"])
    assert [part[0].weight.device.type for part in parts] == ["meta", "cpu"]


def test_without_enough_gpus_all_stay_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    parts = partition_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    assert {parameter.device.type for parameter in parts.parameters()} == {"cpu"}


def test_tuples_are_handed_on_as_several_arguments():
    parts = partition_model(nn.Sequential(Two(), AddSeveral(), Two(), AddSeveral()), [1, 2, 1], ["cpu"] * 3)
    assert parts(torch.tensor(3.0)).item() == 15
    assert Pipe(parts, chunks=2)(torch.full((2,), 3.0)).tolist() == [15, 15]


@pytest.mark.parametrize(
    ("balance", "num_devices", "error"),
    [
        ([1], 2, ValueError),
        ([1, 2], 2, ValueError),
        ([0, 2], 2, ValueError),
        ([3, -1], 2, ValueError),
        ([1, 1], 1, IndexError),
    ],
)
def test_a_balance_that_does_not_fit_is_refused(balance, num_devices, error):
    with pytest.raises(error):
        partition_model(nn.Sequential(nn.Identity(), nn.Linear(1, 1)), balance, ["cpu"] * num_devices)


def test_a_balance_found_is_taken():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert len(partition_model(model, balance_by_size(3, model, torch.rand(2, 4)), ["cpu"] * 3)) == 3
