"""Digests of the frozen prefix: which weights a stored activation comes from, and whether they still are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
import xxhash

from hf_pipetransformer.comm.staging import Arriving, CopyStream, is_apart
from hf_pipetransformer.comm.topology import all_gather_trees
from hf_pipetransformer.options.arguments import PipeTransformerArguments
from hf_pipetransformer.options.refusals import precision_of
from hf_pipetransformer.runtime.stage import Stage
from hf_pipetransformer.splitters import adapters
from hf_pipetransformer.splitters.base import config_value


def unit_digests(
    model_named: Mapping[str, torch.Tensor], units_of: Mapping[str, tuple[int, ...]], units: Iterable[int]
) -> dict[int, str]:
    """A digest of all that each unit computes with: 32 hexadecimal digits over names, dtypes, shapes and bytes.

    The same weights give the same digest on every device and in every memory order.

    Args:
        model_named: parameters and buffers of the model by name.
        units_of: name to the units that use it, as in `Structure`. A tensor counts for each of its users; one whose
            users are not known counts for every unit.
        units: the units to digest.

    Raises:
        ValueError: one of those units uses a tensor that is absent or has no data (another stage owns it).
    """
    wanted = sorted(set(units))
    everywhere = tuple(wanted)
    users = {name: units_of.get(name, everywhere) for name in sorted({*model_named, *units_of})}
    hashers = {unit: xxhash.xxh3_128() for unit in wanted}
    for name, using in users.items():
        used_by = [hashers[unit] for unit in using if unit in hashers]
        if used_by:
            # Once for all its users: shared embeddings are the largest tensor of a model.
            record = _digest_record(name, model_named.get(name))
            for hasher in used_by:
                hasher.update(record)
    return {unit: hasher.hexdigest() for unit, hasher in hashers.items()}


def _digest_record(name: str, tensor: torch.Tensor | None) -> bytes:
    if tensor is None or tensor.is_meta:
        raise ValueError(
            f"{name} {'is absent' if tensor is None else 'is a meta tensor without data'}: the frozen prefix can be "
            "digested only where all of its weights are, on the first stage."
        )
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    fields = (name, str(tensor.dtype), str(tuple(tensor.shape)), xxhash.xxh3_128_hexdigest(data.data))
    return ("\0".join(fields) + "\n").encode()


def chain_keys(digests: Mapping[int, str], num_frozen: int, context: str) -> list[str]:
    """Keys of the prefixes: item `f` stands for the output of embeddings + `layers[0:f]`, 1 <= f <= `num_frozen`.

    Each key is chained to the one before, so it changes with any weight below. Item 0 is empty: the output of the
    embeddings alone is never stored.

    Args:
        digests: what `unit_digests` gave for units 0 to `2 * num_frozen`.
        context: what else decides the output (attention implementation, dtype, ...).

    Raises:
        ValueError: a digest is missing.
    """
    missing = [unit for unit in range(2 * num_frozen + 1) if unit not in digests]
    if missing:
        raise ValueError(f"The keys of {num_frozen} layers need units 0 to {2 * num_frozen}: {missing} are missing.")
    keys = [""]
    # Digests have one length, so no two different chains are the same text.
    key = xxhash.xxh3_128_hexdigest(f"{context}\0{digests[0]}".encode())
    for layer in range(num_frozen):
        key = xxhash.xxh3_128_hexdigest(f"{key}{digests[2 * layer + 1]}{digests[2 * layer + 2]}".encode())
        keys.append(key)
    return keys


class PrefixWatch:
    """Notices at almost no cost that frozen parameters were changed behind the run's back.

    It compares each parameter's version counter, its address and its middle element: what changes a whole tensor is
    noticed; what writes a part of it past autograd (`parameter.data[0] = 1`) may not be. It keeps the memory of the
    parameters alive, so make a new one when a stage hands them on.

    On a device the elements are read without waiting: those that one call asks for are compared by the next.

    Args:
        parameters: the frozen parameters, on whatever devices.

    Raises:
        ValueError: a parameter has no data.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        if any(parameter.is_meta for parameter in parameters):
            raise ValueError("A meta tensor has no data to watch: watch only parameters that this stage owns.")
        self._parameters = list(parameters)
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if parameter.numel():
                groups.setdefault((parameter.device, parameter.dtype), []).append(_middle(parameter))
        self._elements = list(groups.values())
        self._copies = {device: CopyStream(device) for device, _ in groups}
        self._is_apart = any(is_apart(device) for device in self._copies)
        self._marks = self._find_marks()
        self._values = [found.on_host() for found in self._find_values()]
        self._asked: list[Arriving[torch.Tensor]] = []

    def has_changed(self, at_once: bool = True) -> bool:
        """Whether a parameter is another one than at the start.

        Args:
            at_once: wait for the device. Else version and address are those of now, the elements those that the last
                call without it found.
        """
        if self._find_marks() != self._marks:
            return True
        # Elements last: after `parameter.data = other` they are those of the old memory.
        found = self._find_values()
        if self._is_apart and not at_once:
            found, self._asked = self._asked, found
        return not all(torch.equal(f.on_host(), expected) for f, expected in zip(found, self._values, strict=False))

    def _find_marks(self) -> list[tuple[int, int]]:
        return [(0 if p.is_inference() else p._version, p.data_ptr()) for p in self._parameters]

    def _find_values(self) -> list[Arriving[torch.Tensor]]:
        # Bytes, because NaN differs from itself.
        found = [torch.cat(elements).view(torch.uint8) for elements in self._elements]
        return [self._copies[values.device].to_host(values) for values in found]


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """A view of one element, also where the tensor is not contiguous."""
    index, offset = tensor.numel() // 2, tensor.storage_offset()
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offset += index % size * stride
        index //= size
    return tensor.detach().as_strided((1,), (1,), offset)


