"""Models that are none of transformers, with a splitter of their own, as the errors about them advise."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer, Splitter
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.tables import find_schedule
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from tests.support.models import probed_with
from tests.support.one_process import ModelPipeline


L, WIDTH, LENGTH = 4, 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.line(hidden).tanh()


class Stack(nn.Module):
    """Layers without a config."""

    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(L)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class ConfigIsNone(Stack):
    """As models have it that are only partly of transformers."""

    config = None


class OwnSplitter(Splitter):
    cuts_inside_layers = False

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)

    def mlp_parts(self, layer: nn.Module) -> Iterable[nn.Module | nn.Parameter]:
        return ()

    def run_attention(self, layer: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("never cut inside")

    def run_mlp(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("never cut inside")


def rows(num: int = 12) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(LENGTH, 2, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(num)
    ]


@pytest.mark.parametrize("kind", [Stack, ConfigIsNone])
@pytest.mark.parametrize("cache", ["off", "on"])
def test_a_model_without_config_freezes_with_a_splitter_of_its_own(
    kind: type[nn.Module], cache: str, tmp_path: Path
) -> None:
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=4, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", freeze_policy="fixed", freeze_at="3:2", activation_cache=cache,
        activation_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = PipeTransformerTrainer(kind(), args, train_dataset=rows(), splitter=OwnSplitter())
    trainer.train()
    assert trainer.layout.num_frozen_layers == 2
    assert trainer.layout.cache_level == (2 if cache == "on" else 0)


class Unnamed(Stack):
    """Does not say which input is the main one."""

    main_input_name = None


class InSequence(Stack):
    """Its layers hold stacks of their own, and something else is a stack too: no module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(Block(), Block()) for _ in range(L)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.head(self.blocks(self.entry(x))).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


@pytest.mark.parametrize("kind", [Stack, ConfigIsNone, Unnamed, InSequence])
def test_a_model_without_config_is_cut_by_its_only_stack(kind: type[nn.Module], tmp_path: Path) -> None:
    found = []
    for base, options in (
        (Trainer, {}),
        (PipeTransformerTrainer, {"pipeline_parallel_num_microbatches": 2, "freeze_policy": "none"}),
    ):
        torch.manual_seed(0)
        args_class = TrainingArguments if base is Trainer else PipeTransformerArguments
        args = args_class(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=5, logging_steps=1, save_steps=3,
            use_cpu=True, report_to="none", disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = base(kind(), args, train_dataset=rows())
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert (trainer.layout.num_layers, trainer.layout.num_microbatches) == (L, 2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [e["loss"] for e in trainer.state.log_history if "loss" in e] == found[1]


class TwoStacks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(2)])


def test_a_model_without_config_that_has_two_stacks_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedModelError, match=r"found \['4 x Block', '2 x Linear'\]. Pass `splitter=`"):
        find_splitter(TwoStacks()).layers(TwoStacks())


class ToldBlock(Block):
    def forward(self, hidden: torch.Tensor, told: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden if told is None else hidden + told)


# ---- activations that are changed where they lie ----


class AddingBlock(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += self.line(2 * hidden).tanh()
        return hidden


class AddsInLayers(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AddingBlock() for _ in range(L)])


class ChangesAround(Stack):
    """Changes what enters the layers (`before`), or what leaves them."""

    before = False

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        if self.before:
            hidden += 0.5
        for block in self.blocks:
            hidden = block(hidden)
        if not self.before:
            hidden.relu_()
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class ChangesBefore(ChangesAround):
    before = True


@pytest.mark.parametrize("kind", [AddsInLayers, ChangesAround])
def test_a_model_that_changes_activations_in_place_is_cut_everywhere(kind: type[nn.Module]) -> None:
    model, inputs = kind(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    probe = probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs)
    assert probe.structure.changes_in_place


