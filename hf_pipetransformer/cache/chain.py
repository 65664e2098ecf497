"""Digests of the frozen prefix: they identify the weights behind a stored activation and detect changes to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import transformers
import xxhash

from hf_pipetransformer.comm.staging import Arriving, CopyStream, is_apart
from hf_pipetransformer.comm.transfers import ObjectSender, all_gather_trees, digest_of, recv_object
from hf_pipetransformer.options.refusals import precision_of
from hf_pipetransformer.splitters import adapters
from hf_pipetransformer.splitters.base import config_value
from hf_pipetransformer.splitters.quantized import named_scales


if TYPE_CHECKING:
    from hf_pipetransformer.options.arguments import PipeTransformerArguments
    from hf_pipetransformer.runtime.stage import Stage


def block_digests(
    model_named: Mapping[str, torch.Tensor], blocks_of: Mapping[str, tuple[int, ...]], blocks: Iterable[int]
) -> dict[int, str]:
    """Return a digest per block: 32 hex digits over names, dtypes, shapes and bytes of the tensors it uses.

    Equal weights give equal digests on every device and in every memory layout.

    Args:
        blocks_of: blocks that use each tensor, as in `Structure`; a tensor not listed counts for every block.

    Raises:
        ValueError: a wanted block uses a tensor that is absent or has no data (another stage owns it).
    """
    wanted = sorted(set(blocks))
    everywhere = tuple(wanted)
    # Sorted, so that digests do not depend on the order in which modules were registered.
    users = {name: blocks_of.get(name, everywhere) for name in sorted({*model_named, *blocks_of})}
    hashers = {block: xxhash.xxh3_128() for block in wanted}
    for name, using in users.items():
        used_by = [hashers[block] for block in using if block in hashers]
        if used_by:
            # Hashed once for all users: tied embeddings are often a model's largest tensor.
            record = _digest_record(name, model_named.get(name))
            for hasher in used_by:
                hasher.update(record)
    return {block: hasher.hexdigest() for block, hasher in hashers.items()}


def _digest_record(name: str, tensor: torch.Tensor | None) -> bytes:
    if tensor is None or tensor.is_meta:
        raise ValueError(
            f"{name} {'is absent' if tensor is None else 'is a meta tensor without data'}: the frozen prefix can be "
            "digested only where all of its weights are, on the first stage, as they were when training started."
        )
    return f"{name}\0{digest_of(tensor)}\n".encode()


def chain_keys(digests: Mapping[int, str], num_frozen: int, context: str) -> list[str]:
    """Return the keys of the prefixes: item `f` stands for the output of embeddings + `layers[0:f]`.

    Each key is hashed together with the one before, so it changes with any weight below it. Item 0 is empty, because
    the output of the embeddings alone is never stored.

    Args:
        digests: `block_digests` of blocks 0 to `2 * num_frozen`.
        context: everything else that affects the output (attention implementation, dtype, ...).

    Raises:
        ValueError: a digest is missing.
    """
    missing = [block for block in range(2 * num_frozen + 1) if block not in digests]
    if missing:
        raise ValueError(f"The keys of {num_frozen} layers need blocks 0 to {2 * num_frozen}: {missing} are missing.")
    keys = [""]
    # Digests have a fixed length, so different chains never concatenate to the same text.
    key = xxhash.xxh3_128_hexdigest(f"{context}\0{digests[0]}".encode())
    for layer in range(num_frozen):
        # A layer is two blocks, attention and MLP; block 0 is the embeddings.
        key = xxhash.xxh3_128_hexdigest(f"{key}{digests[2 * layer + 1]}{digests[2 * layer + 2]}".encode())
        keys.append(key)
    return keys


class PrefixWatch:
    """Cheap detector of changes to frozen parameters by user code; a parameter without data raises ValueError.

    Sees if `find` gives other tensors than at first, and compares each one's version counter, address and middle
    element. That catches a change of a whole tensor; a partial write past autograd (`parameter.data[0] = 1`) only
    shows if `thoroughly` compares all bytes. It keeps the parameters' memory alive, so create a new one when a stage
    hands its parameters to another rank.
    """

    def __init__(self, find: Callable[[], Iterable[Any]]) -> None:
        self._find = find
        # Kept alive, so that no new tensor can take the address of a watched one, by which `_find_marks` knows it.
        self._parameters: list[torch.Tensor] = list(find())
        if any(parameter.is_meta for parameter in self._parameters):
            raise ValueError("A meta tensor has no data to watch: watch only parameters that this stage owns.")
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if parameter.numel():
                # Joined by device and dtype: a check costs one copy to the host for each group, not for each
                # parameter.
                groups.setdefault((parameter.device, parameter.dtype), []).append(_middle(parameter))
        self._elements = list(groups.values())
        self._copies = {device: CopyStream(device) for device, _ in groups}
        self._is_apart = any(is_apart(device) for device in self._copies)
        self._marks = self._find_marks()
        self._values = [found.on_host() for found in self._find_values()]
        self._asked: list[Arriving[torch.Tensor]] = []
        self._sums = self._find_sums()

    def has_changed(self, at_once: bool = True, thoroughly: bool = False) -> bool:
        """Return True if a parameter differs from its state at construction.

        With `at_once`, synchronize with the GPU; otherwise compare the elements that the last such call requested.
        """
        present = list(self._find())
        if len(present) != len(self._parameters) or not all(map(is_, present, self._parameters)):
            return True
        if (thoroughly and self._find_sums() != self._sums) or self._find_marks() != self._marks:
            return True
        # Marks first: after `parameter.data = other` the elements still view the old memory and look unchanged.
        found = self._find_values()
        if self._is_apart and not at_once:
            # Compare what the call before has asked for, which has arrived, and ask anew for the next one. The first
            # call has nothing to compare, hence strict=False.
            found, self._asked = self._asked, found
        return not all(torch.equal(f.on_host(), expected) for f, expected in zip(found, self._values, strict=False))

    def _find_sums(self) -> list[str | int]:
        return [_sum_on_device(p) if is_apart(p.device) else digest_of(p) for p in self._parameters]

    def _find_marks(self) -> list[tuple[int, int]]:
        # Inference tensors have no version counter.
        return [(0 if p.is_inference() else p._version, p.data_ptr()) for p in self._parameters]

    def _find_values(self) -> list[Arriving[torch.Tensor]]:
        # Bytes, because NaN differs from itself.
        found = [torch.cat(elements).view(torch.uint8) for elements in self._elements]
        return [self._copies[values.device].to_host(values) for values in found]


def _sum_on_device(tensor: torch.Tensor) -> int:
    """Return the sum of the elements' bits as integers: a copy to the host would take far longer than reading them."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    # Integers, because their sum does not depend on the order in which a kernel adds, not even when it overflows.
    return int(tensor.detach().view(integers).sum(dtype=torch.int64))


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the middle element; works for non-contiguous tensors too."""
    index, offset = tensor.numel() // 2, tensor.storage_offset()
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        offset += index % size * stride
        index //= size
    return tensor.detach().as_strided((1,), (1,), offset)


NOT_SETTINGS = ("architectures", "dtype", "_name_or_path", "transformers_version")
"""Config entries that do not affect activations."""

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The coarsest first: of dtypes that differ, it decides how far activations may."""

