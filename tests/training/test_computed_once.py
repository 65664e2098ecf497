"""What a script froze is computed once: the numbers of plain Trainer, and what may not be stored is said."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import IntervalStrategy, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, set_seed

from hf_pipetransformer import (
    PipeTransformerMixin,
    PipeTransformerTrainer,
    Seq2SeqPipelineArguments,
    Seq2SeqPipelineTrainer,
)
from hf_pipetransformer.cache.frozen_parts import watching
from hf_pipetransformer.cache.store import ActivationStore
from tests.distributed.family_worker import FROZEN, account
from tests.support.every_family import Subject, every_subject
from tests.support.frozen_models import (
    CASES,
    NUM_SAMPLES,
    PROBES,
    Case,
    captions,
    convbert_probe,
    images,
    llava,
    logged,
    pad,
    resnet,
    stack,
    t5,
    texts,
    trainer_of,
    with_adapters,
)


TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are looked at however little of a forward these small ones take."""
    monkeypatch.setattr(watching, "WORTH", 0.0)


def both(case: Case, folder: Path, **options: Any) -> tuple[Trainer, Trainer]:
    """Plain Trainer and ours after the same training, with losses, norms and weights compared."""
    plain = trainer_of(Trainer, case, folder / "plain", **options)
    expected = logged(plain)
    ours = trainer_of(PipeTransformerTrainer, case, folder / "ours", **options)
    found = logged(ours)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], weight, rtol=TOLERANCE, atol=TOLERANCE)
    return plain, ours


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def outputs_read(part: str, caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """Outputs of a part that were read, and how many were read or computed."""
    hits, looked_up = map(int, re.findall(rf"{part}[^:]*: (\d+) of (\d+) outputs were read instead", said(caplog))[-1])
    return hits, looked_up


@pytest.mark.parametrize("name", CASES)
def test_what_is_frozen_is_computed_once_with_trainers_numbers(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        _, ours = both(case, tmp_path)
    rows = 2 * NUM_SAMPLES if name == "smolvlm" else NUM_SAMPLES
    hits, looked_up = outputs_read(case.part, caplog)
    first = 3 * rows - looked_up
    assert 0 < first <= rows / 2 and hits == 2 * rows - first, "but for the batch that is watched"
    assert all("forward" not in vars(module) for module in ours.model.modules())


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_computes_no_sample_again(name: str, tmp_path: Path) -> None:
    case = PROBES[name]
    _, ours = both(case, tmp_path)
    lines = Path(str(ours.events.path)).read_text().splitlines()
    epochs = [each for each in map(json.loads, lines) if each["event"] == "cache" and each["what"] == "epoch"]
    assert [(each["hits"], each["misses"]) for each in epochs] == [(0, 8), (8, 4), (12, 0)], "4 rows were watched"


def test_an_image_classifier_that_reads_one_position_stores_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ViT's head reads the first of 17 positions, DINOv2's also the mean of others, an own loss also another layer."""
    write, values = ActivationStore.write, list[int]()

    def note(store: ActivationStore, samples: Any, weights_id: int, activation: Any, lengths: Any, *rest: Any) -> int:
        values.extend(lengths.tolist())
        return write(store, samples, weights_id, activation, lengths, *rest)

    class OwnLoss(PipeTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs, output_hidden_states=True)
            loss = outputs.loss + outputs.hidden_states[-1].mean() * model.classifier.bias.sum()
            return (loss, outputs) if return_outputs else loss

    monkeypatch.setattr(ActivationStore, "write", note)
    for name, kind, expected in (
        ("vit", PipeTransformerTrainer, 1), ("dinov2", PipeTransformerTrainer, 17), ("vit", OwnLoss, 18)
    ):  # fmt: skip
        values.clear()
        trainer_of(kind, PROBES[name], tmp_path / f"{name}{expected}").train()
        assert set(values) == {32 * expected} and len(values) >= NUM_SAMPLES


def bert_lower_layers() -> nn.Module:
    """Embeddings and two of three layers frozen."""
    model: Any = PROBES["bert"].build().requires_grad_(True)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return model


SETTINGS: list[dict[str, Any]] = [
    {"bf16": True, "train_sampling_strategy": "sequential"},
    {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"per_device_train_batch_size": 5},
    {"torch_compile": True, "torch_compile_backend": "eager"},
]
LOWER = replace(PROBES["bert"], build=bert_lower_layers, part="bert.embeddings to bert.encoder.layer.1")


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, id=f"{name} {options}", marks=[pytest.mark.slow] if is_slow else [])
        for name, case in {"llava": CASES["llava"], "probe": PROBES["vit"], "lower": LOWER, **CASES}.items()
        for options in SETTINGS
        if name in ("llava", "probe", "lower", "whisper")
        for is_slow in ["torch_compile" in options and name != "probe"]
    ],
)
def test_numbers_are_trainers_under_other_settings(
    case: Case, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(case, tmp_path, **options)
    # Compiled code takes no outputs that are computed later: modules are stored one by one.
    assert options.get("torch_compile") or outputs_read(case.part, caplog)[0] > 0


class ReadsPadding(Trainer):
    """Adds to the model's loss a mean over all positions of its encoder's outputs, padding among them."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        scale = model.decoder.final_layer_norm.weight.mean()
        loss = outputs.loss + scale * outputs.encoder_last_hidden_state.square().mean()
        return (loss, outputs) if return_outputs else loss


def test_padding_that_a_loss_of_the_scripts_reads_is_there(tmp_path: Path) -> None:
    kinds = ReadsPadding, type("OurReadsPadding", (PipeTransformerMixin, ReadsPadding), {})
    expected, found = (logged(trainer_of(kind, CASES["t5"], tmp_path / kind.__name__)) for kind in kinds)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_draws_of_a_part_are_made_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whisper draws a number for each layer it might skip, before the decoder's dropout and the next epoch's order."""

    def build() -> torch.nn.Module:
        model = CASES["whisper"].build()
        model.model.decoder.dropout = 0.3
        return model

    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(Case(build, CASES["whisper"].data, "model.encoder"), tmp_path)
    assert outputs_read("model.encoder", caplog) == (20, 32)


def test_evaluations_of_a_probe_show_all_positions(tmp_path: Path) -> None:
    """Outputs that no loss reads are handed on: hidden states of all positions, from the store as from Trainer."""

    def predicted(kind: type) -> Any:
        case = PROBES["vit"]
        trainer = trainer_of(kind, case, tmp_path / kind.__name__, eval_strategy="no")
        trainer.model.config.output_hidden_states = True
        trainer.eval_dataset = case.data()
        trainer.args.eval_strategy = IntervalStrategy.EPOCH
        trainer.train()
        return trainer.predict(case.data()).predictions

    expected, found = predicted(Trainer), predicted(PipeTransformerTrainer)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1][-1], expected[1][-1], rtol=1e-4, atol=1e-5)


def test_the_report_shows_what_was_read(tmp_path: Path) -> None:
    trainer = trainer_of(PipeTransformerTrainer, CASES["whisper"], tmp_path)
    trainer.train()
    lines = Path(str(trainer.events.path)).read_text().splitlines()
    epochs = [each for each in map(json.loads, lines) if each["event"] == "cache" and each["what"] == "epoch"]
    assert [(each["hits"], each["misses"]) for each in epochs] == [(0, 8), (8, 4), (12, 0)]
    assert epochs[-1]["bytes_stored"] > 12 * 50 * 32 * 4


def test_the_epoch_in_which_a_part_ends_counts_no_less_than_nothing(tmp_path: Path) -> None:
    class Unfreezes(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.epoch:
                model.convnext.requires_grad_(True)

    trainer = trainer_of(PipeTransformerTrainer, CASES["convnext probe"], tmp_path)
    trainer.add_callback(Unfreezes())
    trainer.train()
    lines = Path(str(trainer.events.path)).read_text().splitlines()
    epochs = [each for each in map(json.loads, lines) if each["event"] == "cache" and each["what"] == "epoch"]
    assert [(each["hits"], each["misses"]) for each in epochs] == [(0, 8), (0, 0), (0, 0)]


def test_a_record_holds_only_what_is_read(tmp_path: Path) -> None:
    """Of LLaVA's tower the features of one layer, 16 patches of 32 values; of CLIP's and of a probe what is pooled."""

    def values_of_record(name: str) -> int:
        trainer = trainer_of(PipeTransformerTrainer, CASES[name], tmp_path / name)
        trainer.train()
        lines = Path(str(trainer.events.path)).read_text().splitlines()
        (size,) = (each["record_bytes"] for each in map(json.loads, lines) if each.get("part") == CASES[name].part)
        return int(size) // 4

    assert values_of_record("llava") == 17 * 32
    assert values_of_record("clip") == values_of_record("convnext probe") == 32


class ReadsMore:
    """Reads in every other step what the first one did not."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        reads_more = self.state.global_step % 2 == 1  # type: ignore[attr-defined]
        outputs = model(**inputs, output_hidden_states=reads_more)
        loss = outputs.loss
        if reads_more:
            loss = loss + model.classifier(outputs.hidden_states[1].mean((2, 3))).square().mean()
        return (loss, outputs) if return_outputs else loss


def test_a_call_of_another_form_is_computed(tmp_path: Path) -> None:
    kinds = [type(f"Other{base.__name__}", (ReadsMore, base), {}) for base in (Trainer, PipeTransformerTrainer)]
    expected, found = (logged(trainer_of(kind, CASES["convnext probe"], tmp_path / kind.__name__)) for kind in kinds)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


class ReadsLater(Trainer):
    """Reads from the third step on what the first two do not, in calls of the same form."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        loss = outputs.loss
        if self.state.global_step >= 4:
            loss = loss + model.classifier(outputs.hidden_states[1].mean((2, 3))).square().mean()
        return (loss, outputs) if return_outputs else loss


def test_what_is_read_in_later_steps_alone_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = ReadsLater, type("OurReadsLater", (PipeTransformerMixin, ReadsLater), {})
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        expected, found = (
            logged(trainer_of(kind, CASES["convnext probe"], tmp_path / kind.__name__)) for kind in kinds
        )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert "Step 5 reads outputs of convnext that the first step did not" in said(caplog)


# ---- what may not be stored ----


def test_dropout_stays_as_in_trainer_unless_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(lambda: t5(dropout=0.1), texts, "encoder", pad)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(case, tmp_path / "auto", activation_cache="auto")
    assert "encoder is frozen and computed as in Trainer in every epoch: it draws random numbers" in said(caplog)
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = logged(trainer_of(PipeTransformerTrainer, case, tmp_path / "on"))
    assert "is computed once in evaluation mode, without dropout" in said(caplog)
    plain = trainer_of(Trainer, case, tmp_path / "plain")

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        # The first step is watched as it is.
        if plain.state.global_step:
            plain.model.encoder.eval()
        return forward(*args, **kwargs)

    forward, plain.model.forward = plain.model.forward, evaluated
    np.testing.assert_allclose(found, logged(plain), rtol=TOLERANCE, atol=TOLERANCE)


def test_batch_statistics_are_kept_as_in_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(Case(resnet, images, "resnet"), tmp_path, activation_cache="auto")
    assert "keeps statistics of its batches (batch normalization in training mode)" in said(caplog)


def test_a_part_that_looks_at_the_whole_batch_is_computed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Centred(torch.nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return super().forward(given - given.mean(0))

    def build() -> torch.nn.Module:
        model = CASES["whisper"].build()
        model.model.encoder.layers[1].fc2 = Centred(64, 32).requires_grad_(False)
        return model

    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(Case(build, CASES["whisper"].data, "model.encoder"), tmp_path)
    assert "its own code gives something else for samples that come a second time" in said(caplog)


def test_a_hook_inside_a_part_goes_on_seeing_every_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def build() -> torch.nn.Module:
        model = CASES["whisper"].build()
        model.model.encoder.layers[0].register_forward_hook(lambda *_: seen.append(1))
        return model

    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(Case(build, CASES["whisper"].data, "model.encoder"), tmp_path)
    assert "it has a hook on layers.0 that stored outputs would pass by" in said(caplog)


class _Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(CASES["whisper"].data())


@pytest.mark.parametrize("steps", [12, 3])
def test_a_stream_without_a_length_is_stored_from_its_second_pass_on(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(replace(CASES["whisper"], data=_Stream), tmp_path, max_steps=steps)
    assert "model.encoder: frozen. Without a length of the data set, the second pass stores what pays." in said(caplog)
    # Four passes of three steps: the first and one batch are not stored, the rest of the second is, and then read.
    if steps > 3:
        assert outputs_read("model.encoder", caplog) == (20, 32)


def _ask_for_gradients(_module: Any, _args: Any, output: Any) -> None:
    output.requires_grad_(True)


def _scale(_module: Any, _args: Any, output: Any) -> None:
    output.mul_(1.5)


@pytest.mark.parametrize(
    "hook",
    [lambda _, __, output: print(output.shape), _ask_for_gradients],
    ids=["prints", "asks for gradients"],
)
def test_a_hook_that_changes_nothing_is_passed_by(hook: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> torch.nn.Module:
        model = CASES["whisper"].build()
        model.model.encoder.conv1.register_forward_hook(hook)
        return model

    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(replace(CASES["whisper"], build=build), tmp_path, num_train_epochs=4)
    # Each row has come out alike twice before one is read.
    assert outputs_read("model.encoder", caplog)[0] >= NUM_SAMPLES


class _Keeps:
    def __init__(self) -> None:
        self.norms: list[float] = []

    def hook(self, _module: Any, _args: Any, output: Any) -> None:
        self.norms.append(float(output.norm()))


_LAST: dict[str, Any] = {}


def _keep_last(_module: Any, _args: Any, output: Any) -> None:
    _LAST["norm"] = float(output.norm())


_COUNT = 0


def _count(_module: Any, _args: Any, _output: Any) -> None:
    global _COUNT
    _COUNT += 1


def _own_attribute(_module: Any, _args: Any, _output: Any) -> None:
    _own_attribute.calls = getattr(_own_attribute, "calls", 0) + 1  # type: ignore[attr-defined]


def _keep_in_default(_module: Any, _args: Any, output: Any, seen: Any = []) -> None:  # noqa: B006
    seen.append(float(output.norm()))


def _keep_in(seen: list[float], _module: Any, _args: Any, output: Any) -> None:
    seen.append(float(output.norm()))


def _unassigned() -> Any:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        if output is None:
            print(later)

    if len(_LAST) > 10**6:
        later = 0
    return hook


@pytest.mark.parametrize(
    "hook",
    [
        _Keeps().hook,
        _keep_last,
        _scale,
        _count,
        _own_attribute,
        _keep_in_default,
        partial(_keep_in, []),
        _unassigned(),
    ],
    ids=["method", "global", "writes", "count", "attribute", "default", "partial", "not assigned"],
)
def test_a_hook_that_does_something_keeps_its_part_computed(
    hook: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> torch.nn.Module:
        model = CASES["whisper"].build()
        model.model.encoder.conv1.register_forward_hook(hook)
        return model

    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(replace(CASES["whisper"], build=build), tmp_path)
    assert "it has a hook on conv1 that stored outputs would pass by" in said(caplog)


def test_images_augmented_anew_end_the_storing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(torch.utils.data.Dataset[Any]):
        rows = captions()

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = self.rows[index]
            return {**row, "pixel_values": row["pixel_values"] + 0.1 * torch.randn(3, 32, 32)}

    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        both(Case(llava, lambda: Noisy(), "model.vision_tower"), tmp_path, num_train_epochs=4)  # type: ignore[arg-type, return-value]
    assert "none of its inputs came a second time" in said(caplog)


# ---- what changes in a run ----


class Changes(TrainerCallback):
    """Changes the weights of LLaVA's tower after the second epoch has begun or in its middle."""

    def __init__(self, at: str, past_autograd: bool) -> None:
        self.at, self.past_autograd = at, past_autograd

    def _change(self, model: torch.nn.Module) -> None:
        weight = next(p for n, p in model.named_parameters() if "vision_tower" in n and "layers.0.mlp.fc1.weight" in n)
        with torch.no_grad():
            if self.past_autograd:
                weight.data[0] = 1.0
            else:
                weight.add_(0.5)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.at == "epoch" and state.epoch:
            self._change(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.at == "step" and state.global_step == 4:
            self._change(model)


def changed(kind: type, folder: Path, at: str, past_autograd: bool) -> Any:
    trainer = trainer_of(kind, CASES["llava"], folder / kind.__name__)
    trainer.add_callback(Changes(at, past_autograd))
    return logged(trainer)


@pytest.mark.parametrize(("at", "past_autograd"), [("epoch", False), ("epoch", True), ("step", False)])
def test_weights_that_are_changed_are_followed(at: str, past_autograd: bool, tmp_path: Path) -> None:
    expected, found = (changed(kind, tmp_path, at, past_autograd) for kind in (Trainer, PipeTransformerTrainer))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_part_that_a_callback_unfreezes_is_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As gradual unfreezing does, with an optimizer that has all parameters from the start."""

    class Unfreezes(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.epoch:
                model.convnext.requires_grad_(True)

    def unfrozen(kind: type) -> Any:
        trainer = trainer_of(kind, CASES["convnext probe"], tmp_path / kind.__name__)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.add_callback(Unfreezes())
        return logged(trainer)

    expected = unfrozen(Trainer)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        np.testing.assert_allclose(unfrozen(PipeTransformerTrainer), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert "convnext is not frozen any more" in said(caplog)


@pytest.mark.parametrize("name", ["whisper", "convnext probe"])
def test_a_resumed_run_goes_on_as_trainers(name: str, tmp_path: Path) -> None:
    def resumed(kind: type) -> Any:
        options = {"save_strategy": "steps", "save_steps": 4}
        trainer_of(kind, CASES[name], tmp_path / kind.__name__, **options).train()
        trainer = trainer_of(kind, CASES[name], tmp_path / kind.__name__, **options)
        trainer.train(resume_from_checkpoint=str(tmp_path / kind.__name__ / "checkpoint-4"))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.model.state_dict()

    expected, found = resumed(Trainer), resumed(PipeTransformerTrainer)
    np.testing.assert_allclose(found[0], expected[0], rtol=TOLERANCE)
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_change_that_shows_too_late_names_the_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The steps up to the next check have read what does not hold; those after it have Trainer's values again."""
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        changed(PipeTransformerTrainer, tmp_path, "step", past_autograd=True)
    assert re.search(r"vision_tower.* computes something else .* Steps 4 to 6 may have read", said(caplog))


def test_a_kept_store_serves_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = {"activation_cache_keep": True, "activation_cache_dir": str(tmp_path / "cache")}
    plain = logged(trainer_of(Trainer, CASES["whisper"], tmp_path / "plain"))
    for number, read in enumerate(((20, 32), (24, 32))):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_pipetransformer"):
            found = logged(trainer_of(PipeTransformerTrainer, CASES["whisper"], tmp_path / str(number), **kept))
        np.testing.assert_allclose(found, plain, rtol=TOLERANCE, atol=TOLERANCE)
        # What an earlier run has stored is compared before it is used.
        assert outputs_read("model.encoder", caplog) == read


def test_runs_of_a_sweep_add_to_one_kept_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Runs on other samples, with other batches: each computes what none before has, and eight rows to compare."""
    case, rows = CASES["whisper"], CASES["whisper"].data()
    kept = {"activation_cache_keep": True, "activation_cache_dir": str(tmp_path / "cache")}
    for number, (chosen, batch_size, read) in enumerate(
        (
            (range(4), 4, (4, 8)), (range(4, 12), 4, (12, 20)), (range(2, 6), 2, (6, 10)), (range(12), 4, (24, 32)),
            (range(12), 6, (18, 30)),
        )
    ):  # fmt: skip
        options = {"per_device_train_batch_size": batch_size, "data": [rows[i] for i in chosen], **kept}
        plain = logged(trainer_of(Trainer, case, tmp_path / f"plain {number}", **options))
        caplog.clear()
        with caplog.at_level(logging.INFO, "hf_pipetransformer"):
            found = logged(trainer_of(PipeTransformerTrainer, case, tmp_path / str(number), **options))
        np.testing.assert_allclose(found, plain, rtol=TOLERANCE, atol=TOLERANCE)
        assert outputs_read("model.encoder", caplog) == read, number


def test_stacks_are_left_alone(tmp_path: Path) -> None:
    """A model whose trained part alone is given stores nothing and has no part."""
    trainer = trainer_of(PipeTransformerTrainer, Case(lambda: CASES["clip"].build().requires_grad_(True),
        CASES["clip"].data, "", CASES["clip"].collate), tmp_path, activation_cache="auto")  # fmt: skip
    logged(trainer)
    assert not trainer.pipeline_run.stored_parts.served
    assert stack([{"a": 1}])["a"].tolist() == [1]


@pytest.mark.parametrize(
    ("name", "has_metrics"),
    [("convnext probe", True), ("llava", True), ("clip", False), ("clip", True), ("smolvlm", False)],
)
def test_evaluations_read_what_they_were_tried_with(
    name: str, has_metrics: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CLIP hands on what its tower's records do not have, so that the tower runs where outputs are read."""
    case = CASES[name]

    def evaluated(kind: type, folder: Path) -> list[float]:
        trainer = trainer_of(kind, case, folder, per_device_eval_batch_size=3)
        trainer.eval_dataset, trainer.args.eval_strategy = case.data()[:6], IntervalStrategy.EPOCH
        trainer.compute_metrics = (lambda _: {}) if has_metrics else None
        trainer.train()
        return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    expected = evaluated(Trainer, tmp_path / "plain")
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = evaluated(PipeTransformerTrainer, tmp_path / "ours")
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    hits, looked_up = outputs_read(case.part, caplog)
    of_sample = 2 if name == "smolvlm" else 1
    # In evaluation mode it may compute something else, so that an evaluation stores its own first.
    of_evaluations = 0 if name == "clip" and has_metrics else 12
    assert hits == (20 + of_evaluations) * of_sample and looked_up == (32 + 18) * of_sample


class Looks:
    """Reads outputs in its own `prediction_step`, although nobody else asks for them."""

    looked: list[float]

    def prediction_step(self, model: Any, inputs: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, None, None]:
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)  # type: ignore[attr-defined]
        self.looked.append(float(outputs.vision_model_output.last_hidden_state.sum()))
        return loss, None, None


class PlainLooks(Looks, Trainer):
    pass


class OurLooks(Looks, PipeTransformerTrainer):
    pass


def test_a_prediction_step_of_ones_own_gets_whole_outputs(tmp_path: Path) -> None:
    """The records of CLIP's tower are enough for the loss, and lack what this reads."""
    found = {}
    for kind in (PlainLooks, OurLooks):
        trainer: Any = trainer_of(kind, CASES["clip"], tmp_path / kind.__name__, per_device_eval_batch_size=3)
        trainer.eval_dataset, trainer.args.eval_strategy = CASES["clip"].data()[:6], IntervalStrategy.EPOCH
        trainer.looked = []
        trainer.train()
        found[kind] = trainer.looked
    np.testing.assert_allclose(found[OurLooks], found[PlainLooks], rtol=TOLERANCE)


def test_evaluations_and_generation_read_whole_outputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Evaluated rows are among those of training; tokens and losses are Trainer's."""

    def evaluated(kind: type, folder: Path) -> tuple[list[Any], Any]:
        set_seed(1)
        case, rows = CASES["whisper"], CASES["whisper"].data()
        options: dict[str, Any] = {
            "output_dir": str(folder), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3,
            "num_train_epochs": 2, "eval_strategy": "epoch", "predict_with_generate": True, "save_strategy": "no",
            "report_to": "none", "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False,
            "generation_max_length": 8, "logging_steps": 1,
        }  # fmt: skip
        seen: list[Any] = []

        def metrics(given: Any) -> dict[str, float]:
            seen.append(given.predictions.copy())
            return {"tokens": float(given.predictions.sum())}

        args: Any = Seq2SeqTrainingArguments(**options)
        if kind is Seq2SeqPipelineTrainer:
            args = Seq2SeqPipelineArguments(**options, activation_cache="on")
        trainer = kind(
            case.build(), args, train_dataset=rows, eval_dataset=rows[:6], data_collator=stack, compute_metrics=metrics
        )
        trainer.train()
        return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry], seen

    expected = evaluated(Seq2SeqTrainer, tmp_path / "plain")
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = evaluated(Seq2SeqPipelineTrainer, tmp_path / "ours")
    np.testing.assert_allclose(found[0], expected[0], rtol=TOLERANCE)
    assert all(np.array_equal(one, other) for one, other in zip(found[1], expected[1], strict=True))
    hits, looked_up = outputs_read("model.encoder", caplog)
    # Generation finds what the loss has stored; the first batch of each kind is computed.
    assert (hits, looked_up) == (8 + 2 * 6, 20 + 4 * 6)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*self_attn\.(q_proj|v_proj)"], ids=["names", "pattern"])
def test_adapters_in_a_tower_are_named_with_targets_that_leave_it_frozen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, targets: Any
) -> None:
    def built(own: Any) -> nn.Module:
        return with_adapters(llava().unload(), own)

    trainer_of(PipeTransformerTrainer, Case(lambda: built(targets), captions, ""), tmp_path, max_steps=1).train()
    told = re.search(r"model.vision_tower is computed .* target_modules=r'(.*)'", said(caplog))
    assert told is not None
    caplog.clear()
    case = Case(lambda: built(told[1]), captions, "")
    trainer_of(PipeTransformerTrainer, case, tmp_path / "then").train()
    assert re.search(r"model.vision_tower \(.* is frozen: it is computed once", said(caplog))


