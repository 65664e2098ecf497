"""The command line: what it draws is the schedule's timeline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import hf_pipetransformer
from hf_pipetransformer.cli import main


REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_plan_without_a_model_draws_one_line_a_rank_and_says_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--schedule", "gpipe", "--stages", "3", "--microbatches", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[0].strip() for line in lines[:3]] == ["rank 0", "rank 1", "rank 2"]
    # (M + K - 1) x (forward 1 + backward 2), of which K - 1 of M + K - 1 are bubble.
    assert lines[3] == "18 units of time, 33% of it bubble"


def test_a_rank_may_hold_several_stages_of_a_share_of_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--schedule", "zb_v", "--stages", "2", "--microbatches", "3"])
    first, _, length = capsys.readouterr().out.splitlines()
    assert "W0" in first and "F0.1" in first
    assert length == "9.5 units of time, 5% of it bubble"


def test_a_frozen_stage_runs_no_backward(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--stages", "2", "--microbatches", "2", "--frozen_stages", "1"])
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "B" not in first
    assert "B0" in second and "B1" in second


def test_a_pipeline_of_frozen_stages_only_is_refused() -> None:
    with pytest.raises(SystemExit, match="active"):
        main(["plan", "--stages", "2", "--microbatches", "2", "--frozen_stages", "2"])


def test_a_window_is_drawn_with_its_updates_and_what_each_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schedule", "async_1f1b", "--stages", "3", "--microbatches", "4", "--update", "1"]
    main(["plan", *options, "--weights", "stashing"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rank 0 |F0-F1-F2-") and "U0-" in lines[1].replace("~", "-")
    # The last rank waits for K - 1 forwards and goes on without a wait; K - 1 backwards and an update follow.
    assert lines[3] == "22 units of time, 27% of it bubble: the window fills and drains once"
    assert lines[4] == "4 units of time a step in a long window"
    assert lines[5:] == [
        f"rank {rank}: micro-batches in flight {3 - rank}, copies of its weights {3 - rank} (stashing)"
        for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [("pipeoptim", "2221"), ("vanilla", "1111"), ("stashing", "2221"), ("double_buffer", "2222"), ("xpipe", "2222")],
)
def test_the_copies_of_every_kind_of_weights(weights: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--schedule", "async_1f1b", "--stages", "4", "--microbatches", "9", "--step_microbatches", "3"]
    main(["plan", *options, "--weights", weights])
    found = [line.split("weights ")[1] for line in capsys.readouterr().out.splitlines() if "copies" in line]
    assert "".join(each.split()[0] for each in found) == expected


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--schedule", "async_1f1b", "--weights", "stale"], "Unknown pipeline_weights 'stale'"),
        (["--schedule", "async_1f1b", "--weights", "double_buffer"], "double_buffer.*expected at least 3"),
        (["--schedule", "async_1f1b", "--step_microbatches", "0"], "must be 1 or more, found 0"),
        (["--weights", "vanilla"], "--weights is for async_1f1b, found 1f1b"),
    ],
)
def test_what_an_asynchronous_schedule_cannot_be_is_refused(options: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit, match=complaint):
        main(["plan", "--stages", "4", "--microbatches", "4", *options])


def test_help_and_version_take_no_torch() -> None:
    code = "import sys; from hf_pipetransformer.cli import main\n" + (
        "try: main([sys.argv[1]])\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    for option in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, option], check=True, timeout=60, cwd=REPOSITORY)


@pytest.mark.parametrize(
    ("option", "text"),
    [("--version", f"hf-pipetransformer {hf_pipetransformer.__version__}\n"), ("--help", "plan")],
)
def test_the_package_is_a_command_that_takes_no_torch_to_say_what_it_is(option: str, text: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hf_pipetransformer", option]
    result = subprocess.run(command, check=True, timeout=60, cwd=REPOSITORY, capture_output=True, text=True)
    assert text in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "hf_pipetransformer.cli" in imported and not {"torch", "transformers", "datasets"} & imported


def test_public_names_are_where_the_package_shows_them() -> None:
    assert all(getattr(hf_pipetransformer, name).__name__ == name for name in hf_pipetransformer.__all__)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "text"),
    [
        ("zb_v", "2", "3", "zb_v takes 2 stages a rank on 2 ranks, found 3."),
        ("zb_v", "2", "0", "zb_v takes 2 stages a rank on 2 ranks, found 0."),
        ("interleaved_1f1b", "4", "1", "interleaved_1f1b takes 2 to 8 stages a rank on 4 ranks, found 1."),
        ("1f1b", "3", "2", "1f1b takes one stage a rank on 3 ranks, found 2."),
        ("zb_v", "1", "2", "zb_v takes one stage a rank on one rank, found 2."),
    ],
)
def test_stages_that_a_schedule_cannot_lay_are_refused_in_one_sentence(
    schedule: str, stages: str, chunks: str, text: str
) -> None:
    with pytest.raises(SystemExit) as found:
        main(["plan", "--schedule", schedule, "--stages", stages, "--chunks", chunks, "--microbatches", "4"])
    assert str(found.value) == text


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def config_of(folder: Path, **values: object) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(("device_memory", "fits"), [(640, True), (80, False)])
def test_a_plan_says_before_any_weight_is_loaded_whether_a_model_fits(
    device_memory: int, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--processes", "8", "--device_memory", str(device_memory), "--sequence_length", "2048", "--json"]
    plan = ["plan", config_of(tmp_path, **LLAMA_70B), *options, "--per_device_train_batch_size", "1"]
    if fits:
        main(plan)
    else:
        with pytest.raises(SystemExit) as ended:
            main(plan)
        assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    rows = [row for row in found["rows"] if row["kind"] == "run"]
    layouts = [(row["pipeline_size"], row["fullest"], row["fits"]) for row in rows]
    assert [size for size, _, _ in layouts] == [1, 2, 4, 8]
    assert found["num_parameters"] == 70_553_706_496
    assert [needed for _, needed, _ in layouts] == sorted((needed for _, needed, _ in layouts), reverse=True)
    assert [is_fit for *_, is_fit in layouts] == [needed <= 0.9e9 * device_memory for _, needed, _ in layouts]
    assert found["chosen"]["fits"] is fits
    # Weights, gradients and two moments in bfloat16; the one backward moves each gradient into the replicas' buffer.
    (alone,) = rows[0]["memory"]
    sizes = [alone[part] / 70_553_706_496 for part in ("weights", "gradients", "optimizer", "copies")]
    assert sizes == pytest.approx([2, 2, 4, 0]) and alone["activations"] > 0


def test_a_plan_counts_master_weights_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", config_of(tmp_path, **LLAMA_70B | {"num_hidden_layers": 4}), "--processes", "2", "--json"]
    plan += ["--device-memory=640", "--sequence-length", "64", "--bf16", "true"]
    main([*plan, "--dtype", "float32"])
    expected = capsys.readouterr().out
    main([*plan, "--pipeline_master_dtype", "float32"])
    assert capsys.readouterr().out == expected
    main([*plan, "--pipeline_master_dtype", "float32", "--lora_rank", "16"])
    (with_adapters,) = json.loads(capsys.readouterr().out)["rows"][0]["memory"]
    assert with_adapters["weights"] < 2.2 * json.loads(expected)["num_parameters"], "the base model stays"


def verdict_in(plan: str) -> str:
    (found,) = [line for line in plan.splitlines() if line.startswith("Does not fit")]
    return found


def test_a_plan_that_fits_nowhere_names_the_bytes_and_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", config_of(tmp_path, **LLAMA_70B), "--processes", "8", "--device_memory", "40"])
    verdict = verdict_in(capsys.readouterr().out)
    assert verdict.startswith("Does not fit: the fullest rank needs ") and " GB of 36 GB. " in verdict
    assert "Recomputation and batches of one sample do not help" in verdict
    assert "PEFT" in verdict


def test_a_plan_that_fits_nowhere_finds_what_would_make_it_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what it says holds: the same plan with these options fits."""
    plan = ["plan", config_of(tmp_path, **LLAMA_70B | {"num_hidden_layers": 8}), "--processes", "2", "--bf16", "true"]
    plan += ["--device_memory", "90", "--sequence_length", "4096", "--per_device_train_batch_size", "16"]
    with pytest.raises(SystemExit):
        main(plan)
    verdict = verdict_in(capsys.readouterr().out)
    found = re.search(r"It fits with (--.*), K=(\d): ([\d.]+) GB", verdict)
    assert found is not None, verdict
    main([*plan, *found[1].split(), "--pipeline_parallel_size", found[2], "--json"])
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["fits"]
    assert chosen["fullest"] == pytest.approx(float(found[3]) * 1e9, rel=0.01)


