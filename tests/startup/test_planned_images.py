"""Plans of language models that take images beside text, from their configs alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlavaForConditionalGeneration

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.cli import main
from hf_pipetransformer.planning.course import num_passes
from hf_pipetransformer.splitters.base import media_of
from hf_pipetransformer.startup.estimate import batch_on_meta, build_on_meta, estimate, freeze_tower, images_on_meta
from hf_pipetransformer.startup.planner import RunPlanner
from hf_pipetransformer.startup.run_plan import Machine
from tests.support.decoders import make_decoder
from tests.support.media_models import IMAGE, MODELS, Rows, build


LENGTH, SIDE = 128, 16
"""Tokens of a sample, and pixels of an image where its size is free."""
QUICK = ("llava", "smolvlm", "qwen2_vl")
FAMILIES = [name for name in MODELS if name != "llava_left"]


def saved(name: str, folder: Path) -> str:
    model = build(name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return str(folder)


def size_of(name: str) -> int | None:
    return SIDE if name.startswith("qwen") else None


def planner(model: Any, images: dict[str, torch.Tensor], folder: Path, length: int = LENGTH) -> RunPlanner:
    args = PipeTransformerArguments(str(folder / "out"), use_cpu=True, report_to="none")
    return estimate(model, batch_on_meta(model, length), args, Machine(2, 1e9, 2), images)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in FAMILIES]
)
def test_the_first_block_computes_what_the_tower_does(name: str, tmp_path: Path) -> None:
    model = build_on_meta(saved(name, tmp_path), torch.float32)
    images = images_on_meta(model, 2, size_of(name))
    real = build(name).eval()
    real.set_attn_implementation("eager")  # Of other kernels of the CPU nobody counts operations.
    pixels = torch.rand(images["pixel_values"].shape)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        real_images = images | {"pixel_values": pixels}
        if name == "llava_onevision":  # An image of one tile is two: whole, and as a tile.
            real_images = {"pixel_values": pixels[None], "image_sizes": images["image_sizes"][:1]}
        media_of(real).module.get_image_features(**real_images)  # type: ignore[union-attr, operator]
    found = planner(model, images, tmp_path)
    without = planner(model, {}, tmp_path)
    assert found.probe.block_flops[0] == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert found.probe.block_flops[1:] == without.probe.block_flops[1:]
    kept, of_text = (each.costs.blocks.activation_bytes[0] for each in (found, without))
    assert kept > of_text
    freeze_tower(model)
    assert planner(model, images, tmp_path).costs.blocks.activation_bytes[0] == pytest.approx(of_text, rel=0.05)


def test_what_enters_behind_several_layers_stays_with_the_first_stage(tmp_path: Path) -> None:
    model = build_on_meta(saved("qwen3_vl", tmp_path), torch.float32)
    structure = planner(model, images_on_meta(model, 1, SIDE), tmp_path).probe.structure
    assert structure.cut_positions() == [0, 7, 9, 11, 13, 14]


@pytest.mark.parametrize("name", ["smolvlm", "qwen2_vl"])
def test_the_command_says_what_was_assumed_and_adapters_leave_the_tower_frozen(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", saved(name, tmp_path), "--processes", "2", "--device_memory", "1"]
    images = ["--images", "2", *(["--image_size", str(SIDE)] if size_of(name) else [])]
    main([*command, *images])
    assert "2 images in each sample, with tokens among those of its sequence" in capsys.readouterr().out
    main(command)
    assert "samples of text alone: --images says" in capsys.readouterr().out
    trained = {}
    for options in ([], ["--frozen_tower"], ["--lora_rank", "2"]):
        main([*command, *images, *options, "--json"])
        stages = json.loads(capsys.readouterr().out)["stages"]
        trained["".join(options)] = sum(each["trained"] for each in stages)
    model = build(name)
    of_tower = sum(each.numel() for path, each in model.named_parameters() if path.startswith(MODELS[name].tower))
    assert trained["--frozen_tower"] == trained[""] - of_tower
    # Queries, keys, values, outputs: 32 x 32; gates, products up and down: 32 x 64.
    assert trained["--lora_rank2"] == 4 * 2 * (4 * (32 + 32) + 3 * (32 + 64))


# ---- a frozen tower that the run stores ----

TWO = [
    *("--processes", "2", "--device_memory", "1", "--communicator_gb", "0"),
    *("--sequence_length", "48", "--images", "2", "--frozen_tower"),
]
RUN = {"per_device_train_batch_size": 2, "pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}


def dropping() -> Any:
    """Return a model whose stages are cut by counted operations, as its language model has dropout."""
    config = build("llava").config
    config.text_config.attention_dropout, config.vision_config.num_hidden_layers = 0.1, 4
    config.architectures = ["LlavaForConditionalGeneration"]
    return LlavaForConditionalGeneration(config)


def of_48_tokens(num_rows: int) -> Rows:
    tokens = torch.cat([torch.full((32,), IMAGE), torch.arange(4, 20)])
    return [{"input_ids": tokens, "images": [*torch.randn(2, 3, 32, 32)]} for _ in range(num_rows)]


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    words = [str(word) for name, value in RUN.items() for word in (f"--{name}", value)]
    capsys.readouterr()
    main(["plan", str(folder), *TWO, *words, *more])
    found = capsys.readouterr().out
    return json.loads(found) if "--json" in more else found


@pytest.mark.parametrize(
    ("cache", "options", "told"),
    [
        ("auto", {"num_train_epochs": 2}, "read"),
        ("on", {"max_steps": 3}, "read"),
        ("auto", {"max_steps": 2}, "computed"),
        ("off", {"num_train_epochs": 2}, None),
    ],
)
def test_plan_and_start_count_a_frozen_tower_alike(
    cache: str, options: dict[str, int], told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, folder = dropping(), tmp_path / "config"
    model.config.save_pretrained(folder)
    freeze_tower(model)
    args = PipeTransformerArguments(
        str(tmp_path / "out"), use_cpu=True, report_to="none", per_device_train_batch_size=4, activation_cache=cache,
        pipeline_parallel_num_microbatches=2, remove_unused_columns=False, **options,
    )  # fmt: skip
    trainer = PipeTransformerTrainer(model, args, train_dataset=of_48_tokens(8), data_collator=MODELS["llava"].collate)
    trainer.train()
    machine = Machine(2, 1e9, 2)
    start = replace(trainer.pipeline_run.in_force.start_up.plans, topology=machine)  # type: ignore[attr-defined]

    given = {name: str(value) for name, value in {**options, "activation_cache": cache}.items()}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    plan = printed(folder, capsys, *words, "--samples", "8", "--json")
    layout = start.plan(2, 0)
    # The first stage has a layer more if its tower takes no time.
    assert plan["chosen"]["layout"]["boundaries"] == [*layout.boundaries] == [0, 5 if told == "read" else 3, 10]
    assert plan["encoders"] == start.encoders_in_words(layout)
    text = printed(folder, capsys, *words, "--samples", "8")
    assert ("Activation cache: " in text) == (told is not None)
    assert told is None or f"stages are cut as if these were {told}." in text
    assert ("the same in every epoch, of which all but the first reads" in text) == (told == "read")

    meta = build_on_meta(str(folder), torch.float32)
    freeze_tower(meta)
    images = images_on_meta(meta, 2, None)
    args = PipeTransformerArguments(
        str(tmp_path), use_cpu=True, report_to="none", activation_cache=cache, **options, **RUN
    )
    planned = estimate(meta, batch_on_meta(meta, 48), args, machine, images, num_passes(args, 2, 8))
    assert start.read_share == planned.read_share == (0.99 if told == "read" else 0)
    # With one table of measured times in both.
    of_start = replace(start, args=args, costs=planned.costs).inputs().predict(layout)
    assert of_start == planned.inputs().predict(layout)
    assert of_start.seconds == plan["chosen"]["step_seconds"]


def test_only_what_stores_a_tower_is_planned_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dropping().config.save_pretrained(tmp_path)
    seconds = {}
    for cache in ("auto", "off"):
        slow = ["--launch_us", "0", "--device_tflops", "1e-4"]
        rows = printed(tmp_path, capsys, "--activation_cache", cache, *slow, "--json")["rows"]
        seconds[cache] = {row["name"]: row["step_seconds"] for row in rows}
    assert seconds["auto"].keys() == seconds["off"].keys()
    stored = {name for name, value in seconds["auto"].items() if value < seconds["off"][name]}
    assert {"K=1", "K=2 with 1f1b", "K=2 with gpipe"} < stored
    computed = {name for name, value in seconds["auto"].items() if value == seconds["off"][name]}
    assert computed == {"Trainer, DDP", "FSDP2/ZeRO-3", "K=2 with async_1f1b"}
    # Python launches nothing of what is read, and nothing goes backward through what is frozen.
    rows = {cache: printed(tmp_path, capsys, "--activation_cache", cache, "--json") for cache in ("auto", "off")}
    (read, _), (computing, _) = (rows[cache]["blocks"]["launch"][0] for cache in ("auto", "off"))
    assert read == pytest.approx(0.01 * computing)
    assert all(each["blocks"]["backward"][0] == 0 for each in rows.values())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen2_vl", ["--images", "1"], "takes images of any size. Say theirs with --image_size"),
        ("gemma3", ["--images", "1", "--image_size", "48"], "takes images and tiles of 32 pixels. Leave it out"),
        ("gemma3", ["--images", "40"], "the images of a sample alone have 160 tokens"),
        ("llama", ["--images", "1"], "takes no images beside text whose size its config tells"),
        ("llama", ["--frozen_tower"], "--frozen_tower: LlamaForCausalLM takes no images beside text"),
    ],
)
def test_images_that_cannot_be_planned_are_refused(
    name: str, options: list[str], message: str, tmp_path: Path
) -> None:
    if name == "llama":
        make_decoder(name).config.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    else:
        saved(name, tmp_path)
    command = ["plan", str(tmp_path), "--processes", "2", "--device_memory", "1", "--sequence_length", str(LENGTH)]
    with pytest.raises(SystemExit, match=message):
        main([*command, *options])