_TELLING = "telling the other stages of this pipeline if frozen weights have changed"


SAME_BATCH_TOLERANCE = {"fp32": 2e-6, "fp16": 5e-4, "bf16": 4e-3}
"""Largest relative difference between two forwards of one batch, by precision: only the order of sums may differ."""

OTHER_BATCH_TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 3e-2}
"""The same for samples that are computed in another batch, where kernels may be others and records are rounded."""


def differs(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return True if two activations differ by more than rounding; nan in the same places is no difference."""
    # Rotary embeddings of some models are complex.
    found, expected = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (found, expected))
    if found.shape != expected.shape or not torch.equal(found.isfinite(), expected.isfinite()):
        return True
    # In float64, because the norm of many float16 values exceeds the range of float16.
    found, expected = (torch.where(values.isfinite(), values, 0).double() for values in (found, expected))
    return float((found - expected).detach().norm()) > tolerance * float(expected.detach().norm())


def any_differs(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Return True if one of equally many activations differs from its counterpart, see `differs`."""
    return any(differs(one, other, tolerance) for one, other in zip(found, expected, strict=True))


def coarsest(precision: str, *dtypes: torch.dtype) -> str:
    """Return the coarsest precision of a computation in `precision` and of values of these dtypes."""
    return next((name for dtype, name in _PRECISIONS.items() if dtype in dtypes), precision)


class FrozenWeights:
    """Digests and keys of the weights below a layout's cached entry. Collective: create on every rank of a pipeline.

    Keeps this rank's parameters alive: drop it before they move.

    Args:
        known: digests of blocks that did not change.
        compute: gives what the blocks below the entry make of a few samples, on every rank; collective.
    """

    def __init__(
        self,
        stage: Stage,
        args: PipeTransformerArguments,
        known: Mapping[int, str],
        compute: Callable[[], torch.Tensor],
    ) -> None:
        layout, structure, model = stage.layout, stage.view.structure, stage.view.model
        # Parameters that other stages own are meta tensors here.
        parameters = {name: p for name, p in model.named_parameters() if not p.is_meta}
        scales = {key: (name, scale) for name, key, scale in named_scales(model) if name in parameters}
        tensors = parameters | {key: scale for key, (_, scale) in scales.items()}
        tensors |= {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
        blocks_of = {**structure.blocks_of_parameter, **structure.blocks_of_buffer}
        blocks_of |= {key: blocks_of[name] for key, (name, _) in scales.items()}
        below_entry = range(layout.entry_block)
        here = [block for part in layout.blocks_of_rank(stage.groups.position) for block in part]
        own = [block for block in here if block in below_entry and block not in known]
        found = block_digests(tensors, blocks_of, own)
        self._groups = stage.groups
        self._watching = layout.ranks_of(below_entry)
        self._sender = ObjectSender(stage.settings.timeout, _TELLING)
        self.digests = {block: digest for block, digest in known.items() if block in below_entry}
        """Digests by block, other stages' blocks included; none for blocks above the entry, which nobody watches."""
        told = {str(block): digest for block, digest in found.items()}
        for answer in all_gather_trees(told, stage.groups.pipeline_control, stage.groups.pipeline_size):
            self.digests.update({int(block): digest for block, digest in answer.items()})
        self._find_context = partial(settings_of, model, args)
        self._context = self._find_context()
        self.keys = chain_keys(self.digests, layout.cache_level, self._context)
        """By number of blocks, a key for everything that affects their output."""
        self._compute, self.output = compute, compute()
        # A model that was loaded in 16 bits rounds as coarsely as its dtype, whatever the arguments say.
        self.precision = coarsest(precision_of(args), self.output.dtype)
        is_watched = stage.groups.position in self._watching
        # The first block that uses a tensor decides: an embedding tied to the head counts as the embedding.
        watched = (name for name in tensors if name not in scales and blocks_of[name][0] in below_entry)
        self._places = {name: _place_of(model, name) for name in watched}
        self._watch = PrefixWatch(lambda: [own.get(key) for own, key in self._places.values()] if is_watched else [])

    @property
    def trained(self) -> str | None:
        """Name of a parameter that asks for gradients by now, which records do not give; None if there is none."""
        present = {name: own.get(key) for name, (own, key) in self._places.items()}
        return next((name for name, each in present.items() if each is not None and each.requires_grad), None)

    def what_changed(self) -> str:
        """Return what differs from construction, weights or what is computed from them; empty if nothing does.

        Compares all bytes, the settings, and the output for the same samples. Collective: call on every rank of the
        pipeline.
        """
        # Agreed on first: the test below runs the pipeline, where a rank that had returned here would be missing.
        own = self._watch.has_changed(thoroughly=True) or self._find_context() != self._context
        if any(all_gather_trees(own, self._groups.pipeline_control, self._groups.pipeline_size)):
            return "their weights or settings"
        return "what they compute" if self.computes_other_than(self._compute()) else ""

    def computes_other_than(self, output: torch.Tensor) -> bool:
        """Return True if `output` is not what the blocks gave for the same samples at construction."""
        return differs(output, self.output, SAME_BATCH_TOLERANCE[self.precision])

    def have_changed(self, at_once: bool) -> bool:
        """Return True if they changed, or others are in their places, on any rank; see `PrefixWatch.has_changed`.

        Collective: call on every rank of the pipeline. The ranks that hold them tell the others. Usually that is the
        first rank alone, which then waits for nobody.
        """
        groups = self._groups
        changed = self._watch.has_changed(at_once)
        if groups.pipeline_size == 1:
            return changed
        # The message of the call before is awaited now rather than then, so that a check does not wait for the peers.
        self._sender.flush()
        if groups.position in self._watching:
            others = [rank for position, rank in enumerate(groups.pipeline_ranks) if position != groups.position]
            self._sender.isend(changed, others, groups.pipeline_control)
        for position in self._watching:
            if position != groups.position:
                changed |= recv_object(groups.pipeline_ranks[position], groups.pipeline_control, _TELLING)
        if changed or at_once:
            self._sender.flush()  # This object may be dropped now.
        return changed


def _place_of(model: torch.nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return where a module has a parameter or buffer, in whose place another one may come."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    own: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    return own, key


def settings_of(model: Any, args: PipeTransformerArguments) -> str:
    """Return everything besides the weights that affects stored activations."""
    attention = config_value(model, "_attn_implementation")
    # Device type and float32 precision settings (TF32, bfloat16) may differ in a later run.
    convolutions, products = torch.backends.cudnn.conv, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    backends = (torch.backends.cuda.matmul, convolutions, products)
    arithmetic = (args.device.type, *(backend.fp32_precision for backend in backends))
    versions = (transformers.__version__, torch.__version__)
    parts = (type(model).__name__, attention, precision_of(args), *arithmetic, *versions)
    # Saving a model rewrites the excluded entries, and the digests already cover the weights' dtype.
    entries: dict[str, Any] = config_value(model, "to_dict", dict)()
    settings = {key: value for key, value in entries.items() if key not in NOT_SETTINGS}
    if adapters.has_adapters(model):
        settings = {**settings, "adapters": adapters.settings(model)}
    return " ".join([*map(str, parts), json.dumps(settings, sort_keys=True, default=str)])
