"""Checks that the split model computes what the whole one does.

Functions of a `ProbeTarget` without communication. All compare in deterministic float32.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_pipetransformer.data.batches import first_tokens
from hf_pipetransformer.splitters.base import UnsupportedModelError, config_value
from hf_pipetransformer.splitters.structure import ActivationShape, Probe, Structure, padded_length, trace_structure
from hf_pipetransformer.startup.model import (
    ProbeTarget,
    gradient_norms,
    gradients_discarded,
    in_float32,
    in_full_precision,
    run_stage,
)


SPLIT_LOSS_TOLERANCE = 1e-5
"""Largest relative difference between the loss in parts (stages, token slices) and the whole that is rounding."""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of the gradient norms that is rounding."""
SMALLEST_SCALE = 1e-3
"""Floor of the denominator of a relative difference."""


@dataclass(frozen=True)
class Result:
    """Loss and gradient norms of one run."""

    loss: float
    norms: torch.Tensor

    @property
    def total_norm(self) -> float:
        return float(self.norms.norm())

    def agrees_with(self, expected: Result, loss_tolerance: float) -> bool:
        """Return True if both are close where finite, and not finite in the same places."""
        # inf - inf is nan.
        same_loss = self.loss == expected.loss or (math.isnan(self.loss) and math.isnan(expected.loss))
        near_loss = abs(self.loss - expected.loss) <= loss_tolerance * max(abs(expected.loss), SMALLEST_SCALE)
        same_norms = (self.norms == expected.norms) | (self.norms.isnan() & expected.norms.isnan())
        distance = torch.where(same_norms, 0.0, self.norms - expected.norms).norm()
        scale = max(float(expected.norms[expected.norms.isfinite()].norm()), SMALLEST_SCALE)
        return (same_loss or near_loss) and float(distance) <= GRADIENT_TOLERANCE * scale


def run_whole(target: ProbeTarget) -> Result:
    # A copy: a loss may take labels out of its inputs, as Trainer's label smoothing does.
    return run_loss(target, lambda: target.loss(dict(target.inputs)))


def run_loss(target: ProbeTarget, compute: Callable[[], torch.Tensor]) -> Result:
    """Run a loss, and its backward."""
    with gradients_discarded(target.model):
        loss = compute()
        # An evaluation may inspect a model of which nothing is trained.
        if loss.requires_grad:
            loss.backward()
        return Result(float(loss.detach()), gradient_norms(target.parameters))


# ---- structure, and the split into stages ----


def probe_model(target: ProbeTarget) -> Probe:
    """Trace the model and check in float32 that cutting it at every possible place keeps its loss and gradients.

    Raises:
        UnsupportedModelError: the split model differs from the whole one, or its loss reads the routers of all layers.
    """
    model, inputs, main_input = target.model, target.inputs, target.main_input
    value = inputs.get(main_input)
    if not isinstance(value, torch.Tensor) or not value.dim():
        raise UnsupportedModelError(
            f"The batch has no tensor {main_input!r}, the main input of {type(model).__name__}, with one row a "
            f"sample; it has {sorted(inputs)}."
        )
    if config_value(model, "output_router_logits", False):
        raise UnsupportedModelError(
            "config.output_router_logits=True adds a loss over the routers of all layers and all tokens of a batch: a "
            "stage knows the routers of its own layers, a micro-batch its own tokens, and frozen layers that are not "
            "run again tell nothing of theirs. Set it to False (with TRL: router_aux_loss_coef=0.0), or use "
            "transformers.Trainer."
        )
    structure = trace_structure(model, target.splitter, lambda: target.loss(inputs), target.is_text)
    with torch.no_grad(), _entry_errors_explained(model, structure):
        # In the precision of the run, whose dtypes between stages are wanted. The comparison below is in float32.
        sent, flops = run_stages(target, structure, inputs, of_stages=False)
        media_share = share_of_media(target, structure)
    hidden_shape = tuple(sent[-2].shape)
    # With fewer tokens, media would have none of theirs; what puts them among text pads nothing.
    is_known = structure.media is not None or not target.is_text
    multiple = 1 if is_known else _padding_multiple(target, structure, hidden_shape)
    activation = ActivationShape(main_input, tuple(value.shape[1:]), hidden_shape[1:], multiple)
    expected_shape = activation.of(inputs)
    if hidden_shape != expected_shape or len(hidden_shape) < 2:
        rule = expected_shape if hidden_shape != expected_shape else "(batch, ..., hidden)"
        raise UnsupportedModelError(
            f"{type(model).__name__} gives its layers activations of shape {hidden_shape}; expected {rule}, one row a "
            "sample. Models that fold other dimensions into the batch (multiple choice) cannot be pipelined."
        )
    # Such a hook may change what passes, or count its calls.
    with in_full_precision(model, target.twin, inputs), target.calling_hooks_below_head(structure):
        is_read = _check_split(replace(target, inputs=in_float32(inputs)), structure)
    stages, twin = pairwise(target.twin.cut_positions(structure, of_stages=False)), target.twin
    dtypes = [each.dtype for (start, end), each in zip(stages, sent[:-1], strict=False) for _ in range(start, end)]
    # What later stages do not read is not sent to them: they get a tensor of its shape.
    placeholders = frozenset[str]() if is_read else frozenset({main_input})
    placeholders |= frozenset() if structure.media is None else structure.media.names
    flops, dtypes = twin.of_all_blocks(flops), twin.of_all_blocks(dtypes)
    return Probe(structure, tuple(flops), tuple(dtypes), activation, placeholders, media_share)


