"""Embeddings are predicted by rows: a forward reads what it would with all of them predicted, and nothing stays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from hf_pipetransformer.engine.weights.rates import coming_rates
from hf_pipetransformer.engine.weights.rows import find_embeddings
from hf_pipetransformer.engine.weights.stage import StageWeights
from hf_pipetransformer.schedules.weight_kinds import find_weights
from tests.support.async_driver import bytes_held


OPTIMIZERS = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "last update": partial(SGD, lr=0.1),
    "rmsprop": partial(RMSprop, lr=0.1),
    "adam, maximized": partial(Adam, lr=0.1, maximize=True),
    "adamw": partial(AdamW, lr=0.1, weight_decay=0.3),
    "adamw, fused": partial(AdamW, lr=0.1, weight_decay=0.3, fused=True),
    "adamw, amsgrad": partial(AdamW, lr=0.1, amsgrad=True),
}
IDS = torch.tensor([[3, 5, 3, 0], [10, 3, 5, 1]])
MORE_IDS = torch.tensor([[5, 6, 5, 0]])


class Model(nn.Module):
    """Two embeddings, one of them called twice, and a product.

    Args:
        width: an odd one too, whose rows end amid what a processor computes at once.
    """

    def __init__(self, width: int = 35) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width, padding_idx=0)
        self.kinds = nn.Embedding(2, width)
        self.linear = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, ...]:
        words, more, kinds = self.words(ids), self.words(input=MORE_IDS), self.kinds(ids % 2)
        return words, more, kinds, self.linear(words + kinds).mean() + more.tanh().mean()


class Staged:
    """A model in a window, updated a few times; in one with `modules` its embeddings are predicted by rows."""

    def __init__(self, make_optimizer, kind="pipeoptim", by_rows=True, model=None) -> None:
        torch.manual_seed(0)
        self.model = model or Model()
        self.optimizer = make_optimizer(self.model.parameters())
        rates, modules = coming_rates(None, self.optimizer), self.model.modules() if by_rows else ()
        # Stage 2 of 4: passes of other kinds see predicted weights in the backward too.
        self.weights = StageWeights(find_weights(kind), 2, 4, self.optimizer, rates, modules=modules)
        self.micro_batch = 0
        for _ in range(3):
            self.update()

    def update(self) -> None:
        with self.weights.forward(self.micro_batch, self.micro_batch):
            loss = self.model()[-1]
        with self.weights.backward(self.micro_batch, self.micro_batch):
            loss.square().backward()
        self.weights.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.weights.after_update()
        self.micro_batch += 1

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def weights_of_embeddings(self) -> list[torch.Tensor]:
        return [self.model.words.weight, self.model.kinds.weight]


@pytest.mark.parametrize("kind", ["pipeoptim", "xpipe"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_forward_reads_the_bits_that_it_would_with_all_rows_predicted(kind, optimizer):
    by_rows, whole = (Staged(OPTIMIZERS[optimizer], kind, rows) for rows in (True, False))
    current = by_rows.values()
    assert all(map(torch.equal, current, whole.values()))
    with whole.weights.forward(4, 4), by_rows.weights.forward(4, 4):
        found, expected = by_rows.model(), whole.model()
        assert all((f - e).abs().max().item() == 0.0 for f, e in zip(found, expected, strict=True))
        assert not torch.equal(found[0], embedding(IDS, current[0]))
        assert all(value.isfinite().all() for value in found)
        assert all(map(torch.equal, by_rows.weights_of_embeddings(), current))
    assert all(map(torch.equal, by_rows.values(), current))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in by_rows.model.modules())


def test_a_forward_that_is_run_again_in_a_backward_reads_predicted_rows():
    by_rows, whole = (Staged(OPTIMIZERS["adamw"], "spectrain", rows) for rows in (True, False))
    seen = []
    for staged in (by_rows, whole):
        with staged.weights.forward(3, 3):
            pass
        with staged.weights.backward(3, 3):
            seen.append(staged.model())
    assert all(map(torch.equal, *seen))
    assert not torch.equal(seen[0][0], by_rows.model()[0])


def test_rows_come_back_after_a_fault():
    staged = Staged(OPTIMIZERS["adamw"])
    current = staged.values()

    def faulty_forward() -> None:
        with staged.weights.forward(4, 4):
            staged.model.linear.forward = None  # The fault comes after the embeddings.
            staged.model(torch.tensor([1]))

    with pytest.raises(TypeError):
        faulty_forward()
    with pytest.raises(IndexError), staged.weights.forward(5, 5):
        staged.model.words(torch.tensor([11]))
    assert all(map(torch.equal, staged.values(), current))


def test_an_embedding_that_is_never_called_is_predicted_whole():
    """Its weight is read in another way, as DeBERTa's relative positions."""

    class Reads(Model):
        def forward(self):
            return (
                self.words(IDS),
                self.kinds.weight * 1,
                self.linear(self.words(IDS)).mean() + self.kinds.weight.mean(),
            )

    by_rows, whole = (Staged(OPTIMIZERS["adamw"], by_rows=rows, model=Reads()) for rows in (True, False))
    whole.model.load_state_dict(by_rows.model.state_dict())
    whole.optimizer.load_state_dict(by_rows.optimizer.state_dict())
    with whole.weights.forward(4, 4), by_rows.weights.forward(4, 4):
        assert all(map(torch.equal, by_rows.model(), whole.model()))
        assert torch.equal(by_rows.model.kinds.weight, whole.model.kinds.weight)
        assert not torch.equal(by_rows.model.words.weight, whole.model.words.weight)