def test_adapters_train_little_and_images_and_sequences_are_planned_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 128}
    configs = {
        "BertForSequenceClassification": {"model_type": "bert", "vocab_size": 100},
        "BertForQuestionAnswering": {"model_type": "bert", "vocab_size": 100},
        "ViTForImageClassification": {"model_type": "vit", "image_size": 32, "patch_size": 8},
    }
    trained = {}
    for name, values in configs.items():
        for adapters in ([], ["--lora_rank", "2"]):
            folder = config_of(tmp_path, architectures=[name], **small, **values)
            main(
                [
                    "plan",
                    folder,
                    "--processes",
                    "2",
                    "--device_memory",
                    "1",
                    "--sequence_length",
                    "16",
                    "--json",
                    *adapters,
                ]
            )
            found = json.loads(capsys.readouterr().out)
            assert found["num_layers"] == 6 and found["chosen"]["pipeline_size"] == 1
            trained[name, bool(adapters)] = sum(each["trained"] for each in found["stages"])
    assert all(0 < trained[name, True] < trained[name, False] / 5 for name in configs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "8", "--processes_per_node", "3"], "no multiple of --processes_per_node 3"),
        (["--processes", "2", "--node_bandwidth", "5"], "--node_bandwidth with all processes on one node"),
        (["--processes", "2", "--pipeline_parallel_size", "4"], "cannot be planned: the nodes.* allow .1, 2."),
        (["--processes", "2", "--dtype", "float33"], "--dtype float33: expected a dtype of torch"),
        (["--processes", "2", "--sequence_length", "9000"], "takes up to 8192 tokens"),
        (["--processes", "2", "--pipeline_num_chunks", "2"], "pipeline_num_chunks"),
        ([], "The plan of a model needs --processes"),
        (["--proceses", "8"], r"--proceses is no option of plan, nor of a run\. Did you mean .--processes.\?"),
        (
            ["--processes", "2", "--per_device_batch", "8"],
            "--per_device_batch is no .* Did you mean .--per_device_",
        ),
        (["--processes", "2", "--qqq=3"], r"--qqq is no option of plan, nor of a run\."),
        (["--processes", "2", "--device_memory", "80e9"], r"--device_memory 8e\+10: expected gigabytes of one device"),
        (["--processes", "2", "--bandwidth", "0"], r"--bandwidth .*: expected a positive number"),
        (["--processes", "2", "--samples", "0"], "--samples 0: expected a number of samples"),
        (["--processes", "2", "--svg", "plan.png"], "--svg plan.png: expected a file that ends in .svg"),
    ],
)
def test_a_plan_of_what_cannot_be_is_refused_in_a_sentence(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["plan", config_of(tmp_path, **LLAMA_70B), "--device_memory", "80", *options])


