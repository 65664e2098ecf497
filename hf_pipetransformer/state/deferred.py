"""Tensors to save whose values are fetched only when their bytes are written.

transformers saves some models in another form than it trains them: tensors are renamed, split (the experts of a
mixture), merged or transposed. A `Deferred` goes through all of that without data and remembers the operations;
`write_tensors` then fetches the parameters that a few tensors need, computes and writes these, and forgets them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from hf_pipetransformer.comm.transfers import in_rounds


FETCHED_BYTES = 2**25
"""Limit of the bytes of parameters that are fetched at a time, for files much smaller than one round of a move."""

_LENGTH_BYTES = 8
"""Bytes of the length of a safetensors header, which it is aligned to."""

Fetch = Callable[[Sequence[str]], dict[str, torch.Tensor]]
"""Returns the values of the named parameters, on the CPU."""


# By identity: steps are keys of dictionaries, and two that look alike may have different values.
@dataclass(frozen=True, eq=False)
class Step:
    """One value: of the parameter `name`, or what `compute` makes of the values of `inputs`."""

    compute: Callable[[list[Any]], Any] | None = None
    inputs: tuple[Step, ...] = ()
    name: str = ""
    num_bytes: int = 0

    def with_inputs(self) -> Iterator[Step]:
        yield self
        for step in self.inputs:
            yield from step.with_inputs()

    def value(self, known: dict[Step, Any]) -> Any:
        """Return the value, and note it and all on the way in `known`, which has the parameters' values."""
        if self.compute is not None and self not in known:
            known[self] = self.compute([step.value(known) for step in self.inputs])
        return known[self]


class Deferred(torch.Tensor):
    """Meta tensor that knows how its value is computed. Functions of it are deferred too."""

    step: Step

    @staticmethod
    def of(like: torch.Tensor, step: Step) -> Deferred:
        """Return a tensor with the shape and dtype of `like`; it has a storage of its own, as in a file."""
        deferred = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(Deferred)
        deferred.step = step
        return deferred

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
            # An operation in place would change a meta tensor that is thrown away: it shows in the version, and is
            # refused.
            versions = [leaf._version for leaf in tree_leaves(on_meta) if isinstance(leaf, torch.Tensor)]
            found = function(*on_meta[0], **on_meta[1])
            if versions != [leaf._version for leaf in tree_leaves(on_meta) if isinstance(leaf, torch.Tensor)]:
                raise NotImplementedError(f"{function.__name__} changes a tensor that will be fetched later.")
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(found)):
            return found

        def compute(values: list[Any]) -> Any:
            left = iter(values)
            arguments, options = tree_map_only(Deferred, lambda _: next(left), given)
            return function(*arguments, **options)

        step = Step(compute, tuple(leaf.step for leaf in tree_leaves(given) if isinstance(leaf, Deferred)))
        if isinstance(found, torch.Tensor):
            return cls.of(found, step)
        return type(found)(cls.of(part, Step(partial(_part, index), (step,))) for index, part in enumerate(found))


def _part(index: int, values: list[Any]) -> Any:
    return values[0][index]


def why_not_deferred(model: nn.Module) -> str | None:
    """Return why `deferred_state` cannot be saved in place of the state of a model in stages; None if it can."""
    if getattr(model.state_dict, "__func__", None) is not nn.Module.state_dict:
        return f"{type(model).__name__} has its own state_dict"
    state = model.state_dict(keep_vars=True)
    known = {id(parameter) for parameter in model.parameters()}
    others = [key for key, value in state.items() if id(value) not in known and getattr(value, "is_meta", False)]
    if others:
        return f"a hook of the model changes {others[0]} in its state_dict"
    # transformers drops all but one name. Without it safetensors refuses them, by their memory.
    is_tied = len({id(value) for value in state.values()}) < len(state)
    return "some of its weights are tied" if is_tied and not isinstance(model, PreTrainedModel) else None


def deferred_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict with a `Deferred` for each parameter, held or not; buffers are as they are."""
    steps = {id(p): Step(name=name, num_bytes=p.nbytes) for name, p in model.named_parameters()}
    state = model.state_dict(keep_vars=True)
    return {key: Deferred.of(each, steps[id(each)]) if id(each) in steps else each for key, each in state.items()}


def write_tensors(
    tensors: Mapping[str, torch.Tensor],
    path: str | PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    fetch: Fetch,
) -> None:
    """Write the file that `safetensors.torch.save_file` would write, of tensors that may be `Deferred`.

    At most `FETCHED_BYTES` of parameters are fetched at a time, unless a single tensor needs more. One that several
    tensors need is kept until the last of them is written.
    """
    header, names = _header_of(tensors, metadata)
    needed = [list(_steps_of(tensors[name])) for name in names]
    last_use = {step: index for index, steps in enumerate(needed) for step in steps}
    # Backwards, so that the first use is the one that stays in the dictionary.
    first_use = {step: index for index, steps in reversed(list(enumerate(needed))) for step in steps}
    new = [[s for s in dict.fromkeys(steps) if s.name and first_use[s] == i] for i, steps in enumerate(needed)]
    known: dict[Step, Any] = {}
    # Like safetensors, replace a file of this name only at the end: this process may have mapped its weights from it.
    with _replacing(path) as file:
        file.write(header)
        for indices in in_rounds([sum(step.num_bytes for step in steps) for steps in new], FETCHED_BYTES):
            arriving = [step for index in indices for step in new[index]]
            found = fetch([step.name for step in arriving])
            # Popped, so that `known` alone holds the values, and frees each after its last use.
            known.update({step: found.pop(step.name) for step in arriving})
            for index in indices:
                file.write(_bytes_of(tensors[names[index]], known))
                for step in needed[index]:
                    if last_use[step] == index:
                        known.pop(step, None)


@contextmanager
def _replacing(path: str | PathLike[str]) -> Iterator[BinaryIO]:
    # One name for all shards: what a killed process leaves, the next save in this folder takes.
    unfinished = os.path.join(os.path.dirname(path), "weights.unfinished")
    try:
        with open(unfinished, "wb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            os.remove(unfinished)


def _steps_of(tensor: torch.Tensor) -> Iterator[Step]:
    return tensor.step.with_inputs() if isinstance(tensor, Deferred) else iter(())


def _bytes_of(tensor: torch.Tensor, known: dict[Step, Any]) -> memoryview:
    value = tensor.step.value(known) if isinstance(tensor, Deferred) else tensor
    # The header is written: other bytes than it promises would shift all tensors that follow.
    assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
    data: memoryview = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def _header_of(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None) -> tuple[bytes, list[str]]:
    """Return the head of a safetensors file, and the names of the tensors in the order of their bytes."""
    # safetensors itself orders the names and names the dtypes, of tensors without elements.
    drawn = safetensors.torch.save({n: torch.empty(0, dtype=t.dtype) for n, t in tensors.items()}, metadata)
    entries = json.loads(drawn[_LENGTH_BYTES:])
    names, start = [name for name in entries if name != "__metadata__"], 0
    for name in names:
        end = start + tensors[name].numel() * tensors[name].element_size()
        entries[name] |= {"shape": list(tensors[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # As safetensors pads its headers, so that tensors start where they can be mapped.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, names
