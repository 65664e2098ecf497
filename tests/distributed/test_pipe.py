"""Replicas of a pipeline: DistributedDataParallel around `Pipe`."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_pipetransformer.comm.groups import let_group_threads_finish
from hf_pipetransformer.pipe.pipe import Pipe
from hf_pipetransformer.pipe.stages import WithDevice
from tests.distributed.scenarios import run, scenario
from tests.pipe.test_pipe import MODES, gradients, sequential


pytestmark = pytest.mark.distributed


@scenario
def compare_with_the_whole_batch(folder: Path) -> bool:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module, x = sequential().double(), torch.randn(12, 8).double()
    module(x).pow(2).mean().backward()
    for mode in MODES:
        for many in (False, True):
            copy = deepcopy(module)
            copy.zero_grad()
            if many:
                copy = nn.Sequential(*(WithDevice(child, f"cpu:{k}") for k, child in enumerate(copy)))
            replica = DistributedDataParallel(Pipe(copy, 3, mode))
            for _ in range(2):
                replica.zero_grad()
                output = replica(x.chunk(num_ranks)[rank])
                assert type(output.local_value()) is torch.Tensor
                output.pow(2).mean().backward()
                for name, expected in gradients(module).items():
                    torch.testing.assert_close(gradients(replica.module)[name], expected, rtol=1e-12, atol=1e-13)
    check_static_graph(rank, num_ranks)
    let_group_threads_finish()
    dist.destroy_process_group()
    return True


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.detach()


def check_static_graph(rank: int, num_ranks: int) -> None:
    """The wrapper has to find the tensors of a tuple."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 8), Both()), torch.randn(12, 8)
    module(x)[0].pow(2).mean().backward()
    copy = deepcopy(module)
    copy.zero_grad()
    replica = DistributedDataParallel(Pipe(copy, 3, "never"), static_graph=True)
    for _ in range(2):
        replica.zero_grad()
        replica(x.chunk(num_ranks)[rank])[0].pow(2).mean().backward()
        for name, expected in gradients(module).items():
            torch.testing.assert_close(gradients(replica.module)[name], expected)


def test_replicas_of_a_pipeline_have_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    assert run(compare_with_the_whole_batch, tmp_path, 2, timeout=60) == [True, True]
