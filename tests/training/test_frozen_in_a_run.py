"""Frozen parts in a run and between two runs: edits, patches, copies and kept stores, beside plain Trainer."""

from __future__ import annotations

import copy
import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts import served, watching
from hf_pipetransformer.cache.frozen_parts.call import PartCall
from hf_pipetransformer.cache.frozen_parts.contents import ContentStore
from tests.support.frozen_models import CASES, PROBES, Case, images, logged, pad, stack, trainer_of


TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "WORTH", 0.0)


class Tower(nn.Module):
    """Code of a script."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.Tanh(), nn.Linear(16, 16))
        self.norm = nn.LayerNorm(16)
        self.register_buffer("shift", torch.zeros(16), persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(pixel_values)) * self.scale + self.shift


class Probe(nn.Module):
    """A tower and a trained head; `switches` gives an attribute of the tower another value in each step."""

    def __init__(self, switches: bool = False) -> None:
        super().__init__()
        self.tower, self.head, self.switches, self.steps = Tower().requires_grad_(False), nn.Linear(16, 3), switches, 0

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += self.training
        if self.switches:
            self.tower.scale = 1.0 + self.steps % 2
        logits = self.head(self.tower(pixel_values))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


KINDS = {"package": (PROBES["vit"], "vit"), "script": (Case(Probe, images, "tower", stack), "tower")}
"""A model of an installed package, and one of the script's own, each with the path of its frozen part."""


def inside(tower: nn.Module, kind: type[nn.Module] = nn.Linear) -> Any:
    return [each for each in tower.modules() if type(each) is kind][-1]


def replaced(tower: nn.Module) -> None:
    old, new = inside(tower), copy.deepcopy(inside(tower))
    new.weight.data.mul_(2)
    for each in tower.modules():
        for name, child in list(each.named_children()):
            if child is old:
                setattr(each, name, new)


def forward_patched(tower: nn.Module) -> None:
    layer, own = inside(tower), inside(tower).forward
    layer.forward = lambda *args: own(*args) * 1.5


