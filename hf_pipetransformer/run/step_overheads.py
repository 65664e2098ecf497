"""What a step costs beside the computation of its samples, measured before the first one."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import Trainer

from hf_pipetransformer.report.events import logger
from hf_pipetransformer.run import host


MOST_ELEMENTS = 2**22
"""Parameters that are stepped at most: a rough figure will do, and each takes 16 bytes."""
NUM_REPEATS = 5
KNOWN_PACKAGES = ("torch.optim.", "transformers.")
"""Of optimizers that one rank may make and step alone; those of others may wait for all ranks."""


def optimizer_seconds(trainer: Trainer, parameters: Iterable[nn.Parameter]) -> float:
    """Seconds that clipping and an optimizer step take for one trained parameter: copies of some are stepped.

    AdamW stands for an optimizer that cannot be made or stepped so, or of which that is not known. Where AdamW cannot
    either, nothing is known: 0.

    Args:
        trainer: of the optimizer.
        parameters: that it trains here.
    """
    given = list(parameters)
    for make in (_alike, _adamw):
        # What an optimizer of the user's, or a device without memory, raises here is no reason to end the run.
        with suppress(Exception):
            copies = _copies(given)
            return _seconds(make(trainer, copies), copies, trainer.args.max_grad_norm) if copies else 0.0
    logger.warning("What an optimizer step takes could not be measured: the planned time leaves it out.")
    return 0.0


def _copies(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    copies, left = [], MOST_ELEMENTS
    for parameter in parameters:
        if left and parameter.numel():
            rows = parameter.detach()
            per_row = max(1, parameter.numel() // len(rows)) if rows.dim() else 1
            rows = rows[: max(1, left // per_row)] if rows.dim() else rows
            copies.append(nn.Parameter(rows.clone()))
            left = max(0, left - rows.numel())
    return copies


def _seconds(optimizer: torch.optim.Optimizer, copies: list[nn.Parameter], max_norm: float | None) -> float:
    times = []
    for _ in range(NUM_REPEATS + 1):
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        start = _now(copies[0].device)
        if max_norm:
            clip_grad_norm_(copies, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        times.append(_now(copies[0].device) - start)
    # The first step makes the optimizer's state.
    return statistics.median(times[1:]) / sum(copy.numel() for copy in copies)


def _alike(trainer: Trainer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the run's kind."""
    if trainer.optimizer is None:
        kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    else:
        own = host.torch_optimizer(trainer)
        # Not all that an optimizer has as defaults may be given to it: AdamW sets one itself.
        kind, known = type(own), inspect.signature(type(own)).parameters
        options = {name: value for name, value in own.defaults.items() if name in known}
    if not f"{kind.__module__}.".startswith(KNOWN_PACKAGES):
        return _adamw(trainer, parameters)
    made: torch.optim.Optimizer = kind(parameters, **options)
    return made


def _adamw(_trainer: Trainer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
