"""Language models that take images beside text: where stages begin, what they hold, and what they run without."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel, Trainer, TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache.frozen_parts.part import FrozenPart, PresentStep
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.report.events import EVENTS_FILE
from hf_pipetransformer.runtime.generation import check_generation, settings_of
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.splitters.adapters import adapted_tower
from hf_pipetransformer.splitters.base import GenericSplitter, MediaSplitter, UnsupportedModelError, media_of
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.splitters.view import StageView
from hf_pipetransformer.startup.costs import middle_layers
from hf_pipetransformer.startup.model import undisturbed
from hf_pipetransformer.startup.rows import FirstBatch, probe_samples
from hf_pipetransformer.startup.twin import WHOLE
from tests.distributed import media_worker
from tests.distributed.media_worker import STEPS, MediaCase, make_trainer
from tests.distributed.scenarios import Lines
from tests.support.media_models import MODELS, build, gemma4, make_rows, qwen3_vl
from tests.support.models import probed_with


def batch_of(name: str, num_rows: int = 5) -> dict[str, Any]:
    return MODELS[name].collate(make_rows(MODELS[name], num_rows))


def probe(name: str, model: Any = None, **entries: Any) -> Probe:
    model = build(name) if model is None else model
    with undisturbed(model, True):
        return probed_with(model, MediaSplitter(), lambda given: model(**given).loss, batch_of(name) | entries)


def test_a_layer_of_each_kind_is_measured() -> None:
    """Those of Qwen3.5 take turns."""
    assert middle_layers(WHOLE, probe("qwen3_5").structure) == {2: [0, 2], 3: [1, 3]}
    assert middle_layers(WHOLE, probe("llava").structure) == {2: [0, 1, 2, 3]}


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_whole_again_where_its_stages_are_put_together(name: str) -> None:
    """Losses and gradients at all cuts are compared as at each start."""
    model = build(name)
    found, media = probe(name, model), media_of(model)
    assert media is not None
    assert "pixel_values" in media.names
    assert found.placeholders == media.names
    structure, first = found.structure, next(media.module.parameters())
    # Its decoder may be a causal language model itself.
    text: Any = getattr(media.decoder, "model", media.decoder)
    assert structure.layers == list(text.layers)
    of_tower = [path for path, _ in model.named_parameters() if path.startswith(MODELS[name].tower)]
    for path in of_tower:
        expected = range(structure.num_blocks) if model.get_parameter(path) is first else [0]
        assert list(structure.blocks_of_parameter[path]) == [*expected]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_the_work_of_frozen_encoders_is_told_from_that_of_other_embeddings(name: str) -> None:
    model = build(name)
    media = media_of(model)
    assert media is not None
    assert media.frozen == {}
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(not path.startswith(MODELS[name].tower))
    frozen = media.frozen
    # Its last projection is no part any more.
    last = [parameter for module in frozen.values() for parameter in module.parameters() if parameter.dim() == 2][-1]
    assert probe(name, model).media_share == 1, "words are looked up, which is no product"
    last.requires_grad_(True)
    assert 0.4 < probe(name, model).media_share < 1
    model.requires_grad_(False)
    assert media.frozen == frozen, "nothing of the language model"


def test_stages_are_cut_without_what_is_read_where_that_is_known(tmp_path: Path) -> None:
    # The first of these runs has an epoch less.
    expected = {("on", STEPS): "computed", ("on", 7): "read", ("auto", 7): "read", ("off", 7): None}
    for (cache, steps), told in expected.items():
        options = {"max_steps": steps}
        case = MediaCase("llava", "frozen", 2, options=options, ours={"activation_cache": cache})
        trainer = make_trainer(case, (1, 1), tmp_path)
        trainer.train()
        planner = trainer.pipeline_run.in_force.start_up.plans  # type: ignore[attr-defined]
        assert planner.read_share == (0.99 if told == "read" else 0)
        text = planner.describe(trainer.layout, "none", False)["expectation"]  # type: ignore[attr-defined]
        assert ("stages are cut as if these were" in text) == (told is not None)
        assert told is None or f"as if these were {told}." in text
        # A layer has more work than words that are looked up.
        embeddings, layer, *_ = planner.blocks.forward
        assert told != "read" or embeddings < layer


def test_a_stage_above_the_first_needs_no_weights_of_the_tower() -> None:
    """They are meta tensors there, but for the first of all, by which transformers tells the device of a model."""
    for name in ("smolvlm", "idefics3", "qwen2_5_vl"):
        model = build(name)
        structure, batch = probe(name, model).structure, batch_of(name)
        later = structure.num_blocks
        view = StageView(model, MediaSplitter(), structure)
        received = view.run(range(3), None, partial(model, **batch))
        view.widen()
        expected = view.run(range(3, later), received, partial(model, **batch)).loss
        view.remove()
        ParameterStore(model).release(
            {path for path, blocks in structure.blocks_of_parameter.items() if blocks[-1] > 2}
        )
        found = view.run(range(3, later), received, partial(model, **batch)).loss
        view.remove()
        assert torch.equal(found, expected)


def test_what_enters_behind_several_layers_stays_with_the_first_stage() -> None:
    """Qwen3-VL adds what its tower finds to what layers 0 and 1 give: the next one may be the first of a stage."""
    structure = probe("qwen3_vl").structure
    assert structure.changed_before == 2
    assert structure.cut_positions() == [0, 7, 9, 11, 13, 14]
    assert structure.block_starts() == [0, 1, 3, 5, 7, 9, 11, 13, 14]
    # Its work is counted where no stage begins, too.
    assert all(flops > 0 for flops in probe("qwen3_vl").block_flops[1:13:2])


def test_what_enters_behind_the_last_layer_is_missed_by_the_head_alone() -> None:
    """That counts if an image predicts a word."""
    assert probe("qwen3_vl", qwen3_vl(num_layers=2)).structure.cut_positions() == [0, 5, 6]
    with pytest.raises(UnsupportedModelError, match="when it is split into pipeline stages"):
        probe("qwen3_vl", qwen3_vl(num_layers=2), labels=batch_of("qwen3_vl")["input_ids"])


def test_layers_that_are_given_more_than_the_activation_are_named() -> None:
    """The smaller ones of Gemma 4 make of the embeddings what each of their layers adds."""
    with pytest.raises(UnsupportedModelError, match="Layer 0 reads per_layer_input beside the activation"):
        probe("gemma4", gemma4(width_by_layer=8))


def test_models_of_text_alone_and_pairs_of_towers_have_no_media() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "num_hidden_layers": 1}
    assert media_of(BertModel(BertConfig(vocab_size=9, **sizes))) is None
    towers = CLIPModel(CLIPConfig(text_config={"vocab_size": 9, **sizes}, vision_config=sizes, projection_dim=4))
    assert media_of(towers) is None
    with pytest.raises(UnsupportedModelError, match="its forward takes no encoded media .mm_encoder_outputs. either"):
        GenericSplitter().layers(towers)
    with pytest.raises(UnsupportedModelError, match="has no single stack of") as refused:
        GenericSplitter().layers(build("llava"))
    assert "encoded media" not in str(refused.value)


def test_images_are_looked_for_in_the_first_batch() -> None:
    rows, family = make_rows(MODELS["llava"], 8), MODELS["llava"]
    without = [row for row in rows if not row["images"]]

    def first(rows: list[Any]) -> FirstBatch:
        collated = lambda start, stop: SampleBatch(family.collate(rows[start:stop]))  # noqa: E731
        return FirstBatch(SampleBatch(family.collate(rows)), len(rows), frozenset({"pixel_values"}), collated)

    found = probe_samples(first([*without, *rows]), "input_ids", lambda _: 1, most=3)
    assert len(found["input_ids"]) == 3
    assert "pixel_values" in found
    assert "pixel_values" in FirstBatch(SampleBatch(family.collate(rows)), 8, frozenset({"pixel_values"})).read(2)


def test_stages_do_not_generate_from_images() -> None:
    model = build("llava")
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration takes images, videos or sounds beside tokens"):
        check_generation(model, settings_of(model, {}), {})


# ---- one process ----


def logged(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_text_alone_follows_trainer_and_a_later_image_ends_the_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints that take images are trained on text, too."""
    case, found = MediaCase(name, "trained", 2), {}
    for layout in (None, (1, 1)):
        trainer = make_trainer(case, layout, tmp_path / str(layout))
        with_images = trainer.train_dataset
        texts = [row for row in with_images if not row["images"]]  # type: ignore[union-attr]
        trainer.train_dataset = texts * 8
        found[layout] = logged(trainer)
    assert len(found[None]) == 2 * STEPS and found[1, 1] == pytest.approx(found[None], rel=1e-5)
    assert "stages are tried and cut with text alone" in caplog.text
    trainer = make_trainer(case, (1, 1), tmp_path / "later")
    trainer.args.train_sampling_strategy = "sequential"
    trainer.train_dataset = [*texts * 8, *with_images]  # type: ignore[misc]
    trainer.args.max_steps = 100
    with pytest.raises(ValueError, match="with which the stages of this model were not tried, since no sample"):
        trainer.train()


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_micro_batches_of_one_process_follow_trainer(name: str, tmp_path: Path) -> None:
    case = MediaCase(name, "trained", 2)
    ours, plain = make_trainer(case, (1, 1), tmp_path / "ours"), make_trainer(case, None, tmp_path / "plain")
    found = logged(ours)
    assert len(found) == 2 * STEPS
    assert found == pytest.approx(logged(plain), rel=1e-5)
    assert not ours.pipeline_run.is_left_to_trainer  # type: ignore[attr-defined]
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