NOT_SETTINGS = ("architectures", "dtype", "_name_or_path", "transformers_version")
"""Entries of a configuration that no activation hangs on."""


class FrozenWeights:
    """The weights below the cached entry of a layout, named together by a pipeline's ranks.

    It holds those of this rank's stages: let go of it before they move. `known` are digests of units that have not
    changed since they were found.
    """

    def __init__(self, stage: Stage, args: PipeTransformerArguments, known: Mapping[int, str]) -> None:
        layout, structure, model = stage.layout, stage.view.structure, stage.view.model
        parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
        tensors = parameters | {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
        units_of = {**structure.units_of_parameter, **structure.units_of_buffer}
        below_entry = range(layout.entry_unit)
        here = [unit for part in layout.units_of_rank(stage.groups.position) for unit in part]
        own = [unit for unit in here if unit in below_entry and unit not in known]
        found = unit_digests(tensors, units_of, own)
        self._groups = stage.groups
        self.digests = {unit: digest for unit, digest in known.items() if unit in below_entry}
        """By unit, those of other stages too; none of units that are no longer watched."""
        for answer in self._from_all({str(unit): digest for unit, digest in found.items()}):
            self.digests.update({int(unit): digest for unit, digest in answer.items()})
        self.keys = chain_keys(self.digests, layout.cache_level, _context(model, args))
        """By number of layers, what identifies all that their output hangs on."""
        watched = [p for name, p in parameters.items() if structure.units_of_parameter[name][0] in below_entry]
        self._watch = PrefixWatch(watched)

    def have_changed(self, at_once: bool) -> bool:
        """Whether they are not those that were named, on any rank of the pipeline; see `PrefixWatch.has_changed`."""
        return any(self._from_all(int(self._watch.has_changed(at_once))))

    def _from_all(self, own: Any) -> list[Any]:
        return all_gather_trees(own, self._groups.pipeline_control, self._groups.pipeline_size)


def _context(model: Any, args: PipeTransformerArguments) -> str:
    """All that stored activations hang on beside the weights."""
    attention = config_value(model, "_attn_implementation")
    versions = (transformers.__version__, torch.__version__)
    parts = (type(model).__name__, attention, precision_of(args), *_arithmetic(args), *versions)
    # Saving a model writes these into its configuration, and the weights' dtype is in their digests.
    entries: dict[str, Any] = config_value(model, "to_dict", dict)()
    settings = {key: value for key, value in entries.items() if key not in NOT_SETTINGS}
    if adapters.has_adapters(model):
        settings = {**settings, "adapters": adapters.settings(model)}
    return " ".join([*map(str, parts), json.dumps(settings, sort_keys=True, default=str)])


def _arithmetic(args: PipeTransformerArguments) -> tuple[str, ...]:
    """Where float32 is computed, and how its products are rounded (TF32, bfloat16): a kept store outlives both."""
    convolutions, products = torch.backends.cudnn.conv, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    backends = (torch.backends.cuda.matmul, convolutions, products)
    return (args.device.type, *(str(backend.fp32_precision) for backend in backends))
