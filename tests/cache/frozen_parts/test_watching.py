"""What of a model is frozen, what of it may be stored, and why the rest may not: seen in a step that runs anyway."""

from __future__ import annotations

import copy
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_pipetransformer.cache.frozen_parts import watching
from hf_pipetransformer.cache.frozen_parts.call import Deferred
from hf_pipetransformer.cache.frozen_parts.contents import Pick
from hf_pipetransformer.cache.frozen_parts.part import PresentStep
from hf_pipetransformer.cache.frozen_parts.state import ModuleState, _code_text
from hf_pipetransformer.cache.frozen_parts.watching import Plan, Watch
from hf_pipetransformer.splitters.base import maximal_frozen


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are looked at however little of a forward these small ones take, and tried as those of packages are."""
    monkeypatch.setattr(watching, "WORTH", 0.0)
    monkeypatch.setattr(ModuleState, "is_of_script", False)
    monkeypatch.setattr(watching, "is_script_free", lambda _: True)


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

    def forward(self, pixels: torch.Tensor, **_: Any) -> Any:
        return {"loss": self.head(self.read(self.tower(pixels))).square().mean()}


class OfTokens(Tower):
    """Zero where the mask shows padding."""

    def forward(self, pixels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = self.layer(pixels) * attention_mask[:, :, None]
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.sum(1))


class Texts(Model):
    def forward(self, pixels: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
        output = self.tower(pixels, attention_mask=attention_mask)
        assert attention_mask is not None
        hidden = self.read((output, attention_mask))
        return {"loss": self.head(hidden).square().mean()}


def watch_of(
    model: nn.Module, may_evaluate: bool = False, length: int = 5, number: int = 3
) -> tuple[Watch, torch.Tensor]:
    """A watch that has seen a step of the model, and the loss of the step."""
    pixels = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.tensor([5, 5, length])[:, None]).long()
    batch = {"pixels": pixels, "attention_mask": mask, "input_ids": torch.zeros(3, 5, dtype=torch.long)}
    batch = {name: value[:number] for name, value in batch.items()}
    step = PresentStep(model.train(), torch.device("cpu"))
    watch = Watch(model, maximal_frozen(model), model, step, "fp32", may_evaluate, reads_loss_alone=True)
    step.begin(batch)
    torch.manual_seed(0)
    watch.begin_step()
    watch.enter_root((), batch)
    with watching.ExitStack() as stack:
        for part in watch.parts:
            stack.enter_context(part.standing_in())
        loss = model(**batch)["loss"]
    watch.leave_root()
    watch.end_step()
    return watch, loss


def found_in(model: nn.Module, may_evaluate: bool = False, length: int = 5, number: int = 3) -> list[Plan]:
    watch, _ = watch_of(model, may_evaluate, length, number)
    found = watch.find(set(watch.called))
    assert all("forward" not in vars(each) for each in model.modules())
    return found


def pooled(output: Any) -> torch.Tensor:
    return output.pooler_output


def test_the_largest_modules_without_trained_parameters_are_frozen() -> None:
    model = Model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), lambda hidden: hidden)
    assert maximal_frozen(model) == {}
    model.tower.requires_grad_(False)
    assert list(maximal_frozen(model)) == ["tower"]
    model.same = model.tower
    assert list(maximal_frozen(model)) == ["tower"], "one module, under its first name"
    del model.same
    model.tower[2].bias.requires_grad_(True)
    assert list(maximal_frozen(model)) == ["tower.0"]
    model.tower = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).requires_grad_(False)
    assert list(maximal_frozen(model)) == ["tower.0", "tower.1"], "nobody calls a list"


def test_modules_that_have_numbers_alone_are_told_by_their_classes() -> None:
    def names(model: nn.Module) -> list[str]:
        step = PresentStep(model, torch.device("cpu"))
        watch = Watch(model, maximal_frozen(model), model, step, "fp32", may_evaluate=False)
        return [each.name for each in watch.parts]

    model = nn.Sequential(Tower(), nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    assert names(model) == []
    model[2].bias.requires_grad_(True)
    assert names(nn.Sequential(model[0], model[2])) == ["Tower"]
    assert names(model) == ["Tower", "1 (Linear)"], "which of two"
    assert names(Model(model, lambda hidden: hidden)) == ["tower.0", "tower.1"], "a path says enough"
    within = nn.Sequential(Model(Tower().requires_grad_(False), lambda hidden: hidden))
    assert names(within) == ["Model.tower"]


@pytest.mark.parametrize(
    ("read", "picks"),
    [
        (pooled, (Pick(1),)),
        (lambda output: output.last_hidden_state, (Pick(0),)),
        (lambda output: output.last_hidden_state[:, 0], (Pick(0, is_first=True),)),
        (lambda output: output.last_hidden_state[:, 1], (Pick(0),)),
        (lambda output: output[0][:, 0] + output[1], (Pick(0, is_first=True), Pick(1))),
        (lambda output: output[0][:, 0] + output[0].mean(1), (Pick(0),)),
    ],
)
def test_a_record_has_what_is_read(read: Callable[[Any], torch.Tensor], picks: tuple[Pick, ...]) -> None:
    (found,) = found_in(Model(Tower(), read))
    assert found.why_not is None and found.form is not None and found.name == "tower" and found.form.num_rows == 3
    assert found.reading.picks == picks


def test_a_watched_step_computes_what_it_would_compute() -> None:
    torch.manual_seed(0)
    model = Model(Tower(lambda hidden: nn.functional.dropout(hidden, 0.5)), pooled)
    pixels = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    expected = model.train()(pixels)["loss"]
    after = torch.get_rng_state()
    _, loss = watch_of(model)
    assert torch.equal(loss, expected) and torch.equal(torch.get_rng_state(), after)
    (found,) = found_in(model)
    assert torch.equal(torch.get_rng_state(), after), "a part is tried without a trace in the generators"
    assert found.why_not == "draws random numbers (dropout)"


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


class Leaves(Tower):
    """Leaves something on itself, in its input or in a buffer."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.left = what, list[float]()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, pixels: torch.Tensor) -> Any:
        if self.what == "list":
            self.left.append(1.0)
        elif self.what == "input":
            pixels.add_(0)
        elif self.what == "buffer":
            self.count.add_(1)
        else:
            self.last = float(pixels.sum())
        return super().forward(pixels)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("list", "changes its own attributes"),
        ("attribute", "changes its own attributes"),
        ("input", "writes into its inputs"),
        ("buffer", "keeps statistics of its batches"),
    ],
)
def test_a_part_that_leaves_a_trace_is_not_called_again(what: str, reason: str) -> None:
    tower = Leaves(what)
    (found,) = found_in(Model(tower, pooled))
    assert found.why_not is not None and found.why_not.startswith(reason)
    assert len(tower.left) == (what == "list") and int(tower.count) == (what == "buffer")


