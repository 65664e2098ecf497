"""The plan of a run: figures that follow from a model's shapes, what freezing changes, and what it concludes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, ViTConfig

from hf_pipetransformer.cli import main
from hf_pipetransformer.freeze.policies import MEASURED
from hf_pipetransformer.planning.course import length_of_run
from hf_pipetransformer.report.drawing import MISSING_LIBRARY
from hf_pipetransformer.schedules.abilities import SCHEDULE_NAMES
from hf_pipetransformer.schedules.layout import Layout
from hf_pipetransformer.startup.costs import _LiveBytes
from hf_pipetransformer.startup.estimate import _OnDevice, batch_on_meta, build_on_meta
from hf_pipetransformer.startup.plan_words import blocks_in_words
from hf_pipetransformer.startup.run_plan import communicators


CONFIGS = {
    "llama_70b": LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        dtype="bfloat16",
    ),
    "llama_7b": LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16"),
    "vit": ViTConfig(architectures=["ViTForImageClassification"], num_labels=1000),
    "minilm": BertConfig(
        architectures=["BertForSequenceClassification"], hidden_size=384, num_hidden_layers=6,
        num_attention_heads=12, intermediate_size=1536,
    ),
}  # fmt: skip
"""Configs alone; weights are nowhere. The Llama's defaults are those of 7 B."""

IMAGES = 1_281_167
IMAGENET = [
    "--processes", "8", "--device_memory", "16", "--samples", str(IMAGES), "--num_train_epochs", "10",
    "--per_device_train_batch_size", "64", "--freeze_policy", "fixed", "--freeze_at", "0:6",
    "--activation_cache_max_gb", "38", "--activation_cache_dtype", "bfloat16", "--reading_ms", "8",
]  # fmt: skip
HALF_FROZEN = "first 1/2 frozen, half of the epochs"
"""A contender of the study of accuracy against time."""
SMALL = ["--processes", "2", "--device_memory", "4", "--sequence_length", "64", "--samples", "6400"]
SHORT = [*SMALL, "--samples", "800"]
"""Three epochs of 50 steps each."""


