"""The row of a plan for sharded data parallelism beside FSDP2 itself, on two processes."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.cli import main
from tests.distributed.scenarios import run, scenario


SAMPLES, LENGTH = 4, 128
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"], hidden_size=256, intermediate_size=688, num_hidden_layers=6,
    num_attention_heads=8, vocab_size=4000, max_position_embeddings=LENGTH, tie_word_embeddings=False,
)  # fmt: skip


@scenario
def shard(folder: Path) -> dict[str, Any]:
    """Take a step of FSDP2; return what rank 0 holds of weights, gradients, optimizer state and saved tensors."""
    model, mesh = LlamaForCausalLM(CONFIG), init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    words = torch.randint(0, CONFIG.vocab_size, (SAMPLES, LENGTH))
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Gathered weights are saved too, but belong to FSDP, which frees and gathers them again.
        if not isinstance(tensor, torch.nn.Parameter) and not tensor.is_leaf:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=words, labels=words).loss
    loss.backward()
    optimizer.step()

    def local(tensor: torch.Tensor) -> int:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return own.numel() * own.element_size()

    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        "rank": dist.get_rank(),
        "weights": sum(map(local, model.parameters())),
        "gradients": sum(local(each.grad) for each in model.parameters() if each.grad is not None),
        "optimizer": sum(map(local, states)),
        "activations": sum(saved.values()),
    }


def planned(folder: Path) -> dict[str, float]:
    CONFIG.save_pretrained(folder / "model")
    with contextlib.redirect_stdout(io.StringIO()) as written:
        main(
            ["plan", str(folder / "model"), "--processes", "2", "--device_memory", "16", "--sequence_length",
             str(LENGTH), "--per_device_train_batch_size", str(SAMPLES), "--json"]
        )  # fmt: skip
    (memory,) = [row["memory"][0] for row in json.loads(written.getvalue())["rows"] if row["kind"] == "shards"]
    return memory


@pytest.mark.distributed
def test_a_plan_counts_what_fsdp2_holds(tmp_path: Path) -> None:
    measured, memory = run(shard, tmp_path, 2)[0], planned(tmp_path)
    # Gradients of a layer, and of embeddings and head, are whole before they are summed: the plan has them beside the
    # shares, which are measured.
    layer, outermost = 4 * 256 * 256 + 3 * 256 * 688 + 2 * 256, 2 * 4000 * 256 + 256
    memory["gradients"] -= 4 * (layer + outermost)
    for part in ("weights", "gradients", "optimizer", "activations"):
        assert memory[part] == pytest.approx(measured[part], rel=0.1), part