def test_a_schedule_that_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = ["plan", "--stages", "2", "--microbatches", "2"]
    with pytest.raises(SystemExit, match="Without a model, plan draws equal stages and knows no --optim=sgd"):
        main([*drawing, "--optim=sgd"])
    with pytest.raises(SystemExit, match="The picture cannot be written to"):
        main([*drawing, "--svg", str(tmp_path / "none" / "plan.svg")])
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(SystemExit, match="Charts are drawn with vl-convert-python, which is not installed"):
        main([*drawing, "--svg", str(tmp_path / "plan.svg")])


def test_a_word_that_a_command_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "folder", "--colour"])
    assert "unrecognized arguments:" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="config.json"):
        main(["plan", str(tmp_path / "none"), "--processes", "2", "--device_memory", "80"])


def test_the_folder_of_a_run_names_the_checkpoint_that_was_meant(tmp_path: Path) -> None:
    for step in (20, 40):
        (tmp_path / "outA" / f"checkpoint-{step}").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"Did you mean '.*outA/checkpoint-40'\?"):
        main(["export-checkpoint", str(tmp_path / "outA"), str(tmp_path / "exported")])
    assert not (tmp_path / "exported").exists()


def test_no_command_answers_bad_input_with_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    missing, empty, file = (str(tmp_path / name) for name in ("missing", "empty", "file"))
    commands = [
        *(["export-checkpoint", folder, str(tmp_path / "exported")] for folder in (missing, empty, file)),
        *(["plan", folder, "--processes", "2", "--device_memory", "80"] for folder in (missing, empty, file)),
        *(["cache", "list", "--activation_cache_dir", folder] for folder in (file,)),
        ["plan", "--stages", "2", "--microbatches", "0"],
        ["plan", "--stages", "2", "--microbatches", "2", "--schedule", "async_1f1b", "--step_microbatches", "0"],
    ]
    for command in commands:
        with suppress(SystemExit):  # Of any other kind, an error fails the test.
            main(command)
    with pytest.raises(SystemExit, match=r"missing.*is not a folder"):
        main(commands[0])


