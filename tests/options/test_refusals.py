"""What is refused or warned of for options, models and optimizers, one cheap case for each message."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from transformers import TrainingArguments

from hf_pipetransformer import PipeTransformerArguments
from hf_pipetransformer.comm import topology
from hf_pipetransformer.freeze.policy import check_policy
from hf_pipetransformer.options import refusals
from hf_pipetransformer.options.arguments import READERS, with_pipeline_options
from hf_pipetransformer.options.combinations import DEMANDS, unused_by_trainer, unused_freeze_options
from hf_pipetransformer.options.refusals import (
    check_arguments,
    check_communication_hook,
    check_launch,
    check_model,
    warn_about_options,
)
from hf_pipetransformer.schedules.abilities import ABILITIES


def arguments(folder: Path, **options: Any) -> PipeTransformerArguments:
    return PipeTransformerArguments(str(folder), use_cpu=True, **options)


# Options that exclude each other, found when the arguments are made.
EXCLUDED = [
    ({"deepspeed": "no.json"}, "the DeepSpeed engine owns"),
    ({"freeze_policy": "fixed"}, "freeze_policy='fixed' needs freeze_at='step:layers,...', found none"),
    ({"freeze_at": "1:2"}, "freeze_at='1:2' needs freeze_policy='fixed', found 'none'"),
    ({"freeze_policy": "fixed", "freeze_at": "1:2,1:3"}, "names step 1 twice"),
    ({"freeze_policy": "fixed", "freeze_at": "0:2,9:1/2"}, "has numbers and shares of layers: expected only one"),
    ({"freeze_policy": "fixed", "freeze_at": "9:2,1/2:0"}, "has numbers and shares of steps: expected only one"),
    ({"freeze_policy": "fixed", "freeze_at": "0:2/0"}, "or shares of the run and of the layers"),
    ({"freeze_layers": 2, "freeze_policy": "schedule"}, "Leave it out, or the other two"),
    ({"freeze_layers": 2, "freeze_policy": "fixed", "freeze_at": "0:3"}, "it stands for freeze_policy='fixed'"),
    ({"layout_plan": "no-such.jsonl"}, "is not a file: expected the pipetransformer_events.jsonl"),
    ({"pipeline_drain_interval": 4}, "pipeline_drain_interval=4 needs pipeline_schedule='async_1f1b', found '1f1b'"),
    ({"pipeline_schedule": "interleaved_1f1b", "pipeline_chunks": 1}, "stages a rank. Choose another schedule"),
    ({"pipeline_schedule": "async_1f1b", "torch_compile": True}, "which has not been verified with compiled layers"),
    ({"pipeline_schedule": "token", "activation_cache": "on"}, "Leave activation_cache out"),
    ({"pipeline_schedule": "async_1f1b", "fp16": True}, "its stages agree in every step whether"),
    ({"pipeline_schedule": "async_1f1b", "pipeline_loss": "batch"}, "so that no loss sees a whole batch"),
    ({"freeze_alpha": 2}, "freeze_alpha must be between 0 and 1, both excluded, found 2"),
]


@pytest.mark.parametrize(("options", "words"), EXCLUDED, ids=lambda value: str(value)[:40])
def test_options_that_exclude_each_other(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        arguments(tmp_path, **options)


def test_schedules_read_and_refuse_options_that_there_are() -> None:
    names = {option.name for option in fields(PipeTransformerArguments)}
    for abilities in ABILITIES.values():
        assert names.issuperset(abilities.reads)
        # A frozen reference is no option: `check_trainer` and plans ask for it.
        assert DEMANDS.keys() | {"reference"} >= abilities.refuses.keys()
    assert names >= DEMANDS.keys()


def test_the_number_of_frozen_layers_stands_for_a_table(tmp_path: Path) -> None:
    args = arguments(tmp_path, freeze_layers="2/3")
    assert (args.freeze_policy, args.freeze_at) == ("fixed", "0:2/3")
    again = arguments(tmp_path, freeze_layers=args.freeze_layers, freeze_policy="fixed", freeze_at=args.freeze_at)
    assert again.freeze_layers == "2/3"


# Trainer's options that no pipeline takes; some are set afterwards, so that Trainer itself does not look first.
REFUSED = [
    ({"fsdp": "full_shard"}, "FSDP shards every layer over all ranks.* hold fewer weights each"),
    ({"parallelism_config": object()}, "tensor and context parallelism are not combined.*takes long sequences"),
    ({"auto_find_batch_size": True}, "it restarts the run with a smaller batch"),
    ({"optim": "lomo"}, "LOMO, GaLore and APOLLO update"),
    ({"train_sampling_strategy": "batch_rebalance"}, "gives ranks different numbers of samples"),
    ({"eval_use_gather_object": True}, "predictions are gathered over replicas"),
    ({"dataloader_in_order": False}, "would depend on the workers' speed"),
    (
        {"activation_checkpointing_kwargs": {}, "pipeline_checkpoint": "always"},
        "have no effect on the pipeline's own recomputation",
    ),
    ({"_n_gpu": 2}, "Start one process a GPU"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_options_that_no_pipeline_takes(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    check_arguments(args)
    for name, value in options.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=words):
        check_arguments(args)


def test_accelerate_that_was_told_of_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="accelerate was told to use DeepSpeed"):
        check_arguments(args)


def test_accelerate_that_was_told_of_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` tells the processes that it starts with such a configuration."""
    args = arguments(tmp_path)
    for name, words in (
        ("FSDP", "fsdp='in the config of accelerate': FSDP shards"),
        ("PARALLELISM_CONFIG", "parallelism are not combined with the pipeline"),
        ("MEGATRON_LM", "parallelism are not combined with the pipeline"),
    ):
        monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
        with pytest.raises(ValueError, match=words):
            check_arguments(args)
        monkeypatch.delenv(f"ACCELERATE_USE_{name}")
    check_arguments(args)


