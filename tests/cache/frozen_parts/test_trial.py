"""What of a model is frozen, what of it may be stored, and why the rest may not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_pipetransformer.cache.frozen_parts import trial
from hf_pipetransformer.cache.frozen_parts.part import Pick
from hf_pipetransformer.cache.frozen_parts.trial import Found, Trial, maximal_frozen


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are looked at however little of a forward these small ones take."""
    monkeypatch.setattr(trial, "WORTH", 0.0)


class Tower(nn.Module):
    """Features `(batch, tokens, 4)` and their mean, in other rows or kinds as a test asks."""

    def __init__(self, change: Callable[[torch.Tensor], Any] = lambda hidden: hidden) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.change = change

    def forward(self, pixels: torch.Tensor) -> Any:
        hidden = self.change(self.layer(pixels))
        pooled = hidden.mean(1) if isinstance(hidden, torch.Tensor) and hidden.dim() > 2 else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


class Model(nn.Module):
    def __init__(self, tower: nn.Module, read: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.tower, self.read, self.head = tower, read, nn.Linear(4, 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.tower(pixels)))


def found_in(model: nn.Module, may_evaluate: bool = False) -> list[Found]:
    pixels = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))

    def run() -> tuple[torch.Tensor, Any]:
        torch.manual_seed(0)
        output = model(pixels)
        return output.square().mean(), output

    return Trial(model.train(), run, [pixels], "fp32", may_evaluate).find()


def pooled(output: Any) -> torch.Tensor:
    return output.pooler_output


def test_the_largest_modules_without_trained_parameters_are_frozen() -> None:
    model = Model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), lambda hidden: hidden)
    assert maximal_frozen(model) == {}
    model.tower.requires_grad_(False)
    assert list(maximal_frozen(model)) == ["tower"]
    model.tower[2].bias.requires_grad_(True)
    assert list(maximal_frozen(model)) == ["tower.0"]
    model.tower = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).requires_grad_(False)
    assert list(maximal_frozen(model)) == ["tower.0", "tower.1"], "nobody calls a list"


@pytest.mark.parametrize(
    ("read", "picks"),
    [
        (pooled, (Pick(1),)),
        (lambda output: output.last_hidden_state, (Pick(0),)),
        (lambda output: output.last_hidden_state[:, 0], (Pick(0, is_first=True),)),
        (lambda output: output.last_hidden_state[:, 1], (Pick(0),)),
        (lambda output: output[0][:, 0] + output[1], (Pick(0, is_first=True), Pick(1))),
    ],
)
def test_a_record_has_what_is_read(read: Callable[[Any], torch.Tensor], picks: tuple[Pick, ...]) -> None:
    (found,) = found_in(Model(Tower(), read))
    assert found.why_not is None and found.part.name == "tower" and found.rows == 3
    assert found.part.reading.picks == picks


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda hidden: nn.functional.dropout(hidden, 0.5), "draws random numbers (dropout)"),
        (lambda hidden: hidden - hidden.mean(0), "depends on the other samples of its batch"),
        (lambda hidden: hidden.flatten(0, 1)[:, None], "gives outputs of shape (15, 1, 4), (15, 4) for 3 rows"),
        (lambda hidden: hidden.to(torch.complex64), "expected one kind of floating point numbers"),
    ],
)
def test_what_may_not_be_stored_is_said(change: Callable[[torch.Tensor], Any], reason: str) -> None:
    (found,) = found_in(Model(Tower(change), lambda output: output.last_hidden_state.real.reshape(3, 5, 4)))
    assert found.why_not is not None and reason in found.why_not


@pytest.mark.parametrize(
    ("change", "draws"),
    [
        (lambda hidden: hidden if torch.rand([]) < 0 else hidden, True),
        (lambda hidden: hidden * (torch.rand(()) >= 0), True),
        (lambda hidden: hidden * (torch.rand(()) > 1e-9), None),
        (lambda hidden: hidden * (torch.rand(()) < 0.999999), None),
        (lambda hidden: hidden + 0 * torch.rand(2).sum(), None),
        (lambda hidden: hidden + 0 * random.random(), None),
    ],
)
def test_draws_without_effect_can_be_made_up_for(change: Callable[[torch.Tensor], Any], draws: bool | None) -> None:
    """As those of layers that are skipped with probability 0; one of 1e-9 shows with the least number there is."""
    (found,) = found_in(Model(Tower(change), pooled))
    if draws is None:
        assert found.why_not == "draws random numbers (dropout)"
    else:
        assert found.why_not is None and found.part.draws is draws