def test_inputs_that_are_overwritten_later_keep_a_part_from_being_stored() -> None:
    class Overwrites(Model):
        def forward(self, pixels: torch.Tensor, **_: Any) -> Any:
            loss = super().forward(pixels)
            pixels.zero_()
            return loss

    (found,) = found_in(Overwrites(Tower(), pooled))
    assert found.why_not == "is given tensors that are written into later in the step"


@pytest.mark.parametrize("length", [4, 5])
def test_padding_is_cut_only_where_some_was_seen_and_nobody_reads_it(length: int) -> None:
    masked = found_in(Texts(OfTokens(), lambda both: (both[0][0] * both[1][:, :, None]).sum(1)), length=length)
    mean = found_in(Texts(OfTokens(lambda hidden: hidden), lambda both: (both[0][0] + 1).mean(1)), length=length)
    for (found,), reads_padding in ((masked, False), (mean, False)):
        assert found.why_not is None
        assert found.reading.is_by_token == (length == 4 and not reads_padding)


def test_what_is_pooled_is_stored_whatever_the_padding() -> None:
    (found,) = found_in(Texts(OfTokens(), lambda both: both[0][1]), length=4)
    assert not found.reading.is_by_token and found.part.cuts_padding


def test_a_part_that_depends_on_the_padded_length_is_said() -> None:
    class Mean(OfTokens):
        def forward(self, pixels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return BaseModelOutputWithPooling(pooler_output=self.layer(pixels).mean(1))

    (found,) = found_in(Texts(Mean(), lambda both: both[0].pooler_output), length=4)
    assert found.why_not == "depends on how far its batch is padded"


def test_inputs_that_are_handed_on_are_not_stored() -> None:
    class Features(Tower):
        def forward(self, features: dict[str, Any]) -> Any:
            return {**features, "hidden": self.layer(features["pixels"])}

    class Reads(Model):
        def forward(self, pixels: torch.Tensor, **_: Any) -> Any:
            features = self.tower({"pixels": pixels, "weights": torch.tensor([1, 2, 3])})
            assert type(features["weights"]) is not Deferred
            return {"loss": (self.head(features["hidden"].mean(1)) * features["weights"][:, None]).mean()}

    (found,) = found_in(Reads(Features(), pooled))
    assert found.why_not is None and found.reading.picks == (Pick(2),)


def test_a_call_without_rows_says_so() -> None:
    (found,) = found_in(Model(Tower(), lambda output: output.pooler_output), number=0)
    assert found.why_not == "gets an empty batch"


def test_what_nobody_reads_is_not_stored() -> None:
    assert found_in(Model(Tower(), lambda output: torch.ones_like(output.pooler_output, device="cpu"))) != []
    assert found_in(Model(Tower(), lambda output: torch.ones(3, 4))) == []


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
    assert found.why_not is None and found.part.in_evaluation
    assert model.tower.drop.training


class InnerModel(Model):
    """The tower runs without gradients on the samples, on what is trained, or on what was made of it."""

    def __init__(self, given: str) -> None:
        super().__init__(Tower(), pooled)
        self.given, self.before = given, nn.Linear(4, 4)

    def forward(self, pixels: torch.Tensor, **_: Any) -> Any:
        trained = self.before(pixels)
        with torch.no_grad():
            output = self.tower({"first": pixels, "trained": trained, "made": trained * 2}[self.given])
        return {"loss": (self.head(pooled(output)) + trained.mean()).mean()}


@pytest.mark.parametrize("given", ["first", "trained", "made"])
def test_without_gradients_only_samples_are_known_to_come_again(given: str) -> None:
    found = found_in(InnerModel(given))
    assert len(found) == (given != "trained")
    assert all(each.notes_first == (given == "made") for each in found)


def test_a_part_that_computes_with_what_is_trained_elsewhere_is_found() -> None:
    model = Model(Tower(), pooled)
    model.tower.change = lambda hidden: hidden * model.head.weight
    (found,) = found_in(model)
    assert found.why_not == "computes with parameters that are trained elsewhere"


def test_activations_that_ask_for_gradients_are_no_trained_parameters() -> None:
    """As `enable_input_require_grads` lets them."""
    (found,) = found_in(Model(Tower(lambda hidden: hidden.requires_grad_()), pooled))
    assert found.why_not is None


def test_a_part_that_fails_on_some_rows_is_left_alone() -> None:
    class OfThree(Tower):
        def forward(self, pixels: torch.Tensor) -> Any:
            return super().forward(pixels + torch.zeros(3, 1, 1))

    (found,) = found_in(Model(OfThree(), pooled))
    assert found.why_not is not None


def test_a_copy_of_the_model_computes_by_itself() -> None:
    model = Model(Tower(), pooled)
    watch, _ = watch_of(model)
    (part,) = watch.parts
    with part.standing_in():
        copied = copy.deepcopy(model)
    assert copied.tower.forward.__self__ is copied.tower
    pixels = torch.randn(2, 5, 4)
    assert torch.equal(copied(pixels)["loss"], model(pixels)["loss"])
    # A forward that the script has put in place of the module's own stays, in copies too.
    own = model.tower.forward
    model.tower.forward = lambda pixels: own(pixels * 2)
    patched = model.tower.forward
    with part.standing_in():
        assert model.tower.forward is part
    assert model.tower.forward is patched


def test_frozen_modules_that_follow_each_other_are_one_part() -> None:
    """What is stored is what the last one gives; whoever else reads in between has it stored there."""

    class Connected(nn.Module):
        """A tower with a frozen connector to fewer values, and a trained head; `shows` reads the tower besides."""

        def __init__(self, shows: bool = False) -> None:
            super().__init__()
            self.tower, self.connector = Tower(), nn.Linear(4, 2).requires_grad_(False)
            self.head, self.shows = nn.Linear(2, 4), shows

        def forward(self, pixels: torch.Tensor, **_: Any) -> Any:
            hidden = self.tower(pixels).last_hidden_state
            return {"loss": (self.head(self.connector(hidden)) + (hidden.mean() if self.shows else 0)).mean()}

    (found,) = found_in(Connected())
    assert found.why_not is None and found.name == "tower with connector"
    assert [each.name for each in found_in(Connected(shows=True))] == ["tower", "tower with connector"]


@pytest.fixture
def forgotten() -> Iterator[Callable[[], None]]:
    """Forgets texts of functions, as another process does not know them."""
    yield _code_text.cache_clear
    _code_text.cache_clear()


def test_code_without_a_text_is_known_in_one_process_alone(forgotten: Callable[[], None]) -> None:
    made: dict[str, Any] = {}
    exec("def forward(self, hidden): return hidden", made)

    def digest_with(forward: Any) -> bytes:
        tower = Tower()
        tower.change = forward
        return ModuleState(tower, tower.forward).digest

    one, other = (lambda hidden: hidden + 1), (lambda hidden: hidden + 2)
    for function, is_told in ((made["forward"], False), (nn.functional.relu, True), (one, False), (other, False)):
        digest = digest_with(function)
        assert digest_with(function) == digest
        forgotten()
        assert (digest_with(function) == digest) == is_told
    assert digest_with(one) != digest_with(other), "lambdas in one line"


def test_code_of_a_file_that_was_changed_since_is_not_told_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]
) -> None:
    file = tmp_path / "changed_since.py"
    file.write_text("def act(hidden):\n    return hidden\n")
    monkeypatch.syspath_prepend(tmp_path)
    act = importlib.import_module("changed_since").act
    for age, is_told in ((10**6, True), (-10, False)):
        os.utime(file, (time.time() - age,) * 2)
        forgotten()
        text = _code_text(act.__code__)
        forgotten()
        assert (_code_text(act.__code__) == text) == is_told
