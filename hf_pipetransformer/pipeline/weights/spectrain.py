"""SpecTrain: both passes see predicted weights."""

from __future__ import annotations

from hf_pipetransformer.pipeline.weights.kind import Predictor


class SpecTrain(Predictor):
    """Both passes of a unit see the weights that the stage will have when stage 0 runs the unit's backward.

    In the steady state with one unit a step the forward predicts `stage // 2 + K - 1 - stage` updates, the backward
    `stage // 2`. SpecTrain's own direction is that of SGD with momentum; for other optimizers it is theirs.
    """

    name = "spectrain"
