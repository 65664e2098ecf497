"""What a pipeline must not do behind its user's back: keep memory, mix tensors up, draw other numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from copy import deepcopy
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_pipetransformer.pipe import workers
from hf_pipetransformer.pipe.batchnorm import DeferredBatchNorm
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.pipe.recomputation import Drawing
from hf_pipetransformer.pipe.skip import pop, skippable, stash
from hf_pipetransformer.pipe.stages import WithDevice
from hf_pipetransformer.pipe.workers import arrive, depart
from tests.pipe.test_pipe import MODES, Sum, assert_transparent, gradients, on_many_devices, sequential


@pytest.fixture
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Watch(nn.Module):
    """Keeps weak references to what passes."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        self.seen.append(weakref.ref(y))
        if self.fails and len(self.seen) == 2:
            raise ValueError("planted")
        return y.cos()


@pytest.mark.usefixtures("_without_gc")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_is_dropped_leaves_nothing(mode: str, many: bool) -> None:
    watch = Watch()
    module = nn.Sequential(nn.Linear(4, 4), watch, nn.Linear(4, 4))
    output = Pipe(on_many_devices(module) if many else module, 3, mode)(torch.randn(6, 4))
    result = weakref.ref(output.local_value())
    del output
    assert result() is None
    assert [each() for each in watch.seen] == [None] * 3


@pytest.mark.usefixtures("_without_gc")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_that_is_dropped_leaves_nothing(mode: str, many: bool) -> None:
    watch = Watch(fails=True)
    module = nn.Sequential(nn.Linear(4, 4), watch, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="planted") as caught:
        Pipe(on_many_devices(module) if many else module, 3, mode)(torch.randn(6, 4))
    del caught
    assert [each() for each in watch.seen] == [None] * 2


class Twin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, y


class Double(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a.mul_(2)
        return a, b


def test_a_tensor_that_is_returned_twice_stays_one() -> None:
    stages = Twin(), Double(), Sum()
    x = torch.randn(6, 4)
    stages[2](*stages[1](*stages[0](x))).sum().backward()
    expected = {name: value.clone() for name, value in gradients(stages[0]).items()}
    stages[0].zero_grad()
    Pipe(nn.Sequential(*stages), 2, "never")(x).sum().backward()
    found = gradients(stages[0])
    assert found.keys() == expected.keys() == {"linear.weight", "linear.bias"}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


@skippable(stash=["s"])
class Stash(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        yield stash("s", y)
        return y


@skippable(pop=["s"])
class Pop(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x + (yield pop("s"))


def test_a_change_in_place_of_what_is_stashed_too_is_refused() -> None:
    def build(changes: nn.Module) -> nn.Sequential:
        return nn.Sequential(Stash(), changes, Pop())

    x = torch.randn(6, 4)
    for module in (build(nn.ReLU(inplace=True)), on_many_devices(build(nn.ReLU(inplace=True)))):
        with pytest.raises(RuntimeError, match="one that is stashed or returned twice"):
            Pipe(module, 2, "never")(x)
    module = build(nn.ReLU())
    assert_transparent(module, Pipe(deepcopy(module), 2, "never"), x, bound=1e-6)
    # Undivided it is what the bare Sequential does.
    module = build(nn.ReLU(inplace=True))
    torch.testing.assert_close(Pipe(module, 1)(x), module(x))


def test_a_stage_elsewhere_that_draws_on_the_cpu_is_found_out() -> None:
    drawing = Drawing(torch.device("meta"))
    with drawing.noted():
        pass
    assert drawing.is_on_cpu is False
    drawing = Drawing(torch.device("meta"))
    with drawing.noted() as restore:
        drawn = torch.rand(3)
    assert drawing.is_on_cpu
    after = torch.get_rng_state()
    with restore():
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), after)


def test_pipelines_of_several_threads_draw_again_what_they_drew() -> None:
    wrong: list[int] = []

    def train() -> None:
        module = nn.Sequential(*(nn.Dropout(0.3) for _ in range(3)))
        pipe = Pipe(module, 4, "always")
        for i in range(10):
            x = torch.ones(40, 10, requires_grad=True)
            output = pipe(x)
            output.sum().backward()
            wrong.extend([i] * (not torch.equal(x.grad, output.detach())))

    threads = [Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


@pytest.mark.parametrize("in_partition", [False, True])
def test_a_module_that_takes_the_place_of_a_child_is_run(in_partition: bool) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 2)
    new = nn.Linear(4, 4)
    setattr(pipe.partitions[0] if in_partition else pipe, "0", new)
    x = torch.randn(6, 4)
    pipe.eval()
    torch.testing.assert_close(pipe(x), pipe[1](new(x)))
    assert pipe[0] is pipe.partitions[0][0] is new
    assert "0.weight" in pipe.state_dict()
    setattr(pipe, "1", nn.Linear(4, 2, device="meta"))
    with pytest.raises(ValueError, match="'1' was replaced by one on meta"):
        pipe(x)


def test_the_result_has_a_local_value_behind_hooks_too() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4)), 2)
    called: list[bool] = []
    pipe.register_full_backward_hook(lambda *_: called.append(True))
    pipe(torch.randn(4, 4)).local_value().sum().backward()
    assert called == [True]


