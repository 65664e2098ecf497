"""What is said of checkpoints that cannot be read or do not fit, one cheap case for each message."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from hf_pipetransformer.data.loader import PipelineLoader
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.runtime.context import CollectiveTimeouts
from hf_pipetransformer.runtime.optimizer_state import OptimizerState
from hf_pipetransformer.schedules import json_values
from hf_pipetransformer.state import checkpoint, plain_checkpoint, saving
from hf_pipetransformer.state.checkpoint import STATE_FILE, STATE_FOLDER, read_optimizer, read_state
from hf_pipetransformer.state.plain_checkpoint import check_trainers
from hf_pipetransformer.state.resumption import Resumption
from hf_pipetransformer.state.run_state import _describe_changes, checksum_of
from hf_pipetransformer.state.saving import Checkpoints
from hf_pipetransformer.state.weights import _check_complete


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no complete checkpoint: it holds neither"):
        read_state(str(tmp_path))
    with pytest.raises(ValueError, match="is incomplete: saving it was interrupted"):
        check_trainers(str(tmp_path))
    (tmp_path / "trainer_state.json").write_text('{"global_step": 1, "epoch": 1.0}')
    with pytest.raises(ValueError, match="is no complete checkpoint: it holds no weights"):
        check_trainers(str(tmp_path))
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    words = r"holds the model only \(save_only_model=True\): .* of the pipeline. Start a new run"
    with pytest.raises(ValueError, match=words):
        read_state(str(tmp_path))
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="was saved by plain Trainer: expected a folder"):
        read_state(str(tmp_path))
    with pytest.raises(ValueError, match=r"is damaged: scheduler.pt is missing"):
        check_trainers(str(tmp_path))


def test_a_state_with_other_content(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / STATE_FOLDER).mkdir()
    state = tmp_path / STATE_FOLDER / STATE_FILE
    state.write_text(json.dumps({"version": checkpoint.VERSION, "checksum": "0"}))
    with pytest.raises(ValueError, match="is damaged: .*: it has other content than was written"):
        read_state(str(tmp_path))
    with pytest.raises(ValueError, match="expected a file of a checkpoint that every process can see"):
        read_optimizer(str(tmp_path), 1)


def test_weights_that_no_file_holds() -> None:
    with pytest.raises(ValueError, match="expected a checkpoint of the same model"):
        _check_complete(["weight"], torch.nn.Linear(1, 1), "saved")


def test_values_that_are_nested_too_deep() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="The values are nested too deep for a JSON file"):
        checksum_of({"decisions": deep})


def test_an_optimizer_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="The checkpoint's optimizer has 2 parameter groups: expected 1"):
        OptimizerState(optimizer, {}, cast(Any, None), False, {}).set_options([{}, {}])
    monkeypatch.setattr(checkpoint, "read_optimizer", lambda *_: ({}, ["head.weight"], []))
    resumption = SimpleNamespace(folder="saved", state=SimpleNamespace(layout=SimpleNamespace(pipeline_size=1)))
    stage = SimpleNamespace(store=SimpleNamespace(is_active=lambda _: False), trained_here=dict)
    parts = SimpleNamespace(optimizer_state=None, pipeline=SimpleNamespace(stage=stage))
    with pytest.raises(ValueError, match="has optimizer state for .*, which this run does not train"):
        Checkpoints._restore_optimizer(cast(Any, parts), cast(Any, resumption))
    with (
        pytest.raises(ValueError, match="the state of the .* cannot be restored .*planted"),
        saving._restoring("freeze policy", cast(Any, resumption)),
    ):
        raise KeyError("planted")


def test_an_optimizer_that_trains_what_is_not_the_models() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="which no stage would own"):
        OptimizerState(optimizer, {}, cast(Any, None), False, {}).keep({})
    parts = SimpleNamespace(
        optimizer_state=SimpleNamespace(optimizer=optimizer, options=list),
        _schedules=dict,
        controller=SimpleNamespace(state=dict),
        pipeline=SimpleNamespace(stage=SimpleNamespace(store=SimpleNamespace(held=dict))),
    )
    with pytest.raises(ValueError, match="and a checkpoint holds the model's only"):
        Checkpoints.check_savable(cast(Checkpoints, parts))


def test_an_optimizer_that_plain_trainer_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(parameters={}, decaying=[], layout=SimpleNamespace(pipeline_size=1))
    monkeypatch.setattr(plain_checkpoint, "_check_is_checkpoint", lambda _: None)
    monkeypatch.setattr(checkpoint, "read_state", lambda _: state)
    monkeypatch.setattr(checkpoint, "read_optimizer", lambda *_: ({}, [], [{}, {}, {}]))
    with pytest.raises(ValueError, match="parameter groups, expected .*: plain Trainer knows only those"):
        plain_checkpoint.export_checkpoint("saved", str(tmp_path / "exported"))


def test_an_optimizer_of_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"param_groups": [{"params": [0], "lr": 1.0}], "state": {0: {"exp_avg": torch.ones(3)}}}
    monkeypatch.setattr(plain_checkpoint, "_load", lambda *_: saved)
    with pytest.raises(ValueError, match="its optimizer trained other parameters, or in another order"):
        plain_checkpoint.read_plain_optimizer("saved", [["weight"]], {"weight": (2,)}, [{"lr": 1.0}])


def test_what_plain_trainer_does_differently() -> None:
    state = SimpleNamespace(layout=SimpleNamespace(num_frozen_layers=2), place=None, is_counted=False, world_size=2)
    found = " ".join(plain_checkpoint._differences(cast(Any, state)))
    assert "2 layers were frozen by the run; plain Trainer trains them again" in found
    assert "The run had 2 processes: start as many" in found


def test_a_fault_that_cannot_be_written_down(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="hf_pipetransformer")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("planted")

    context = SimpleNamespace(_is_recorded=False, journal=SimpleNamespace(write=fail, tried={}))
    CollectiveTimeouts._record(cast(Any, context), "cause", "")
    assert "The events file cannot take the fault 'cause'" in caplog.text


def test_a_run_of_other_layers_or_batches() -> None:
    layout = SimpleNamespace(num_layers=4)
    resumption = SimpleNamespace(
        args=SimpleNamespace(train_samples_per_device=1), is_plain=False, folder="saved",
        state=SimpleNamespace(layout=layout, step=1),
    )  # fmt: skip
    plans = SimpleNamespace(probe=SimpleNamespace(structure=SimpleNamespace(num_layers=6)))
    with pytest.raises(ValueError, match="has 4 layers, expected 6: pass the same splitter"):
        Resumption.choose_layout(cast(Any, resumption), cast(Any, plans), None, 1, cast(Any, None))

    class Stream(PipelineLoader):
        order, total_batch_size = None, 8

        def __init__(self) -> None:
            pass

    args, place = SimpleNamespace(gradient_accumulation_steps=1), SimpleNamespace(global_batch=4)
    saved = cast(Any, SimpleNamespace(args=args, step=1, place=place, folder="saved"))
    with pytest.raises(ValueError, match="was saved with 4 samples a batch over all replicas, expected 8"):
        Resumption.counts(saved, (), Stream(), 1.0)


def test_options_that_the_checkpoint_keeps() -> None:
    saved = SimpleNamespace(arguments={"weight_decay": 1}, has_plan=False, policy="", policy_class="", world_size=1)
    present = SimpleNamespace(**{**vars(saved), "arguments": {"weight_decay": 2}})
    found = str(_describe_changes(cast(Any, saved), cast(Any, present)))
    assert "The run goes on with other settings" in found
    assert "As with Trainer, weight_decay of the checkpoint stays in force" in found


@pytest.mark.parametrize("value", ["x", True, -1])
def test_a_value_of_a_file_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="found .* as 'step', expected a whole number from 0 to"):
        json_values.whole_number(value, "step")
    with pytest.raises(ValueError, match="found no 'step'"):
        json_values.entry({}, "step")


def test_arguments_that_a_plain_trainer_would_ignore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = PipeTransformerArguments(str(tmp_path), use_cpu=True)
    assert args.place_model_on_device is None
    assert "were given to a Trainer without a pipeline" in caplog.text