def test_a_schedule_may_be_written_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--stages", "2", "--microbatches", "2", "--schedule", "1F1B"])
    assert "bubble" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied", "/of/another/user")

    monkeypatch.setattr("hf_pipetransformer.state.plain_checkpoint.export_checkpoint", refuse)
    with pytest.raises(SystemExit, match="/of/another/user: Permission denied"):
        main(["export-checkpoint", str(tmp_path), str(tmp_path / "exported")])


def test_a_configuration_of_accelerate_is_what_its_comments_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["config", "--device", "gpu", "--processes", "8"])
    text = capsys.readouterr().out
    values = yaml.safe_load(text)
    assert (values["num_processes"], values["num_machines"], values["use_cpu"]) == (8, 1, False)
    # The lines for several machines, in place of those of one.
    begin = text.index("# num_machines: 2")
    several = "\n".join(line.removeprefix("# ") for line in text[begin:].splitlines())
    assert yaml.safe_load(several).items() > {"num_machines": 2, "num_processes": 16, "machine_rank": 0}.items()
    path = str(tmp_path / "accelerate.yaml")
    main(["config", "--device", "cpu", "--processes", "1", "--output", path])
    assert yaml.safe_load(Path(path).read_text())["distributed_type"] == "NO"
    assert f"accelerate launch --config_file {path} script.py" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--processes 0: expected a number of processes, 1 or more"):
        main(["config", "--processes", "0"])
    with pytest.raises(SystemExit, match="No GPU is here: expected a number of processes"):
        main(["config", "--device", "gpu"])


def test_a_configuration_fits_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for num_gpus, expected in ((0, (2, True)), (4, (4, False))):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=num_gpus: count)
        main(["config"])
        values = yaml.safe_load(capsys.readouterr().out)
        assert (values["num_processes"], values["use_cpu"]) == expected
