"""Which weights the forwards and backwards of asynchronous 1F1B see.

Between two drains (a window) each stage updates its weights as soon as the last backward of a step has run there, so
the backward of a unit comes after more updates than its forward: s more. What both passes see, by kind:

    kind            forward                         backward
    pipeoptim       predicted s updates ahead       current
    vanilla         current                         current
    stashing        current                         the forward's
    double_buffer   of the step before              the forward's
    spectrain       predicted beyond s, to stage 0's backward, in both
    xpipe           the same, always in the direction of Adam

PipeOptim, sections II and III, Tables I and II.
"""

from __future__ import annotations

from hf_pipetransformer.pipeline.weights.double_buffer import DoubleBuffer
from hf_pipetransformer.pipeline.weights.kind import WeightKind, copies_beside
from hf_pipetransformer.pipeline.weights.pipeoptim import PipeOptim
from hf_pipetransformer.pipeline.weights.prediction_errors import MEASURED_EVERY, SAMPLED_WEIGHTS, PredictionErrors
from hf_pipetransformer.pipeline.weights.rates import coming_rates
from hf_pipetransformer.pipeline.weights.spectrain import SpecTrain
from hf_pipetransformer.pipeline.weights.stage import StageWeights
from hf_pipetransformer.pipeline.weights.stashing import Stashing
from hf_pipetransformer.pipeline.weights.vanilla import Vanilla
from hf_pipetransformer.pipeline.weights.xpipe import XPipe


__all__ = [
    "MEASURED_EVERY",
    "SAMPLED_WEIGHTS",
    "WEIGHTS_NAMES",
    "PredictionErrors",
    "StageWeights",
    "WeightKind",
    "coming_rates",
    "copies_beside",
    "find_weights",
]

_KINDS: dict[str, WeightKind] = {
    kind.name: kind for kind in (PipeOptim(), Vanilla(), Stashing(), DoubleBuffer(), SpecTrain(), XPipe())
}

WEIGHTS_NAMES = tuple(_KINDS)
"""What `pipeline_weights` may be."""


def find_weights(name: str) -> WeightKind:
    """The kind of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in _KINDS:
        raise ValueError(f"Unknown pipeline_weights {name!r}: expected one of {sorted(_KINDS)}.")
    return _KINDS[name]
