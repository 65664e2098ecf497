"""Options as YAML files, sweeps and careless scripts give them: a value of the right type, or a refusal by name."""

from __future__ import annotations

import fractions
import math
import os
import pathlib
import re
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.options.arguments import FREEZE_POLICIES, READERS, with_pipeline_options
from hf_pipetransformer.options.refusals import comparable


OWN_FIELDS = sorted({f.name for f in fields(PipeTransformerArguments)} - {f.name for f in fields(TrainingArguments)})

NASTY: list[Any] = [
    *(None, True, False, 0, 1, 2, 4, -1, 10**400, 0.0, 0.5, 1.0, 2.0, -0.5, 1e300, 1e-300),
    *(math.inf, -math.inf, math.nan, 3 + 0j, fractions.Fraction(1, 2), np.int64(2), np.float32(0.5), np.bool_(True)),
    *(
        "",
        " ",
        "0",
        "1",
        "4",
        " 4 ",
        "4.0",
        "0.5",
        "1/2",
        "-1",
        "1e3",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "²",
        "٤",
        "9" * 5000,
    ),
    *("true", "False", "YES", "no", "on", "Off", "maybe", "none", "None", "null", "auto", "AUTO", "never", "epoch"),
    *(
        "1f1b",
        "GPipe",
        "fixed",
        "gradient_norm",
        "0:1",
        "0:1,0:2",
        "2:1,4:0",
        "2:1,4:2",
        "²:1",
        "a\0b",
        "💥",
        "x" * 500,
    ),
    *(b"auto", [], ["auto"], {}, {2: 1}, (1,), object(), pathlib.PurePath("folder"), np.array([1, 2]), int),
]

HINTS = get_type_hints(PipeTransformerArguments)


def kinds_of(name: str) -> tuple[type, ...]:
    """The types that the field's annotation names."""
    return get_args(HINTS[name]) or (HINTS[name],)


def read(name: str, value: Any) -> Any:
    return READERS[name](name, value)


def test_every_option_has_a_reader():
    assert sorted(READERS) == OWN_FIELDS


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_any_value_becomes_one_of_the_options_type_or_is_refused_in_one_sentence(name: str):
    for value in NASTY:
        try:
            found = read(name, value)
        except ValueError as error:
            text = str(error)
            assert text.startswith(name), text
            assert "xpected" in text or (" must be " in text and ", found " in text), text
            assert len(text) < 400
            assert "\n" not in text
            continue
        assert type(found) in kinds_of(name), (value, found)
        assert not isinstance(found, float) or math.isfinite(found)
        # What is read once is read again as the same: arguments are copied and written to files.
        assert read(name, found) == found


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_the_command_line_offers_what_the_reader_takes(name: str):
    choices = PipeTransformerArguments.__dataclass_fields__[name].metadata.get("choices", ())
    assert [read(name, choice) for choice in choices] == list(choices)
    with pytest.raises(ValueError, match=re.escape(f"one of {choices}") if choices else "must be|is not"):
        read(name, "zig\0zag")


def test_the_command_line_reads_all_options_and_explains_them():
    parser = HfArgumentParser(PipeTransformerArguments)
    given = ["--pipeline_schedule", "zb_h1", "--pipeline_chunks", "1", "--no_elastic", "--freeze_alpha", "0.5"]
    args = parser.parse_args_into_dataclasses(["--output_dir", "outputs", "--use_cpu", *given])[0]
    assert (args.pipeline_schedule, args.pipeline_chunks, args.elastic, args.freeze_alpha) == ("zb_h1", 1, False, 0.5)
    told = parser.format_help()
    assert all(f"--{name}" in told for name in OWN_FIELDS)


@pytest.mark.parametrize("name", OWN_FIELDS)
def test_defaults_stay_as_they_are(name: str):
    default = PipeTransformerArguments.__dataclass_fields__[name].default
    assert read(name, default) == default


