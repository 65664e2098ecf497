"""Making a model whole whose parameters lie on several stages, tied ones on more than one, and saving it in parts."""

from __future__ import annotations

import json
import os
import queue
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertModel, Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerMixin, PipeTransformerTrainer
from hf_pipetransformer.comm import transfers as rounds
from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.runtime import gathering as collecting
from hf_pipetransformer.runtime.gathering import collect_parameters, share_buffers
from hf_pipetransformer.runtime.ownership import ParameterStore
from hf_pipetransformer.state import deferred
from hf_pipetransformer.state.deferred import deferred_state, why_not_deferred, write_tensors
from hf_pipetransformer.state.weights import hash_of_weights
from tests.support.decoders import DECODERS, make_decoder
from tests.support.models import MODELS, build_model
from tests.support.one_process import together
from tests.support.wires import Wires


OWNERS = {"embeddings": (0, 2), "first": (0,), "second": (1,), "scalar": (1,), "head": (2,), "position": (0, 1, 2)}


def value_of(name: str) -> torch.Tensor:
    number = list(OWNERS).index(name)
    return torch.tensor(number, dtype=torch.bfloat16) if name == "scalar" else torch.full((4, 3), float(number))


def on_three_stages(call: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[int]]:
    """What `call` gives on each stage, and how many tensors each stage sent."""
    wires, sent = Wires(3), [0] * 3

    def carry(parcels: Any, control: int, timeout: float) -> None:
        sent[control] += sum(parcel.is_leaving for parcel in parcels)
        wires.carry(parcels, control, timeout)

    def run(stage: int) -> Any:
        named, control = part_of(stage), {"pipeline_ranks": (0, 1, 2), "pipeline_control": stage}
        groups = SimpleNamespace(pipeline_size=3, position=stage, is_first=stage == 0, **control)
        settings = SimpleNamespace(timeout=10, topology=SimpleNamespace(rank=stage))
        store = SimpleNamespace(named=lambda: named)
        return call(SimpleNamespace(groups=groups, settings=settings, store=store, owners=OWNERS, is_spread=True))

    monkeypatch.setattr(collecting, "carry", carry)
    return together([partial(run, stage) for stage in range(3)]), sent


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
    found, sent = on_three_stages(lambda stage: collect_parameters(stage, positions=stages), monkeypatch)
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

    def share(stage: Any) -> None:
        buffers = held[stage.groups.position]
        stage.view = SimpleNamespace(model=SimpleNamespace(named_buffers=buffers.items))
        stage.buffer_owners = owners
        share_buffers(stage)

    on_three_stages(share, monkeypatch)
    for buffers in held:
        assert buffers["count"].item() == 11
        assert buffers["positions"].tolist() == [0, 1, 2]
        assert buffers["expanded"].tolist() == [2.0] * 4


