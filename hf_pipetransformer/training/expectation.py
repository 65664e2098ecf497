"""Predicted training time: measures what a step costs besides its samples, before the first step."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from hf_pipetransformer.compat import trainer_compat
from hf_pipetransformer.engine.timing import settled_seconds
from hf_pipetransformer.planning.forecast import Forecast
from hf_pipetransformer.report import duration, logger


if TYPE_CHECKING:
    from hf_pipetransformer.cache.training import TrainingCache
    from hf_pipetransformer.runtime.pipeline import Pipeline


MOST_ELEMENTS = 2**22
"""Upper limit of parameters that are stepped: a rough figure is enough, and each takes 16 bytes."""
NUM_REPEATS = 5
KNOWN_PACKAGES = ("torch.optim.", "transformers.")
"""Packages whose optimizers one rank can build and step alone; others may contain collectives."""


def optimizer_seconds(trainer: Trainer, parameters: Iterable[nn.Parameter]) -> float:
    """Measure the seconds per parameter of clipping and an optimizer step, on copies of some parameters.

    AdamW stands in for an optimizer that cannot be built or stepped alone. If AdamW fails too, returns 0.
    """
    given = list(parameters)
    for make in (_alike, _adamw):
        # A user's optimizer may raise anything, and the device may be out of memory; neither should end the run.
        with suppress(Exception):
            copies = _copies(given, trainer.args.device)
            return _seconds(make(trainer, copies), copies, trainer.args.max_grad_norm) if copies else 0.0
    logger.warning("The optimizer step could not be timed; the predicted training time leaves it out.")
    return 0.0


def _copies(parameters: Iterable[nn.Parameter], device: torch.device) -> list[nn.Parameter]:
    copies, left = [], MOST_ELEMENTS
    for parameter in parameters:
        if left and parameter.numel():
            rows = parameter.detach()
            per_row = max(1, parameter.numel() // len(rows)) if rows.dim() else 1
            rows = rows[: max(1, left // per_row)] if rows.dim() else rows
            # A copy on the same device too, because the steps that are timed change it.
            copies.append(nn.Parameter(rows.to(device, copy=True)))
            left = max(0, left - rows.numel())
    return copies


def _seconds(optimizer: torch.optim.Optimizer, copies: list[nn.Parameter], max_norm: float | None) -> float:
    times = []
    for _ in range(NUM_REPEATS + 1):
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        start = settled_seconds(copies[0].device)
        if max_norm:
            clip_grad_norm_(copies, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        times.append(settled_seconds(copies[0].device) - start)
    # The first step allocates the optimizer's state.
    return statistics.median(times[1:]) / sum(copy.numel() for copy in copies)


def _alike(trainer: Trainer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Build an optimizer of the run's class and options."""
    if trainer.optimizer is None:
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    else:
        own = trainer_compat.torch_optimizer(trainer)
        # Defaults are not always constructor arguments: AdamW adds one itself.
        kind, known = type(own), inspect.signature(type(own)).parameters
        options = {name: value for name, value in own.defaults.items() if name in known}
    if not f"{kind.__module__}.".startswith(KNOWN_PACKAGES):
        return _adamw(trainer, parameters)
    made: torch.optim.Optimizer = kind(parameters, **options)
    return made


def _adamw(_trainer: Trainer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def make_forecast(trainer: Trainer, pipeline: Pipeline, cache: TrainingCache | None) -> Forecast:
    """Build a forecast for runs that start on the pipeline's current layout, from what rank 0 measures.

    Its stage stands for the others.
    """
    layout, costs = pipeline.layout, pipeline.start_up.plans.costs
    update = optimizer_seconds(trainer, pipeline.stage.trained_here().values())
    overheads = replace(costs.overheads, optimizer_per_parameter=update, per_step=0.0)
    storing = None if cache is None else cache.planner.storing()
    inputs = replace(pipeline.start_up.plans.inputs(layout), overheads=overheads)
    return Forecast(layout, inputs, storing)


def in_words(seconds: float, full_seconds: float, is_certain: bool, num_frozen: int = 0) -> str:
    """Compare a predicted time with that of a run that freezes no more than `num_frozen` layers, in sentences."""
    at_least, more = "" if is_certain else "at least ", " more" if num_frozen else ""
    # Compared as it is shown below, so that no sentence contradicts its number.
    share = f"{seconds / full_seconds:.2f}"
    time = f"{at_least}{duration(seconds)}, {share} of what it takes with nothing{more} frozen"
    if float(share) >= 1:
        return f"Predicted training time: {time}. Freezing saves no time in this run."
    epochs = f"{share} of the epochs, which takes as long." if is_certain else "fewer epochs."
    return (
        f"Predicted training time: {time}. Freezing may cost accuracy: compare it with training everything for "
        f"{epochs}"
    )