# As it stands in a YAML file, and what the user means.
@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("activation_cache: off", "off"),
        ("activation_cache: on", "on"),
        ("activation_cache: no", "off"),
        ("activation_cache: 'false'", "off"),
        ("freeze_policy: none", "none"),
        ("freeze_policy: null", "none"),
        ("freeze_policy: off", "none"),
        ("pipeline_checkpoint: off", "never"),
        ("pipeline_gather_at_end: off", "never"),
        ("pipeline_master_dtype: Float32", "float32"),
        ("pipeline_master_dtype: null", None),
        ("elastic: off", False),
        ("elastic: 'yes'", True),
        ("elastic: 0", False),
        ("pipeline_parallel_size: 4", "4"),
        ("pipeline_parallel_size: '4'", "4"),
        ("pipeline_parallel_size: 4.0", "4"),
        ("pipeline_parallel_size: Auto", "auto"),
        ("pipeline_schedule: 1F1B", "1f1b"),
        ("pipeline_timeout: 1e3", 1000.0),
        ("freeze_alpha: '0.5'", 0.5),
        ("freeze_min_active_layers: '3'", 3),
        ("freeze_interval: 200", "200"),
        ("freeze_interval: 0.1", "0.1"),
        ("freeze_at: '4:2, 2:1'", "2:1,4:2"),
        ("freeze_at: none", None),
        ("freeze_at: '0:2/3, 20:.5, 40:0'", "0:2/3,20:1/2,40:0"),
        ("freeze_at: '1/2:0,0:1/2'", "0:1/2,1/2:0"),
        ("freeze_layers: 8", "8"),
        ("freeze_layers: 2/3", "2/3"),
        ("freeze_layers: 50%", "1/2"),
        ("freeze_layers: '12.5 %'", "1/8"),
        ("freeze_at: '0:50%,25%:0'", "0:1/2,1/4:0"),
        ("freeze_layers: 0.25", "1/4"),
        ("freeze_layers: 0.6666666666666666", "3333333333333333/5000000000000000"),
        ("freeze_layers: 3333333333333333/5000000000000000", "3333333333333333/5000000000000000"),
        ("activation_cache_max_gb: '2.5'", 2.5),
        ("activation_cache_max_gb: null", None),
        ("layout_plan: ~", None),
    ],
)
def test_yaml_means_what_the_user_wrote(line: str, meant: Any):
    [(name, value)] = yaml.safe_load(line).items()
    assert read(name, value) == meant


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("elastic: maybe", "elastic must be True or False, found 'maybe'."),
        ("elastic: null", "elastic must be True or False, found None."),
        ("pipeline_master_dtype: float16", "pipeline_master_dtype must be one of ('float32',), found 'float16'."),
        ("activation_cache: null", "activation_cache must be one of ('auto', 'on', 'off'), found None."),
        ("activation_cache_dtype: off", "found False."),
        (
            "pipeline_parallel_size: on",
            "pipeline_parallel_size must be 'auto' or a positive whole number, found True.",
        ),
        (
            "pipeline_timeout: .inf",
            "pipeline_timeout must be a number of seconds from 0.001 to 1000000000, found inf.",
        ),
        ("freeze_alpha: .nan", "freeze_alpha must be between 0 and 1, both excluded, found nan."),
        ("freeze_min_active_layers: 2.5", "found 2.5."),
        ("freeze_at: 100:2", "(in quotes: YAML takes 100:2 for the number 6002), found 6002."),
        ("freeze_interval: 1.0", "found 1.0."),
        ("freeze_layers: 3/2", "freeze_layers must be a number of layers, or a share of them between 0 and 1"),
        ("freeze_layers: 1/0", "found '1/0'."),
        ("freeze_layers: 100%", "found '100%'."),
        (
            "freeze_policy: ''",
            f"freeze_policy must be one of {FREEZE_POLICIES}, found ''",
        ),
        ('layout_plan: "caf\\udce9"', "layout_plan must be a path in UTF-8"),
        ("freeze_layers: true", "found True."),
        ("layout_plan: off", "layout_plan must be a path, found False."),
        (
            "activation_cache_max_gb: .inf",
            "activation_cache_max_gb must be a positive number of gigabytes, found inf.",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(line: str, refusal: str):
    [(name, value)] = yaml.safe_load(line).items()
    with pytest.raises(ValueError, match="must be") as caught:
        read(name, value)
    assert refusal in str(caught.value)


def test_arguments_are_read_when_they_are_made(tmp_path: pathlib.Path):
    written = {"activation_cache": False, "freeze_policy": None, "elastic": "no", "pipeline_timeout": "4"}
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, **written)
    assert (args.activation_cache, args.freeze_policy, args.elastic, args.pipeline_timeout) == (
        "off",
        "none",
        False,
        4.0,
    )
    with pytest.raises(ValueError, match="elastic must be True or False, found 'maybe'"):
        PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, elastic="maybe")