def test_options_that_a_run_left_to_trainer_does_not_read(tmp_path: Path) -> None:
    quiet = {"pipeline_parallel_size": 1, "pipeline_parallel_num_microbatches": 1, "activation_cache": "off"}
    assert unused_by_trainer(arguments(tmp_path), READERS) is None
    assert unused_by_trainer(arguments(tmp_path, pipeline_timeout=9, **quiet), READERS) is None
    ignored = {"activation_cache_keep": True, "pipeline_schedule": "zb_v"}
    said = unused_by_trainer(arguments(tmp_path, **ignored), READERS) or ""
    assert all(name in said for name in ignored) and "no effect, because nothing freezes and no batch" in said
    plain = with_pipeline_options(TrainingArguments(str(tmp_path), use_cpu=True))
    assert "TrainingArguments have no options of the pipeline" in (unused_by_trainer(plain, READERS) or "")


# Options that several processes, or several stages, do not take.
REFUSED_WITH_PROCESSES = [
    ({"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 3}, "which takes a multiple of 2"),
    ({"accelerator_config": {"use_seedable_sampler": False}}, "takes the order from each process's own generator"),
    ({"bf16_full_eval": True}, "cast a whole model"),
    ({"torch_compile": True, "torch_compile_mode": "reduce-overhead"}, "CUDA graphs use the memory"),
    ({"torch_compile": True, "pipeline_schedule": "zb_h1"}, "torch_compile=True compiles them into the backward"),
    ({"save_on_each_node": True}, "the whole model is put together on rank 0 only"),
    ({"debug": "underflow_overflow"}, "it inspects the weights of the whole model"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED_WITH_PROCESSES, ids=lambda value: str(value)[:40])
def test_options_that_several_processes_do_not_take(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(tmp_path, **options)
    check_arguments(args)
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda _: 2))
    with pytest.raises(ValueError, match=words):
        check_arguments(args)


WARNED = [
    ({"average_tokens_across_devices": False}, "losses are always averaged over the items"),
    ({"accelerator_config": {"even_batches": False}}, "no sample is ever repeated or dropped"),
    ({"pipeline_parallel_size": 1, "pipeline_checkpoint": "always"}, "recomputes a whole stage"),
    ({"pipeline_schedule": "zb_v"}, "does nothing with one stage, which waits for no other"),
    ({"ddp_bucket_cap_mb": 5, "ddp_static_graph": True}, "=5, ddp_static_graph=True: options of Distrib"),
    ({"ddp_broadcast_buffers": True}, "options of DistributedDataParallel do nothing"),
]


@pytest.mark.parametrize(("options", "words"), WARNED, ids=lambda value: str(value)[:40])
def test_options_that_mean_something_else(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert not any(words in text for text in warn_about_options(arguments(tmp_path)))
    assert any(words in text for text in warn_about_options(arguments(tmp_path, **options)))


def test_a_communication_hook_that_nothing_would_call() -> None:
    def check(hook: str, num_processes: int = 2) -> None:
        handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType(hook))
        check_communication_hook(SimpleNamespace(ddp_handler=handler, num_processes=num_processes))

    check("no")
    check("fp16", num_processes=1)
    check_communication_hook(SimpleNamespace(ddp_handler=None, num_processes=2))
    with pytest.raises(ValueError, match="comm_hook='fp16'.*and the hook would not be called"):
        check("fp16")


def test_options_that_a_policy_does_not_read(tmp_path: Path) -> None:
    found = unused_freeze_options(arguments(tmp_path, freeze_alpha=0.5, freeze_rule="exclusive"), "schedule")
    assert len(found) == 1
    assert "='exclusive' does nothing with freeze_policy='schedule': expected one of ('gradient_norm',)." in found[0]
    assert "no layer freezes" in unused_freeze_options(arguments(tmp_path, freeze_alpha=0.5), "none")[0]


def test_processes_that_a_configuration_of_accelerate_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"

    def asked(kind: str, *more: str) -> int:
        config.write_text(f"distributed_type: {kind}\nnum_processes: 3\n")
        words = ["python", "accelerate", "launch", "--config_file", str(config), *more, "script.py"]
        parent = SimpleNamespace(cmdline=lambda: words)
        monkeypatch.setattr(refusals.psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
        return refusals._processes_asked_of_accelerate()

    assert asked("MULTI_CPU") == 3
    assert asked("MULTI_CPU", "--num_processes=1") == 1
    assert asked("MULTI_GPU", "--num-processes", "2") == 2
    assert asked("MULTI_GPU") == 1


def test_accelerate_that_started_one_process_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(refusals, "_processes_asked_of_accelerate", lambda: 4)
    right = r"as it does with --cpu and for MULTI_CPU.*num_processes N script.py \(without GPUs, too;"
    with pytest.raises(ValueError, match=right):
        check_launch(SimpleNamespace(world_size=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="but each believes in a world of 1"):
        check_launch(SimpleNamespace(world_size=1))


def test_a_trainer_after_the_end_of_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would join the group again, and wait for ever."""
    monkeypatch.setitem(topology._TOPOLOGIES, (object(), 300.0, 2), SimpleNamespace())
    with pytest.raises(ValueError, match=r"processes have parted: an earlier trainer's end\(\)"):
        arguments(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="processes have parted"):
        check_launch(SimpleNamespace(world_size=2))


def refused(words: str, model: Any = None, optimizer: Any = None) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_model(torch.nn.Linear(2, 2) if model is None else model, 2, False, (optimizer, None))


def test_models_that_are_placed_already() -> None:
    model = torch.nn.Linear(2, 2)
    model.hf_device_map = {"": 0, "head": 1}  # type: ignore[assignment]
    refused("was loaded with device_map; load it without", model)
    model = torch.nn.Linear(2, 2)
    model.is_distributed_loading_by_transformers = True  # type: ignore[assignment]
    sizes = SimpleNamespace(pp_size=2, tp_size=1, fsdp_size=1)
    model.config = SimpleNamespace(distributed_config=sizes)  # type: ignore[assignment]
    refused("was loaded with distributed_config (pp_size=2", model)


def test_models_whose_layers_no_stage_can_hold() -> None:
    refused("The model has batch normalization (0)", torch.nn.Sequential(torch.nn.BatchNorm1d(2)))
    quantizing = type("QuantAct", (torch.nn.Module,), {})
    refused("tracks the ranges of its activations", torch.nn.Sequential(quantizing()))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("layerdrop", "config.layerdrop=1: layers that are skipped at random cannot be stages"),
        ("output_attentions", "config.output_attentions=1: a stage knows its own layers only"),
    ],
)
def test_models_that_ask_for_what_no_stage_has(option: str, words: str) -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(**{option: 1})  # type: ignore[assignment]
    refused(words, model)


def test_a_model_that_reads_weights_of_its_embeddings_behind_them() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="prophetnet")  # type: ignore[assignment]
    refused("ProphetNet reads weights of its embeddings behind them", model)


def test_optimizers_that_cannot_be_divided() -> None:
    model = torch.nn.Linear(2, 2)
    refused("LBFGS keeps one state for all parameters", model, torch.optim.LBFGS(model.parameters()))
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    refused("the optimizer has state for 1 of 2 parameters", model, optimizer)


def test_policies_that_ask_for_what_is_not_measured() -> None:
    from tests.support.settled_policy import Settled

    class Wrong(Settled):
        needs = frozenset({"phase_of_the_moon"})

    with pytest.raises(ValueError, match=r"needs has .*: expected some of"):
        check_policy(Wrong(), 4, 10, 1)
