"""Digests of the frozen prefix: which weights a stored activation comes from, and whether they still are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from hf_pipetransformer.staging import Arriving, CopyStream, is_apart


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