class Narrows(Stack):
    """Code before the layers takes one number more a token than they do."""

    wants_embeddings = False

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(2, WIDTH + 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        if self.wants_embeddings and not hidden.any():
            raise ValueError("nothing is embedded")
        hidden = hidden @ torch.ones(WIDTH + 1, WIDTH)
        for block in self.blocks:
            hidden = block(hidden)
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class WantsEmbeddings(Narrows):
    """Code before the layers that looks at numbers which a stage without the embeddings does not have."""

    wants_embeddings = True


def test_code_that_does_not_run_without_the_embeddings_is_refused_in_words() -> None:
    model, inputs = WantsEmbeddings(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    with pytest.raises(UnsupportedModelError, match="Let a module do what comes between"):
        probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs)


def test_what_comes_between_embeddings_and_layers_may_be_code() -> None:
    model, inputs = ChangesBefore(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    assert probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs).structure.enters_layers


# ---- activations of another shape than (batch, seq, hidden) ----


class Reduce(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "rows":
            return hidden.flatten(0, 1)
        return hidden.mean(dim={"sample": 1, "numbers": (1, 2), "one": (0, 1, 2)}[self.kind])


class Flat(Stack):
    """`(batch, hidden)`."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = Reduce("sample")

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.reduce(self.entry(x))
        for block in self.blocks:
            hidden = block(hidden)
        y = self.head(hidden)[:, 0]
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def test_activations_without_a_sequence_freeze_but_are_not_stored(tmp_path: Path) -> None:
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=4, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", freeze_policy="fixed", freeze_at="3:2", activation_cache="on",
        activation_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = PipeTransformerTrainer(Flat(), args, train_dataset=rows(), splitter=OwnSplitter())
    trainer.train()
    assert (trainer.layout.num_frozen_layers, trainer.layout.cache_level) == (2, 0)
    events = (tmp_path / "pipetransformer_events.jsonl").read_text()
    assert "expected three dimensions, (batch, seq, hidden)" in events


# ---- weights that code reads without calling their module ----


class TiedByHand(Stack):
    """The entry's weight once more at the end, and one of a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden = block(hidden)
        y = (hidden @ self.entry.weight * self.beside.weight).mean(dim=(1, 2)) + self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def test_a_weight_belongs_to_where_it_is_read() -> None:
    model, inputs = TiedByHand(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    structure = probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs).structure
    assert structure.blocks_of_parameter["entry.weight"] == (0, structure.num_blocks - 1)
    assert structure.blocks_of_parameter["entry.bias"] == (0,)


# ---- what layers and modules before them return ----


class ListBlock(Block):
    def forward(self, hidden: torch.Tensor) -> Any:  # type: ignore[override]
        return [super().forward(hidden), None]


class ReturnsLists(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ListBlock() for _ in range(L)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        for block in self.blocks:
            hidden, others = block(hidden)
            assert others is None
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


class Project(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.line(x), {"wide": torch.cat([x, x], dim=2)}


class Angles(nn.Module):
    """As rotary embeddings: no weights, two outputs."""

    def forward(self, hidden: torch.Tensor) -> Any:
        angles = torch.arange(hidden.shape[1], dtype=torch.float32)[:, None]
        return angles.cos(), angles.sin()


class GivesTuples(Stack):
    """The modules before the one that makes what enters the layers give tuples, and are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.angles = Project(), Angles()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList([ToldBlock() for _ in range(L)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        shifted = self.entry(x)
        shifted *= 2.0
        hidden, other = self.project(x)
        cos, sin = self.angles(hidden)
        width = other["wide"].shape[2]
        hidden = self.norm(hidden + shifted + self.entry(x))
        for block in self.blocks:
            hidden = block(hidden, (cos + sin).expand(-1, WIDTH))
        y = width * self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


@pytest.mark.parametrize("kind", [ReturnsLists, GivesTuples])
def test_what_modules_return_is_any_form(kind: type[nn.Module]) -> None:
    model, inputs = kind(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    structure = probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs).structure
    assert structure.returns_list == (kind is ReturnsLists)
    assert not structure.enters_layers


class WithMask(nn.Module):
    """Embeddings that give a mask of their padding, and the length, beside the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table(ids), (ids == 0)[..., None], ids.shape[1]


class ReadsBesideTheActivation(Stack):
    """Its layers, or its head, read what the embeddings give beside the activation."""

    main_input_name = "ids"

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads, self.entry = reads, WithMask()
        self.blocks = nn.ModuleList([ToldBlock() for _ in range(L)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden, mask, length = self.entry(ids)
        for block in self.blocks:
            hidden = block(hidden, mask.float() if self.reads == "mask" else None)
        y = self.head(hidden).sum(dim=(1, 2)) / (length if self.reads == "length" else 1)
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


@pytest.mark.parametrize("reads", ["mask", "length", "nothing"])
def test_what_later_stages_do_not_have_is_not_taken_for_what_a_batch_happened_to_hold(reads: str) -> None:
    """Without padding the mask is zeros, as is what stands in for it; another batch would train with wrong numbers."""
    model, inputs = ReadsBesideTheActivation(reads), {"ids": torch.randint(1, 9, (4, 5)), "labels": torch.randn(4)}
    if reads == "nothing":
        assert probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs).activation
        return
    with pytest.raises(UnsupportedModelError, match="reads what they give beside the activation"):
        probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs)


MODELS = {
    kind.__name__: kind
    for kind in (
        *(Stack, ConfigIsNone, AddsInLayers, ChangesAround, ChangesBefore, TiedByHand, Flat),
        *(ReturnsLists, GivesTuples, Narrows),
    )
}
"""Those that can be cut, by name."""


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + (self.weight * hidden).tanh()


class Numbers(Stack):
    """One number a sample, one for the batch, or rows of several samples in one."""

    kind = "numbers"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gate() for _ in range(L)])
        self.reduce = Reduce(self.kind)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.reduce(self.entry(x))
        for block in self.blocks:
            hidden = block(hidden)
        y = hidden.reshape(len(x), -1).mean(dim=1) if hidden.dim() else hidden.expand(len(x))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


@pytest.mark.parametrize("kind", ["numbers", "one", "rows"])
def test_activations_without_a_row_a_sample_are_refused_in_words(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "kind", kind)
    model, inputs = Numbers(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    with pytest.raises(UnsupportedModelError, match="one row a sample"):
        probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs)


class Between(Stack):
    """Code between its layers reads weights: for the next layer to take, or to change what goes from layer to layer.

    Args:
        kind: of the code.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([ToldBlock() for _ in range(L)])
        self.gates = nn.ModuleList([nn.Linear(2, WIDTH) for _ in range(L)])
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.entry(x)
        for index, block in enumerate(self.blocks):
            told = None
            if index and self.kind == "modules":
                told = self.gates[index](x)
            elif index and self.kind == "reads":
                told = nn.functional.linear(x, self.entry.weight)
            elif index and self.kind == "shape":
                hidden = hidden * (len(self.entry.weight.shape) / self.entry.weight.dim())
            elif index and self.kind == "norm":
                hidden = self.norm(hidden)
            elif index and self.kind == "scale":
                hidden = hidden * self.scale
            hidden = block(hidden, told)
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def structure_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = Between(kind)
    batch = {"x": torch.randn(4, LENGTH, 2), "labels": torch.randn(4)}
    return probed_with(model, OwnSplitter(), lambda inputs: model(**inputs)[0], batch).structure


@pytest.mark.parametrize(("kind", "name"), [("modules", "gates.2.weight"), ("reads", "entry.weight")])
def test_a_weight_that_is_read_between_layers_is_on_every_stage(kind: str, name: str) -> None:
    users = structure_of(kind).blocks_of_parameter
    assert users[name] == tuple(range(2 * L + 2))
    assert users["blocks.1.line.weight"] == (3,) and users["head.weight"] == (2 * L + 1,)


def test_the_shape_of_a_weight_is_known_on_every_stage() -> None:
    assert structure_of("shape").blocks_of_parameter["entry.weight"] == (0,)


@pytest.mark.parametrize(("kind", "name"), [("norm", "norm.weight"), ("scale", "scale")])
def test_a_weight_that_changes_activations_between_layers_is_refused_in_words(kind: str, name: str) -> None:
    words = rf"Between reads {name} between layers 0 and 1.*let it run inside a layer"
    with pytest.raises(UnsupportedModelError, match=words):
        structure_of(kind)


# ---- models that recompute their layers themselves ----


class Recomputes(Stack):
    """Runs its layers again in the backward, by calling them."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.enter(x)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.training else block(hidden)
        y = self.head(hidden).mean(dim=(1, 2))
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self.entry(x)


class RecomputesFromInputs(Recomputes):
    """No module makes what enters the first layer."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 1, WIDTH // 2)


@pytest.mark.parametrize("kind", [Recomputes, RecomputesFromInputs])
def test_a_model_that_recomputes_its_layers_is_cut_everywhere(kind: type[nn.Module]) -> None:
    model, inputs = kind().train(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    probe = probed_with(model, OwnSplitter(), lambda given: model(**given)[0], inputs)
    assert probe.structure.enters_layers == (kind is RecomputesFromInputs)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("kind", [Recomputes, RecomputesFromInputs])
def test_a_layer_is_recomputed_as_part_of_its_own_stage_and_micro_batch(kind: type[nn.Module], schedule: str) -> None:
    """In a backward, another stage of the rank or another micro-batch may have run last."""
    torch.manual_seed(0)
    model, inputs = kind().train(), {name: torch.stack([row[name] for row in rows(4)]) for name in ("x", "labels")}
    whole = copy.deepcopy(model)
    loss = whole(**inputs)[0]
    loss.backward()
    num_chunks = 2 if schedule == "interleaved_1f1b" else 1
    chosen = find_schedule(schedule)
    placement = Placement(2, num_chunks, chosen.placement)
    bounds = [0, 3, 5, 7, 10] if num_chunks == 2 else [0, 5, 10]
    pipeline = ModelPipeline(
        model, bounds, placement, inputs, 2, splitter=OwnSplitter(), loss_of=lambda outputs: outputs[0]
    )
    found = pipeline.run(chosen.table(2, 2, num_chunks))
    torch.testing.assert_close(found, loss.detach())
    gradients = pipeline.gradients()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)


MODELS |= {kind.__name__: kind for kind in (Recomputes, RecomputesFromInputs)}
