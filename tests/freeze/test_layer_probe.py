"""What layers give is noted once for each layer, on whichever stage reads it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BertForSequenceClassification, DataCollatorWithFlattening

from hf_pipetransformer import PipeTransformerArguments, PipeTransformerTrainer
from hf_pipetransformer.comm.topology import Topology
from hf_pipetransformer.data.flattened import find_sequences, without_sequences
from hf_pipetransformer.freeze.signals import LayerProbe
from hf_pipetransformer.schedules.placement import Placement
from hf_pipetransformer.schedules.schedule import FORWARD_ONLY
from hf_pipetransformer.splitters.families import find_splitter
from hf_pipetransformer.splitters.structure import trace_structure
from hf_pipetransformer.splitters.view import StageExit, StageView
from tests.support.decoders import make_decoder
from tests.support.models import NUM_LAYERS, build_model, collate, make_dataset, make_rows
from tests.support.one_process import ModelPipeline, together
from tests.support.settled_policy import Settled


@pytest.mark.parametrize("name", ["bert_sequence", "vit"])
@pytest.mark.parametrize("cuts", [(), (5,), (6,), (1, 2, 8)])
def test_stages_note_what_the_whole_model_does(name: str, cuts: tuple[int, ...]) -> None:
    model, samples = build_model(name).train(), collate(make_rows(name, 6))
    splitter = find_splitter(model)
    structure = trace_structure(model, splitter, lambda: model(**samples).loss)
    expected = [hidden.flatten(1, -2).mean(dim=1) for hidden in hidden_states(model, samples)]
    view, received = StageView(model, splitter, structure), None
    found: dict[str, torch.Tensor] = {}
    ends = [0, *cuts, 2 * NUM_LAYERS + 2]
    for start, end in zip(ends, ends[1:], strict=False):
        view.install(range(start, end))
        view.received, stage_output = received, []

        def run(inputs: dict[str, Any]) -> None:
            try:
                model(**inputs)
            except StageExit as reached:
                stage_output.append(reached.hidden)  # noqa: B023

        stage: Any = SimpleNamespace(view=view, layout=SimpleNamespace(pipeline_size=1))
        own = LayerProbe(run, samples, Topology(60, 1), torch.device("cpu")).outputs(stage)
        assert not own.keys() & found.keys()
        found |= own
        received = stage_output[0] if stage_output else None
    view.remove()
    assert sorted(found, key=int) == [str(layer) for layer in range(NUM_LAYERS)]
    for layer, output in enumerate(expected):
        assert torch.equal(found[str(layer)], output)


def test_samples_of_one_row_are_noted_one_by_one() -> None:
    model, lengths = make_decoder("llama").eval(), (5, 3, 8)
    model.config.use_cache = False  # As Trainer sets it: with a cache, transformers looks for no packed rows.
    rows = [{"input_ids": list(range(1, 1 + length))} for length in lengths]
    samples = find_sequences(DataCollatorWithFlattening()(rows), 3)

    def run(inputs: dict[str, Any]) -> None:
        model(**without_sequences(inputs))

    structure = trace_structure(model, find_splitter(model), lambda: run(dict(samples)))
    view = StageView(model, find_splitter(model), structure)
    view.install(range(structure.num_blocks))
    stage: Any = SimpleNamespace(view=view, layout=SimpleNamespace(pipeline_size=1))
    found = LayerProbe(run, samples, Topology(60, 1), torch.device("cpu")).outputs(stage)
    view.remove()
    alone = [model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states for row in rows]
    for layer in range(structure.num_layers - 1):
        expected = torch.cat([hidden[layer + 1].mean(dim=1) for hidden in alone])
        assert torch.allclose(found[str(layer)], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["loop", "v"])
def test_ranks_with_several_stages_note_each_layer_once(kind: str) -> None:
    """Two ranks with two stages each, a batch in two micro-batches; a layer may end on either rank."""
    model, samples = build_model("bert_sequence").train(), collate(make_rows("bert_sequence", 6))
    expected = [hidden.mean(dim=1) for hidden in hidden_states(model, samples)]
    placement = Placement(2, 2, kind)
    pipeline = ModelPipeline(model, (0, 2, 5, 8, 2 * NUM_LAYERS + 2), placement, samples, num_microbatches=2)
    table = FORWARD_ONLY[kind].table(2, 2, 2, 0)

    def outputs(rank: int) -> dict[str, torch.Tensor]:
        def run(_inputs: dict[str, Any]) -> None:
            pipeline.engines[rank].begin(table[rank], pipeline.micro_batches[rank], is_training=False).drain()

        stage: Any = SimpleNamespace(view=pipeline.views[rank], layout=SimpleNamespace(pipeline_size=1))
        return LayerProbe(run, samples, Topology(60, 1), torch.device("cpu")).outputs(stage)

    first, second = together([partial(outputs, rank) for rank in range(2)])
    assert first and second and not first.keys() & second.keys()
    found = first | second
    assert sorted(found, key=int) == [str(layer) for layer in range(NUM_LAYERS)]
    for layer, output in enumerate(expected):
        assert torch.allclose(found[str(layer)], output, rtol=1e-5, atol=1e-6)


class Strict(BertForSequenceClassification):
    """Takes what it knows and nothing else."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


class Weighted(PipeTransformerTrainer):
    """The batch has a column that is not the model's."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        others = {name: value for name, value in inputs.items() if name != "weight"}
        return inputs["weight"].mean() * super().compute_loss(model, others, return_outputs, **kwargs)


def with_weights(rows: Any) -> dict[str, torch.Tensor]:
    return collate(rows) | {"weight": torch.ones(len(rows))}


def test_columns_that_only_the_loss_knows_do_not_reach_the_model(tmp_path: Path) -> None:
    policy = Settled()
    policy.needs = {"activation_similarity"}
    args = PipeTransformerArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        remove_unused_columns=False, freeze_interval="1", freeze_warmup=0, activation_cache="off",
    )  # fmt: skip
    model, data = Strict(build_model("bert_sequence").config), make_dataset("bert_sequence", 12)
    trainer = Weighted(model, args, train_dataset=data, data_collator=with_weights, policy=policy)
    trainer.train()
    events = [json.loads(line) for line in (tmp_path / "pipetransformer_events.jsonl").read_text().splitlines()]
    (similarities,) = [event["activation_similarity"] for event in events if event["event"] == "freeze"]
    assert len(similarities) == NUM_LAYERS


def test_a_number_of_frozen_layers_beside_a_policy_is_refused(tmp_path: Path) -> None:
    args = PipeTransformerArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", freeze_layers=1)
    with pytest.raises(ValueError, match="the policy decides alone"):
        PipeTransformerTrainer(build_model("bert_sequence"), args, policy=Settled())


def hidden_states(model: Any, samples: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """After each layer."""
    found: list[torch.Tensor] = []
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == NUM_LAYERS)
    hooks = [
        layer.register_forward_hook(
            lambda _module, _args, output: found.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in layers
    ]
    model.eval()
    with torch.no_grad():
        model(**{key: value for key, value in samples.items() if key != "labels"})
    model.train()
    for hook in hooks:
        hook.remove()
    return found