class Elsewhere:
    """The stages that hold what a first one lacks and fetches; counts the bytes that were fetched and are alive."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self.values = {name: parameter.detach().clone() for name, parameter in named.items()}
        ParameterStore(model).release(keep=set(list(named)[: len(named) // 3]))
        self.sizes = {name: p.nbytes for name, p in model.named_parameters() if p.is_meta}
        self.alive = self.most = 0

    def fetch(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = {name: self.values[name].clone() for name in names}
        for name in self.sizes.keys() & found.keys():
            self.alive += self.sizes[name]
            weakref.finalize(found[name], self.forget, self.sizes[name])
        self.most = max(self.most, self.alive)
        return found

    def forget(self, size: int) -> None:
        self.alive -= size


def save_both(model: Any, folder: Path, max_shard_size: str) -> tuple[Path, Path, Elsewhere]:
    """Save a model while it is whole, and when two thirds of its parameters are elsewhere."""
    model.save_pretrained(folder / "whole", max_shard_size=max_shard_size)
    elsewhere = Elsewhere(model)
    with trainer_compat.writing_tensors_with(partial(write_tensors, fetch=elsewhere.fetch)):
        model.save_pretrained(folder / "part", max_shard_size=max_shard_size, state_dict=deferred_state(model))
    return folder / "whole", folder / "part", elsewhere


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("size", ["50GB", "60KB"])
@pytest.mark.parametrize("build", [partial(build_model, "vit"), partial(make_decoder, "llama")], ids=["vit", "tied"])
def test_files_of_a_model_in_parts_are_those_of_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Callable[[], Any], size: str
) -> None:
    """Byte for byte, also with names that saving changes or leaves out; the first rank fetches a few at a time."""
    monkeypatch.setattr(deferred, "FETCHED_BYTES", 10_000)
    whole, part, elsewhere = save_both(build(), tmp_path, size)
    assert contents(part) == contents(whole)
    assert (len(contents(whole)) > 4) == (size == "60KB")
    assert 0 < elsewhere.most <= max(10_000, *elsewhere.sizes.values()) < sum(elsewhere.sizes.values()) / 2
    assert elsewhere.alive == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_are_split_where_they_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """transformers trains the experts of a layer as one tensor, and saves each of its own."""
    monkeypatch.setattr(deferred, "FETCHED_BYTES", 10_000)
    whole, part, elsewhere = save_both(make_decoder(name), tmp_path / "one", "50GB")
    assert contents(part) == contents(whole)
    of_a_layer = sum(size for key, size in elsewhere.sizes.items() if ".layers.2." in key)
    assert 0 < elsewhere.most <= of_a_layer < sum(elsewhere.sizes.values()) / 2
    # Views of one memory count once for transformers, so only which file has which may differ.
    whole, part, _ = save_both(make_decoder(name), tmp_path / "many", "60KB")
    indices = [json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (whole, part)]
    assert indices[0]["metadata"] == indices[1]["metadata"]
    assert hash_of_weights(str(part)) == hash_of_weights(str(whole))


@pytest.mark.parametrize("name", [*MODELS, *DECODERS])
def test_every_family_is_saved_in_parts(tmp_path: Path, name: str) -> None:
    whole, part, elsewhere = save_both(build_model(name) if name in MODELS else make_decoder(name), tmp_path, "50GB")
    assert contents(part) == contents(whole) and elsewhere.most


def test_a_file_is_written_as_safetensors_writes_it(tmp_path: Path) -> None:
    tensors = {
        "z": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "ä": torch.tensor(7),
        "a": torch.zeros(0, 4),
        "m": torch.tensor([True, False, True]),
        "b": torch.arange(6.0).reshape(2, 3),
        "h": torch.arange(3, dtype=torch.float16),
    }
    for metadata in ({"format": "pt"}, None):
        save_file(tensors, tmp_path / "theirs", metadata=metadata)
        write_tensors(tensors, tmp_path / "ours", metadata, fetch=lambda names: {})
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_file_that_is_mapped_keeps_its_bytes_while_another_takes_its_name(tmp_path: Path) -> None:
    """A model may be saved where it was loaded from; and a save that fails leaves the file that was there."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    mapped = load_file(path)["a"]

    def fail(_names: Sequence[str]) -> dict[str, torch.Tensor]:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        write_tensors(deferred_state(nn.Linear(30, 30)), path, fetch=fail)
    assert load_file(path).keys() == {"a"} and os.listdir(tmp_path) == [path.name]
    write_tensors({"a": torch.zeros(1000)}, path, fetch=lambda names: {})
    assert torch.equal(mapped, torch.ones(1000)) and torch.equal(load_file(path)["a"], torch.zeros(1000))