def test_a_plan_has_the_frozen_parts_of_a_run_that_trainer_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(PipeTransformerTrainer, CASES["whisper"], tmp_path, plan_only=True, num_train_epochs=100)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code in (None, 0)
    assert re.search(r"model.encoder is frozen. Its outputs \(.* in all\) would be (stored|computed)", said(caplog))
    assert "forward" not in vars(trainer.model.model.encoder)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("lengths", [(5, 23), (12, 12)], ids=["some padding", "no padding"])
def test_layers_that_see_padding_are_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lengths: tuple[int, int]
) -> None:
    """Also if the first samples happen to have none. Every token has a label, the last ones too."""

    def rows() -> list[dict[str, Any]]:
        ids = [torch.randint(4, 99, (lengths[i % 2],), generator=torch.Generator().manual_seed(i)) for i in range(12)]
        return [{"input_ids": own, "attention_mask": torch.ones_like(own), "labels": own % 3} for own in ids]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: pad_sequence([each[name] for each in samples], batch_first=True, padding_value=fill)
            for name, fill in fills.items()
        }

    both(Case(convbert_probe, rows, "convbert", collate), tmp_path)
    assert ("depends on how far its batch is padded" in said(caplog)) == (lengths[0] != lengths[1])


class Larger(nn.Linear):
    """Computes something else in training, without a rate or a name that would tell."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given) * (1.5 if self.training else 1.0)


class Noisy(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found = super().forward(given)
        return found + 0.1 * torch.randn_like(found) if self.training else found


class RarelyZero(nn.Linear):
    """Draws each time, with an effect in one of a thousand."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given) * (torch.rand(()) > 0.001 if self.training else 1.0)


