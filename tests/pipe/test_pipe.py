"""`Pipe` gives what the bare Sequential gives, forward and backward, and refuses what it cannot do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.pipe.flow import clock_cycles, release
from hf_pipetransformer.pipe.micro_batches import NoChunk
from hf_pipetransformer.pipe.pipe import GPipe, Pipe
from hf_pipetransformer.pipe.recomputation import checkpointed, is_checkpointing, is_recomputing, waking
from hf_pipetransformer.pipe.skip import pop, skippable, stash
from hf_pipetransformer.pipe.stages import WithDevice
from hf_pipetransformer.schedules.actions import Op
from hf_pipetransformer.schedules.tables import find_schedule


MODES = ("always", "except_last", "never")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width))


def sequential(num_children: int = 4) -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(num_children)))


def on_many_devices(module: nn.Sequential) -> nn.Sequential:
    """Every stage with a worker of its own."""
    return nn.Sequential(*(WithDevice(child, f"cpu:{i}") for i, child in enumerate(module)))


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_transparent(module: nn.Sequential, pipe: nn.Module, *inputs: torch.Tensor, bound: float = 1e-13) -> None:
    """To the bit the output of the bare module on the same micro-batches, and that of the whole batch, its gradients.

    A matrix product of one row need not give the bits that it gives for this row among others.
    """
    own, others = ([each.clone().requires_grad_() for each in inputs] for _ in range(2))
    expected, output = module(*own), pipe(*others)
    pieces = zip(*(each.detach().chunk(pipe.chunks) for each in inputs), strict=True)
    assert torch.equal(output, torch.cat([module(*piece) for piece in pieces]))
    torch.testing.assert_close(output, expected, rtol=0, atol=bound)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (output * weight).sum().backward()
    assert gradients(module).keys() == gradients(pipe).keys()
    found = [*(each.grad for each in others), *gradients(pipe).values()]
    for one, other in zip([*(each.grad for each in own), *gradients(module).values()], found, strict=True):
        # Sums in another order.
        torch.testing.assert_close(other, one, rtol=0, atol=bound * max(1, float(one.abs().max())))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", range(1, 9))
@pytest.mark.parametrize("batch_size", [1, 5, 8, 13])
def test_outputs_and_gradients_are_those_of_the_sequential(mode: str, chunks: int, batch_size: int) -> None:
    module, x = sequential(3), torch.randn(batch_size, 8)
    assert_transparent(module.double(), Pipe(deepcopy(module), chunks, mode), x.double())
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    assert_transparent(module, Pipe(deepcopy(module), chunks, mode), x, bound=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_gradients_with_a_thread_for_each_stage(mode: str) -> None:
    module = sequential().double()
    assert_transparent(module, Pipe(on_many_devices(deepcopy(module)), 4, mode), torch.randn(7, 8).double())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x * self.scale, (8,)).sin()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", range(1, 9))
def test_outputs_are_bit_equal_where_rows_do_not_depend_on_each_other(mode: str, chunks: int) -> None:
    module, x = nn.Sequential(Scale(), Scale(), Scale()), torch.randn(13, 8)
    assert torch.equal(Pipe(deepcopy(module), chunks, mode)(x), module(x))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(a) * b, b + 1


class Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def test_several_tensors_pass_between_stages() -> None:
    pair, second, total = Pair(), Pair(), Sum()
    a, b = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    expected = total(*second(*pair(a, b)))
    expected.sum().backward()
    wanted = [a.grad.clone(), b.grad.clone(), pair.linear.weight.grad.clone()]
    a.grad = b.grad = pair.linear.weight.grad = None
    output = Pipe(nn.Sequential(pair, second, total), chunks=2)(a, b)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)
    output.sum().backward()
    for found, one in zip([a.grad, b.grad, pair.linear.weight.grad], wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-6)


def test_gradients_can_be_asked_for_and_taken_twice() -> None:
    """What `autograd.grad`, a kept graph and second derivatives need is there in every mode."""
    module = sequential(2)
    x = torch.randn(6, 8, requires_grad=True)
    expected = torch.autograd.grad(module(x).pow(2).sum(), [x, *module.parameters()])
    for mode in MODES:
        output = Pipe(deepcopy(module), 3, mode)
        loss = output(x).pow(2).sum()
        for _ in range(2):
            found = torch.autograd.grad(loss, [x, *output.parameters()], retain_graph=True)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_second_derivatives() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.pow(2).sum()

    x = torch.randn(6, 4, requires_grad=True)
    expected = torch.autograd.grad(penalty(module, x), list(module.parameters())[0])[0]
    found = torch.autograd.grad(penalty(Pipe(module, 3, "never"), x), list(module.parameters())[0])[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_drops_in_the_backward_what_it_dropped_in_the_forward(mode: str, many: bool) -> None:
    module = nn.Sequential(*(nn.Dropout(0.3) for _ in range(4)))
    x = torch.ones(40, 10, requires_grad=True)
    output = Pipe(on_many_devices(module) if many else module, 5, mode)(x)
    output.sum().backward()
    torch.testing.assert_close(x.grad, output.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(("mode", "expected"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_modules_know_what_is_computed_again(mode: str, expected: int) -> None:
    seen: list[tuple[bool, bool]] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((is_checkpointing(), is_recomputing()))
            return x.sin()

    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), Look()), 3, mode)
    pipe(torch.randn(6, 2)).sum().backward()
    assert seen[:3] == [(i < expected, False) for i in range(3)]
    assert seen[3:] == [(False, True)] * expected
    seen.clear()
    pipe.eval()
    pipe(torch.randn(6, 2))
    assert seen == [(False, False)] * 3


def order_of_backwards(module: nn.Sequential, num_stages: int, chunks: int, mode: str) -> list[tuple[int, int]]:
    """(stage, micro-batch) in the order of their backwards; the input says which micro-batch it is."""
    found: list[tuple[int, int]] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, stage: int) -> torch.Tensor:
            ctx.place = stage, int(x[0, 0])
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            found.append(ctx.place)
            return gradient, None

    class Noting(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Note.apply(x, self.stage)

    stages = nn.Sequential(*(Noting(k) for k in range(num_stages)))
    x = torch.arange(chunks).float()[:, None].requires_grad_()
    Pipe(on_many_devices(stages), chunks, mode)(x).sum().backward()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_backwards_of_a_stage_come_in_the_order_of_the_table(mode: str) -> None:
    found = order_of_backwards(sequential(), 3, 5, mode)
    for stage in range(3):
        assert [i for k, i in found if k == stage] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_the_clock_cycles_are_those_of_the_table_of_gpipe(num_micro_batches: int, num_stages: int) -> None:
    cycles = clock_cycles(num_micro_batches, num_stages)
    when = {pair: now for now, cycle in enumerate(cycles) for pair in cycle}
    for stage, actions in enumerate(find_schedule("gpipe").table(num_stages, num_micro_batches)):
        forwards = [action.micro_batch for action in actions if action.op is Op.FORWARD]
        assert [when[i, stage] for i in forwards] == [i + stage for i in range(num_micro_batches)]
        # The order that the tokens of `Flow` keep.
        backwards = [action.micro_batch for action in actions if action.op is Op.BACKWARD]
        assert backwards == list(reversed(range(num_micro_batches)))


class Planted(Exception):
    """What the tests raise."""


class Failing(nn.Module):
    """Raises at its `call`-th forward or backward."""

    def __init__(self, call: int, backward: bool) -> None:
        super().__init__()
        self.call, self.backward, self.num_calls = call, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_recomputing():
            return self.noted(x)
        self.num_calls += 1
        if self.num_calls == self.call and not self.backward:
            raise Planted
        return self.noted(x)

    def noted(self, x: torch.Tensor) -> torch.Tensor:
        outer = self

        class Fail(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                outer.num_calls += 1
                if outer.backward and outer.num_calls == outer.call + 4:
                    raise Planted
                return gradient

        return Fail.apply(x)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_anywhere_is_raised_once_and_nothing_runs_on(
    mode: str, stage: int, call: int, backward: bool, many: bool
) -> None:
    failing = [Failing(call if k == stage else 99, backward) for k in range(3)]
    module = nn.Sequential(*failing)
    before = set(threading.enumerate())
    pipe = Pipe(on_many_devices(module) if many else module, 4, mode)
    x = torch.randn(8, 2, requires_grad=True)
    begin = time.monotonic()
    with pytest.raises(Planted):
        pipe(x).sum().backward()
    assert time.monotonic() - begin < 1
    assert set(threading.enumerate()) == before
    # The next mini-batch is as if nothing had been.
    for each in failing:
        each.call = 99
    pipe(x).sum().backward()


def test_stages_before_a_failed_one_stop_as_well() -> None:
    counted: list[int] = []

    class Count(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counted.append(1)
            return x

    class Fail(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise Planted

    with pytest.raises(Planted):
        Pipe(nn.Sequential(Count(), Fail()), 8)(torch.randn(8, 1))
    assert len(counted) == 2


def test_stages_on_several_devices_compute_at_the_same_time() -> None:
    """Each of two waits until the other is there as well."""
    meeting = threading.Barrier(2, timeout=20)

    class Meet(nn.Module):
        def __init__(self, alone: int) -> None:
            super().__init__()
            self.alone, self.num_calls = alone, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            if self.num_calls != self.alone:
                meeting.wait()
            return x

    # The first micro-batch of the first stage and the last of the second have nobody to meet.
    Pipe(on_many_devices(nn.Sequential(Meet(1), Meet(3))), 3, "never")(torch.randn(3, 1))


@pytest.mark.parametrize("many", [False, True])
def test_the_state_of_the_calling_thread_holds_in_every_stage(many: bool) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipe(on_many_devices(module) if many else module, 2)
    x = torch.randn(4, 4)
    with torch.no_grad():
        assert not pipe(x).requires_grad
    with torch.inference_mode():
        assert pipe(x).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe(x)
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())


def test_other_values_are_given_to_every_micro_batch() -> None:
    seen: list[Any] = []

    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor, word: str, table: torch.Tensor) -> tuple[torch.Tensor, int]:
            seen.append((len(x), word, len(table)))
            return x, 5

    class Last(nn.Module):
        def forward(self, x: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
            return x, number

    output = Pipe(nn.Sequential(Mixed(), Last()), 2)(torch.randn(4, 1), "a", NoChunk(torch.randn(7)))
    assert seen == [(2, "a", 7), (2, "a", 7)]
    assert output[1] == [5, 5]
    assert output.local_value()[0].shape == (4, 1)


def test_a_batch_may_be_smaller_than_chunks() -> None:
    sizes: list[int] = []

    class Size(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return x

    Pipe(nn.Sequential(Size()), 4)(torch.randn(2, 1))
    assert sizes == [1, 1]
    sizes.clear()
    Pipe(nn.Sequential(Size()), 4)(torch.randn(7, 1))
    assert sizes == [2, 2, 2, 1]


def test_wrong_inputs_are_refused() -> None:
    pipe = Pipe(nn.Sequential(nn.Identity()), 3)
    for inputs in [(), (5,), ("a", 3), (NoChunk(torch.ones(3)),)]:
        with pytest.raises(TypeError, match="at least one tensor"):
            pipe(*inputs)
    with pytest.raises(
        RuntimeError, match=r"number of chunks produced for inputs: .* 0 of size 4 in 2, input 1 of size 9 in 3"
    ):
        Pipe(nn.Sequential(Sum()), 3)(torch.randn(4, 1), torch.randn(9, 1))
    with pytest.raises(ValueError, match="is a tensor without dimensions, which no batch"):
        pipe(torch.tensor(3.0))
    with pytest.raises(ValueError, match="on the same device as the first partition, cpu: input 0 is on meta"):
        pipe(torch.randn(3, 1, device="meta"))
    with pytest.raises(TypeError, match="NoChunk only supported for tensors, found int"):
        NoChunk(3)  # type: ignore[arg-type]


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, *_: Any) -> Any:
        return self.value


def test_values_between_stages_need_a_tensor() -> None:
    with pytest.raises(TypeError, match="What stage 0 returns must have at least one tensor, found int"):
        Pipe(nn.Sequential(Returns(5), nn.Identity()))(torch.ones(1))
    with pytest.raises(TypeError, match="must be a tensor or a tuple of tensors, found str"):
        GPipe(nn.Sequential(Returns((torch.ones(1), "a"))), [1], devices=["cpu"])(torch.ones(1))


def test_the_result_is_a_tensor_and_has_a_local_value() -> None:
    output = Pipe(nn.Sequential(nn.Linear(2, 2)), 2)(torch.randn(4, 2))
    assert isinstance(output, torch.Tensor)
    value = output.local_value()
    assert type(value) is torch.Tensor
    assert value is output.local_value() is output.to_here()
    assert type(output + 1) is torch.Tensor
    assert type(output.detach()) is torch.Tensor
    assert type(deepcopy(output.detach())) is torch.Tensor
    value.retain_grad()
    nn.functional.mse_loss(value, torch.zeros(4, 2)).backward()
    assert value.grad is not None


def test_state_has_the_names_of_the_sequential_and_old_names_load() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pipe = Pipe(deepcopy(module))
    assert list(pipe.state_dict()) == list(module.state_dict()) == [name for name, _ in pipe.named_parameters()]
    nn.init.zeros_(module[1].weight)
    pipe.load_state_dict(module.state_dict())
    assert not pipe[1].weight.any()
    old = {f"partitions.{key[0]}.0{key[1:]}": value + 1 for key, value in module.state_dict().items()}
    pipe.load_state_dict(old)
    torch.testing.assert_close(pipe[1].weight, torch.ones(2, 2))


def test_old_names_of_both_forms_load_into_stages_of_several_modules() -> None:
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    pipe = GPipe(module, [3, 2], devices=["cpu", "cpu"])
    values = {name: torch.full_like(value, float(name[0])) for name, value in pipe.state_dict().items()}
    by_name = {f"partitions.{int(name[0]) // 3}.{name}": value for name, value in values.items()}
    by_position = {
        f"partitions.{int(name[0]) // 3}.{int(name[0]) % 3}{name[1:]}": value for name, value in values.items()
    }
    for old in (by_name, by_position):
        pipe.load_state_dict(old)
        assert [child.weight.item() for child in pipe] == [0, 1, 2, 3, 4]
    unclear = GPipe(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))), [1, 3], devices=["cpu", "cpu"])
    places = ["partitions.0.0", "partitions.1.1", "partitions.1.2"]
    with pytest.raises(RuntimeError, match="can be read as torchgpipe's"):
        unclear.load_state_dict({f"{place}.{kind}": torch.ones(1) for place in places for kind in ("weight", "bias")})


def test_a_pipe_is_like_the_sequential() -> None:
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    pipe = Pipe(nn.Sequential(a, b), chunks=2.0, checkpoint="always")  # type: ignore[arg-type]
    assert (len(pipe), list(pipe), pipe[0], pipe[-1]) == (2, [a, b], a, b)
    with pytest.raises(IndexError):
        pipe[2]
    assert (pipe.chunks, pipe.checkpoint, pipe.devices) == (2, "always", [torch.device("cpu")] * 2)
    assert [list(partition) for partition in pipe.partitions] == [[a], [b]]
    assert not pipe.eval().partitions[0].training
    calls: list[Any] = []
    pipe.partitions[1].register_forward_hook(lambda *each: calls.append(each))
    pipe(torch.ones(2, 1))
    assert len(calls) == 2


def test_a_copy_of_a_pipe_is_whole() -> None:
    pipe = Pipe(sequential(2), 2)
    copy = deepcopy(pipe)
    with torch.no_grad():
        copy[0][0].weight.zero_()
        x = torch.randn(4, 8)
        torch.testing.assert_close(copy(x), copy[1](copy[0](x)))
        assert not torch.equal(copy(x), pipe(x))


def test_moving_is_refused_and_casting_is_not() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)))
    moves: Iterator[Any] = iter(
        [
            pipe.cuda, pipe.cpu, lambda: pipe.to("cuda"), lambda: pipe.to(0), lambda: pipe.to(device="cpu"),
            lambda: pipe.to(torch.rand(1)), lambda: pipe.to(tensor=torch.rand(1)),
            lambda: pipe.to(torch.device("cpu")), lambda: pipe.to_empty(device="cpu"),
        ]
    )  # fmt: skip
    for move in moves:
        with pytest.raises(TypeError, match="stay on their devices"):
            move()
    assert pipe.half()[0].weight.dtype == torch.float16
    assert pipe.to(torch.float64, True)[0].weight.dtype == torch.float64
    assert pipe.to(dtype=torch.float32)[0].weight.dtype == torch.float32


def test_what_no_pipeline_can_be_made_of_is_refused() -> None:
    linear = nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"must be nn\.Sequential"):
        Pipe(linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="duplicate children is not supported: '1' is '0' again"):
        Pipe(nn.Sequential(linear, linear))
    scattered = nn.Module()
    scattered.near, scattered.far = nn.Linear(1, 1), nn.Linear(1, 1, device="meta")
    with pytest.raises(ValueError, match="to place the module on a single device. Found cpu, meta"):
        Pipe(nn.Sequential(scattered))
    with pytest.raises(ValueError, match="chunks must be positive, found 0"):
        Pipe(nn.Sequential(linear), 0)
    with pytest.raises(ValueError, match="not one of 'always', 'except_last', or 'never', found 'often'"):
        Pipe(nn.Sequential(linear), checkpoint="often")
    with pytest.raises(TypeError, match="foo"):
        Pipe(nn.Sequential(skippable(stash=["foo"])(type("Stashing", (nn.Module,), {}))()))


def test_an_input_changed_in_place_is_refused_where_it_is_needed_again() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(4, 2)
    with pytest.raises(RuntimeError, match="changes its input in place, which checkpointing would compute again"):
        Pipe(module, 2)(x)
    assert_transparent(module, Pipe(deepcopy(module), 2, "never"), x, bound=1e-6)


@skippable(stash=["far", "near"])
class Stashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        yield stash("far", x * 2)
        yield stash("near", self.linear(x))
        return x.sin()


@skippable(pop=["near"])
class Near(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * (yield pop("near"))


@skippable(pop=["far"])
class Far(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + (yield pop("far"))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_skip_tensors_reach_the_stages_that_pop_them(mode: str, chunks: int, many: bool) -> None:
    module = nn.Sequential(block(), Stashing(), Near(), block(), Far()).double()
    copy = deepcopy(module)
    assert_transparent(module, Pipe(on_many_devices(copy) if many else copy, chunks, mode), torch.randn(7, 8).double())


@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_gpipe_cuts_as_it_is_told(balance: list[int]) -> None:
    module = nn.Sequential(block(), Stashing(), Near(), block(), Far()).double()
    pipe = GPipe(deepcopy(module), balance, devices=["cpu"] * 6, chunks=3)
    assert (pipe.balance, len(pipe.devices), [len(p) for p in pipe.partitions]) == (balance, len(balance), balance)
    assert type(pipe(torch.randn(3, 8).double())) is torch.Tensor
    assert_transparent(module, pipe, torch.randn(7, 8).double())


def test_gpipe_hands_a_tuple_on_as_one_argument() -> None:
    class Two(nn.Module):
        def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            assert isinstance(both, tuple)
            return both[0] + 1, both[1] * 2

    a, b = GPipe(nn.Sequential(Two(), Two()), [1, 1], devices=["cpu", "cpu"], chunks=2)((torch.ones(3), torch.ones(3)))
    assert (a.tolist(), b.tolist()) == ([3] * 3, [4] * 3)


def test_gpipe_refuses_what_it_cannot_cut() -> None:
    two = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    for balance in ([1], [3], [0, 2], [-1, 3]):
        with pytest.raises(ValueError, match=r"balance must sum up|must have one child or more"):
            GPipe(two, balance, devices=["cpu"] * 3)
    with pytest.raises(ValueError, match="balance is required"):
        GPipe(two)
    with pytest.raises(IndexError, match="Too few devices for 2 stages"):
        GPipe(two, [1, 1], devices=["cpu"])
    two[1].weight = two[0].weight
    GPipe(two, [1, 1], devices=["cpu", "cpu"])
    with pytest.raises(ValueError, match="duplicate parameters in distinct children"):
        GPipe(two, [1, 1], devices=["cpu:0", "cpu:1"])


@pytest.mark.parametrize("mode", MODES)
def test_deferred_batch_norm_counts_a_mini_batch_once(mode: str) -> None:
    module = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    pipe = Pipe(deepcopy(module), 3, mode, deferred_batch_norm=True)
    x = torch.randn(8, 8) * 3 + 1
    module[0](x)
    pipe(x).sum().backward()
    torch.testing.assert_close(pipe[0].running_mean, module[0].running_mean)
    torch.testing.assert_close(pipe[0].running_var, module[0].running_var)
    assert int(pipe[0].num_batches_tracked) == int(pipe[1].num_batches_tracked) == 1


def test_an_empty_sequential_is_legal_and_told_of() -> None:
    with pytest.warns(UserWarning, match="The nn.Sequential has no modules: what goes in comes out"):
        pipe = Pipe(nn.Sequential())
    with pytest.warns(UserWarning, match="no modules"):
        GPipe(nn.Sequential(), balance=[])
    assert pipe(torch.tensor(42)).local_value() == 42
    with pytest.raises(TypeError):
        pipe(42)


@pytest.mark.parametrize("chunks", [0, -1, float("nan"), float("inf"), None, "many"])
def test_a_number_of_micro_batches_that_is_none_is_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=f"number of chunks must be positive, found {chunks}"):
        Pipe(nn.Sequential(nn.Linear(1, 1)), chunks)


def test_a_stage_can_be_computed_again_before_its_gradient_is_there() -> None:
    calls: list[bool] = []

    def stage(x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        calls.append(is_recomputing())
        y = x.sin()
        return y, waking([y])

    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y, tokens = checkpointed(stage, x)
    (released,), left = release([other], tokens)
    assert left == ()
    (released.sum() + 0 * y.sum()).backward()
    assert calls == [False, True]
    (released,), _ = release([other], checkpointed(stage, x)[1])
    calls.clear()
    released.sum().backward()
    assert calls == [True]


def test_modules_run_where_their_tensors_are() -> None:
    far = nn.Linear(2, 2, device="meta")
    with_buffer = nn.BatchNorm1d(2, affine=False, device="meta")
    stages = nn.Sequential(
        nn.Linear(2, 2), nn.ReLU(), WithDevice(nn.ReLU(), "meta"), far, with_buffer, nn.Linear(2, 2)
    )
    pipe = Pipe(stages)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    # Neighbours on one device are a stage.
    assert pipe.devices == [cpu, cpu, meta, cpu]
    assert [len(partition) for partition in pipe.partitions] == [1, 1, 3, 1]
    places: list[torch.device] = []
    for child in pipe:
        child.register_forward_pre_hook(lambda _, values: places.append(values[0].device))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        pipe(torch.ones(3, 2))
    assert places == [cpu, cpu, meta, meta, meta]


def test_defaults() -> None:
    pipe = Pipe(nn.Sequential(nn.BatchNorm1d(2)))
    assert (pipe.chunks, pipe.checkpoint, type(pipe[0])) == (1, "except_last", nn.BatchNorm1d)


def test_the_example_of_the_old_page() -> None:
    first, second = nn.Linear(16, 8), nn.Linear(8, 4)
    model = Pipe(nn.Sequential(first, second), chunks=8)
    x = torch.rand(16, 16)
    torch.testing.assert_close(model(x).local_value(), second(first(x)))