def test_embeddings_are_not_copied_nor_sampled():
    staged = Staged(OPTIMIZERS["adamw"])
    with staged.weights.forward(4, 4):
        assert bytes_held(staged.weights) == 4 * (35 * 35 + 35)
    assert len(staged.weights._meter.sample()) == 35 * 35 + 35


def test_a_stage_of_nothing_but_embeddings_is_predicted():
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 32)

        def forward(self):
            return self.words(IDS), self.words(IDS).mean()

    staged = Staged(OPTIMIZERS["adamw"], model=Words())
    current = staged.values()
    with staged.weights.forward(4, 4):
        assert not torch.equal(staged.model()[0], embedding(IDS, current[0]))
    assert torch.equal(staged.values()[0], current[0])
    assert staged.weights.take_errors() is None


def test_only_what_plain_embeddings_alone_hold_is_taken():
    class Scaled(nn.Embedding):
        def forward(self, input):
            return super().forward(input) * self.weight.mean()

    model = nn.ModuleDict({name: nn.Embedding(5, 4) for name in ("plain", "shared", "also", "tied", "own", "frozen")})
    model["also"].weight = model["shared"].weight
    model["head"] = nn.Linear(4, 5)
    model["head"].weight = model["tied"].weight
    model["own"].forward = lambda ids: model["own"].weight[ids]
    model["frozen"].requires_grad_(False)
    model["derived"] = Scaled(5, 4)
    model["bounded"] = nn.Embedding(5, 4, max_norm=1.0)
    model["sparse"] = nn.Embedding(5, 4, sparse=True)
    model["untrained"] = nn.Embedding(5, 4)
    parameters = [p for p in model.parameters() if p is not model["untrained"].weight]
    found = set(find_embeddings(model.modules(), parameters).values())
    assert found == {(model["plain"],), (model["shared"], model["also"])}
    assert find_embeddings((), parameters) == {}


class Operations(TorchDispatchMode):
    """Notes what a device would be asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_a_device_is_not_waited_for():
    staged = Staged(OPTIMIZERS["momentum"])
    with staged.weights.forward(4, 4), Operations() as operations:
        staged.model.words(IDS)
    assert {"embedding", "index_copy_"} <= operations.names
    assert not {"_local_scalar_dense", "nonzero", "unique_dim", "_unique2", "is_nonzero"} & operations.names