def vit_with(kind: type[nn.Linear]) -> nn.Module:
    model = PROBES["vit"].build()
    next(module for module in model.vit.modules() if isinstance(module, nn.Linear)).__class__ = kind
    return model


def wav2vec2_with_masks() -> nn.Module:
    """Its base model masks times of what enters the layers, in training."""
    model = PROBES["wav2vec2"].build()
    model.config.update({"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2})
    return model


@pytest.mark.parametrize("kind", [Larger, Noisy, RarelyZero])
def test_what_frozen_layers_do_in_training_alone_stays(
    kind: type[nn.Linear], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both(replace(PROBES["vit"], build=lambda: vit_with(kind)), tmp_path)
    assert ("draws random numbers" in said(caplog)) == (kind is not Larger)


class DrawsForNothing(nn.Linear):
    """As layers do that are skipped with probability 0."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.training:
            torch.rand(())
        return super().forward(given)


@pytest.mark.parametrize("drops", [False, True], ids=["nothing random above", "dropout above"])
def test_draws_for_nothing_count_where_layers_above_draw(
    drops: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropout of the head would get other numbers if frozen layers were read."""

    def build() -> nn.Module:
        model = vit_with(DrawsForNothing)
        if drops:
            model.classifier = nn.Sequential(nn.Dropout(0.5), model.classifier)
        return model

    both(replace(PROBES["vit"], build=build), tmp_path)
    assert "it draws random numbers" in said(caplog), "code of a script, which is not tried"


@pytest.mark.parametrize("cache", ["auto", "on"])
def test_masks_over_time_are_drawn_as_in_trainer(cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With 'on' the module that masks is in evaluation mode, and a line says so."""
    case = replace(PROBES["wav2vec2"], build=wav2vec2_with_masks)
    if cache == "on":
        trainer_of(PipeTransformerTrainer, case, tmp_path).train()
        assert "wav2vec2 (0.0271 million parameters) is frozen: it is computed once in evaluation mode" in said(caplog)
    else:
        both(case, tmp_path, activation_cache=cache)
        assert "draws random numbers (dropout)" in said(caplog)


def subject_of(name: str) -> Subject:
    return next(each for each in every_subject() if each.name == name)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        # Its loss reads padding, and what its layers give there depends on the length of the batch.
        ("DebertaV2ForQuestionAnswering", "deberta: "),
        # In evaluation it gives more outputs than in training.
        ("XLNetLMHeadModel", "transformer: 8 of 24 outputs were read instead of computed"),
        # Its hidden states are collected by hooks, which its first forward makes.
        ("BeitForSemanticSegmentation", "no frozen part was seen to compute from the samples alone"),
        # Its forward puts other tensors in the place of buffers.
        ("IBertForMaskedLM", "no frozen part was seen to compute from the samples alone"),
    ],
)
def test_classes_that_were_trained_otherwise_once(
    name: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is stored: losses, norms, weights and buffers of Trainer."""
    share = FROZEN["half" if "no frozen part" in told else "most"]
    expected = account(subject_of(name), tmp_path, "plain", None, frozen_share=share)
    with caplog.at_level(logging.INFO, "hf_pipetransformer"):
        found = account(subject_of(name), tmp_path, "ours", {"activation_cache": "on"}, frozen_share=share)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=TOLERANCE)
    assert told in said(caplog)
    plain, ours = (load_file(tmp_path / f"{name}.{which}.safetensors") for which in ("plain", "ours"))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_layers_with_batch_statistics_are_computed_as_in_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = subject_of("Wav2Vec2ConformerForXVector")
    expected = account(subject, tmp_path, "plain", None, frozen_share=1.0)
    found = account(subject, tmp_path, "ours", {"activation_cache": "auto"}, frozen_share=1.0)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=TOLERANCE)
    account(subject, tmp_path, "on", {"activation_cache": "on"}, frozen_share=1.0)
    assert "it is computed once in evaluation mode" in said(caplog)
