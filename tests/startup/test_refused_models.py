"""What is said of models, batches, loaders and callbacks that no stage can take, one cheap case for each message."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.data.loader import Request
from hf_pipetransformer.engine.weights.stage import Versions
from hf_pipetransformer.pipe.flow import Flow
from hf_pipetransformer.pipe.micro_batches import MicroBatch, gather
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.runtime.pipeline import Pipeline
from hf_pipetransformer.splitters.adapters import why_unsplittable
from hf_pipetransformer.splitters.base import UnsupportedModelError
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import ActivationShape, _check_order
from hf_pipetransformer.startup import slices
from hf_pipetransformer.startup.check import probe_model
from hf_pipetransformer.startup.estimate import batch_on_meta
from hf_pipetransformer.startup.slices import why_unsliceable
from hf_pipetransformer.training.builder import PipelineBuilder
from hf_pipetransformer.training.callbacks import SpreadModel
from hf_pipetransformer.training.loaders import LateLoader, check_undivided
from hf_pipetransformer.training.metrics import _sendable
from hf_pipetransformer.training.needs import check_trained_model
from hf_pipetransformer.training.pipeline_session import PipelineSession
from tests.support.models import build_model


def test_a_decoder_that_a_splitter_of_encoders_gets() -> None:
    model = build_model("bert_sequence")
    splitter = find_splitter(model)
    assert len(splitter.layers(model)) == 4
    model.config.is_decoder = True
    with pytest.raises(UnsupportedModelError, match="is configured as a decoder"):
        splitter.layers(model)


def test_layers_that_run_in_another_order() -> None:
    trace = SimpleNamespace(layer_calls=[1, 0], changes_between=[])
    with pytest.raises(UnsupportedModelError, match="ran its layers in the order .1, 0.: expected each of 2 once"):
        _check_order(nn.Linear(1, 1), [nn.Identity(), nn.Identity()], cast(Any, trace))


def test_batches_of_another_shape_than_the_first() -> None:
    shape = ActivationShape("pixel_values", (3, 8, 8), (5, 4))
    assert shape.of({"pixel_values": torch.zeros(2, 3, 8, 8)}) == (2, 5, 4)
    with pytest.raises(ValueError, match="all inputs but text must have one size"):
        shape.of({"pixel_values": torch.zeros(2, 3, 9, 9)})
    with pytest.raises(ValueError, match="The batch has no tensor 'pixel_values', the model's main input; found"):
        shape.of({"labels": torch.zeros(2)})


def test_a_first_batch_without_the_main_input() -> None:
    target = SimpleNamespace(model=nn.Linear(1, 1), inputs={"labels": torch.zeros(2)}, main_input="input_ids")
    with pytest.raises(UnsupportedModelError, match="The batch has no tensor 'input_ids', the main input of Linear"):
        probe_model(cast(Any, target))


def test_inputs_that_no_slices_are_cut_from() -> None:
    target = SimpleNamespace(model=nn.Linear(1, 1), inputs={"values": torch.zeros(2)}, main_input="values")
    found = str(why_unsliceable(cast(Any, target), cast(Any, None), cast(Any, None)))
    assert "of shape (2,), not (batch, seq). Token slices" in found


def test_a_model_that_fails_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(slices, "run_whole", lambda _: None)
    monkeypatch.setattr(slices, "run_slices", fail)
    inputs = SampleBatch({"input_ids": torch.zeros(2, 8)})
    target = SimpleNamespace(model=nn.Linear(1, 1), inputs=inputs, main_input="input_ids")
    found = str(why_unsliceable(cast(Any, target), cast(Any, None), cast(Any, None)))
    assert "does not run on slices of a sequence (TypeError: planted)" in found


def test_a_plan_of_a_model_for_sound() -> None:
    class Ears(nn.Module):
        main_input_name = "input_values"
        config = PretrainedConfig()

    with pytest.raises(ValueError, match="reads 'input_values': expected a model for text or images"):
        batch_on_meta(cast(Any, Ears()), 8)


def test_adapters_that_no_stage_could_hold() -> None:
    model = cast(Any, build_model("bert_sequence"))
    model._hf_peft_config_loaded = True
    model.peft_config = {"default": SimpleNamespace(peft_type=SimpleNamespace(value="ADALORA"))}
    assert "PEFT adapters of the kind ADALORA have not been tried" in str(why_unsplittable(model))

    class Mixed(nn.Module):
        peft_config = model.peft_config
        _hf_peft_config_loaded = True

    assert "which mixes kinds of PEFT adapters" in str(why_unsplittable(cast(Any, Mixed())))
    with pytest.raises(UnsupportedModelError, match="Use plain LoRA, or ask for no stages"):
        check_trained_model(Mixed(), cast(Any, None), None)


def test_a_loader_of_the_users_for_several_stages() -> None:
    check_undivided([], "get_eval_dataloader", 1)
    with pytest.raises(ValueError, match="returned a list, which knows nothing of stages"):
        check_undivided([], "get_eval_dataloader", 2)


def test_metrics_that_cannot_be_sent() -> None:
    assert _sendable({"accuracy": 1.0}) == {"accuracy": 1.0}
    with pytest.raises(ValueError, match="compute_metrics returned set as 'words', which cannot be sent from rank 0"):
        _sendable({"words": {1}})


def test_a_model_that_is_in_parts() -> None:
    model = SpreadModel(nn.Linear(1, 1), "Mine.on_log")
    assert not hasattr(model, "no_such_name")
    with pytest.raises(ValueError, match="which lies on several stages. Give the method an argument"):
        _ = model.weight
    pipeline: Any = SimpleNamespace(is_in_parts=True, is_inside_step=True, layout=SimpleNamespace(pipeline_size=2))
    pipeline.check_between_steps = partial(Pipeline.check_between_steps, pipeline)
    with pytest.raises(ValueError, match=r"whole_model\(\) was called amid a step"), Pipeline.whole_model(pipeline):
        pass


def test_parts_that_no_call_has_begun() -> None:
    with pytest.raises(RuntimeError, match="The pipeline has not started"):
        _ = PipelineBuilder.pipeline.fget(SimpleNamespace(in_force=None))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="There is no training"):
        _ = PipelineSession.training.fget(SimpleNamespace(present=None))  # type: ignore[attr-defined]


class Total(nn.Module):
    """Sums each micro-batch."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.sum()


