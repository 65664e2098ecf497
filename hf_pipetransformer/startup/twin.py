"""Twin of a model for the start-up checks: the model itself, of whose equal layers only a few compute.

A model that needs a pipeline is too large to be run, copied to float32 or differentiated whole on any rank. Layers of
one kind do the same with other weights, so that the first of each kind, and the last layer, stand for all. The other
layers pass their input through, as layers of other stages do in a pipeline: the model's own loop still calls all of
them, in order, and parameter names stay. Only what computes is moved to the run's device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from hf_pipetransformer.schedules.placement import attention_of, block_of, head_of, mlp_of
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, layers_of
from hf_pipetransformer.splitters.quantized import move_scales


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.structure import Structure


T = TypeVar("T")


@dataclass(frozen=True)
class ProbeSubmodel:
    """Layers of a model that compute in the start-up checks.

    Args:
        representatives: for each layer the computing layer that it equals; empty if all layers compute.
        passing: ids of the parameters and buffers that nothing reads while layers pass their input through.
    """

    representatives: tuple[int, ...] = ()
    passing: frozenset[int] = frozenset()

    def representative(self, layer: int) -> int:
        return self.representatives[layer] if self.representatives else layer

    def computes(self, layer: int) -> bool:
        return self.representative(layer) == layer

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters that are read."""
        return [parameter for parameter in model.parameters() if id(parameter) not in self.passing]

    def tensors(self, model: nn.Module) -> list[torch.Tensor]:
        """Return the parameters and buffers that are read."""
        return [*self.parameters(model), *(buffer for buffer in model.buffers() if id(buffer) not in self.passing)]

    def cut_positions(self, structure: Structure, of_stages: bool = True) -> list[int]:
        """Return the blocks before which the checks cut: every possible place beside or inside a computing layer.

        Args:
            of_stages: False for places where no stage may begin, too.
        """
        head = head_of(structure.num_layers)

        def is_checked(block: int) -> bool:
            layer = block_of(block) - 1
            if layer < 0 or block >= head:
                return True
            is_beside = block == attention_of(layer) and (layer == 0 or self.computes(layer - 1))
            return is_beside or self.computes(layer)

        places = structure.cut_positions() if of_stages else structure.block_starts()
        return [block for block in places if is_checked(block)]

    def of_all_blocks(self, values: Sequence[T]) -> list[T]:
        """Give every block the value of the computing one that it equals; the head's may be left out."""

        def equal_to(block: int) -> int:
            layer = block_of(block) - 1
            if layer < 0 or layer >= len(self.representatives):
                return block
            place = attention_of if block == attention_of(layer) else mlp_of
            return place(self.representative(layer))

        return [values[equal_to(block)] for block in range(len(values))]

    def share_of(self, per_block: Sequence[float]) -> float:
        """Return the share of a sum over all blocks, above 0, that the computing ones have."""
        total = sum(per_block)
        head = len(per_block) - 1
        read = sum(
            value for block, value in enumerate(per_block) if block in (0, head) or self.computes(block_of(block) - 1)
        )
        return read / total if read else 1.0


WHOLE = ProbeSubmodel()


@contextmanager
def as_twin(model: nn.Module, splitter: Splitter) -> Iterator[ProbeSubmodel]:
    """Let only one layer of each kind, and the last one, compute inside."""
    try:
        layers = layers_of(splitter, bare_model(model))
    except UnsupportedModelError:
        yield WHOLE  # The checks raise it again, on every rank.
        return
    representatives = _representatives(layers)
    passed = [layer for index, layer in enumerate(layers) if representatives[index] != index]
    if not passed:
        yield WHOLE
        return
    inside = {id(module) for layer in passed for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    read = {id(tensor) for module in outside for tensor in _own_tensors(module).values()}
    # A weight of a passed layer that another module shares is read all the same.
    unread = {id(tensor) for layer in passed for tensor in [*layer.parameters(), *layer.buffers()]} - read
    last, handles = _LastOutput(), []
    # The instance may have a forward of its own, set by a wrapper: it is put back.
    own = [(layer, vars(layer).get("forward")) for layer in passed]
    try:
        for index, layer in enumerate(layers):
            if representatives[index] == index:
                handles.append(layer.register_forward_hook(last.note))
            else:
                layer.forward = partial(last.passing_through, layer.forward)
        yield ProbeSubmodel(tuple(representatives), frozenset(unread))
    finally:
        for handle in handles:
            handle.remove()
        for layer, forward in own:
            vars(layer).pop("forward", None)
            if forward is not None:
                layer.forward = forward


@dataclass
class _LastOutput:
    """Output of the last layer that computed; layers that pass their input through return the like of it."""

    value: Any = field(default=None)

    def note(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        self.value = output

    def passing_through(self, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.value is None:
            # The first layer was not called as a module: the trace says so in words once the forward has ended.
            return own_forward(*args, **kwargs)
        # A copy: the next layer may change its input in place.
        hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        # Some layers of transformers return a tuple with the hidden states first; the model reads the others by their
        # place.
        if isinstance(self.value, (tuple, list)):
            return type(self.value)([hidden, *self.value[1:]])
        return hidden


def _representatives(layers: Sequence[nn.Module]) -> list[int]:
    """Return for each layer the first of its kind; the last layer stands for itself, as the head follows it."""
    first_of: dict[Any, int] = {}
    found = [first_of.setdefault(kind, index) for index, kind in enumerate(_kinds(layers))]
    found[-1] = len(layers) - 1
    return found


def _kinds(layers: Sequence[nn.Module]) -> list[Any]:
    """Describe what each layer does: its modules, shapes, dtypes, hooks and plain attributes, without its position."""
    described = [_description(layer) for layer in layers]
    # An attribute that grows by one from layer to layer is the layer's position.
    positions = {
        key
        for key in set.intersection(*map(set, described))
        if all(type(each[key]) is int for each in described)
        and len({each[key] - index for index, each in enumerate(described)}) == 1
    }
    return [frozenset((key, value) for key, value in each.items() if key not in positions) for each in described]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _description(layer: nn.Module) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        found[path, ""] = (type(module), "forward" in vars(module), *(len(vars(module)[hooks]) for hooks in _HOOKS))
        for name, tensor in _own_tensors(module).items():
            found[path, name] = (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, value in vars(module).items():
            # Rates that grow with the depth (stochastic depth) make no other kind.
            if name != "training" and isinstance(value, (bool, int, str, NoneType)):
                found[path, name] = value
    return found


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


@contextmanager
def moved(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Hold these parameters and buffers on `device` inside; afterward they have their own memory again."""
    # All CPUs are one host, but `to` copies from `cpu` to `cpu:0`, as accelerate names it with several processes.
    own = [(tensor, tensor.data) for tensor in tensors if (tensor.device.type, device.type) != ("cpu", "cpu")]
    try:
        for tensor, data in own:
            tensor.data = data.to(device)
            move_scales(tensor, device)
        yield
    finally:
        for tensor, data in own:
            tensor.data = data
            move_scales(tensor, data.device)
