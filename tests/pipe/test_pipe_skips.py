"""Skip connections of `hf_pipetransformer.pipe`: modules that stash and pop, outside of a pipeline and in pieces."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from hf_pipetransformer.pipe.balance import partition_model
from hf_pipetransformer.pipe.skip import (
    Namespace,
    SkipExchange,
    current_exchange,
    exchanging,
    find_routes,
    pop,
    skippable,
    stash,
    verify_skippables,
)


@pytest.fixture(autouse=True)
def exchange():
    with exchanging(SkipExchange()) as here:
        yield here


@skippable(stash=["foo"])
class Stash(nn.Module):
    """Stashes what it gets."""

    def __init__(self, factor: float = 2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(factor))

    def forward(self, value):
        yield stash("foo", value)
        return value * self.weight


@skippable(pop=["foo"])
class Pop(nn.Module):
    def forward(self, value):
        return value + (yield pop("foo"))


@skippable(stash=["bar"], pop=["foo"])
class PopFooStashBar(nn.Module):
    def forward(self, value):
        foo = yield pop("foo")
        yield stash("bar", value)
        return value - foo


@skippable(pop=["bar"])
class PopBar(nn.Module):
    def forward(self, value):
        return value * (yield pop("bar"))


@skippable(stash=["foo"], pop=["foo"])
class StashAndPop(nn.Module):
    def forward(self, value):
        yield stash("foo", value)
        return (yield pop("foo"))


class Around(nn.Module):
    """No Sequential: nobody knows in which order it runs those inside."""

    def __init__(self, *inner: nn.Module):
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, value):
        for module in reversed(self.inner):
            value = module(value)
        return value


def one_module(body, stash=(), pop=()):
    """An instance of a skippable class whose forward is `body`."""
    return skippable(stash=stash, pop=pop)(type("Layer", (nn.Module,), {"forward": body}))()


def chain(**names):
    def forward(self, value):
        for name in sorted(self.poppable_names):
            yield pop(name)
        for name in sorted(self.stashable_names):
            yield stash(name, value)
        return value

    return one_module(forward, **names)


# Bare models.


def test_a_model_with_skips_runs_without_a_pipeline(exchange):
    value = torch.tensor(3.0, requires_grad=True)
    output = nn.Sequential(Stash(), nn.Identity(), PopFooStashBar(), PopBar())(value)
    assert output.item() == 3 * 6
    output.backward()
    assert value.grad.item() == 12  # (2x - x) * 2x
    assert exchange.left == {}


def test_nothing_is_kept_when_it_has_been_popped():
    left = []

    def run():
        nn.Sequential(Stash(), Pop())(torch.ones(2))
        left.append(current_exchange().left)

    thread = threading.Thread(target=run)  # Outside of the exchange of these tests.
    thread.start()
    thread.join()
    assert left == [{}]


def test_a_forward_that_failed_does_not_disturb_the_next():
    fails = [True]

    class MayFail(nn.Module):
        def forward(self, value):
            if fails.pop():
                raise ValueError("planted")
            return value

    model = nn.Sequential(Stash(), MayFail(), Pop())
    with pytest.raises(ValueError, match="planted"):
        model(torch.tensor(1.0))
    fails.append(False)
    assert model(torch.tensor(5.0)).item() == 15


def test_threads_do_not_meet():
    model, barrier, found = nn.Sequential(Stash(), Pop()), threading.Barrier(2, timeout=20), {}
    model.insert(1, Waiting(barrier))

    def run(number):
        found[number] = model(torch.tensor(float(number))).item()

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 3.0, 2: 6.0}


class Waiting(nn.Module):
    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def forward(self, value):
        self.barrier.wait()
        return value


def test_none_can_be_stashed():
    def stash_none(self, value):
        yield stash("foo", None)
        return value

    def expect_none(self, value):
        assert (yield pop("foo")) is None
        return value

    model = nn.Sequential(one_module(stash_none, stash=["foo"]), one_module(expect_none, pop=["foo"]))
    assert model(torch.tensor(4)).item() == 4


def test_a_forward_without_declarations_need_not_be_a_generator():
    assert one_module(lambda self, value: value + 1)(torch.tensor(1)).item() == 2


# What a forward does wrong.


def just_return(self, value):
    return value


def stash_foo(self, value):
    yield stash("foo", value)
    return value


def pop_foo(self, value):
    return (yield pop("foo"))


@pytest.mark.parametrize(
    ("body", "names", "error", "message"),
    [
        (just_return, {"stash": ["foo"]}, RuntimeError, "did not stash 'foo'"),
        (just_return, {"pop": ["foo"]}, RuntimeError, "did not pop 'foo'"),
        (stash_foo, {"stash": ["foo", "bar"]}, RuntimeError, "did not stash 'bar'"),
        (stash_foo, {}, RuntimeError, r"stash\('foo'\), but the class declares nothing"),
        (stash_foo, {"pop": ["foo"]}, RuntimeError, "declares nothing for stash"),
        (pop_foo, {"pop": ["bar"]}, RuntimeError, r"pop\('foo'\), but the class declares 'bar'"),
        (pop_foo, {"pop": ["foo"]}, RuntimeError, "No skip tensor 'foo' is stashed; stashed are: none"),
    ],
)
def test_a_forward_that_breaks_its_declaration(body, names, error, message):
    with pytest.raises(error, match=message):
        one_module(body, **names)(torch.tensor(42))


@pytest.mark.parametrize(
    ("command", "message"),
    [("foo", "yielded an object of str"), (stash("foo", 1), "stashed an object of int as 'foo'")],
)
def test_a_command_of_another_type(command, message):
    def forward(self, value):
        yield command
        return value

    with pytest.raises(TypeError, match=message) as caught:
        one_module(forward, stash=["foo"])(torch.tensor(1))
    # The traceback ends in the forward, where the mistake is.
    assert caught.traceback[-1].name == "answer" and "forward" in [entry.name for entry in caught.traceback]


def test_a_pop_names_what_is_there():
    key, exchange = (Namespace(), "foo"), SkipExchange({(None, "bar"): None})
    exchange.stash((None, "baz"), None)
    with pytest.raises(RuntimeError, match=r"No skip tensor 'foo' is stashed in Namespace.*stashed are: 'bar', 'baz'"):
        exchange.pop(key)


# The class that the decorator makes.


def test_the_class_looks_like_the_users():
    assert (Stash.__name__, Stash.__qualname__, Stash.__module__) == ("Stash", "Stash", __name__)
    assert Stash.__doc__ == "Stashes what it gets."
    assert [name for name, _ in Stash().named_parameters()] == ["weight"]


def test_repr():
    @skippable(stash=["hello"])
    class Hello(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

    assert repr(Hello()) == "@skippable(Hello(\n  (conv): Conv2d(1, 1, kernel_size=(1, 1), stride=(1, 1))\n))"


def test_state_dicts_of_wrapped_modules_are_loaded():
    """Those of torchgpipe and of torch.distributed.pipeline."""
    model = nn.Sequential(Stash(), nn.Linear(1, 1), Pop())
    state = {"0.module.weight": torch.tensor(7.0), **{k: v for k, v in model.state_dict().items() if k[0] == "1"}}
    model.load_state_dict(state)
    assert model[0].weight.item() == 7
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    assert "0.module.weight" in state
    copy.deepcopy(model).load_state_dict(state)


@pytest.mark.parametrize("old", [False, True])
def test_a_child_that_is_called_module(old):
    @skippable()
    class WithModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

    model = WithModule()
    names = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    model.load_state_dict({f"module.{name}" if old else name: value for name, value in names.items()})
    assert model.module.bias.item() == 3


def test_nested_skippable_modules_of_an_old_state_dict():
    @skippable()
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stash()

    model = Outer()
    model.load_state_dict({"module.inner.module.weight": torch.tensor(9.0)})
    assert model.inner.weight.item() == 9


def test_hooks_see_what_the_forward_returns():
    layer, seen = Stash(), []
    layer.register_forward_hook(lambda _module, args, output: seen.append((args[0].item(), output.item())))
    layer(torch.tensor(2.0))
    assert seen == [(2.0, 4.0)]


def test_a_copy_is_isolated_as_the_original_is():
    namespace = Namespace()
    layer = Stash().isolate(namespace)
    assert list(copy.deepcopy(layer).stashable()) == list(layer.stashable()) == [(namespace, "foo")]


def test_training_mode_reaches_inside():
    assert not Stash().eval().training and Stash().train().training


def test_a_subclass_inherits_the_forward():
    class Tripled(Stash):
        def __init__(self):
            super().__init__(3.0)

    assert nn.Sequential(Tripled(), Pop())(torch.tensor(1.0)).item() == 4


def test_a_subclass_may_wrap_the_forward():
    class Negated(Stash):
        def forward(self, value):
            return -super().forward(value)

    assert nn.Sequential(Negated(), Pop())(torch.tensor(1.0)).item() == -1


def test_a_subclass_with_commands_of_its_own():
    class Other(Stash):
        def forward(self, value):
            yield stash("foo", value * 10)
            return value

    assert nn.Sequential(Other(), Pop())(torch.tensor(1.0)).item() == 11


def test_a_subclass_that_is_decorated_again_declares_all_it_uses():
    @skippable(stash=["foo", "bar"])
    class Both(Stash):
        def forward(self, value):
            yield stash("bar", value * 5)
            return super().forward(value)

    assert nn.Sequential(Both(), Pop(), PopBar())(torch.tensor(1.0)).item() == (2 + 1) * 5
    assert repr(Both()) == "@skippable(Both())"

    @skippable(stash=["foo", "bar", "baz"])
    class NotAll(Both):
        pass

    with pytest.raises(RuntimeError, match="but its forward did not stash 'baz'"):
        NotAll()(torch.tensor(1.0))


def test_a_skippable_module_inside_another():
    @skippable(pop=["foo"], stash=["bar"])
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = PopFooStashBar()

        def forward(self, value):
            yield stash("bar", self.inner(value))
            return value + (yield pop("foo"))

    outer = Outer()
    outer.inner.isolate(Namespace(), only="bar").isolate(Namespace(), only=["foo"])
    with pytest.raises(RuntimeError, match="in Namespace"):
        nn.Sequential(Stash(), outer)(torch.tensor(1.0))


# Namespaces.


def test_namespaces_are_values():
    namespace, other = Namespace(), Namespace()
    assert namespace != other and len({namespace, other, copy.copy(namespace)}) == 2
    for same in (copy.copy(namespace), copy.deepcopy(namespace)):
        assert same == namespace and same is not namespace


def test_isolated_modules_meet_only_their_own():
    first, second = Namespace(), Namespace()
    model = nn.Sequential(
        Stash(2.0).isolate(first), Stash(3.0).isolate(second), Pop().isolate(first), Pop().isolate(copy.copy(second))
    )
    verify_skippables(model)
    assert model(torch.tensor(1.0)).item() == 6 + 1 + 2


def test_some_names_are_isolated():
    first, second = Namespace(), Namespace()
    layer = PopFooStashBar()
    assert layer.isolate(first, only="foo") is layer
    assert (*layer.poppable(), *layer.stashable()) == ((first, "foo"), (None, "bar"))
    layer.isolate(second, only=["bar"])
    assert (*layer.poppable(), *layer.stashable()) == ((first, "foo"), (second, "bar"))
    layer.isolate(second)
    assert (*layer.poppable(), *layer.stashable()) == ((second, "foo"), (second, "bar"))
    with pytest.raises(ValueError, match="cannot isolate 'baz': expected some of .* 'bar', 'foo'"):
        layer.isolate(first, only=["baz", "foo"])


# Checking a model.


@pytest.mark.parametrize(
    ("layers", "problems"),
    [
        ([{"stash": "foo"}], ["no module declared 'foo' as poppable but stashed"]),
        ([{"pop": "foo"}], ["'0' declared 'foo' as poppable but it was not stashed"]),
        ([{"stash": "foo"}, {"stash": "foo"}, {"pop": "foo"}], ["'1' redeclared 'foo' as stashable"]),
        ([{"stash": "foo"}, {"pop": "foo"}, {"pop": "foo"}], ["'2' redeclared 'foo' as poppable"]),
        ([{"stash": "foo", "pop": "foo"}], ["'0' declared 'foo' both as stashable and as poppable"]),
        ([{"pop": "foo"}, {"stash": "foo"}], ["'0' declared 'foo' as poppable but it was not stashed"]),
        (
            [{"stash": "foo"}, {"pop": "foo"}, {"stash": "foo"}, {"pop": "foo"}],
            ["'2' redeclared 'foo' as stashable", "'3' redeclared 'foo' as poppable"],
        ),
        (
            [{"stash": "foo"}, {"pop": "bar"}],
            ["'1' declared 'bar' as poppable but it was not stashed", "no module declared 'foo' as poppable"],
        ),
    ],
)
def test_what_does_not_match_is_listed(layers, problems):
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*(chain(**names) for names in layers)))
    assert "Skip connections do not match. Expected one module that stashes each name" in str(caught.value)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  * ")]
    assert len(lines) == len(problems)
    for line, problem in zip(lines, problems, strict=True):
        assert problem in line


def test_models_that_match():
    verify_skippables(nn.Sequential(Stash(), nn.Identity(), PopFooStashBar(), PopBar()))
    verify_skippables(nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.Sequential(Pop()))))
    # The order inside is not that of the names.
    verify_skippables(nn.Sequential(Around(Pop(), Stash())))


def test_modules_inside_modules_are_named():
    with pytest.raises(TypeError, match=r"'0\.1' declared 'foo' as poppable but it was not stashed"):
        verify_skippables(nn.Sequential(nn.Sequential(nn.Identity(), Pop()), Around(Stash())))


def test_the_order_in_a_stage_is_known():
    with pytest.raises(TypeError, match=r"'0\.0' declared 'foo' as poppable but it was not stashed"):
        verify_skippables(partition_model(nn.Sequential(Pop(), Stash(), nn.Identity()), [2, 1], ["cpu"] * 2))


def test_a_module_at_two_places_counts_twice():
    last = Pop()
    with pytest.raises(TypeError, match="'2' redeclared 'foo' as poppable"):
        verify_skippables(nn.Sequential(Stash(), last, last))


def test_routes():
    namespace = Namespace()
    stages = [
        nn.Sequential(Stash(), Stash().isolate(namespace)),
        nn.Sequential(nn.Sequential(PopFooStashBar())),
        nn.Sequential(Around(Pop().isolate(namespace)), PopBar()),
    ]
    assert find_routes(stages) == {(None, "foo"): (0, 1), (namespace, "foo"): (0, 2), (None, "bar"): (1, 2)}


# Pieces of a model, as the pipeline runs them.


def test_what_a_piece_leaves_goes_to_another():
    first, second = nn.Sequential(Stash(), PopFooStashBar()), nn.Sequential(PopBar())
    with exchanging(SkipExchange()) as exchange:
        value = first(torch.tensor(3.0))
    assert list(exchange.left) == [(None, "bar")]
    received = dict(exchange.left)
    for _ in range(2):  # The second time for recomputation.
        with exchanging(SkipExchange(received)) as after:
            assert second(value).item() == 18
        assert after.left == {} and list(received) == [(None, "bar")]


def test_exchanges_nest():
    outer = current_exchange()
    with exchanging(SkipExchange()) as inner:
        assert current_exchange() is inner
    assert current_exchange() is outer


def test_an_error_leaves_the_exchange():
    outer = current_exchange()
    with pytest.raises(RuntimeError), exchanging(SkipExchange()):
        Pop()(torch.tensor(1))
    assert current_exchange() is outer