class Planner:
    """Plans of the configs, by command line; a status of 1 is noted."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.status = 0

    def text(self, name: str, *options: str) -> str:
        CONFIGS[name].save_pretrained(self.folder / name)
        try:
            main(["plan", str(self.folder / name), *options])
            self.status = 0
        except SystemExit as ended:
            if ended.code != 1:
                raise
            self.status = 1
        return self.capsys.readouterr().out

    def json(self, name: str, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text(name, *options, "--json"))
        return found


def rows(found: dict[str, Any], kind: str = "run") -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["kind"] == kind]


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planner:
    return Planner(tmp_path, capsys)


def test_pipelines_over_nodes_are_planned_with_the_speed_between_nodes(plan: Planner) -> None:
    options = ["--processes", "8", "--processes_per_node", "4", "--device_memory", "80", "--sequence_length", "64"]
    found = {rate: plan.json("minilm", *options, *given) for rate, given in {
        None: [], 25: ["--node_bandwidth", "25"], 0.1: ["--node_bandwidth", "0.1"],
    }.items()}  # fmt: skip
    step = {rate: {each["pipeline_size"]: each["step_seconds"] for each in rows(one)} for rate, one in found.items()}
    assert list(step[None]) == [1, 2, 4, 8] and step[25] == step[None]
    # The one pipeline over both nodes waits for messages, replicas for their reduction.
    assert all(step[0.1][size] > step[25][size] for size in (1, 2, 4, 8))
    assert any("0.1 GB/s between two devices of different nodes" in each for each in found[0.1]["course"]["assumed"])
    on_three = plan.json("minilm", *options[2:], "--processes", "12")
    assert [each["pipeline_size"] for each in rows(on_three)] == [1, 2, 4, 12]
    with pytest.raises(SystemExit, match="pipeline_parallel_size=3 cannot be planned: .* allow .1, 2, 4, 8."):
        plan.json("minilm", *options, "--pipeline_parallel_size", "3")
    # The cache waits until a pipeline fits a node, which one that is not elastic never does.
    spanning = [
        "--pipeline_parallel_size",
        "8",
        "--samples",
        "64000",
        "--freeze_policy",
        "fixed",
        "--freeze_at",
        "0:4",
    ]
    for elastic, given in ((True, []), (False, ["--elastic", "false"])):
        caching = plan.json("minilm", *options, *spanning, *given)["caching"]
        assert (caching["why_off"] is None) == elastic
    assert "each pipeline spans nodes (K=8 on nodes of 4 processes)" in caching["why_off"]


def sizes(found: dict[str, Any], part: str) -> list[float]:
    return [rank[part] for rank in found["chosen"]["memory"]]


@pytest.mark.parametrize(
    ("precision", "per_element", "per_token"), [([], 64, 12 * 4 + 2 * 8), (["--bf16", "true"], 40, 12 * 4 + 2 * 8)]
)
def test_activations_are_of_the_precision_that_autocast_computes_in(
    plan: Planner, precision: list[str], per_element: int, per_token: int
) -> None:
    """Of a layer, for an element of the hidden states in float32: the input 4, queries, keys and values 12, attention
    4, its sum 4, the norm's 4, the MLP 16 + 16, its sum 4. With autocast: inputs of three products 6, 6, 2, 4, of the
    fourth 2, 8 + 8, 4. For a token: what attention keeps of each head, mean and deviation of two norms. A plan of
    BERT-base in bf16 had 25 % more than an H200 took, one of ViT-base 34 %."""
    found = plan.json("minilm", *SMALL, "--per_device_train_batch_size", "1", *precision)
    costs = found["blocks"]["activation_bytes"]
    # The state of attention's random numbers comes to it.
    assert costs[1] + costs[2] == pytest.approx(64 * (per_element * 384 + per_token), abs=32)


def test_a_pass_takes_as_long_as_its_operations_are_launched(plan: Planner) -> None:
    """MiniLM's step took 14 ms on an H200, for which 0.8 ms were planned by its rate."""
    sparse = [*SMALL, "--pipeline_parallel_size", "1", "--device_tflops", "1e6", "--memory_bandwidth", "1e9"]
    none, some, twice = (
        plan.json("minilm", *sparse, "--bandwidth", "1e9", "--launch_us", each)["chosen"]["step_seconds"]
        for each in ("0", "20", "40")
    )
    assert none < 1e-5 and twice == pytest.approx(2 * some, rel=1e-3)
    # A layer has 12 operations, embeddings and head have a few; a backward takes as long as a forward.
    assert 2 * 6 * 12 * 20e-6 < some < 2 * (6 * 12 + 20) * 20e-6
    verdicts = plan.json("minilm", *sparse, "--bandwidth", "1e9", "--launch_us", "20")["verdicts"]
    assert any("wait for Python to launch their operations, which they compute in 0.00" in each for each in verdicts)
    slow = [*SMALL, "--pipeline_parallel_size", "1", "--device_tflops", "0.001"]
    found = [plan.json("minilm", *slow, "--launch_us", each)["chosen"]["step_seconds"] for each in ("20", "0")]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert not any("to launch" in each for each in plan.json("minilm", *slow, "--launch_us", "20")["verdicts"])


@pytest.mark.parametrize("name", ["llama_7b", "minilm", "vit"])
def test_blocks_and_what_is_around_them_launch_what_a_whole_forward_launches(plan: Planner, name: str) -> None:
    """A Llama's masks and positions were counted with each half of each layer."""
    found = plan.json(name, *SMALL, "--launch_us", "1")
    blocks, around = found["blocks"]["launch"], found["overheads"]["per_forward"]
    model = build_on_meta(str(plan.folder / name), None)
    batch = batch_on_meta(model, 64)
    with _OnDevice(None), _LiveBytes() as live:
        model(**batch)
    assert sum(forward for forward, _ in blocks) + around == pytest.approx(1e-6 * live.num_operations, abs=1e-9)
    assert blocks[0][0] > 0 and all(backward == forward for forward, backward in blocks)
    again = plan.json(name, *SMALL, "--launch_us", "1", "--activation_checkpointing", "true")["blocks"]["launch"]
    assert again == [[forward, 2 * forward] for forward, _ in blocks]