def class_patched(tower: nn.Module) -> None:
    kind = type(tower)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = kind.forward(self, *args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found * 1.5
        return type(found)(**{name: each * 1.5 for name, each in found.items()})

    tower.__class__ = type(kind.__name__, (kind,), {"forward": forward})  # type: ignore[assignment]


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@torch.no_grad()
def written(tower: nn.Module) -> None:
    inside(tower).weight.mul_(1.5)


def with_state_dict(tower: nn.Module, assign: bool) -> None:
    state = {name: value * 1.2 if value.is_floating_point() else value for name, value in tower.state_dict().items()}
    tower.load_state_dict(state, assign=assign)
    tower.requires_grad_(False)


SEEN: dict[str, Callable[[nn.Module], Any]] = {
    "written": written,
    "data replaced": lambda tower: setattr(inside(tower).weight, "data", inside(tower).weight.data * 1.5),
    "state loaded": lambda tower: with_state_dict(tower, False),
    "state assigned": lambda tower: with_state_dict(tower, True),
    "module replaced": replaced,
    "hook": lambda tower: inside(tower).register_forward_hook(lambda _module, _args, output: output * 1.5),
    "attribute": lambda tower: setattr(inside(tower, nn.LayerNorm), "eps", 0.5),
    "forward patched": forward_patched,
    "class patched": class_patched,
    "parametrized": lambda tower: parametrize.register_parametrization(inside(tower), "weight", Halved()),
    "unfrozen": lambda tower: tower.requires_grad_(True),
    "nothing": lambda _tower: None,
}
"""Edits that a look at the part shows."""


def past_autograd(tower: nn.Module) -> None:
    inside(tower).weight.data[0] = 1.0


class Edits(TrainerCallback):
    """Edits the frozen part before a step, 3 steps an epoch."""

    def __init__(self, step: int, edit: Callable[[nn.Module], Any], part: str) -> None:
        self.step, self.edit, self.part = step, edit, part

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            self.edit(model.get_submodule(self.part))


def edited(
    kind: type, which: str, step: int, edit: Callable[[nn.Module], Any], folder: Path, **options: Any
) -> Trainer:
    case, part = KINDS[which]
    trainer = trainer_of(kind, case, folder / kind.__name__, num_train_epochs=5, **options)
    # With all parameters from the start, as for gradual unfreezing.
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    trainer.add_callback(Edits(step, edit, part))
    return trainer


def losses_after(trainer: Trainer) -> Any:
    return np.array(logged(trainer))


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("edit", SEEN)
@pytest.mark.parametrize("step", [9, 10], ids=["at an epoch", "within one"])
def test_an_edit_that_shows_is_followed_at_once(which: str, edit: str, step: int, tmp_path: Path) -> None:
    expected, found = (
        losses_after(edited(kind, which, step, SEEN[edit], tmp_path)) for kind in (Trainer, PipeTransformerTrainer)
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("edit", [lambda buffer: buffer.add_(0.5), lambda buffer: buffer.set_(buffer + 0.5)])
@pytest.mark.parametrize("step", [9, 10], ids=["at an epoch", "within one"])
def test_a_buffer_that_is_not_saved_is_followed_at_once(edit: Callable[[Any], Any], step: int, tmp_path: Path) -> None:
    expected, found = (
        losses_after(edited(kind, "script", step, lambda tower: edit(tower.shift), tmp_path / str(step)))
        for kind in (Trainer, PipeTransformerTrainer)
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


class EachStep(TrainerCallback):
    """As a teacher that follows its student."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        written(model.vit)


def test_a_part_that_changes_in_each_step_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def followed(kind: type) -> Any:
        trainer = trainer_of(kind, PROBES["vit"], tmp_path / kind.__name__)
        trainer.add_callback(EachStep())
        return losses_after(trainer)

    expected = followed(Trainer)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        np.testing.assert_allclose(followed(PipeTransformerTrainer), expected, rtol=TOLERANCE, atol=TOLERANCE)
    told = [record.getMessage() for record in caplog.records]
    assert "vit changes again and again: it is computed as in Trainer from here on." in told


def test_an_edit_that_does_not_show_is_found_by_the_next_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a checkpoint, which then says which steps it holds; from there on the values are Trainer's own."""
    options = {"save_strategy": "steps", "save_steps": 12, "learning_rate": 0.0}
    plain = losses_after(edited(Trainer, "package", 9, past_autograd, tmp_path, **options))
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        ours = losses_after(edited(PipeTransformerTrainer, "package", 10, past_autograd, tmp_path, **options))
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert re.search(r"vit computes something else than what was stored.*Steps 10 to 12 may have read", told)
    assert len(ours) == len(plain) == 15, "the run goes on"


@pytest.mark.parametrize("fault", ["another record", "another key", "another module"])
def test_a_planted_fault_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the check of the first rows that are read, which the step then computes."""
    case, _ = KINDS["package"]
    if fault == "another record":
        own = ContentStore.read
        monkeypatch.setattr(ContentStore, "read", lambda self, places, length: own(self, places[::-1].copy(), length))
    elif fault == "another key":
        find = ContentStore.find
        monkeypatch.setattr(ContentStore, "find", lambda self, keys: np.roll(find(self, keys), 1))
    else:
        written_records = served.Records.keep

        def keep(self: Any, call: PartCall, leaves: Any) -> None:
            written_records(self, call, [leaf * 1.1 for leaf in leaves])

        monkeypatch.setattr(served.Records, "keep", keep)
    expected = losses_after(trainer_of(Trainer, case, tmp_path / "plain", num_train_epochs=2))
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = losses_after(trainer_of(PipeTransformerTrainer, case, tmp_path / "ours", num_train_epochs=2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "vit was changed from outside" in told or "computes something else than what was stored" in told


def test_an_attribute_that_switches_from_step_to_step_has_records_of_its_own(tmp_path: Path) -> None:
    case = Case(lambda: Probe(switches=True), images, "tower", stack)
    expected, found = (
        losses_after(trainer_of(kind, case, tmp_path / kind.__name__, num_train_epochs=6))
        for kind in (Trainer, PipeTransformerTrainer)
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


# ---- a stored prefix, by micro-batches ----


def lower_layers() -> nn.Module:
    """BERT with wide weights, whose embeddings and two of three layers are frozen."""
    model: Any = PROBES["bert"].build().requires_grad_(True)
    for each in model.parameters():
        if each.dim() > 1:
            each.data.mul_(10)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return model


PREFIX = Case(lower_layers, PROBES["bert"].data, "bert.encoder.layer.1", pad)


def other_activation(layer: nn.Module) -> None:
    layer.intermediate.intermediate_act_fn = nn.ReLU()


def layer_hook(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda _module, _args, output: output * 1.5)


def parameter_replaced(layer: nn.Module) -> None:
    inside(layer).weight = nn.Parameter(inside(layer).weight * 1.5, requires_grad=False)


OF_PREFIX: dict[str, Callable[[nn.Module], Any]] = {
    **{name: edit for name, edit in SEEN.items() if name != "class patched"},
    "past autograd": past_autograd,
    "layer hook": layer_hook,
    "layer patched": lambda layer: setattr(layer, "forward", MethodType(_larger, layer)),
    "activation": other_activation,
    "parameter replaced": parameter_replaced,
    "rounded": lambda layer: layer.to(torch.bfloat16).float(),
    "adapter": lambda layer: setattr(inside(layer), "extra", nn.Linear(2, 2)),
    "layer replaced": lambda layers: layers.__setitem__(1, copy.deepcopy(layers[1])),
}
AT_ONCE = {
    "nothing", "written", "data replaced", "state loaded", "state assigned", "parameter replaced", "rounded"
}  # fmt: skip
"""What a step sees; other changes end a run unless they come between epochs."""
NEVER = {
    "unfrozen": "requires_grad is True now",
    "parametrized": "the frozen prefix can be digested only",
    "adapter": "came into the model after training started",
    "layer replaced": "which no stage knows",
}
"""What a stored prefix cannot follow, and what is said."""


def _larger(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs) * 1.5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_layers_above_a_stored_prefix_that_are_checkpointed_train(use_reentrant: bool, tmp_path: Path) -> None:
    """Reentrant checkpoints give no gradients unless an input asks for them, as what the embeddings give does."""
    recomputed = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        "pipeline_parallel_num_microbatches": 2,
    }
    expected, found = (
        losses_after(trainer_of(kind, PREFIX, tmp_path / kind.__name__, **recomputed))
        for kind in (Trainer, PipeTransformerTrainer)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("edit", OF_PREFIX)
@pytest.mark.parametrize("step", [9, 10], ids=["at an epoch", "within one"])
def test_an_edit_of_a_stored_prefix_is_followed_or_ends_the_run(edit: str, step: int, tmp_path: Path) -> None:
    def losses(kind: type, **options: Any) -> Any:
        part = PREFIX.part.rpartition(".")[0] if edit == "layer replaced" else PREFIX.part
        trainer = trainer_of(
            kind, PREFIX, tmp_path / kind.__name__, num_train_epochs=5, save_strategy="steps", save_steps=11, **options
        )
        trainer.add_callback(Edits(step, OF_PREFIX[edit], part))
        return losses_after(trainer)

    in_parts = {"pipeline_parallel_num_microbatches": 2}
    if edit in AT_ONCE or (edit not in NEVER and step == 9):
        expected = losses(Trainer)
        np.testing.assert_allclose(losses(PipeTransformerTrainer, **in_parts), expected, rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(ValueError, match=NEVER.get(edit, "Steps 10 to 11 may have used stored activations")):
        losses(PipeTransformerTrainer, **in_parts)
    assert not list(tmp_path.glob("*/checkpoint-*")), "none holds what came of the edit"


# ---- between two runs ----


@pytest.mark.parametrize("which", KINDS)
@pytest.mark.parametrize("edit", ["nothing", "written", "attribute", "forward patched", "class patched", "hook"])
def test_a_kept_store_is_read_for_the_same_part_alone(which: str, edit: str, tmp_path: Path) -> None:
    case, part = KINDS[which]
    kept = {"activation_cache_keep": True, "activation_cache_dir": str(tmp_path / "cache")}
    trainer_of(PipeTransformerTrainer, case, tmp_path / "first", **kept).train()

    def again(kind: type) -> Any:
        trainer = trainer_of(kind, case, tmp_path / kind.__name__, **kept)
        SEEN[edit](trainer.model.get_submodule(part))
        return losses_after(trainer)

    np.testing.assert_allclose(again(PipeTransformerTrainer), again(Trainer), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_resumed_run_reads_what_holds_for_it(tmp_path: Path) -> None:
    """An attribute that a callback changes before the interruption is changed in the resumed run, too."""

    def resumed(kind: type) -> Any:
        kept = {"activation_cache_keep": True, "activation_cache_dir": str(tmp_path / "cache")}
        saves = {"save_strategy": "steps", "save_steps": 6}
        edited(kind, "script", 3, lambda tower: setattr(tower, "scale", 2.0), tmp_path, **kept, **saves).train()
        trainer = edited(kind, "script", 99, lambda tower: None, tmp_path, **kept, **saves)
        trainer.train(resume_from_checkpoint=str(tmp_path / kind.__name__ / "checkpoint-6"))
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    np.testing.assert_allclose(resumed(PipeTransformerTrainer), resumed(Trainer), rtol=TOLERANCE)


# ---- the model as the script sees it ----


class Looks(TrainerCallback):
    """Saves, copies and compares the model between steps."""

    def __init__(self) -> None:
        self.copies: list[float] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        torch.save(model, io.BytesIO())
        batch = stack(images()[:4])
        with torch.no_grad():
            self.copies += [float(each.eval()(**batch)["loss"]) for each in (copy.deepcopy(model),)]


def test_callbacks_see_the_model_as_it_is(tmp_path: Path) -> None:
    """Patched by the script before the run: the patch holds in the run, in copies, and after it."""

    def patched(kind: type) -> tuple[Any, list[float], bool]:
        trainer, looks = trainer_of(kind, PROBES["vit"], tmp_path / kind.__name__), Looks()
        tower: Any = trainer.model.vit

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = type(self).forward(self, *args, **kwargs)
            found["last_hidden_state"] = found["last_hidden_state"] * 1.5
            return found

        tower.forward = MethodType(forward, tower)
        looks.on_epoch_end = MethodType(_copies_only, looks)  # type: ignore[method-assign]
        trainer.add_callback(looks)
        return losses_after(trainer), looks.copies, "forward" in vars(tower)

    (expected, copies, has_patch), (found, others, still) = patched(Trainer), patched(PipeTransformerTrainer)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(others, copies, rtol=1e-4)
    assert has_patch and still


def _copies_only(self: Looks, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
    batch = stack(images()[:4])
    with torch.no_grad():
        self.copies.append(float(copy.deepcopy(model).eval()(**batch)["loss"]))


def test_a_callback_may_save_the_model_as_an_object(tmp_path: Path) -> None:
    trainer, looks = trainer_of(PipeTransformerTrainer, PROBES["vit"], tmp_path), Looks()
    trainer.add_callback(looks)
    trainer.train()
    assert len(looks.copies) == 3


def test_an_output_that_is_read_after_its_part_has_changed_is_no_silent_wrong_number(tmp_path: Path) -> None:
    class Keeps(PipeTransformerTrainer):
        kept: Any = None

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            if self.state.global_step == 5:
                with torch.no_grad():
                    model.vit.layernorm.weight.mul_(2)
                float(self.kept[1].sum())
            outputs = model(**inputs, output_hidden_states=True)
            self.kept = outputs.hidden_states
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    with pytest.raises(RuntimeError, match="vit was changed, or a tensor that it was called with"):
        trainer_of(Keeps, PROBES["vit"], tmp_path).train()


def test_values_beyond_the_range_of_what_is_stored_are_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled() -> nn.Module:
        model: Any = PROBES["vit"].build()
        model.vit.layernorm.weight.data.fill_(1e6)
        return model

    case = Case(scaled, images, "vit")
    found, expected = (
        losses_after(trainer_of(kind, case, tmp_path / kind.__name__, activation_cache_dtype="float16"))
        for kind in (PipeTransformerTrainer, Trainer)
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert "some outputs are beyond the range of activation_cache_dtype='float16'" in caplog.text


def test_outputs_of_parts_with_other_rows_are_joined_as_by_trainer(tmp_path: Path) -> None:
    """The second part takes outputs of both, of which one has twice as many rows."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Linear(32, 8).requires_grad_(False) for _ in range(2))
            self.joint = nn.Bilinear(8, 8, 8).requires_grad_(False)
            self.head = nn.Linear(8, 3)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            rows = pixel_values[:, 0, 0]
            first, second = self.one(rows), self.two(torch.cat([rows, rows]))
            hidden = self.joint(first, second.reshape(2, len(rows), 8)[0])
            return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}

    case = Case(Joined, images, "one", stack)
    expected, found = (
        losses_after(trainer_of(kind, case, tmp_path / kind.__name__)) for kind in (Trainer, PipeTransformerTrainer)
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_workers_that_crop_at_random_write_nothing_at_first(tmp_path: Path) -> None:
    class Cropped(torch.utils.data.Dataset[Any]):
        rows = images()

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = self.rows[index]
            return {**row, "pixel_values": row["pixel_values"].roll(int(torch.randint(0, 9, ())), -1)}

    def bytes_of(workers: int) -> int:
        options = {"dataloader_num_workers": workers, "per_device_train_batch_size": 2, "num_train_epochs": 3}
        trainer: Any = trainer_of(PipeTransformerTrainer, PROBES["vit"], tmp_path / str(workers), Cropped(), **options)
        trainer.train()
        events = map(json.loads, Path(str(trainer.events.path)).read_text().splitlines())
        return [each["bytes_stored"] for each in events if each["event"] == "cache" and each["what"] == "epoch"][0]

    assert bytes_of(0) == bytes_of(1) == 0


def test_a_speech_models_masks_over_time_come_before_its_encoder(tmp_path: Path) -> None:
    """They are drawn in each step: what follows is not known to come again, and is not stored in the first epoch."""

    def masked() -> nn.Module:
        model: Any = CASES["whisper"].build()
        model.config.update({"apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 5})
        return model

    case = Case(masked, CASES["whisper"].data, "model.encoder")
    expected, found = (
        losses_after(trainer_of(kind, case, tmp_path / kind.__name__)) for kind in (Trainer, PipeTransformerTrainer)
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
