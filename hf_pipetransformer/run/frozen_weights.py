"""The weights that stored activations hang on: their names, and whether they still are what was named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from hf_pipetransformer import adapters
from hf_pipetransformer.arguments import PipeTransformerArguments
from hf_pipetransformer.autocache.chain import PrefixWatch, chain_keys, unit_digests
from hf_pipetransformer.autodp.topology import all_gather_trees
from hf_pipetransformer.refusals import precision_of
from hf_pipetransformer.splitters.base import config_value
from hf_pipetransformer.transition import Stage


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
