"""`scripts/bench/peers.py`: its contenders, what it says of them, and its page, on figures that are made up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from scripts.bench import tables
from scripts.bench.measure import EXPERIMENTS
from scripts.bench.peers import CHUNKS, MEMORY, NAIVE, SUBJECTS, contenders, loss_of, row_of, stages_of, winners


def ranks(losses: list[float], *mebibytes: int) -> list[dict[str, Any]]:
    return [{"losses": losses, "seconds": 1.0, "bytes": size * 2**20} for size in mebibytes]


def measured(name: str, seconds: float, *mebibytes: int) -> dict[str, Any]:
    row = row_of(contenders()[name], ranks([1.0, 2.0], *mebibytes), [1.0, 2.0])
    spread = {"median": seconds, "min": seconds - 0.1, "max": seconds + 0.1}
    return row | {"seconds of a step": spread, "of the naive split's": spread}


def test_every_schedule_of_torch_is_a_contender() -> None:
    from torch.distributed.pipelining import schedules

    known = {name.removeprefix("Schedule") for name in dir(schedules) if name.startswith("Schedule")}
    assert set(CHUNKS) == known - {""}
    assert {f"torch.distributed.pipelining, {name}" for name in CHUNKS} <= set(contenders())
    assert list(contenders())[0] == NAIVE, "losses are compared with the first"


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_stages_compute_the_loss_of_the_model(kind: str, num_stages: int) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = (
        BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
        if kind == "bert"
        else ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    )
    inputs = torch.randint(0, 50, (6, 8)) if kind == "bert" else torch.randn(6, 3, 8, 8)
    labels = torch.arange(6) % 2
    expected = model(inputs, labels=labels).loss.item()
    stages = stages_of(model, num_stages)
    hidden = inputs
    for stage in stages:
        hidden = stage(hidden)
    assert loss_of(hidden, labels).item() == pytest.approx(expected, rel=1e-6)
    assert len(stages) == num_stages and all(len(stage) for stage in stages)


def test_another_library_that_fails_or_differs_is_a_row_and_this_package_an_error() -> None:
    of = contenders()
    assert row_of(of["FSDP2"], [{"error": "no such thing"}], [1.0])["does not run"] == "no such thing"
    assert row_of(of["FSDP2"], ranks([1.0001], 5, 5), [1.0])["does not run"] == "other losses, by 1.0e-04"
    assert "does not run" not in row_of(of["FSDP2"], ranks([1.000001], 5, 5), [1.0])
    with pytest.raises(RuntimeError, match="ours, K=2, zb_v: other losses"):
        row_of(of["ours, K=2, zb_v"], ranks([1.0001], 5, 5), [1.0])
    assert "does not run" not in row_of(of["ours, K=2, async_1f1b"], ranks([], 5, 5), [1.0])


def test_winners_are_exact_and_the_page_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        NAIVE: measured(NAIVE, 2.0, 90),
        "ours, K=2, 1f1b": measured("ours, K=2, 1f1b", 1.2, 60, 50),
        "ours, K=2, async_1f1b": measured("ours, K=2, async_1f1b", 0.5, 10, 10),
        "Trainer, DDP": measured("Trainer, DDP", 1.0, 110, 110),
        "FSDP2": measured("FSDP2", 3.0, 55, 55),
        "torchgpipe": row_of(contenders()["torchgpipe"], [{"error": "is not there"}], []),
    }
    assert rows["FSDP2"][MEMORY] == [55, 55]
    won = winners(rows)
    assert won == {"fastest": "Trainer, DDP", "least memory": "FSDP2", "least product": "ours, K=2, 1f1b"}
    found = {"machine": {}, "vit": {"model": SUBJECTS["vit"].title, "contenders": rows, "winners": won}}
    monkeypatch.setattr(tables, "content", lambda file: found)
    lines = tables.table("peers.json").splitlines()
    first = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert first[1:7] == [
        "| ours, K=2, async_1f1b", "| Trainer, DDP", "| ours, K=2, 1f1b", f"| {NAIVE}", "| FSDP2", "| torchgpipe",
    ]  # fmt: skip
    assert "| ours, K=2, 1f1b | 1.20 [1.10, 1.30] s | 1.20 [1.10, 1.30] | 60 and 50 MiB | exact |" in lines
    assert "| torchgpipe | does not run: is not there | | | |" in lines
    assert lines[-1] == "| ViT 12 x 192 | Trainer, DDP | FSDP2 | ours, K=2, 1f1b |"
    assert EXPERIMENTS.keys() >= {f"peers-{name}" for name in SUBJECTS}