def trainers(folder: pathlib.Path, name: str, value: Any) -> Any:
    """What becomes of an option of Trainer's; the pipeline's own are left out."""
    return getattr(PipeTransformerArguments(output_dir=str(folder), use_cpu=True, **{name: value}), name)


@pytest.mark.parametrize(
    ("name", "expected", "meaningless"),
    [
        ("gradient_accumulation_steps", "a positive whole number", (0, -1, 0.5, math.inf, math.nan)),
        ("per_device_train_batch_size", "a positive whole number", (0, -1, 0.5, math.inf, math.nan)),
        ("per_device_eval_batch_size", "a positive whole number", (0, -1, math.nan)),
        ("eval_accumulation_steps", "a positive whole number", (0, -1, math.nan)),
        ("num_train_epochs", "a number of epochs, 0 or more", (-1, math.inf, math.nan)),
        ("max_steps", "a whole number", (1.5, math.inf, math.nan)),
        ("learning_rate", "a number, 0 or more", (-1e-3, math.inf, math.nan)),
        ("warmup_steps", "a number, 0 or more", (-1, math.inf, math.nan)),
        ("weight_decay", "a number", (math.inf, -math.inf, math.nan)),
        ("adam_beta1", "a number in [0, 1)", (-0.1, 1.0, math.inf, math.nan)),
        ("adam_beta2", "a number in [0, 1)", (-0.1, 1.0, math.inf, math.nan)),
        ("adam_epsilon", "a number, 0 or more", (-1e-8, math.inf, math.nan)),
        ("max_grad_norm", "a number", (math.nan,)),
        ("label_smoothing_factor", "a number", (math.inf, math.nan)),
        ("neftune_noise_alpha", "a number, 0 or more", (-1, math.inf, math.nan)),
        ("logging_steps", "a number", (math.inf, math.nan)),
        ("eval_steps", "a number", (math.inf, math.nan)),
        ("save_steps", "a number", (math.inf, math.nan)),
        ("eval_delay", "a number", (math.nan,)),
        ("save_total_limit", "a whole number", (1.5, math.nan)),
        ("seed", "a whole number from 0 to 4294967295", (-1, 0.5, 2**32, math.inf, math.nan)),
        ("data_seed", "a whole number", (0.5, math.inf, math.nan)),
        ("dataloader_num_workers", "a whole number, 0 or more", (-1, 0.5, math.inf, math.nan)),
    ],
)
def test_numbers_of_trainers_that_no_run_can_use_are_refused(
    tmp_path: pathlib.Path, name: str, expected: str, meaningless: tuple[Any, ...]
):
    for value in meaningless:
        with pytest.raises(ValueError, match="must be") as caught:
            trainers(tmp_path, name, value)
        assert str(caught.value) == f"{name} must be {expected}, found {value!r}."


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("learning_rate", 0, 0),
        ("learning_rate", "5e-5", 5e-5),  # What YAML makes of it.
        ("gradient_accumulation_steps", "2", 2),
        ("logging_steps", "1", 1),
        ("num_train_epochs", 0, 0),
        ("max_steps", -1, -1),
        ("max_grad_norm", math.inf, math.inf),
        ("max_grad_norm", None, None),
        ("learning_rate", None, None),
        ("max_grad_norm", -1, -1),
        ("neftune_noise_alpha", None, None),
        ("eval_delay", math.inf, math.inf),
        ("save_total_limit", None, None),
        ("weight_decay", -0.5, -0.5),
        ("data_seed", -1, -1),
    ],
)
def test_numbers_of_trainers_that_mean_something_are_taken(tmp_path: pathlib.Path, name: str, value: Any, meant: Any):
    found = trainers(tmp_path, name, value)
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize(
    ("name", "options", "strategy"),
    [
        ("logging_steps", {}, "logging_strategy='steps'"),
        ("save_steps", {"save_strategy": "steps"}, "save_strategy='steps'"),
        ("eval_delay", {"eval_strategy": "epoch", "eval_steps": 1}, "eval_strategy='epoch'"),
    ],
)
def test_a_number_that_trainer_would_compare_may_not_be_left_out(
    tmp_path: pathlib.Path, name: str, options: dict[str, Any], strategy: str
) -> None:
    for nothing in (None, "", "none"):
        with pytest.raises(ValueError, match=re.escape(f"{name} must be a number with {strategy}, found {nothing!r}")):
            PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, **{name: nothing}, **options)
    unread = {strategy.partition("=")[0]: "no"}
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, **{name: None}, **unread)
    assert getattr(args, name) is None


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    for folder in (str(tmp_path / "caf\udce9"), 3):
        with pytest.raises(ValueError, match="output_dir must be a path"):
            PipeTransformerArguments(output_dir=folder, use_cpu=True)
    with pytest.raises(ValueError, match="output_dir must be a path in UTF-8"):
        with_pipeline_options(TrainingArguments(output_dir=str(tmp_path / "caf\udce9"), use_cpu=True))


