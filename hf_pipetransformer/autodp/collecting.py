"""Making a model whole that lies on the ranks of a pipeline: to save it, or to give it back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from hf_pipetransformer.autodp.rounds import Parcel, carry, in_rounds
from hf_pipetransformer.autodp.topology import PipelineGroups


Owners = Mapping[str, tuple[int, ...]]
"""Name to the ranks that use it, as positions in the pipeline, first user first."""


def collect_parameters(
    named: Mapping[str, torch.nn.Parameter],
    owners: Owners,
    place: PipelineGroups,
    device: torch.device,
    timeout: float,
    wanting: Sequence[int] | None = None,
    only: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The parameters that this rank does not hold, on `device`, from the first ranks that use them.

    A collective call of one pipeline, of whose parameters each rank holds exactly its own.

    Args:
        named: all parameters of the model by name; those that this rank does not hold are meta tensors.
        owners: of the parameters.
        place: this rank's pipeline.
        device: where what comes is kept. It arrives where the parameters of the run are, at most `ROUND_BYTES` at a
            time, so that a whole model can be kept that no device holds.
        timeout: seconds that any rank may wait for another.
        wanting: positions of the ranks that want the parameters, if not all.
        only: names of the parameters that they want, if not all.
    """
    wanting = range(place.pipeline_size) if wanting is None else wanting
    run_device = next(p.device for p in named.values() if not p.is_meta)
    names = [name for name in named if only is None or name in only]
    found: dict[str, torch.Tensor] = {}
    for indices in in_rounds([_num_bytes(named[name]) for name in names]):
        parcels, arriving = [], {}
        for name in (names[index] for index in indices):
            source, parameter = owners[name][0], named[name].detach()
            targets = [position for position in wanting if position not in owners[name]]
            if source == place.position:
                parcels += _leaving(name, parameter.contiguous(), targets, place)
            elif place.position in targets:
                arriving[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device=run_device)
                parcels.append(_arriving(name, arriving[name], source, place))
        carry(parcels, place.pipeline_control, timeout)
        found.update({name: tensor.to(device) for name, tensor in arriving.items()})
    return found


def share_buffers(named: Mapping[str, torch.Tensor], owners: Owners, place: PipelineGroups, timeout: float) -> None:
    """Give all ranks the buffers as the first rank that uses them has them. A collective call of one pipeline."""
    parcels, arriving = [], {}
    for name, buffer in named.items():
        source = owners[name][0]
        if source == place.position:
            others = [position for position in range(place.pipeline_size) if position != source]
            parcels += _leaving(name, buffer.detach().contiguous(), others, place)
        else:
            arriving[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=buffer.device)
            parcels.append(_arriving(name, arriving[name], source, place))
    carry(parcels, place.pipeline_control, timeout)
    for name, value in arriving.items():
        named[name].data.copy_(value)


def _leaving(name: str, tensor: torch.Tensor, positions: list[int], place: PipelineGroups) -> list[Parcel]:
    ranks = [place.pipeline_ranks[position] for position in positions]
    return [Parcel(tensor, rank, True, f"{name} to rank {rank}") for rank in ranks]


def _arriving(name: str, tensor: torch.Tensor, position: int, place: PipelineGroups) -> Parcel:
    rank = place.pipeline_ranks[position]
    return Parcel(tensor, rank, False, f"{name} from rank {rank}")


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
