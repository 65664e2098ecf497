"""Checks that the split model, its loss and its token slices compute what the whole model does.

Functions of a `ProbeTarget` without communication. All compare in deterministic float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_pipetransformer.data.batches import IGNORED_LABEL, cut_tokens, num_rows, pad_batch, take_rows
from hf_pipetransformer.data.flattened import first_tokens, sequences_of
from hf_pipetransformer.engine.head import HeadPlan, HeadProgram, HeadSlices
from hf_pipetransformer.engine.losses import FoundRule, LossRule, Parts, find_loss_rule
from hf_pipetransformer.engine.program import MicroBatch, ModelProgram
from hf_pipetransformer.engine.token_program import TokenSliceContexts, TokenSpan
from hf_pipetransformer.report import logger
from hf_pipetransformer.schedules import GPIPE
from hf_pipetransformer.splitters.base import UnsupportedModelError, config_value
from hf_pipetransformer.splitters.structure import ActivationShape, Probe, Structure, padded_length, trace_structure
from hf_pipetransformer.startup.model import (
    ProbeTarget,
    gradient_norms,
    gradients_discarded,
    in_float32,
    in_full_precision,
    run_stage,
    with_two_labels,
)


SPLIT_LOSS_TOLERANCE = 1e-5
"""Largest relative difference between the loss in parts (stages, token slices) and the whole that is rounding."""
PADDING_LOSS_TOLERANCE = 1e-6
"""Largest relative difference between the losses of a batch with and without more padding that is rounding."""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of the gradient norms that is rounding."""
SMALLEST_SCALE = 1e-3
"""Floor of the denominator of a relative difference."""


@dataclass(frozen=True)
class _Result:
    """Loss and gradient norms of one run."""

    loss: float
    norms: torch.Tensor

    @property
    def total_norm(self) -> float:
        return float(self.norms.norm())

    def agrees_with(self, expected: _Result, loss_tolerance: float) -> bool:
        """Return True if both are close where finite, and not finite in the same places."""
        # inf - inf is nan.
        same_loss = self.loss == expected.loss or (math.isnan(self.loss) and math.isnan(expected.loss))
        near_loss = abs(self.loss - expected.loss) <= loss_tolerance * max(abs(expected.loss), SMALLEST_SCALE)
        same_norms = (self.norms == expected.norms) | (self.norms.isnan() & expected.norms.isnan())
        distance = torch.where(same_norms, 0.0, self.norms - expected.norms).norm()
        scale = max(float(expected.norms[expected.norms.isfinite()].norm()), SMALLEST_SCALE)
        return (same_loss or near_loss) and float(distance) <= GRADIENT_TOLERANCE * scale


def _run_whole(target: ProbeTarget) -> _Result:
    with gradients_discarded(target.model):
        # A copy: a loss may take labels out of its inputs, as Trainer's label smoothing does.
        loss = target.loss(dict(target.inputs))
        if loss.requires_grad:
            loss.backward()
        return _Result(float(loss.detach()), gradient_norms(target.parameters))


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
        sent, flops = run_stages(target, structure, inputs)
    hidden_shape = tuple(sent[-2].shape)
    multiple = _padding_multiple(target, structure, hidden_shape) if target.is_text else 1
    activation = ActivationShape(main_input, tuple(value.shape[1:]), hidden_shape[1:], multiple)
    expected_shape = activation.of(inputs)
    if hidden_shape != expected_shape or len(hidden_shape) < 2:
        rule = expected_shape if hidden_shape != expected_shape else "(batch, ..., hidden)"
        raise UnsupportedModelError(
            f"{type(model).__name__} gives its layers activations of shape {hidden_shape}; expected {rule}, one row a "
            "sample. Models that fold other dimensions into the batch (multiple choice) cannot be pipelined."
        )
    with in_full_precision(model, target.twin, inputs):
        is_read = _check_split(replace(target, inputs=in_float32(inputs)), structure)
    stages, twin = pairwise(target.twin.cut_positions(structure)), target.twin
    dtypes = [each.dtype for (start, end), each in zip(stages, sent[:-1], strict=False) for _ in range(start, end)]
    placeholders = frozenset[str]() if is_read else frozenset({main_input})
    return Probe(
        structure, tuple(twin.of_all_blocks(flops)), tuple(twin.of_all_blocks(dtypes)), activation, placeholders
    )


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
    expected, split = _run_whole(target), _run_split(target, structure, inputs)
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