def test_wrappers_find_the_tensors_of_a_tuple() -> None:
    output = Pipe(nn.Sequential(Twin()), 2)(torch.randn(4, 4))
    assert [type(leaf) for leaf in tree_leaves(output)] == [torch.Tensor, torch.Tensor]


def test_tensors_from_elsewhere_are_moved_too() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    values = depart((torch.ones(2, device="meta"), torch.ones(2)), cpu)
    assert [value.device for value in arrive(values, meta)] == [meta, meta]


def test_threads_have_the_default_device_of_the_caller() -> None:
    class Make(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            return x, torch.empty(1).device.type

    with torch.device("meta"):
        output = Pipe(on_many_devices(nn.Sequential(Make())), 1)(torch.ones(2, device="cpu"))
    assert output[1] == ["meta"]


def test_inputs_that_fall_into_other_shares_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"micro-batches of the same shares of the batch: 2\+2, 3\+2 rows"):
        Pipe(nn.Sequential(Sum()), 2)(torch.ones(4, 1), torch.ones(5, 1))

    class First(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            assert len(b) == 2 * len(a)
            return a

    assert len(Pipe(nn.Sequential(First()), 2)(torch.ones(4, 1), torch.ones(8, 1))) == 4


def test_parameters_on_several_devices_are_refused() -> None:
    linear = nn.Linear(1, 1)
    for module in (nn.Sequential(WithDevice(linear, "cpu:0"), WithDevice(linear, "cpu:1")),):
        with pytest.raises(ValueError, match="one belongs to '0' on cpu:0 and to '1' on cpu:1"):
            Pipe(module)


def test_deferred_batch_norms_in_nested_pipelines_are_refused() -> None:
    inner = Pipe(nn.Sequential(DeferredBatchNorm(4)), 2)
    with pytest.raises(ValueError, match="inside a pipeline"):
        Pipe(nn.Sequential(inner), 2)
    module = sequential(2)
    nested = nn.Sequential(Pipe(deepcopy(module), 2), nn.Identity())
    x = torch.randn(8, 8)
    torch.testing.assert_close(Pipe(nested, 2)(x), module(x))


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_needs_no_gradient_leaves_backwards_in_order(mode: str) -> None:
    found: list[int] = []

    class Note(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            if y.requires_grad:
                y.register_hook(lambda _: found.append(int(x[0, 0])))
            return y

    x = torch.arange(5.0)[:, None]
    Pipe(on_many_devices(nn.Sequential(Note(), nn.Identity())), 5, mode)(x).sum().backward()
    assert [i for n, i in enumerate(found) if i not in found[:n]] == [4, 3, 2, 1, 0]


def test_a_thread_that_cannot_begin_ends_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("planted")

    pipe = Pipe(on_many_devices(sequential(2)), 2)
    monkeypatch.setattr("hf_pipetransformer.pipe.workers._TorchState.enter", fail)
    with pytest.raises(MemoryError, match="planted"):
        pipe(torch.randn(4, 8))
    assert [each.name for each in enumerate_threads() if each.name.startswith("pipe-")] == []


def test_of_several_errors_in_one_clock_cycle_the_first_task_is_reported() -> None:
    failed = [Future(), Future(), Future()]
    for future, error in zip(failed, (None, KeyError("first"), ValueError("second")), strict=True):
        future.set_result(None) if error is None else future.set_exception(error)
    with pytest.raises(KeyError, match="first"):
        workers._raise_first(failed)
    assert failed == []