def test_epochs_do_not_count_where_steps_do(tmp_path: pathlib.Path):
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=5, num_train_epochs=math.inf)
    assert args.num_train_epochs == math.inf


def test_numbers_are_looked_at_again_when_a_trainer_takes_them(tmp_path: pathlib.Path):
    """Also plain arguments, and what a script has set since."""
    plain = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be a positive whole number, found 0"):
        with_pipeline_options(plain)
    changed = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True)
    changed.learning_rate = math.nan
    with pytest.raises(ValueError, match="learning_rate must be a number, 0 or more, found nan"):
        with_pipeline_options(changed)


def test_ranks_that_have_no_number_agree():
    """NaN is not equal to itself."""
    found = comparable({"some_number": math.nan, "another": math.inf})
    assert found == comparable({"some_number": float("nan"), "another": math.inf})
    assert found != comparable({"some_number": 1.0, "another": math.inf})


def test_a_table_that_names_a_step_twice_is_refused_with_the_arguments(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="names step 0 twice"):
        PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, freeze_policy="fixed", freeze_at="0:1,0:2")


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1f1b", None, 1),
        ("1f1b", 1, 1),
        ("zb_h1", None, 1),
        ("interleaved_1f1b", None, 2),
        ("interleaved_1f1b", "3", 3),
        ("zb_v", None, 2),
        ("zb_v", 2, 2),
    ],
)
def test_ranks_have_the_stages_that_the_schedule_says_or_the_user(tmp_path, schedule, chunks, expected):
    found = PipeTransformerArguments(output_dir=tmp_path, pipeline_schedule=schedule, pipeline_chunks=chunks)
    assert found.num_chunks == expected