def _cause_of_difference(target: ProbeTarget, structure: Structure, expected: _Result) -> str:
    """Return a sentence on why a model may compute something else in stages, and what to change."""
    again = _run_whole(target)
    if not again.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        return (
            f"The whole model gives {again.loss:.8g} for the same batch in its next call: something counts calls or "
            "draws random numbers of its own. Let the loss depend on the batch alone, or on trainer.state.global_step."
        )
    inside = {id(module) for layer in structure.layers for module in layer.modules()}
    hooked = [
        label
        for label, module in target.model.named_modules()
        if id(module) in inside and any(map(_is_of_a_script, _hooks_of(module)))
    ]
    if hooked:
        return (
            f"A hook on {hooked[0]} does not run on the stages that do not own that layer: remove it, compute the "
            "same in the layer's own forward, or use transformers.Trainer."
        )
    return (
        "This model cannot be pipelined as it is; pass `splitter=` with a Splitter that knows it, or use "
        "transformers.Trainer."
    )


def _hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]


def _is_of_a_script(hook: Any) -> bool:
    """Return False for the hooks by which transformers collects hidden states, and for those of the inspection."""
    return not str(getattr(hook, "__module__", "")).startswith(("transformers.", "hf_pipetransformer."))


def _noise_like(value: torch.Tensor) -> torch.Tensor:
    """Return other values from the same range. Zeros could leave the result unchanged even where they are read."""
    low, high = value.aminmax()
    return torch.where(high > low, low + (high - low) * torch.rand_like(value), value + 1)


@dataclass(frozen=True)
class _SplitRun:
    """Stage outputs (the loss last) and gradients of one run in stages."""

    sent: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    result: _Result

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
        return _SplitRun(sent, gradients, _Result(float(sent[-1]), gradient_norms(parameters)))


class _NoModules(nullcontext[None]):
    """Replacement for the module tracker of `FlopCounterMode` that counts everything under one module.

    Torch's own tracker hooks the gradients of module inputs, which fails under `no_grad` if an input is a weight.
    """

    parents: ClassVar = {"Global"}


def run_stages(
    target: ProbeTarget, structure: Structure, later_inputs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[float]]:
    """Run every stage, and the backward if gradients are enabled.

    Args:
        later_inputs: batch of all stages but the first.

    Returns:
        Each stage's output, the loss last, and the forward FLOPs by block, each stage's at its first block.
    """
    view, flops = target.view(structure), [0.0] * structure.num_blocks
    received, gradient = None, None
    done: list[tuple[range, torch.Tensor | None, torch.Tensor]] = []
    try:
        for start, end in pairwise(target.twin.cut_positions(structure)):
            given = dict(target.inputs if received is None else later_inputs)
            counter = FlopCounterMode(display=False)
            counter.mod_tracker = _NoModules()  # type: ignore[assignment]
            with counter:
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
    finally:
        view.remove()
    return [output.detach() for _, _, output in done], flops


def _padding_multiple(target: ProbeTarget, structure: Structure, hidden_shape: tuple[int, ...]) -> int:
    """Return the multiple that the model pads sequences to: 1 if it does not pad, 0 if lengths follow another rule."""
    length = target.inputs[target.main_input].shape[1]
    view = target.view(structure)

    def length_for(tokens: int) -> int | None:
        """Return the activation's length for sequences of `tokens` tokens; None if the model does not take them."""
        if sequences_of(target.inputs) is not None:
            given = first_tokens(target.inputs, tokens)
        else:
            given = {key: _of_length(value, length, tokens) for key, value in target.inputs.items()}
        try:
            with torch.no_grad():
                hidden = run_stage(view, range(1), None, lambda: target.loss(given))
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:
            return None  # For example, a model of one length that says so.
        finally:
            view.remove()
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
    lengths = [length, shortest, max(1, too_short)]
    return multiple if all(length_for(each) == padded_length(each, multiple) for each in lengths) else 0


