"""XPipe: as SpecTrain, in the direction of Adam whatever the optimizer."""

from __future__ import annotations

from hf_pipetransformer.pipeline.weights.kind import DirectionName, Predictor


class XPipe(Predictor):
    """Both passes see weights predicted by Adam's formula: from the state of an Adam, else from moments of its own."""

    name = "xpipe"
    direction: DirectionName = "adam"
