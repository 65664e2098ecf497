"""Plans of language models that take images beside text, from their configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.cli import main
from hf_pipetransformer.splitters.base import media_of
from hf_pipetransformer.startup.estimate import batch_on_meta, build_on_meta, estimate, freeze_tower, images_on_meta
from hf_pipetransformer.startup.planner import RunPlanner
from hf_pipetransformer.startup.run_plan import Machine
from tests.support.decoders import make_decoder
from tests.support.media_models import MODELS, build


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