def test_70b_on_8_devices_of_80_gb_fits_with_adapters_only(plan: Planner) -> None:
    options = ["--processes", "8", "--device_memory", "80", "--sequence_length", "1024"]
    batch = ["--per_device_train_batch_size", "1", "--activation_checkpointing", "true"]
    assert not plan.json("llama_70b", *options, *batch)["chosen"]["fits"]
    assert plan.status == 1
    found = plan.json("llama_70b", *options, *batch, "--lora_rank", "16")
    assert plan.status == 0
    assert [each["pipeline_size"] for each in rows(found) if each["fits"]] == [4, 8]
    assert found["chosen"]["pipeline_size"] == 4 and not rows(found, "Trainer")[0]["fits"]
    # All weights are on the ranks of a pipeline once, in bfloat16.
    assert sum(sizes(found, "weights")) == found["weight_bytes"] >= 2 * found["num_parameters"]
    assert sum(stage["parameters"] for stage in found["stages"]) == found["num_parameters"]


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_plan_with_adapters_warns_of_no_option_that_nobody_gave(plan: Planner) -> None:
    plan.json("minilm", *SMALL, "--lora_rank", "4")


@pytest.mark.parametrize(("devices", "gigabytes"), [("2", "16"), ("4", "12")])
def test_7b_in_4_bits_fits_on_small_devices_with_adapters(plan: Planner, devices: str, gigabytes: str) -> None:
    options = ["--processes", devices, "--device_memory", gigabytes, "--sequence_length", "512", "--lora_rank", "16"]
    options += ["--per_device_train_batch_size", "1", "--activation_checkpointing", "true"]
    found = plan.json("llama_7b", *options, "--load_in_4bit")
    assert plan.status == 0
    # Half a byte a weight and 4 bytes for 64; norms, embeddings and head in bfloat16.
    in_layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    beside = 2 * (2 * 32000 * 4096 + 65 * 4096)
    adapters = 32 * 16 * 4 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    assert found["weight_bytes"] == in_layers // 2 + in_layers // 16 + beside + adapters
    assert sum(sizes(found, "weights")) == found["weight_bytes"]
    whole = plan.json("llama_7b", *options)
    assert whole["weight_bytes"] == 2 * in_layers + beside + adapters
    assert min(each["pipeline_size"] for each in rows(whole) if each["fits"]) > found["chosen"]["pipeline_size"]


def test_4_bits_without_adapters_are_refused(plan: Planner) -> None:
    with pytest.raises(SystemExit, match="--load_in_4bit without --lora_rank"):
        plan.text("minilm", *SMALL, "--load_in_4bit")


def test_7b_on_4_devices_of_24_gb_names_bytes_and_what_helps(plan: Planner) -> None:
    options = ["--processes", "4", "--device_memory", "24", "--sequence_length", "512"]
    text = plan.text("llama_7b", *options, "--per_device_train_batch_size", "1")
    assert plan.status == 0
    for heading in ("stages K", "Trainer, DDP", "communicators", "Host memory", "zb_v", "Assumed"):
        assert heading in text
    found = plan.json("llama_7b", *options, "--per_device_train_batch_size", "1", "--optim", "adamw_8bit")
    # A byte for each of two moments, and their scales.
    state = sum(sizes(found, "optimizer")) / found["num_parameters"]
    assert state == pytest.approx(2 * (1 + 4 / 256))
    found = plan.json("llama_7b", *options, "--per_device_train_batch_size", "1")
    # In bfloat16: weights, gradients, two moments. The gradients' float32 sums would not fit.
    assert [each["pipeline_size"] for each in rows(found) if each["fits"]] == [4]
    assert [sum(sizes(found, part)) / found["num_parameters"] for part in ("weights", "optimizer")] == [2, 4]
    # At the fullest moment of the first stage the gradient of its word embeddings is not there yet, only some rows.
    table = 2 * 32_000 * 4096
    assert 0.9 * table < 2 * found["num_parameters"] - sum(sizes(found, "gradients")) < table
    plan.text("llama_7b", *options, "--per_device_train_batch_size", "16")
    assert plan.status == 1