@pytest.mark.parametrize(
    ("schedule", "chunks", "text"),
    [
        ("1f1b", 2, "pipeline_chunks=2 with pipeline_schedule='1f1b': expected 1 stages"),
        ("gpipe", 4, "expected 1 stages"),
        ("zb_h1", 2, "expected 1 stages"),
        ("interleaved_1f1b", 1, "expected 2 to"),
        ("zb_v", 3, "expected 2 stages"),
    ],
)
def test_stages_that_a_schedule_cannot_lay_are_refused(tmp_path, schedule, chunks, text):
    with pytest.raises(ValueError, match=text):
        PipeTransformerArguments(output_dir=tmp_path, pipeline_schedule=schedule, pipeline_chunks=chunks)


@pytest.mark.parametrize(
    ("name", "value", "close"),
    [
        ("freeze_policy", "gradnorm", "gradient_norm"),
        ("pipeline_schedule", "1F1", "1f1b"),
        ("pipeline_token_slices", "atuo", "auto"),
    ],
)
def test_a_value_that_is_almost_right_is_answered_with_the_right_one(
    name: str, value: str, close: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*Did you mean '{close}'"):
        PipeTransformerArguments(str(tmp_path), use_cpu=True, **{name: value})
    # The command line too leaves the answer to the option, and not to argparse's page of usage.
    with pytest.raises(ValueError, match=f"Did you mean '{close}'"):
        HfArgumentParser(PipeTransformerArguments).parse_args_into_dataclasses(
            ["--output_dir", str(tmp_path), "--use_cpu", f"--{name}", value]
        )


def test_a_schedule_is_found_in_any_case(tmp_path: pathlib.Path) -> None:
    assert PipeTransformerArguments(str(tmp_path), use_cpu=True, pipeline_schedule="1F1B").pipeline_schedule == "1f1b"
    with pytest.raises(ValueError, match=r"freeze_policy must be one of[^?]*$"):
        PipeTransformerArguments(str(tmp_path), use_cpu=True, freeze_policy="zzz")


@pytest.mark.parametrize(
    ("schedule", "is_started", "environment", "expected"),
    [
        ("1f1b", True, {}, None),
        ("async_1f1b", False, {}, "EAGER"),
        ("async_1f1b", False, {"CUDA_MODULE_LOADING": "LAZY"}, "EAGER"),
        ("async_1f1b", True, {"CUDA_MODULE_LOADING": "EAGER"}, "EAGER"),
        ("async_1f1b", True, {"CUDA_MODULE_LOADING": "LAZY"}, ValueError),
        ("async_1f1b", True, {"WORLD_SIZE": "1"}, None),
    ],
)
def test_kernels_are_loaded_before_ranks_wait_for_each_other_with_transfers_under_way(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    is_started: bool,
    environment: dict[str, str],
    expected: Any,
) -> None:
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, pipeline_schedule=schedule)
    args.use_cpu = False
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    for name, value in {"WORLD_SIZE": "4", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_started)
    if expected is ValueError:
        with pytest.raises(ValueError, match="needs CUDA to load all kernels at its start"):
            args._load_kernels_at_once()
        return
    args._load_kernels_at_once()
    assert os.environ.get("CUDA_MODULE_LOADING") == expected


@pytest.mark.parametrize(
    ("precision", "expected"), [("bf16", (True, False)), ("fp16", (False, True)), ("no", (False, False))]
)
def test_the_precision_of_the_launcher_is_that_of_the_options(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, precision: str, expected: tuple[bool, bool]
) -> None:
    """Records of other precisions, memory and refusals follow from the options."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    args = PipeTransformerArguments(**common)
    assert (args.bf16, args.fp16) == expected
    taken = with_pipeline_options(TrainingArguments(**common))
    assert (taken.bf16, taken.fp16) == expected
    own = PipeTransformerArguments(**common, bf16=True)
    assert (own.bf16, own.fp16) == (True, False)
    if precision == "fp16":
        with pytest.raises(ValueError, match="fp16=True with pipeline_schedule='async_1f1b'"):
            PipeTransformerArguments(**common, pipeline_schedule="async_1f1b")
