"""Liger's kernels on a CPU, as `use_liger_kernel=True` puts them into a model.

With `TRITON_INTERPRET=1`, which has to be set before anything imports Triton, it interprets the kernels themselves
(`make test-liger`). Else a double stands for them, which changes a model in the same places: the head's weight is read
without a call of the head, the loss has its gradients before the backward begins, and no logits are kept.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations import liger
from transformers.modeling_outputs import CausalLMOutputWithPast


IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def install_kernels() -> None:
    """Make what `use_liger_kernel=True` imports work here."""
    if IS_INTERPRETED:
        from tests.support import triton_interpreter

        triton_interpreter.complete()
    else:
        package, transformers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
        transformers._apply_liger_kernel_to_instance = _apply  # type: ignore[attr-defined]
        sys.modules |= {each.__name__: each for each in (package, transformers)}
        liger.is_liger_kernel_available = lambda: True


# ---- the double ----


class _FusedLoss(torch.autograd.Function):
    """Loss of the head whose forward has the gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, loss_of: Any) -> torch.Tensor:
        given = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            loss: torch.Tensor = loss_of(functional.linear(*given))
            ctx.gradients = torch.autograd.grad(loss, given)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.gradients
        return gradients[0] * of_hidden, gradients[0] * of_weight if ctx.needs_input_grad[1] else None, None


def _forward(
    self: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    labels: Any = None,
    skip_logits: bool | None = None,
    **inputs: Any,
) -> CausalLMOutputWithPast:
    shift_labels = inputs.get("shift_labels")
    found = self.model(input_ids, attention_mask, position_ids, **inputs)
    has_labels = labels is not None or shift_labels is not None
    cap = getattr(self.config, "final_logit_softcapping", None)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        given = {name: inputs[name] for name in ("shift_labels", "num_items_in_batch") if name in inputs}
        loss: torch.Tensor = self.loss_function(logits, labels, self.config.vocab_size, **given)
        return loss

    skips = self.training and has_labels if skip_logits is None else skip_logits
    if skips:
        loss = _FusedLoss.apply(found.last_hidden_state, self.lm_head.weight, loss_of)  # type: ignore[no-untyped-call]
        return CausalLMOutputWithPast(loss=loss, past_key_values=found.past_key_values)
    logits = self.lm_head(found.last_hidden_state)
    return CausalLMOutputWithPast(loss_of(logits) if has_labels else None, logits, found.past_key_values)


# What computes the loss must be known as Liger's.
_forward.__module__ = "liger_kernel.transformers.model.double"


def _apply(model: nn.Module, **_config: Any) -> None:
    model.forward = MethodType(_forward, model)
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            vars(module)["forward"] = partial(type(module).forward, module)
