"""The policy that the options name."""

from __future__ import annotations

from hf_pipetransformer.freeze.policies.fixed import Fixed
from hf_pipetransformer.freeze.policies.gradient_norm import GradientNorm
from hf_pipetransformer.freeze.policies.no_freezing import NoFreezing
from hf_pipetransformer.freeze.policies.protocol import FreezePolicy
from hf_pipetransformer.freeze.policies.schedule import Schedule
from hf_pipetransformer.option_values import parse_freeze_at


def make_policy(
    name: str,
    alpha: float,
    rule: str,
    freeze_at: str | None,
) -> FreezePolicy:
    """The policy that the options name.

    Raises:
        ValueError: unknown name, `freeze_at` missing or of the wrong form.
    """
    if name == "gradient_norm":
        return GradientNorm(alpha, rule)
    if name == "schedule":
        return Schedule(alpha)
    if name == "fixed":
        return Fixed(parse_freeze_at(freeze_at or ""))
    if name == "none":
        return NoFreezing()
    raise ValueError(f"Unknown freeze policy {name!r}.")
