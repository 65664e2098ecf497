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
from functools import partial
from operator import itemgetter
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


class Deferred(torch.Tensor):
    """Meta tensor that knows how its value is computed. Functions of it are deferred too."""

    needs: dict[str, int]
    """Parameters that it is computed of, with their bytes."""
    compute: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    """Function that returns its value for those of the parameters."""

    @staticmethod
    def of(like: torch.Tensor, needs: dict[str, int], compute: Callable[..., torch.Tensor]) -> Deferred:
        """Return a tensor with the shape and dtype of `like`; it has a storage of its own, as in a file."""
        deferred = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(Deferred)
        deferred.needs, deferred.compute = needs, compute
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

        def compute(values: Mapping[str, torch.Tensor], part: int | None = None) -> Any:
            arguments, options = tree_map_only(Deferred, lambda each: each.compute(values), given)
            result = function(*arguments, **options)
            return result if part is None else result[part]

        needs = {
            name: size
            for leaf in tree_leaves(given)
            if isinstance(leaf, Deferred)
            for name, size in leaf.needs.items()
        }
        if isinstance(found, torch.Tensor):
            return cls.of(found, needs, compute)
        return type(found)(cls.of(each, needs, partial(compute, part=index)) for index, each in enumerate(found))


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
    own = {id(p): Deferred.of(p, {name: p.nbytes}, itemgetter(name)) for name, p in model.named_parameters()}
    return {key: own.get(id(each), each) for key, each in model.state_dict(keep_vars=True).items()}


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
    needed: list[dict[str, int]] = [getattr(tensors[name], "needs", {}) for name in names]
    last_use = {name: index for index, needs in enumerate(needed) for name in needs}
    # Backwards, so that the first use is the one that stays in the dictionary.
    first_use = {name: index for index, needs in reversed(list(enumerate(needed))) for name in needs}
    new = [{n: size for n, size in needs.items() if first_use[n] == index} for index, needs in enumerate(needed)]
    known: dict[str, torch.Tensor] = {}
    # Like safetensors, replace a file of this name only at the end: this process may have mapped its weights from it.
    with _replacing(path) as file:
        file.write(header)
        for indices in in_rounds([sum(each.values()) for each in new], FETCHED_BYTES):
            # `known` alone holds the values, and frees each after its last use.
            known |= fetch([name for index in indices for name in new[index]])
            for index in indices:
                file.write(_bytes_of(tensors[names[index]], known))
                for name in needed[index]:
                    if last_use[name] == index:
                        del known[name]


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


def _bytes_of(tensor: torch.Tensor, known: Mapping[str, torch.Tensor]) -> memoryview:
    value = tensor.compute(known) if isinstance(tensor, Deferred) else tensor
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
