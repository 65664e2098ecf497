"""Collecting a model that is spread over the stages of a pipeline."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from hf_pipetransformer.errors import guarded


class PipelinePlace(Protocol):
    """What collecting needs to know of this rank's pipeline."""

    @property
    def pipeline_ranks(self) -> tuple[int, ...]: ...

    @property
    def pipeline_control(self) -> Any: ...


def collect_parameters(
    named: dict[str, torch.nn.Parameter], owners: dict[str, tuple[int, ...]], place: PipelinePlace, keep: bool = True
) -> dict[str, torch.Tensor]:
    """The parameters that this rank does not hold, on the CPU, from the stages that own them.

    A collective call of one pipeline; parameters go one by one in one order.

    Args:
        named: all parameters of the model by name; those that this rank does not hold are meta tensors.
        owners: name of every parameter to the stages that use it, first user first.
        place: this rank's pipeline.
        keep: False on a rank that only hands its own parameters on.
    """
    missing: dict[str, torch.Tensor] = {}
    for name, parameter in named.items():
        source = place.pipeline_ranks[owners[name][0]]
        is_missing = parameter.is_meta
        buffer = (
            torch.empty(parameter.shape, dtype=parameter.dtype)
            if is_missing
            else parameter.detach().to("cpu", copy=True).contiguous()
        )
        guarded(
            lambda buffer=buffer, source=source: dist.broadcast(  # type: ignore[misc]
                buffer, src=source, group=place.pipeline_control
            ),
            f"receiving {name} from rank {source}",
        )
        if is_missing and keep:
            missing[name] = buffer
    return missing