@contextmanager
def _entry_errors_explained(model: nn.Module, structure: Structure) -> Iterator[None]:
    """Explain errors of model code between embeddings and first layer that does not run without the embeddings."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not structure.enters_layers or isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(
            f"No module of {type(model).__name__} returns the tensor that enters its first layer as it is then, and "
            f"the code between does not run without the embeddings ({type(error).__name__}: {error}). Let a module "
            "do what comes between, or pass `splitter=` with a Splitter for this model family."
        ) from error


def _check_split(target: ProbeTarget, structure: Structure) -> bool:
    """Compare the split model with the whole one; return True if later stages may read the main input."""
    inputs, name = target.inputs, type(target.model).__name__
    expected, split = run_whole(target), _run_split(target, structure, inputs)
    found = split.result
    if not found.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        raise UnsupportedModelError(
            f"{name} gives {found.loss:.8g} when it is split into pipeline stages and {expected.loss:.8g} when it is "
            f"whole (gradient norms {found.total_norm:.8g} and {expected.total_norm:.8g}). "
            f"{_cause_of_difference(target, structure, expected)}"
        )
    if not structure.has_only_activations:
        with_other_forms = replace(structure, stand_ins=structure.other_stand_ins)
        # Bits, not a tolerance: what a stage does not read changes nothing at all.
        if not split.has_the_bits_of(_run_split(target, with_other_forms, inputs)):
            raise UnsupportedModelError(
                f"Code of {name} behind its embeddings reads what they give beside the activation (a mask or a "
                "length, say), which a later stage does not have. Compute it from the inputs of the model instead, or "
                "use transformers.Trainer."
            )
    value = inputs[target.main_input]
    if not value.is_floating_point():
        return True
    others = {**inputs, target.main_input: _noise_like(value)}
    return not split.has_the_bits_of(_run_split(target, structure, others))


def _cause_of_difference(target: ProbeTarget, structure: Structure, expected: Result) -> str:
    """Return a sentence on why a model may compute something else in stages, and what to change."""
    again = run_whole(target)
    if not again.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        return (
            f"The whole model gives {again.loss:.8g} for the same batch in its next call: something counts calls or "
            "draws random numbers of its own. Let the loss depend on the batch alone, or on trainer.state.global_step."
        )
    of_whole = _given_beside_activation(structure, lambda: run_whole(target))
    of_stages = _given_beside_activation(structure, lambda: _run_split(target, structure, target.inputs))
    for (index, name), value in of_whole.items():
        if not torch.equal(of_stages.get((index, name), value), value):
            return (
                f"Layer {index} reads {name} beside the activation, which the model makes of its embeddings or of an "
                "encoder: the stages above the first have neither. Use transformers.Trainer."
            )
    return (
        "This model cannot be pipelined as it is; pass `splitter=` with a Splitter that knows it, or use "
        "transformers.Trainer."
    )


def _given_beside_activation(structure: Structure, run: Callable[[], Any]) -> dict[tuple[int, str], torch.Tensor]:
    """Return the tensors beside the activation that `run` calls each layer with, by its number and their names."""
    given: dict[tuple[int, str], torch.Tensor] = {}

    def note(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Of the class: on a stage a layer may have another forward.
        names = list(inspect.signature(type(layer).forward).parameters)[2:]
        for name, value in {**dict(zip(names, args[1:], strict=False)), **kwargs}.items():
            if isinstance(value, torch.Tensor) and name != "hidden_states":
                given[index, name] = value

    layers = enumerate(structure.layers)
    hooks = [each.register_forward_pre_hook(partial(note, index), with_kwargs=True) for index, each in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return given


def _noise_like(value: torch.Tensor) -> torch.Tensor:
    """Return other values from the same range. Zeros could leave the result unchanged even where they are read."""
    low, high = value.aminmax()
    return torch.where(high > low, low + (high - low) * torch.rand_like(value), value + 1)


@dataclass(frozen=True)
class _SplitRun:
    """Stage outputs (the loss last) and gradients of one run in stages."""

    sent: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    result: Result

    def has_the_bits_of(self, other: _SplitRun) -> bool:
        pairs = zip([*self.sent, *self.gradients], [*other.sent, *other.gradients], strict=True)
        return all(a is b is None or (a is not None and b is not None and _same_bits(a, b)) for a, b in pairs)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _run_split(target: ProbeTarget, structure: Structure, later_inputs: dict[str, Any]) -> _SplitRun:
    model = target.model
    with gradients_discarded(model):
        sent, _ = run_stages(target, structure, later_inputs)
        parameters = target.parameters
        gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
        return _SplitRun(sent, gradients, Result(float(sent[-1]), gradient_norms(parameters)))


class _NoModules(nullcontext[None]):
    """Replacement for the module tracker of `FlopCounterMode` that counts everything under one module.

    Torch's own tracker hooks the gradients of module inputs, which fails under `no_grad` if an input is a weight.
    """

    parents: ClassVar = {"Global"}


def _flop_counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


def share_of_media(target: ProbeTarget, structure: Structure) -> float:
    """Return the share of the embeddings' operations in frozen encoders of media, see `Probe`."""
    frozen = [] if structure.media is None else [*structure.media.frozen.values()]
    if not frozen:
        return 0.0
    counter, spent = _flop_counter(), list[int]()

    def noting(sign: int) -> Callable[..., None]:
        return lambda *_: spent.append(sign * counter.get_total_flops())

    hooks = [module.register_forward_pre_hook(noting(-1)) for module in frozen]
    hooks += [module.register_forward_hook(noting(1)) for module in frozen]
    try:
        with counter, target.view(structure) as view:
            run_stage(view, range(1), None, partial(target.loss, dict(target.inputs)))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(spent) / max(1, counter.get_total_flops())


