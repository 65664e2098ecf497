"""How many layers to freeze: pure functions of a signal, a file a policy.

The protocol of all of them is in `protocol.py`, what they may look at in `signal.py`.
"""

from hf_pipetransformer.freeze.policies.clock import DecisionClock, make_clock
from hf_pipetransformer.freeze.policies.decision import Decision, check_policy, decide, held
from hf_pipetransformer.freeze.policies.fixed import Fixed
from hf_pipetransformer.freeze.policies.gradient_norm import GradientNorm
from hf_pipetransformer.freeze.policies.making import make_policy
from hf_pipetransformer.freeze.policies.no_freezing import NoFreezing
from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.schedule import Schedule
from hf_pipetransformer.freeze.policies.signal import (
    ACTIVATION_SIMILARITY,
    GRADIENT_NORMS,
    MEASUREMENTS,
    PREDICTED_SECONDS,
    WEIGHT_CHANGES,
    FreezeSignal,
    is_usable,
)


__all__ = [
    "ACTIVATION_SIMILARITY",
    "GRADIENT_NORMS",
    "MEASUREMENTS",
    "PREDICTED_SECONDS",
    "WEIGHT_CHANGES",
    "Decision",
    "DecisionClock",
    "Fixed",
    "FreezePolicy",
    "FreezeSignal",
    "GradientNorm",
    "NoFreezing",
    "Schedule",
    "check_policy",
    "decide",
    "held",
    "is_usable",
    "make_clock",
    "make_policy",
]