def _of_length(value: Any, length: int, wanted: int) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    return torch.cat([value] * -(-wanted // length), dim=1)[:, :wanted]


# ---- effect of padding; these and the checks below are called in full precision ----


def depends_on_length(target: ProbeTarget) -> bool:
    """Return True if one more position of padding changes the loss, so that replicas must pad to a common length."""
    if not target.is_text or sequences_of(target.inputs) is not None:
        return False
    padded = _with_more_padding(target)
    if padded is None:
        return True
    with torch.no_grad():
        expected = float(target.loss(target.inputs))
        found = _loss_if_taken(target, padded)
    return found is None or abs(found - expected) > PADDING_LOSS_TOLERANCE * abs(expected)


def depends_on_padding(target: ProbeTarget, probe: Probe) -> bool:
    """Return True if values at masked positions may change the loss, so that stored records must keep them.

    Adds noise to the hidden states there: a softmax over positions (question answering) depends on it, a mean over
    labeled tokens does not.
    """
    padded = _with_more_padding(target) if target.is_text and not probe.activation.changes_length else None
    if padded is None or _loss_if_taken(target, padded) is None:
        return True
    return not _is_unread(target, probe, padded, 1, lambda hidden: (padded["attention_mask"] == 0)[..., None])


def reads_first_alone(target: ProbeTarget, probe: Probe) -> bool:
    """Return True if the head reads of a sample without tokens the first position alone, as ViT's classifiers do."""
    if target.is_text or len(probe.activation.hidden_shape) != 2 or probe.activation.hidden_shape[0] < 2:
        return False

    def others(hidden: torch.Tensor) -> torch.Tensor:
        return (torch.arange(hidden.shape[1], device=hidden.device) > 0)[:, None]

    return _is_unread(target, probe, target.inputs, probe.structure.num_blocks - 1, others)


def _is_unread(
    target: ProbeTarget,
    probe: Probe,
    inputs: dict[str, Any],
    block: int,
    unread: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Return True if positions of what enters a block change neither the loss nor gradients: with noise, and as zeros.

    `unread` gives their mask for hidden states `(batch, seq, hidden)`.
    """
    view, later = target.view(probe.structure), range(block, probe.structure.num_blocks)

    def result_of(entering: torch.Tensor) -> _Result:
        with gradients_discarded(target.model):
            loss = run_stage(view, later, entering, lambda: target.loss(dict(inputs)))
            if loss.requires_grad:
                loss.backward()
            return _Result(float(loss.detach()), gradient_norms(target.parameters))

    try:
        hidden = run_stage(view, range(block), None, lambda: target.loss(dict(inputs))).detach()
        where = unread(hidden)
        plain = result_of(hidden)
        # Zeros alone could leave the result as it is although they are read.
        others = [result_of(hidden + torch.randn_like(hidden) * where), result_of(hidden * ~where)]
    finally:
        view.remove()
    is_finite = math.isfinite(plain.loss) and math.isfinite(plain.total_norm)
    return is_finite and all(other.agrees_with(plain, PADDING_LOSS_TOLERANCE) for other in others)


def _with_more_padding(target: ProbeTarget) -> dict[str, Any] | None:
    """Return the batch with one more position of padding; None without an attention mask or room for it."""
    length = target.inputs[target.main_input].shape[1]
    longest = config_value(target.model, "max_position_embeddings", length + 1)
    if "attention_mask" not in target.inputs or length + 2 >= longest:
        return None
    return pad_batch(target.inputs, target.main_input, length + 1, target.pad_token_id)


def _loss_if_taken(target: ProbeTarget, inputs: dict[str, Any]) -> float | None:
    """Return the loss; None if the model does not accept this sequence length (Nystromformer accepts one only)."""
    try:
        with torch.no_grad():
            return float(target.loss(inputs))
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, ValueError):
        return None


# ---- rule that combines the losses of parts ----


def check_loss(target: ProbeTarget, is_split: bool) -> FoundRule:
    """Return how the losses of parts of a batch combine; `is_split` is False if the run never splits a batch."""
    model, inputs = target.model, target.inputs
    is_alone = num_rows(inputs) == 1
    if is_alone:
        # Only losses are compared then, since two samples with gradients may not fit into memory.
        inputs = take_rows(inputs, torch.tensor([0, 0]))

    def measure(parts: Parts, num_items: int) -> torch.Tensor:
        with gradients_discarded(model), torch.set_grad_enabled(not is_alone):
            # In float64, so that the sum of the parts has no rounding of its own.
            sum_of_losses = torch.zeros((), dtype=torch.float64)
            for part, weight in parts:
                if weight:
                    loss = target.compute(dict(part), num_items) * weight
                    sum_of_losses += loss.detach().double().cpu()
                    if loss.requires_grad:
                        loss.backward()
            return torch.cat([sum_of_losses.reshape(1), gradient_norms(target.parameters).double().cpu()])

    found = find_loss_rule(measure, with_two_labels(inputs), target.count, is_split)
    if not found.is_finite and any(bool(p.isnan().any()) for p in target.parameters):
        # With nan weights no rule can be found, and none would matter.
        logger.warning(
            "Weights of the model are nan before the first step, and so is all that follows: load it from another "
            "checkpoint, or in another dtype."
        )
        return replace(found, refusal=None)
    return found


# ---- token slices ----

_TOKEN_REMEDY = "Token slices are for models in which no token reads a later one. Set pipeline_schedule='1f1b'."


def run_slices(
    target: ProbeTarget, structure: Structure, rule: LossRule, bounds: Sequence[int], note: Callable[[int], None]
) -> float:
    """Run the whole model, as a pipeline of one stage, over token slices; accumulate gradients and return the loss.

    Args:
        bounds: token positions where slices begin, and the sequence length at the end.
        note: called with a slice's number after its forward and after its backward.
    """
    total, slices = target.count(target.inputs), cut_tokens(target.inputs, bounds)
    (actions,) = GPIPE.table(1, len(slices))
    contexts = TokenSliceContexts(structure.num_layers)
    program = ModelProgram(
        target.view(structure), range(structure.num_blocks), torch.float32, sends_gradient=False, contexts=contexts
    )

    def forward(given: dict[str, Any]) -> Any:
        return target.compute(given, total)

    parts = [
        MicroBatch(
            number, own, rule.weight(target.count(own), total), (), forward,
            place=TokenSpan(0, start, stop, bounds[-1]),
        )
        for number, (own, (start, stop)) in enumerate(zip(slices, pairwise(bounds), strict=True))
    ]  # fmt: skip
    program.begin(actions)
    losses = []
    for part in parts:
        losses.append(float(program.forward(part, None)))
        note(part.index)
    # Later slices first: they add to the gradients of the keys and values of earlier ones.
    for part in reversed(parts):
        program.backward(part, None)
        note(part.index)
    return sum(losses)


def why_unsliceable(target: ProbeTarget, structure: Structure, rule: LossRule) -> str | None:
    """Return why token slices do not reproduce the loss and gradients of whole sequences; None if they do."""
    model, value, name = target.model, target.inputs[target.main_input], type(target.model).__name__
    if value.dim() < 2:
        return f"{name} reads {target.main_input!r} of shape {tuple(value.shape)}, not (batch, seq). {_TOKEN_REMEDY}"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # With gradient checkpointing, transformers silently drops the key/value cache, but only in training mode.
        return f"{name} recomputes its layers itself: leave that to pipeline_checkpoint='layers'."
    if sequences_of(target.inputs) is not None:
        return (
            "the collator puts several samples into one row, and a slice would hold tokens of several. Use a collator "
            "that pads, or set pipeline_schedule='1f1b'."
        )
    length = value.shape[1]
    half = -(-length // 2)
    bounds = sorted({0, half, min(length, half + max(1, length // 4)), length})
    expected = _run_whole(target)
    with gradients_discarded(model):
        try:
            loss = run_slices(target, structure, rule, bounds, lambda _: None)
        # A model that cannot take cached keys and values may raise anything.
        except Exception as error:
            return f"{name} does not run on slices of a sequence ({type(error).__name__}: {error}). {_TOKEN_REMEDY}"
        found = _Result(loss, gradient_norms(target.parameters))
    if found.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        return None
    return (
        f"{name} gives the loss {found.loss:.8g} for slices of {[b - a for a, b in pairwise(bounds)]} tokens and "
        f"{expected.loss:.8g} for whole sequences (gradient norms {found.total_norm:.8g} and "
        f"{expected.total_norm:.8g}). {_TOKEN_REMEDY}"
    )


def why_no_head_slices(target: ProbeTarget, structure: Structure, slices: HeadSlices) -> str | None:
    """Return why head and loss in slices of a sequence do not give what whole ones do, without a period, or None."""
    name = type(target.model).__name__
    if not target.is_text or sequences_of(target.inputs) is not None:
        return f"{name} is not given rows of tokens, each of one text"
    labels, tokens = target.inputs.get("labels"), target.inputs[target.main_input]
    if isinstance(labels, torch.Tensor) and labels.shape == tokens.shape:
        # Every token is a target, those at the ends of slices, too.
        target = replace(target, inputs={**target.inputs, "labels": labels.where(labels != IGNORED_LABEL, tokens)})
    expected = _run_whole(target)
    view, whole = target.view(structure), MicroBatch(0, target.inputs, 1.0, (), target.loss)

    def of(blocks: range) -> ModelProgram:
        return ModelProgram(view, blocks, torch.float32, sends_gradient=True)

    blocks, plan = range(structure.num_blocks), HeadPlan(slices)
    program = HeadProgram(plan, of(blocks), of(blocks[:-1]), of(blocks[-1:]), torch.float32, sends_gradient=False)
    with gradients_discarded(target.model):
        try:
            program.begin(())
            loss = program.forward(whole, None)
            program.backward_input(whole, None)
        except torch.OutOfMemoryError:
            raise
        # A model that reads another form of labels may raise anything.
        except Exception as error:
            return f"the head of {name} does not run on slices of a sequence ({type(error).__name__}: {error})"
        finally:
            view.remove()
        found = _Result(float(loss), gradient_norms(target.parameters))
    if found.agrees_with(expected, SPLIT_LOSS_TOLERANCE):
        return None
    return (
        f"{name} gives the loss {found.loss:.8g} in slices of the sequence and {expected.loss:.8g} for whole ones "
        f"(gradient norms {found.total_norm:.8g} and {expected.total_norm:.8g})"
    )