def run_stages(
    target: ProbeTarget, structure: Structure, later_inputs: dict[str, Any], of_stages: bool = True
) -> tuple[list[torch.Tensor], list[float]]:
    """Run every stage, and the backward if gradients are enabled.

    Args:
        later_inputs: batch of all stages but the first.
        of_stages: False to cut also where no stage may begin.

    Returns:
        Each stage's output, the loss last, and the forward FLOPs by block, each stage's at its first block.
    """
    flops, received, gradient = [0.0] * structure.num_blocks, None, None
    done: list[tuple[range, torch.Tensor | None, torch.Tensor]] = []
    with target.view(structure) as view:
        for start, end in pairwise(target.twin.cut_positions(structure, of_stages)):
            given = dict(target.inputs if received is None else later_inputs)
            with _flop_counter() as counter:
                output = run_stage(view, range(start, end), received, partial(target.loss, given))
            flops[start] = float(counter.get_total_flops())
            done.append((range(start, end), received, output))
            # A leaf: each stage has a graph of its own, as on a rank of its own.
            received = output.detach().requires_grad_(torch.is_grad_enabled())
        # Outputs can require grad under no_grad (embedding hooks).
        for blocks, received, output in reversed(done) if torch.is_grad_enabled() else ():
            if output.requires_grad:
                with view.backward_of(blocks, received):
                    torch.autograd.backward(output, gradient)
            gradient = None if received is None else received.grad
    return [output.detach() for _, _, output in done], flops


def _padding_multiple(target: ProbeTarget, structure: Structure, hidden_shape: tuple[int, ...]) -> int:
    """Return the multiple that the model pads sequences to: 1 if it does not pad, 0 if lengths follow another rule."""
    length = target.inputs[target.main_input].shape[1]

    def length_for(tokens: int) -> int | None:
        """Return the activation's length for sequences of `tokens` tokens; None if the model does not take them."""
        if target.inputs.sequences is not None:
            given = first_tokens(target.inputs, tokens)
        else:
            given = target.inputs.mapped(lambda value: _of_length(value, length, tokens))
        try:
            with torch.no_grad(), target.view(structure) as view:
                hidden = run_stage(view, range(1), None, lambda: target.loss(given))
        # They say nothing of the lengths that the model takes.
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:
            return None  # For example, a model of one length that says so.
        return hidden.shape[1] if hidden.dim() > 1 else None

    found, other = hidden_shape[1] if len(hidden_shape) > 1 else 0, max(1, length - 1)
    # A length that stays as it is may be a multiple by chance; its neighbor is not.
    if found == length and length_for(other) == other:
        return 1
    # The shortest length that is padded to the same one. No longer ones are tried: there may be no positions for them,
    # which ends a process on a GPU.
    shortest, too_short = length, 0
    while shortest - too_short > 1:
        middle = (shortest + too_short) // 2
        shortest, too_short = (middle, too_short) if length_for(middle) == found else (shortest, middle)
    multiple = found - too_short
    if multiple <= 1 or found % multiple:
        return 0
    # One length may fit a multiple by chance: the ends of its interval have to follow it as well.
    lengths = [length, shortest, max(1, too_short)]
    return multiple if all(length_for(each) == padded_length(each, multiple) for each in lengths) else 0


def _of_length(value: torch.Tensor, length: int, wanted: int) -> torch.Tensor:
    if value.dim() < 2 or value.shape[1] != length:
        return value
    return torch.cat([value] * -(-wanted // length), dim=1)[:, :wanted]
