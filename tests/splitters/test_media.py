"""Language models that take images beside text: where stages begin, what they hold, and what they run without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel, Trainer

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.runtime.generation import check_generation, settings_of
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.splitters.base import GenericSplitter, MediaSplitter, UnsupportedModelError, media_of
from hf_pipetransformer.splitters.structure import Probe
from hf_pipetransformer.splitters.view import StageView
from hf_pipetransformer.startup.model import undisturbed
from hf_pipetransformer.startup.rows import FirstBatch, probe_samples
from tests.distributed.test_media import STEPS, MediaCase, make_trainer
from tests.support.media_models import MODELS, build, make_rows, qwen3_vl
from tests.support.models import probed_with


def batch_of(name: str, num_rows: int = 5) -> dict[str, Any]:
    return MODELS[name].collate(make_rows(MODELS[name], num_rows))


def probe(name: str, model: Any = None, **entries: Any) -> Probe:
    model = build(name) if model is None else model
    with undisturbed(model, True):
        return probed_with(model, MediaSplitter(), lambda given: model(**given).loss, batch_of(name) | entries)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_whole_again_where_its_stages_are_put_together(name: str) -> None:
    """Losses and gradients at all cuts are compared as at each start."""
    model = build(name)
    found, media = probe(name, model), media_of(model)
    assert media is not None
    assert "pixel_values" in media.names
    assert found.placeholders == media.names
    structure, first = found.structure, next(media.module.parameters())
    assert structure.layers == list(media.decoder.layers)  # type: ignore[arg-type]
    of_tower = [path for path, _ in model.named_parameters() if path.startswith(MODELS[name].tower)]
    for path in of_tower:
        expected = range(structure.num_blocks) if model.get_parameter(path) is first else [0]
        assert list(structure.blocks_of_parameter[path]) == [*expected]
    assert not any(module._forward_pre_hooks for module in model.modules())


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
    with pytest.raises(ValueError, match="No sample of the first batch has pixel_values: expected one with images"):
        probe_samples(first(without), "input_ids", lambda _: 1)
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