def test_operations_on_deferred_tensors_give_what_they_give_on_their_values(tmp_path: Path) -> None:
    module = nn.Linear(4, 6)
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def changed(weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        upper, lower = weight.chunk(2)
        stacked = torch.stack([lower, upper.neg()], dim=1).transpose(0, 1)
        return {"a": stacked.contiguous(), "b": torch.cat([bias[1:], torch.ones(2)]), "c": upper.T[2], "d": weight}

    write_tensors(
        changed(**deferred_state(module)), tmp_path / "file", fetch=lambda names: {n: values[n] for n in names}
    )
    found, expected = load_file(tmp_path / "file"), changed(**values)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("change", ["add_", "__iadd__", "mul_"])
def test_a_deferred_tensor_is_never_changed_in_place(change: str) -> None:
    with pytest.raises(NotImplementedError, match="changes a tensor that will be fetched later"):
        getattr(deferred_state(nn.Linear(2, 2))["weight"], change)(1.0)


def test_stages_send_what_the_first_one_fetches_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [queue.Queue[list[str]]() for _ in range(3)]

    def broadcast(names: list[str], source: int, group: int, rank: int) -> list[str]:
        for other in told[1:] if rank == source else ():
            other.put(names)
        return names if rank == source else told[rank].get(timeout=10)

    def run(stage: Any) -> Any:
        with collecting.fetching(stage) as fetch:
            return [fetch(names) for names in wanted] if stage.groups.is_first else "sent"

    wanted = [["first"], ["second", "embeddings"], ["head", "scalar"], ["second"]]
    monkeypatch.setattr(collecting, "broadcast_tree", broadcast)
    found, sent = on_three_stages(run, monkeypatch)
    assert [set(each) for each in found[0]] == [set(names) for names in wanted]
    assert all(torch.equal(value, value_of(name)) for each in found[0] for name, value in each.items())
    # What the first holds is sent by nobody, and what is wanted twice is sent twice.
    assert sent == [0, 3, 1] and found[1:] == ["sent", "sent"]


class SavesBelow(Trainer):
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        super().save_model(*args, **kwargs)


class Below(PipeTransformerMixin, SavesBelow):
    pass


class Above(PipeTransformerTrainer):
    def save_model(self, *args: Any, **kwargs: Any) -> None:
        super().save_model(*args, **kwargs)


class Inside(PipeTransformerTrainer):
    def _save(self, *args: Any, **kwargs: Any) -> None:
        super()._save(*args, **kwargs)


class SavesItself(BertModel):
    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(*args, **kwargs)


class StatesItself(BertModel):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs)


def reason(kind: type = PipeTransformerTrainer, model: Any = None, **attributes: Any) -> str | None:
    """Why the whole model is gathered before such a trainer saves."""
    trainer = object.__new__(kind)
    trainer.model = model or tiny_bert()
    for name, value in attributes.items():
        setattr(trainer.model, name, value)
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model, **_options: getattr(model, "module", model))
    return trainer_compat.why_gathered_to_save(trainer) or why_not_deferred(trainer.model)


def tiny_bert(kind: type = BertModel) -> Any:
    return kind(build_model("bert_sequence").config)


def test_what_reads_no_weight_is_saved_in_parts() -> None:
    assert reason() is None and reason(Above) is None and reason(model=nn.Linear(2, 3)) is None
    model = tiny_bert()
    assert reason(model=model, save_pretrained=partial(model.save_pretrained, max_shard_size="1MB")) is None
    assert reason(hf_device_map={"": 0}) is None


def test_what_may_read_any_weight_gets_the_whole_model() -> None:
    assert "Below saves in a way of its own" in str(reason(Below))
    assert "Inside saves in a way of its own" in str(reason(Inside))
    assert "SavesItself has its own save_pretrained" in str(reason(model=tiny_bert(SavesItself)))
    assert "own save_pretrained" in str(reason(save_pretrained=lambda *args, **kwargs: None))
    assert "StatesItself has its own state_dict" in str(reason(model=tiny_bert(StatesItself)))
    assert "wrapped" in str(reason(model=nn.DataParallel(tiny_bert())))
    assert "quantized" in str(reason(hf_quantizer=object()))
    assert "offloaded" in str(reason(hf_device_map={"encoder": 0, "pooler": "cpu"}))


def test_state_that_is_no_parameter_gets_the_whole_model() -> None:
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert "tied" in str(reason(model=tied))
    model = build_model("bert_sequence")
    model.register_state_dict_post_hook(
        lambda module, state, *_: state.update({"classifier.weight": state["classifier.weight"] * 2})
    )
    assert reason(model=model) is None
    ParameterStore(model).release(keep={"classifier.bias"})
    assert "a hook of the model changes classifier.weight" in str(reason(model=model))


def test_trainer_saves_a_model_of_torch_in_parts(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True))
    trainer._save(str(tmp_path / "whole"))
    elsewhere = Elsewhere(model)
    with trainer_compat.writing_tensors_with(partial(write_tensors, fetch=elsewhere.fetch)):
        trainer._save(str(tmp_path / "part"), deferred_state(model))
    files = [(tmp_path / which / "model.safetensors").read_bytes() for which in ("whole", "part")]
    assert files[0] == files[1] and elsewhere.most