def test_an_output_of_a_pipe_that_cannot_be_joined() -> None:
    assert Pipe(nn.Sequential(Total()), 1)(torch.ones(4)).local_value() == 4
    with pytest.raises(ValueError, match="The last stage returned a tensor without dimensions"):
        Pipe(nn.Sequential(Total()), 2)(torch.ones(4))


def test_outputs_of_other_lengths() -> None:
    parts = [MicroBatch((1,), is_single=False), MicroBatch((1, 2), is_single=False)]
    with pytest.raises(ValueError, match="values for different micro-batches: expected as many for each"):
        gather(parts)


def test_a_loader_without_a_batch() -> None:
    with pytest.raises(ValueError, match="The list is empty: expected at least one batch"):
        LateLoader([]).read_first(None, is_kept=True)


def test_a_loader_of_no_data_set() -> None:
    trainer, topology = SimpleNamespace(model=nn.Linear(1, 1)), SimpleNamespace(rank=0)
    builder = SimpleNamespace(context=SimpleNamespace(trainer=trainer, topology=topology, args=None))
    request = Request(None, "Training", 4)
    with pytest.raises(ValueError, match="Training needs a data set: pass train_dataset"):
        PipelineBuilder.inspect(cast(Any, builder), request, is_training=True)


def test_an_optimizer_that_moves_parameters() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    versions = SimpleNamespace(parameters=parameters, _values=[parameters[0].data])
    Versions.check_storage(cast(Any, versions), cast(Any, None))
    parameters[0].data = torch.ones(1)
    with pytest.raises(ValueError, match="gives parameters new memory in a step"):
        Versions.check_storage(cast(Any, versions), torch.optim.SGD(parameters))


def test_a_skip_tensor_that_nobody_pops() -> None:
    flow = SimpleNamespace(
        stages=[SimpleNamespace(device=torch.device("cpu"))], _batches=[SimpleNamespace(values=())], routes={}
    )
    with pytest.raises(RuntimeError, match="Stage 0 stashed 'foo', which no later stage pops"):
        Flow._send(cast(Flow, flow), 0, 0, {(None, "foo"): torch.ones(1)})  # type: ignore[dict-item]