def test_a_collator_that_draws_is_refused_where_it_would_be_called_by_pieces(tmp_path: Path) -> None:
    trainer = make_trainer(MediaCase("llava", "trained", 2), (1, 1), tmp_path)
    collate = trainer.data_collator

    def drawing(rows: list[Any]) -> dict[str, Any]:
        found = collate(rows)
        return {**found, "pixel_values": found["pixel_values"] + 0 * torch.rand(())} if len(found) > 3 else found

    trainer.data_collator = drawing
    with pytest.raises(ValueError, match=r"is collated in parts, 2 here .* its collator draws random numbers"):
        trainer.train()


def test_layers_do_not_freeze_while_a_run_on_stages_goes_on(tmp_path: Path) -> None:
    case = MediaCase("llava", "trained", 2, ours={"freeze_policy": "fixed", "freeze_at": "2:1"})
    with pytest.raises(UnsupportedModelError, match="its layers cannot freeze or move on stages while a run goes on"):
        make_trainer(case, (1, 1), tmp_path).train()


def test_without_an_option_for_stages_or_parts_it_is_left_to_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(MediaCase("llava", "frozen", 1), (1, 1), tmp_path)
    assert isinstance(trainer, PipeTransformerTrainer)
    assert len(logged(trainer)) == 2 * STEPS
    assert trainer.pipeline_run.is_left_to_trainer