def test_vit_on_imagenet_stores_a_tenth_of_what_the_cache_needs(plan: Planner) -> None:
    found = plan.json("vit", *IMAGENET)
    caching, course, took = found["caching"], found["course"], found["duration"]
    # 197 tokens of 768 in bfloat16, rounded up to the store's alignment.
    assert caching["needed_bytes"] / IMAGES == pytest.approx(197 * 768 * 2, rel=2e-3)
    assert caching["share"] == pytest.approx(38e9 / caching["needed_bytes"])
    assert course["steps_per_epoch"] == -(-IMAGES // 512) and course["num_steps"] == 10 * course["steps_per_epoch"]
    assert course["freezing"]["spans"] == [{"num_steps": course["num_steps"], "num_frozen": 6}]
    assert took["seconds"] < took["full_seconds"]
    assert took["equal_epochs"] == pytest.approx(10 * took["seconds"] / took["full_seconds"])
    fastest, freeze = found["verdicts"]
    assert fastest == "Fastest that fits, before layers freeze: K=1, as this run begins."
    assert f"compare it with {took['equal_epochs']:.3g} epochs of full fine-tuning" in freeze
    assert "10% of the samples are stored; activation_cache_max_gb" in plan.text("vit", *IMAGENET)


def test_all_samples_that_fit_are_read_back_and_save_more(plan: Planner) -> None:
    part, whole = plan.json("vit", *IMAGENET), plan.json("vit", *IMAGENET, "--activation_cache_max_gb", "500")
    assert whole["caching"]["share"] == 1
    without = plan.json("vit", *IMAGENET, "--activation_cache", "off", "--activation_cache_dtype", "auto")
    assert without["caching"]["why_off"] == "activation_cache='off'"
    assert whole["duration"]["seconds"] < part["duration"]["seconds"] < without["duration"]["seconds"]


def test_a_cache_that_would_not_pay_is_said_to_stay_empty(plan: Planner) -> None:
    found = plan.json("vit", *IMAGENET, "--reading_ms", "0", "--disk_bandwidth", "0.1")
    assert not found["caching"]["is_used"] and "recomputing" in found["caching"]["reason"]
    text = plan.text("vit", *IMAGENET, "--reading_ms", "0", "--disk_bandwidth", "0.1")
    assert f"nothing is stored ({found['caching']['reason']}); 387.7 GB needed" in text


def test_layers_that_wait_for_python_are_worth_storing(plan: Planner) -> None:
    """A record takes longer to read than a fast device computes, but not than Python launches what it computes."""
    options = [*IMAGENET, "--processes", "1", "--activation_cache_max_gb", "500", "--reading_ms", "0"]
    options += ["--per_device_train_batch_size", "1", "--device_tflops", "1e5", "--disk_bandwidth", "1"]
    idle, waiting = (plan.json("vit", *options, "--launch_us", each)["caching"] for each in ("0", "25"))
    assert not idle["is_used"] and "recomputing" in idle["reason"]
    assert waiting["is_used"]


def test_records_that_are_read_while_the_device_computes_take_no_time(plan: Planner) -> None:
    """At 1 GB/s a record takes twice as long as the frozen layers, and half as long as the layers above."""
    options = [*IMAGENET, "--processes", "1", "--activation_cache_max_gb", "500", "--reading_ms", "0"]
    slow, fast = (plan.json("vit", *options, "--disk_bandwidth", each) for each in ("1", "100"))
    assert slow["caching"]["is_used"]
    assert slow["duration"]["seconds"] == pytest.approx(fast["duration"]["seconds"])


def test_what_freezes_too_late_gains_nothing_in_two_epochs(plan: Planner) -> None:
    options = [*SMALL, "--num_train_epochs", "2", "--freeze_policy", "fixed", "--freeze_at", "795:3"]
    found = plan.json("minilm", *options)
    assert (found["course"]["num_steps"], found["course"]["steps_per_epoch"]) == (800, 400)
    assert found["verdicts"][-1].startswith("No gain: 2 epochs, in which freezing and cache take 1.00 of")
    none = plan.json("minilm", *SMALL, "--freeze_policy", "gradient_norm", "--freeze_min_active_layers", "6")
    assert none["verdicts"][-1].startswith("No gain: no layer freezes in 3 epochs")
    assert none["caching"] is None


def test_nothing_is_said_of_freezing_that_is_not_known(plan: Planner) -> None:
    text = plan.text("minilm", "--processes", "2", "--device_memory", "4", "--freeze_policy", "schedule")
    assert "Without --samples" not in text and "Frozen" not in text
    text = plan.text("minilm", *SMALL, "--freeze_policy", "fixed", "--freeze_at", "10:3,20:0")
    assert "The policy may unfreeze layers: what it saves is not predicted." in text
    text = plan.text("minilm", *SHORT)
    assert "Nothing freezes with these options" in text and "No gain" not in text and MEASURED in text
    assert "Measured" not in plan.text("minilm", *SMALL), "1,200 steps"
    text = plan.text("minilm", *SMALL, "--freeze_policy", "gradient_norm")
    assert "at most" in text and "Freezing is predicted to take at least" in text


def test_the_verdict_on_a_short_run_says_what_was_measured_of_half_of_its_layers(plan: Planner) -> None:
    """In others, and of other layers, nothing is claimed; the sentence's figures are those of the committed study."""
    half = ["--freeze_layers", "1/2"]
    for options in (half, ["--freeze_policy", "auto"]):
        assert plan.json("minilm", *SHORT, *options)["verdicts"][-1].endswith(MEASURED), options
    for options in (["--num_train_epochs", "4", *half], ["--freeze_layers", "1/3"]):
        assert "Measured" not in plan.text("minilm", *SHORT, *options), options
    study = json.loads((Path(__file__).resolve().parents[2] / "benchmarks" / "front.json").read_text())["tasks"]
    rows = {name: row for name, task in study.items() for row in task["rows"] if row["contender"] == HALF_FROZEN}
    found = {name: row["against_full_at_equal_time"] for name, row in rows.items()}
    others = [found.pop(name) for name in ("digits", "entailment")]
    longer = [found.pop(name) for name in ("sst2_middle", "squad_middle")]
    assert max(found.pop("sst2_long")["points"]) < 0, "1,250 steps, in which `auto` freezes nothing"
    points = [each["mean"] for each in found.values()]
    low, high = min(points), max(points)
    assert f"{low:.1f} to {high:.1f} points above full fine-tuning of equal time in all {len(points)} sett" in MEASURED
    faster = f"{HALF_FROZEN}, twice the rate"
    points = [
        row["against_full_at_equal_time"]["mean"]
        for name in found
        for row in study[name]["rows"]
        if row["contender"] == faster
    ]
    assert len(points) == len(found)
    assert f"{min(points):.1f} to {max(points):.1f} with twice the learning rate" in MEASURED
    told = " and ".join("{:.1f} [{:.1f}, {:.1f}]".format(each["mean"], *each["interval_95"]) for each in others)
    assert f"{told} on 2 others" in MEASURED
    assert max(each["interval_95"][1] for each in longer) < 0
    below = " and ".join(f"{-each['mean']:.1f}" for each in longer)
    assert f"{below} points below it in runs of 400 steps" in MEASURED


def test_schedules_are_sorted_and_those_that_options_exclude_say_why(plan: Planner) -> None:
    found = plan.json("minilm", *SMALL, "--pipeline_parallel_size", "2")
    others = rows(found, "schedule")
    assert {each["layout"]["schedule"] for each in others} == set(SCHEDULE_NAMES) - {"token", "1f1b"}
    seconds = [each["step_seconds"] for each in others]
    assert seconds == sorted(seconds) and 0 < found["chosen"]["bubble"] < 0.5
    of_classes = found["refused"]["token"]
    found = plan.json("minilm", *SMALL, "--pipeline_schedule", "interleaved_1f1b", "--pipeline_chunks", "3")
    assert rows(found, "schedule") == [] and found["chosen"]["layout"]["schedule"] == "interleaved_1f1b"
    assert "pipeline_chunks=3" in found["refused"]["zb_v"]
    of_text = plan.json("llama_7b", *SMALL, "--pipeline_parallel_size", "2")["refused"]["token"]
    assert (of_classes, of_text) == (
        "causal language models alone can use it.",
        "only a run with it measures the slices that it needs.",
    )


def test_trainers_own_parallelism_takes_what_one_stage_takes(plan: Planner) -> None:
    found = plan.json("minilm", *SMALL, "--pipeline_schedule", "zb_v")
    (trainer,), alone = rows(found, "Trainer"), rows(found)[0]
    assert trainer["memory"] == alone["memory"] and trainer["step_seconds"] == alone["step_seconds"]
    # The only backward of a step moves each gradient into the buffers that they are reduced in.
    assert alone["memory"][0]["gradients"] == 4 * found["num_parameters"]


def layout_of(size: int, replicas: int, **others: Any) -> Layout:
    values = {"boundaries": tuple(range(0, 14, 14 // size)[:size]) + (14,), "schedule": "1f1b", **others}
    return Layout(6, 0, size, replicas, num_microbatches=size, **values)


def test_every_communicator_is_counted() -> None:
    assert communicators(layout_of(1, 1), []) == [0]
    assert communicators(layout_of(1, 4), []) == [2]  # All ranks, and the replicas.
    assert communicators(layout_of(2, 1), []) == [4, 4]  # All, the pipeline, two ways.
    assert communicators(layout_of(2, 2), [(0, 13)]) == [7, 7]  # The replicas, and two for a shared weight.
    assert communicators(layout_of(7, 1), [(0, 1)]) == [4, *[6] * 5, 4]


def test_blocks_are_named() -> None:
    layout = layout_of(2, 1, boundaries=(0, 6, 14))
    assert [blocks_in_words(layout, rank) for rank in (0, 1)] == [
        "embeddings, layers 1-2, attention of layer 3", "MLP of layer 3, layers 4-6, head",
    ]  # fmt: skip
    layout = layout_of(3, 1, boundaries=(0, 1, 3, 14))
    assert [blocks_in_words(layout, rank) for rank in (0, 1)] == ["embeddings", "layer 1"]


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        (100, {}, (3 * 7, 7)),  # 13 batches of 8, 2 in a step.
        (100, {"max_steps": 5}, (5, 7)),
        (100, {"num_train_epochs": 0.5}, (4, 7)),
        (None, {"max_steps": 5}, (5, 5)),
        (None, {}, (0, 1)),
    ],
)
def test_a_run_is_as_long_as_trainers(samples: int | None, options: dict[str, Any], expected: tuple[int, int]) -> None:
    values = {"train_samples_per_device": 4, "gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 3}
    args = type("Options", (), {**values, **options})
    assert length_of_run(args, 2, samples) == expected


@pytest.mark.parametrize("schedule", ["zb_h1", "async_1f1b"])
def test_pictures_are_drawn_with_and_without_a_model(schedule: str, plan: Planner) -> None:
    png, svg = plan.folder / "a.png", plan.folder / "a.svg"
    main(["plan", "--stages", "3", "--microbatches", "4", "--schedule", schedule, "--png", str(png), "--json"])
    found = json.loads(plan.capsys.readouterr().out)
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    assert {rank for rank, *_ in found["spans"]} == {0, 1, 2} and max(end for *_, end in found["spans"]) == found[
        "end"
    ]
    plan.text("minilm", *SMALL, "--pipeline_parallel_size", "2", "--pipeline_schedule", schedule, "--svg", str(svg))
    drawing = svg.read_text()
    assert "<svg" in drawing and "BertForSequenceClassification" in drawing and "forward" in drawing


def test_a_picture_without_the_chart_library_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--stages", "2", "--microbatches", "2", "--png", str(tmp_path / "a.png")])
    assert str(ended.value) == MISSING_LIBRARY


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Missing: both"),
        (["--stages", "2"], "Missing: --microbatches"),
        (["--stages", "2", "--microbatches", "2", "--bf16=true"], "knows no --bf16=true"),
        (["--stages", "2", "--microbatches", "2", "--svg", "a.png"], "ends in .svg"),
        (["folder", "--stages", "2"], "--stages: these draw equal stages without a model"),
        (["folder"], "needs --processes and --device_memory"),
        (["folder", "--processes", "2", "--device_memory", "0"], "--device_memory 0: expected a positive number"),
        (["folder", "--processes", "2", "--device_memory", "9", "--launch_us", "-1"], "--launch_us -1: expected 0 or"),
        (["folder", "--processes", "2", "--device_memory", "8", "--freeze_policy", "fixed"], "needs freeze_at"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["plan", *options])


@pytest.mark.parametrize(
    ("config", "example"),
    [
        (BertConfig(architectures=["BertModel"], num_hidden_layers=2), "BertForSequenceClassification"),
        (LlamaConfig(num_hidden_layers=2), "LlamaForCausalLM"),
    ],
)
def test_a_config_without_a_head_is_refused_with_what_to_change(
    config: PreTrainedConfig, example: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=rf'Model, which has no head.*Set "architectures".*\["{example}"\]'):
        main(["plan", str(tmp_path), "--processes", "1", "--device_memory", "8"])


def test_more_layers_than_the_model_has_are_refused(plan: Planner) -> None:
    CONFIGS["minilm"].save_pretrained(plan.folder)
    with pytest.raises(SystemExit, match="freezes 7 layers: the model has 6"):
        main(["plan", str(plan.folder), *SMALL, "--freeze_policy", "fixed", "--freeze_at", "0:7"])


EIGHT = ["--processes", "8", "--per_device_train_batch_size", "1", "--bf16", "--device_memory", "40"]
FAST = ["--bandwidth", "900"]


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("minilm", SMALL, "FSDP2/ZeRO-3"),
        ("minilm", [*SMALL, "--pipeline_parallel_size", "2"], "FSDP2/ZeRO-3"),
        ("minilm", [*SMALL, "--pipeline_schedule", "async_1f1b"], "K=2 with async_1f1b"),
        ("vit", IMAGENET, "K=1"),  # Shards are faster by less than predictions err.
        ("llama_7b", EIGHT, "K=8 with zb_v"),
        ("llama_7b", [*EIGHT, "--pipeline_schedule", "zb_v", "--pipeline_parallel_size", "8"], "K=8 with zb_v"),
        ("llama_7b", [*EIGHT, *FAST, "--pipeline_schedule", "gpipe"], "FSDP2/ZeRO-3"),
        ("llama_7b", [*EIGHT, *FAST, "--gradient_accumulation_steps", "2"], "ZeRO-3"),
        ("llama_7b", [*EIGHT, "--lora_rank", "16", "--load_in_4bit"], "K=1"),
    ],
)
def test_the_verdict_names_the_fastest_row_of_its_table(
    name: str, options: list[str], named: str, plan: Planner
) -> None:
    """Fastest by its samples a second among those that fit and train alike, within what predictions err by."""
    found = plan.json(name, *options)
    speeds = {row["name"]: row["samples_per_second"] for row in found["rows"] if row["fits"]}
    alike = [row["name"] for row in found["rows"] if row["fits"] and (row["trains_alike"] or row["kind"] == "run")]
    (said,) = [each for each in found["verdicts"] if each.startswith("Fastest that fits")]
    first, *others = re.findall(r"(?:fits[^:]*|Trainer's): ([^,.(]*[^,.( ])", said)
    assert first == named and speeds[first] >= 0.97 * max(speeds[each] for each in alike)
    # What trains otherwise than Trainer is named if it leads.
    fastest = max(speeds, key=speeds.__getitem__)
    assert others == ([] if 0.97 * speeds[fastest] <= speeds[first] else [fastest])
    chosen = found["chosen"]
    times = f"{speeds[first] / chosen['samples_per_second']:.3g} times as fast as this run's {chosen['name']}"
    assert ("as this run begins" if first == chosen["name"] else times) in said


def test_sharded_data_parallelism_has_a_row_where_there_is_something_to_shard(plan: Planner) -> None:
    options = [*EIGHT, *FAST, "--pipeline_schedule", "gpipe"]
    slow, fast = plan.json("llama_7b", *EIGHT), plan.json("llama_7b", *options)
    (sharded,), (trainer,) = rows(fast, "shards"), rows(fast, "Trainer")
    # Every rank of a pipeline holds a share of the layers, every one of these a share of each layer.
    assert sharded["fits"] and not trainer["fits"]
    assert sharded["fullest"] == rows(slow, "shards")[0]["fullest"]
    assert "\nFSDP2/ZeRO-3 " in plan.text("llama_7b", *options)
    assert rows(plan.json("llama_7b", *EIGHT, "--processes", "1"), "shards") == []
    assert rows(plan.json("llama_7b", *options, "--lora_rank", "16", "--load_in_4bit"), "shards") == []
    # Activations count also where gradients weigh more, and accumulated ones are whole under FSDP2.
    assert sharded["memory"][0]["activations"] >= 0.9 * trainer["memory"][0]["activations"] > 0
    assert "\nZeRO-3 " in plan.text("llama_7b", *options, "--gradient_accumulation_steps", "2")


def test_one_device_has_nothing_to_choose_from(plan: Planner) -> None:
    assert "Fastest" not in plan.text("minilm", *SMALL, "--processes", "1")


def test_text_json_and_picture_are_made_of_the_same_rows(plan: Planner) -> None:
    options = [*EIGHT, "--pipeline_parallel_size", "8"]
    text, found = plan.text("llama_7b", *options), plan.json("llama_7b", *options, "--svg", str(plan.folder / "a.svg"))
    printed = [re.split("  +", line) for line in text.split("\n\n")[1].splitlines()]
    shown = [row for row in found["rows"] if row["fits"] or row["kind"] != "schedule"][: len(printed) - 1]
    assert len(printed) == 1 + 6 + 6 and printed[0][:2] == ["stages K", "replicas R"]
    for cells, row in zip(printed[1:], shown, strict=True):
        layout = row["layout"]
        assert cells[1:3] == [str(layout["num_replicas"]), str(layout["num_microbatches"])]
        assert cells[6:8] == [f"{row['step_seconds']:.3g} s", f"{row['samples_per_second']:.3g}"]
        assert cells[0] == row["name"] or row["name"].startswith(f"K={cells[0]}")
        assert ("other results" in cells[-1]) != row["trains_alike"]
    assert found["chosen"] in found["rows"] and "K=8 with 1f1b" in (plan.folder / "a.svg").read_text()