@pytest.mark.parametrize("length", [4, 5])
def test_padding_is_cut_only_where_some_was_seen(length: int) -> None:
    """A mean over all positions reads padding: where the tried rows have none, records keep all of a row."""

    class OfTokens(Tower):
        def forward(self, pixels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return BaseModelOutputWithPooling(last_hidden_state=self.layer(pixels))

    class Reads(Model):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            mask = (torch.arange(5) < torch.tensor([5, 5, length])[:, None]).long()
            return self.head(self.tower(pixels, attention_mask=mask).last_hidden_state.mean(1))

    (found,) = found_in(Reads(OfTokens(), pooled))
    assert found.why_not is None and not found.part.reading.cuts_padding


@pytest.mark.parametrize("reads_both", [False, True])
def test_several_outputs_of_padded_rows_are_stored_with_their_padding(reads_both: bool) -> None:
    """A record of several outputs is one line, as long as the batch was padded."""

    class Both(Tower):
        def forward(self, pixels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            hidden = self.layer(pixels) * attention_mask[:, :, None]
            return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.sum(1))

    class Reads(Model):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            mask = (torch.arange(5) < torch.tensor([5, 5, 4])[:, None]).long()
            output = self.tower(pixels, attention_mask=mask)
            hidden = (output.last_hidden_state * mask[:, :, None]).sum(1)
            return self.head(hidden + output.pooler_output if reads_both else hidden)

    (found,) = found_in(Reads(Both(), pooled))
    assert found.why_not is None and found.part.reading.cuts_padding is not reads_both


def test_inputs_that_are_handed_on_are_not_stored() -> None:
    """As the modules of sentence-transformers do, which write into one dict, and so does one behind the part."""

    class Features(Tower):
        def forward(self, features: dict[str, Any]) -> Any:
            features["hidden"] = self.layer(features["pixels"])
            return features

    class Reads(Model):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            features = self.tower({"pixels": pixels, "weights": torch.tensor([1, 2, 3])})
            features["found"] = self.head(features["hidden"].mean(1)) * features["weights"][:, None]
            return features["found"]

    (found,) = found_in(Reads(Features(), pooled))
    assert found.why_not is None and found.part.reading.is_whole
    assert found.part.reading.picks == (Pick(2),) and dict(found.part.reading.handed_on) == {0: 0, 1: 1}


def test_what_the_loss_does_not_read_is_not_stored() -> None:
    (found,) = found_in(Model(Tower(), lambda output: torch.ones_like(output.pooler_output)))
    assert found.why_not == "gives nothing that the loss depends on"


def test_what_reads_past_the_outputs_is_found() -> None:
    """The model reads a value that the tower has left on itself."""

    class Leaves(Tower):
        def forward(self, pixels: torch.Tensor) -> Any:
            self.left = [self.layer(pixels).mean(1), *getattr(self, "left", [])][:1]
            return super().forward(pixels)

    def read(output: Any) -> torch.Tensor:
        return output.pooler_output + tower.left.pop()

    tower = Leaves()
    (found,) = found_in(Model(tower, read))
    assert found.why_not is not None and found.why_not.startswith("raises IndexError")


def test_dropout_may_be_left_out_where_asked() -> None:
    class Drops(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, pixels: torch.Tensor) -> Any:
            return super().forward(self.drop(pixels))

    (found,) = found_in(Model(Drops(), pooled))
    assert found.has_dropout and found.why_not == "draws random numbers (dropout)"
    model = Model(Drops(), pooled)
    (found,) = found_in(model, may_evaluate=True)
    assert found.why_not is None and found.part.in_evaluation and model.tower.drop.training


class InnerModel(Model):
    """The tower runs without gradients on the samples, or on what is trained."""

    def __init__(self, is_first: bool) -> None:
        super().__init__(Tower(), pooled)
        self.is_first, self.before = is_first, nn.Linear(4, 4)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        trained = self.before(pixels)
        with torch.no_grad():
            output = self.tower(pixels if self.is_first else trained)
        return self.head(pooled(output)) + trained.mean()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_without_gradients_is_looked_up_only_on_samples_themselves(is_first: bool) -> None:
    assert [found.part.name for found in found_in(InnerModel(is_first))] == (["tower"] if is_first else [])


def test_a_part_that_computes_with_what_is_trained_elsewhere_is_found() -> None:
    model = Model(Tower(), pooled)
    model.tower.change = lambda hidden: hidden * model.head.weight
    (found,) = found_in(model)
    assert found.why_not == "computes with parameters that are trained elsewhere"


def test_activations_that_ask_for_gradients_are_no_trained_parameters() -> None:
    """As `enable_input_require_grads` lets them."""
    model = Model(Tower(lambda hidden: hidden.requires_grad_()), pooled)
    (found,) = found_in(model)
    assert found.why_not is None


def test_a_part_that_fails_on_some_rows_is_left_alone() -> None:
    class OfThree(Tower):
        def forward(self, pixels: torch.Tensor) -> Any:
            return super().forward(pixels + torch.zeros(3, 1, 1))

    (found,) = found_in(Model(OfThree(), pooled))
    assert found.why_not is not None


def test_a_copy_of_the_model_computes_by_itself() -> None:
    model = Model(Tower(), pooled)
    (found,) = found_in(model)
    model.tower.forward = found.part
    copied = copy.deepcopy(model)
    assert copied.tower.forward.__self__ is copied.tower
    pixels = torch.randn(2, 5, 4)
    torch.testing.assert_close(copied(pixels), model(pixels))


def test_a_tower_is_not_looked_up_above_another() -> None:
    """The second gets what the first gives, and would be skipped with it."""
    model = Model(nn.Sequential(Tower(), Tower()), pooled)
    model.tower = nn.ModuleDict({"one": Tower(), "other": nn.Linear(4, 4).requires_grad_(False)})
    model.tower["head"] = nn.Linear(4, 4)

    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model.tower

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.parts["head"](self.parts["other"](self.parts["one"](pixels).last_hidden_state))

    assert [found.part.name for found in found_in(Chained())] == ["parts.one"]


def test_of_a_tower_and_what_alone_reads_it_the_smaller_output_is_stored() -> None:
    class Scaled(nn.Linear):
        def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(hidden) * scale

    class Connected(nn.Module):
        """A tower with a frozen connector to fewer values, and a trained head; `shows` reads the tower besides."""

        def __init__(self, shows: bool = False) -> None:
            super().__init__()
            self.tower, self.connector = Tower(), Scaled(4, 2).requires_grad_(False)
            self.head, self.shows = nn.Linear(2, 4), shows

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            hidden = self.tower(pixels).last_hidden_state
            return self.head(self.connector(hidden)) + (hidden.mean() if self.shows else 0)

    (found,) = found_in(Connected())
    assert found.why_not is None and found.part.name == "tower with connector"
    # Whoever reads the tower besides gets what shows in the loss.
    assert found.part.unread and all(each.isnan().all() for each in found.part.unread)
    (found,) = found_in(Connected(shows=True))
    assert found.why_not is None and found.part.name == "tower"
    # With another option than in the trial the second computes, here nan from nan.
    part: Any = found_in(Connected())[0].part
    for options, is_known in (({}, True), ({"scale": 2.0}, False)):
        part._waiting = "what a record has"
        given = part.follow([part.unread[-1]], options)
        assert given == "what a record has" if is_known else given.isnan().all()
    (found,) = found_in(model := Connected())
    found.part.begin()
    copied = copy.deepcopy(model)
    pixels = torch.randn(2, 5, 4)
    torch.testing.assert_close(copied(pixels), model(pixels))
    found.part.end()
    assert "forward" not in vars(model.tower) and "forward" not in vars(model.connector)
