"""Making a model whole whose parameters lie on several stages, tied ones on more than one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_pipetransformer.comm import transfers as rounds
from hf_pipetransformer.runtime import gathering as collecting
from hf_pipetransformer.runtime.gathering import Wanted, collect_parameters, share_buffers
from tests.wires import Wires


CPU = torch.device("cpu")
OWNERS = {"embeddings": (0, 2), "first": (0,), "second": (1,), "scalar": (1,), "head": (2,), "position": (0, 1, 2)}


def value_of(name: str) -> torch.Tensor:
    number = list(OWNERS).index(name)
    return torch.tensor(number, dtype=torch.bfloat16) if name == "scalar" else torch.full((4, 3), float(number))


def on_three_stages(call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """What `call` gives on each stage, and how many tensors each stage sent."""
    wires, found, sent = Wires(3), [None] * 3, [0] * 3

    def carry(parcels: Any, control: int, timeout: float) -> None:
        sent[control] += sum(parcel.is_leaving for parcel in parcels)
        wires.carry(parcels, control, timeout)

    def run(stage: int) -> None:
        place = SimpleNamespace(pipeline_size=3, position=stage, pipeline_ranks=(0, 1, 2), pipeline_control=stage)
        found[stage] = call(place)

    monkeypatch.setattr(collecting, "carry", carry)
    threads = [threading.Thread(target=run, args=(stage,)) for stage in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found, sent


def part_of(stage: int) -> dict[str, torch.nn.Parameter]:
    """All parameters, as meta tensors where the stage does not use them."""
    values = {name: value_of(name).to("cpu" if stage in OWNERS[name] else "meta") for name in OWNERS}
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


@pytest.mark.parametrize("round_bytes", [1, 100, 10_000])
@pytest.mark.parametrize(("stages", "num_sent"), [(None, [3, 4, 2]), ((0,), [0, 2, 1])])
def test_each_stage_that_wants_them_gets_what_it_lacks_and_nothing_else_moves(
    monkeypatch: pytest.MonkeyPatch, round_bytes: int, stages: tuple[int, ...] | None, num_sent: list[int]
) -> None:
    monkeypatch.setattr(rounds, "ROUND_BYTES", round_bytes)
    found, sent = on_three_stages(
        lambda place: collect_parameters(part_of(place.position), OWNERS, place, 10, Wanted(CPU, stages)), monkeypatch
    )
    for stage in range(3):
        lacks = [name for name in OWNERS if stage not in OWNERS[name]] if stages is None or stage in stages else []
        assert list(found[stage]) == lacks
        assert all(torch.equal(found[stage][name], value_of(name)) for name in lacks)
    assert sent == num_sent


def test_all_stages_get_the_buffers_of_their_first_user(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"count": (1,), "positions": (0, 2), "expanded": (2,)}
    held: list[dict[str, torch.Tensor]] = [
        {
            "count": torch.tensor(10 + stage),
            "positions": torch.arange(3) + stage,
            "expanded": torch.tensor([float(stage)]).expand(4).clone(),
        }
        for stage in range(3)
    ]
    on_three_stages(lambda place: share_buffers(held[place.position], owners, place, 10), monkeypatch)
    for buffers in held:
        assert buffers["count"].item() == 11
        assert buffers["positions"].tolist() == [0, 1, 2]
        assert buffers["expanded"].tolist() == [2.0] * 4
