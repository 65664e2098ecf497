"""What layers give is noted once for each layer, on whichever stage reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.layer_probe import LayerProbe
from hf_pipetransformer.splitters import find_splitter
from hf_pipetransformer.splitters.structure import trace_structure
from hf_pipetransformer.splitters.view import StageExit, StageView
from tests.models import NUM_LAYERS, build_model, collate, make_rows


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

        def run(**inputs: Any) -> None:
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