class Scales(TrainerCallback):
    """Changes the tower from outside at the begin of the third epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if round(state.epoch) == 2:
            with torch.no_grad():
                model.model.vision_tower.get_parameter(SCALED).mul_(1.5)


SCALED = "encoder.layers.0.mlp.fc1.weight"


def test_a_stored_tower_that_is_changed_from_outside_is_computed_again(tmp_path: Path) -> None:
    case = MediaCase("llava", "frozen", 2, options={"max_steps": 4 * STEPS}, ours={"activation_cache": "on"})
    ours, plain = make_trainer(case, (1, 1), tmp_path / "ours"), make_trainer(case, None, tmp_path / "plain")
    for trainer in (ours, plain):
        trainer.add_callback(Scales())
    expected = logged(plain)
    assert expected != pytest.approx(logged(make_trainer(case, None, tmp_path / "other")), rel=1e-5)
    assert logged(ours) == pytest.approx(expected, rel=1e-5)
    events = [json.loads(line) for line in (tmp_path / "ours" / EVENTS_FILE).read_text().splitlines()]
    epochs = [(each["hits"], each["misses"]) for each in events if each.get("what") == "epoch"]
    (first, _), (second, _), (third, computed), (fourth, _) = epochs
    assert (first, third) == (0, 0)
    assert computed > second > 0
    assert fourth > 0


def test_a_tower_with_adapters_is_computed_on_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = r".*(q_proj|v_proj)"
    monkeypatch.setattr(
        media_worker, "LoraConfig", lambda **given: LoraConfig(**{**given, "target_modules": everywhere})
    )
    case = MediaCase(
        "llava", "frozen", 2, adapts=True, options={"max_steps": 2 * STEPS}, ours={"activation_cache": "on"}
    )
    lines = Lines()
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "handlers", [lines])
    ours, plain = make_trainer(case, (1, 1), tmp_path / "ours"), make_trainer(case, None, tmp_path / "plain")
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-5)
    told = [line for line in lines.lines if "is computed in every epoch, because adapters train it" in line]
    assert [line.partition(" ")[0] for line in told] == ["model.vision_tower"]
    assert not any(line.startswith("model.vision_tower (") for line in lines.lines)


def test_adapters_of_a_model_that_could_hear_and_has_no_encoder_of_sound() -> None:
    """Gemma 4 names an encoder of sound in any case."""
    tower = r"model\.vision_tower.*q_proj\.linear"
    for targets, expected in ((r".*language_model.*q_proj", None), (tower, "model.vision_tower")):
        found = adapted_tower(get_peft_model(build("gemma4"), LoraConfig(r=2, target_modules=targets)))
        assert (found and found[0]) == expected


def test_what_stands_in_for_a_tower_leaves_no_trace_after_an_error_in_another_chunk() -> None:
    """Chunks of a rank without the embeddings replace the tower, too: the last to come goes first."""
    model = build("llava").requires_grad_(False)
    structure, batch = probe("llava", model).structure, batch_of("llava")
    view = StageView(model, MediaSplitter(), structure)
    view.install(range(3), range(5, 7))
    step = PresentStep(model, torch.device("cpu"))
    media = media_of(model)
    assert media is not None
    parts = [
        FrozenPart(name, module, step, lambda part, args, kwargs: part.compute(args, kwargs))
        for name, module in media.frozen.items()
    ]

    def fail() -> None:
        raise ZeroDivisionError

    def run() -> None:
        with ExitStack() as stack:
            for part in parts:
                stack.enter_context(part.standing_in())
            received = view.run(range(3), None, partial(model, **batch))
            view.run(range(5, 7), received, fail)

    with pytest.raises(ZeroDivisionError):
        run()
    view.remove()
    assert all("forward" not in vars(module) for module in model.modules())
