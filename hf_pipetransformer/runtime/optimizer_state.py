"""Optimizer state of one rank while its parameters come and go, and the check that replicas have the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.comm.transfers import plain, reduced


if TYPE_CHECKING:
    from hf_pipetransformer.comm.topology import Topology
    from hf_pipetransformer.runtime.stage import Stage


class OptimizerState:
    """Optimizer of this rank as its set of parameters changes; groups are remembered by the names of their members.

    Args:
        named: all of the model's parameters by name, in its order, those of other ranks included.
        may_move: True if parameters may come from other ranks. The constructor is then collective: call on every rank.
        names_before: names, by id, of parameters that those of the model have replaced since the optimizer was built.

    Raises:
        ValueError: parameters may move, and the optimizer pages its state, or the groups differ between ranks, so the
            group of a parameter that arrives is unknown.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.nn.Parameter],
        topology: Topology,
        may_move: bool,
        names_before: Mapping[int, str],
    ) -> None:
        self.optimizer = optimizer
        self.frozen_by_script: tuple[str, ...] = ()
        """Names of parameters of a user's optimizer that the script froze before training."""
        self._is_reduced = False
        name_of = {**names_before, **{id(parameter): name for name, parameter in named.items()}}
        self.group_of: dict[str, int] = {}
        # A user's optimizer may train parameters outside the model (of a loss, say): they stay.
        self._foreign: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) in name_of:
                    self.group_of[name_of[id(parameter)]] = index
                else:
                    self._foreign[index].append(parameter)
        if may_move and getattr(optimizer, "is_paged", False):
            raise ValueError(
                f"{type(optimizer).__name__} pages its state, and layers may move to another rank, where it would "
                "not be paged. Use the optimizer without paging, such as optim='adamw_bnb_8bit', or set "
                "elastic=False."
            )
        if may_move:
            # As text, since options may be tensors or objects, which are not sent.
            options = [{key: str(group[key]) for key in group if key != "params"} for group in optimizer.param_groups]
            self._learn_groups(topology.gather({"options": options, "group_of": self.group_of}), named)

    def _learn_groups(self, answers: Sequence[Any], order: Iterable[str]) -> None:
        for rank, answer in enumerate(answers):
            if answer["options"] != answers[0]["options"]:
                raise ValueError(
                    f"The optimizer has {len(answer['options'])} parameter groups on rank {rank} and "
                    f"{len(answers[0]['options'])} on rank 0, or groups with other options: expected the same groups "
                    "on every stage, empty ones too, so that a layer can move to another stage. Build them so in "
                    "create_optimizer, or set elastic=False."
                )
            self.group_of.update(answer["group_of"])
        if any(list(answer["group_of"]) != list(answers[0]["group_of"]) for answer in answers):
            # Each rank built its own part of the optimizer. One for the whole model has the model's order.
            place = {name: index for index, name in enumerate(order)}
            self.group_of = dict(sorted(self.group_of.items(), key=lambda item: place[item[0]]))

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = dict(self.optimizer.state.get(parameter, {}))
        return state

    def options(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups as JSON values; schedulers change some of them."""
        return [
            {key: plain(value, f"The optimizer's option {key!r}") for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Invert `options`; raises ValueError if the optimizer has a different number of groups."""
        groups = self.optimizer.param_groups
        if len(options) != len(groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(options)} parameter groups: expected {len(groups)}, as this "
                "run's has. Build the optimizer as in the run that was saved."
            )
        for group, saved in zip(groups, options, strict=True):
            for key, value in saved.items():
                # JSON has no tuples, and Adam's betas are one.
                is_tuple = isinstance(value, list) and isinstance(group.get(key, ()), tuple)
                group[key] = tuple(value) if is_tuple else value

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of parameters that a user's optimizer had and that are not in it now, as the script froze them."""
        return self.frozen_by_script if self._is_reduced else ()

    def keep(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        """Reduce an optimizer that was built for the whole model to the parameters that this rank trains.

        Parameter groups stay, even when empty, so a learning rate scheduler built on them stays valid.

        Raises:
            ValueError: the optimizer trains parameters that are not the model's.
        """
        num_foreign = sum(map(len, self._foreign))
        if num_foreign:
            raise ValueError(
                f"The optimizer trains {num_foreign} parameters that are not the model's, which no stage would own. "
                "Make them parameters of the model, or set pipeline_parallel_size=1."
            )
        self.hold(named, {})

    def let_go(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Remove parameters that this rank no longer trains and free their state; call `hold` afterwards."""
        gone = set(parameters)
        for parameter in gone:
            self.optimizer.state.pop(parameter, None)
        for group in self.optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in gone]

    def hold(self, named: Mapping[str, torch.nn.Parameter], received: Mapping[str, dict[str, Any]]) -> None:
        """Train exactly the parameters `named`: drop the state of all others and install `received` state."""
        self._is_reduced = True
        groups = [list(foreign) for foreign in self._foreign]
        for name, index in self.group_of.items():  # Keeps the parameter order of an optimizer on a single stage.
            if name in named:
                groups[index].append(named[name])
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        kept = {id(parameter) for parameters in groups for parameter in parameters}
        for dropped in [p for p in self.optimizer.state if id(p) not in kept]:
            del self.optimizer.state[dropped]
        for name, state in received.items():
            # A parameter that has had no gradient yet has none.
            if state:
                group = self.optimizer.param_groups[self.group_of[name]]
                beside = bool(group.get("fused") or group.get("capturable"))
                self.optimizer.state[named[name]] = {
                    key: _to(value, named[name], beside) for key, value in state.items()
                }


def _to(value: Any, parameter: torch.nn.Parameter, are_scalars_beside: bool) -> Any:
    """Put received state where torch's optimizers keep it: on the parameter's device, except scalars (step counts)."""
    # Scalars stay on the CPU unless a fused or capturable optimizer counts steps on the device.
    is_tensor = isinstance(value, torch.Tensor)
    return value.to(parameter.device) if is_tensor and (value.dim() or are_scalars_beside) else value


def digests(named: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int]:
    """Return a checksum per name, the sum of the tensors' bits as 64-bit words: unequal sums prove unequal bits.

    Sums are taken on the tensors' devices, and each device is synchronized once.
    """
    sums: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensors in named.items():
        for tensor in tensors:
            sums.setdefault(tensor.device, []).append((name, _sum_of_words(tensor.detach())))
    found = dict.fromkeys(named, 0)
    for entries in sums.values():
        values = torch.stack([value for _, value in entries]).tolist()
        for (name, _), value in zip(entries, values, strict=True):
            # Below 2**63 again, for the int64 tensor in which ranks compare the sums.
            found[name] = (found[name] + value) % _MODULUS
    return found


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()  # `view(torch.int64)` needs an aligned offset.
    # Sums that do not fit 64 bits wrap around, in the same way on every rank.
    num_whole = flat.numel() // _WORD_BYTES * _WORD_BYTES
    return flat[:num_whole].view(torch.int64).sum() + flat[num_whole:].sum(dtype=torch.int64)


_WORD_BYTES = 8
_MODULUS = 2**62


def check_replicas(digests: Mapping[str, int], place: Any) -> None:
    """Compare tensors that must be bit-identical on the replicas of a stage. Collective: call on every replica.

    Raises:
        PipelineError: names the first tensor that differs.
    """
    if place.replica_control is None:
        return
    # The sums travel without names, so that their order has to be the same on all replicas.
    names = sorted(digests)
    own = torch.tensor([digests[name] for name in names], dtype=torch.int64)
    what = f"comparing weights over {place.replicas}"
    # All are equal if the least is the greatest: two reductions, however many replicas there are.
    lowest, highest = (
        reduced(own.clone(), place.replica_control, what, op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
    )
    differing = [name for name, low, high in zip(names, lowest.tolist(), highest.tolist(), strict=True) if low != high]
    if differing:
        raise PipelineError(
            f"{differing[0]} (one of {len(differing)}) differs between {place.replicas}, which must hold the same "
            "bits. A callback or hook changed weights on one rank only, or a device computes wrongly."
        )


def check_replicas_agree(stage: Stage, optimizer: OptimizerState) -> None:
    """Compare the replicas of every block, weights and optimizer state. Collective: call on every rank.

    Raises:
        PipelineError: replicas are not bit-identical.
    """
    if stage.groups.num_replicas == 1:
        return
    compared = {}
    for name, parameter in stage.store.held().items():
        if parameter.requires_grad:
            state = [value for value in optimizer.state_of(parameter).values() if isinstance(value, torch.Tensor)]
            compared[name] = [parameter.data, *state]
    check_replicas(digests(compared), stage.groups)
