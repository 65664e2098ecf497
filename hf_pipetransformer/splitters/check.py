"""The start-up self-check: on one tiny batch, the split model must give what the whole model gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, config_value
from hf_pipetransformer.splitters.precision import in_float32, in_full_precision
from hf_pipetransformer.splitters.structure import Structure, trace_structure
from hf_pipetransformer.splitters.view import StageExit, StageView


LOSS_TOLERANCE = 1e-5
"""Relative difference between the losses of the split and of the whole model that still counts as rounding."""
GRADIENT_TOLERANCE = 1e-4
"""The same for the norms of the gradients."""

Compute = Callable[[dict[str, Any]], torch.Tensor]


@dataclass(frozen=True)
class ActivationShape:
    """How the shape at the stage boundaries follows from a batch.

    Args:
        main_input: name of the model's main input.
        input_shape: the main input's shape in the probe, without the sample dimension.
        hidden_shape: the activation's shape in the probe, without the sample dimension: `(seq, hidden)`.
        multiple: the model pads sequences to the next multiple of it (Longformer, to its attention window); 0 where
            only the probe's length is known to do.
    """

    main_input: str
    input_shape: tuple[int, ...]
    hidden_shape: tuple[int, ...]
    multiple: int = 1

    @property
    def changes_length(self) -> bool:
        """Whether the activation has other positions than the tokens of a text."""
        return len(self.input_shape) == 1 and self.multiple != 1

    def of(self, inputs: dict[str, Any]) -> tuple[int, ...]:
        """The activation's shape `(batch, seq, hidden)` for a batch.

        Raises:
            ValueError: the main input is missing, images have another size than at the start, or sequences
                another length where the model takes one only.
        """
        value = inputs.get(self.main_input)
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"The batch has no tensor {self.main_input!r}, the model's main input; found {sorted(inputs)}."
            )
        shape = tuple(value.shape[1:])
        if shape == self.input_shape:
            return (value.shape[0], *self.hidden_shape)
        if len(shape) == 1 and self.multiple and self._is_of_sequences:
            return (value.shape[0], _padded(shape[0], self.multiple), *self.hidden_shape[1:])
        if len(shape) == 1 and not value.is_floating_point():
            raise ValueError(
                f"A batch holds {self.main_input!r} of {shape[0]} tokens a sample, the first batch had "
                f"{self.input_shape[0]}. With more than one stage this model takes sequences of one length: pad all "
                "to one (padding='max_length'), or set pipeline_parallel_size=1."
            )
        raise ValueError(
            f"A batch holds {self.main_input!r} of shape {shape} a sample, the first batch had {self.input_shape}. "
            "With more than one stage all inputs but text must have one size: resize them in the data set."
        )

    @property
    def _is_of_sequences(self) -> bool:
        return len(self.input_shape) == 1 and _padded(self.input_shape[0], self.multiple) == self.hidden_shape[0]


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class Probe:
    """What one tiny batch told about the model.

    Args:
        structure: units and who uses which parameter.
        unit_flops: forward floating-point operations of each unit on the probe.
        boundary_dtypes: dtype of the activation after each unit but the head.
        activation: shape rule at the boundaries.
        placeholders: batch entries that only the embeddings read: other values of them on later stages change no bit.
    """

    structure: Structure
    unit_flops: tuple[float, ...]
    boundary_dtypes: tuple[torch.dtype, ...]
    activation: ActivationShape
    placeholders: frozenset[str]


def probe_model(
    model: nn.Module, splitter: Splitter, compute: Compute, inputs: dict[str, Any], main_input: str
) -> Probe:
    """Trace the model and check that cutting it at every possible place changes neither result nor gradients.

    The comparison is made in full precision, whatever the run computes in.

    Args:
        compute: runs the whole model on inputs and returns a scalar to compare, the loss where there are labels.
        inputs: a tiny batch on the model's device.
        main_input: name of the input that the embeddings read.

    Raises:
        UnsupportedModelError: the split model differs from the whole one, or a loss reads what all layers say.
    """
    value = inputs.get(main_input)
    if not isinstance(value, torch.Tensor) or not value.dim():
        raise UnsupportedModelError(
            f"The batch has no tensor {main_input!r}, the main input of {type(model).__name__}, with one row a "
            f"sample; it has {sorted(inputs)}."
        )
    _refuse_loss_over_routers(model)
    structure = trace_structure(model, splitter, lambda: compute(inputs))
    chain = _Chain(StageView(model, splitter, structure), structure, compute, inputs, inputs)
    with torch.no_grad(), _said_of(model, structure):
        chain.run()
    is_text = value.dim() == 2 and not value.is_floating_point()
    multiple = _multiple(chain, value.shape[1]) if is_text else 1
    activation = ActivationShape(main_input, tuple(value.shape[1:]), tuple(chain.hidden_shape[1:]), multiple)
    _check_shape(model, chain.hidden_shape, activation.of(inputs))
    with in_full_precision(model):
        is_read = _check_split(model, splitter, structure, compute, in_float32(inputs), main_input)
    placeholders = frozenset[str]() if is_read else frozenset({main_input})
    return Probe(structure, tuple(chain.flops), tuple(chain.dtypes), activation, placeholders)


@contextmanager
def _said_of(model: nn.Module, structure: Structure) -> Iterator[None]:
    """What goes wrong where code around the layers got what a stage received, in words."""
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


def _refuse_loss_over_routers(model: nn.Module) -> None:
    if config_value(model, "output_router_logits", False):
        raise UnsupportedModelError(
            "config.output_router_logits=True adds a loss over the routers of all layers and all tokens of a batch: a "
            "stage knows the routers of its own layers, a micro-batch its own tokens, and frozen layers that are not "
            "run again tell nothing of theirs. Set it to False (with TRL: router_aux_loss_coef=0.0), or use "
            "transformers.Trainer."
        )


def _check_split(
    model: nn.Module,
    splitter: Splitter,
    structure: Structure,
    compute: Compute,
    inputs: dict[str, Any],
    main_input: str,
) -> bool:
    """Compare the split model with the whole one; the answer is whether its later stages read the main input."""
    with gradients_discarded(model):
        expected = compute(inputs)
        if expected.requires_grad:
            expected.backward()
        expected_norms = gradient_norms(model)
    found = _run_split(model, StageView(model, splitter, structure), structure, compute, inputs, inputs)
    same_loss = _is_close(float(found.loss), float(expected.detach()), LOSS_TOLERANCE)
    if not same_loss or not _norms_close(found.norms, expected_norms, GRADIENT_TOLERANCE):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives {float(found.loss):.8g} when it is split into pipeline stages and "
            f"{float(expected.detach()):.8g} when it is whole (gradient norms {_total(found.norms):.8g} and "
            f"{_total(expected_norms):.8g}). This model cannot be pipelined as it is; pass `splitter=` with a "
            "Splitter that knows it, or use transformers.Trainer."
        )
    value = inputs[main_input]
    if not value.is_floating_point():
        return True
    others = {**inputs, main_input: _noise_like(value)}
    with_others = _run_split(model, StageView(model, splitter, structure), structure, compute, inputs, others)
    return not found.has_the_bits_of(with_others)


def _noise_like(value: torch.Tensor) -> torch.Tensor:
    """Other values from the same range: whoever reads them gives something else, zeros might make no difference."""
    low, high = value.aminmax()
    return torch.where(high > low, low + (high - low) * torch.rand_like(value), value + 1)


@dataclass(frozen=True)
class _SplitRun:
    """What the model gave as a chain of stages: its loss, what the stages sent, gradients and their norms."""

    loss: torch.Tensor
    sent: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    norms: torch.Tensor

    def has_the_bits_of(self, other: _SplitRun) -> bool:
        pairs = zip([*self.sent, *self.gradients], [*other.sent, *other.gradients], strict=True)
        return all(a is b is None or (a is not None and b is not None and _same_bits(a, b)) for a, b in pairs)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _multiple(chain: _Chain, length: int) -> int:
    """Which multiples of tokens a model pads sequences to: 1 where it pads none; 0 if lengths follow another rule.

    Found with embeddings of sequences of a few other lengths.
    """

    def follows(multiple: int, lengths: list[int]) -> bool:
        return all(chain.length_for(length, each) == _padded(each, multiple) for each in lengths)

    found, other = chain.hidden_shape[1] if len(chain.hidden_shape) > 1 else 0, max(1, length - 1)
    if found == length and chain.length_for(length, other) == other:
        return 1
    longer = chain.length_for(length, found + 1)
    multiple = 0 if longer is None else longer - found
    return multiple if multiple > 1 and found % multiple == 0 and follows(multiple, [length, other, found]) else 0


def _of_length(value: Any, length: int, found: int) -> Any:
    """Repeat or cut an entry of a batch of `length` tokens so that it has `found`."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    return torch.cat([value] * -(-found // length), dim=1)[:, :found]


def _run_split(
    model: nn.Module,
    view: StageView,
    structure: Structure,
    compute: Compute,
    inputs: dict[str, Any],
    later_inputs: dict[str, Any],
) -> _SplitRun:
    with gradients_discarded(model):
        sent = _Chain(view, structure, compute, inputs, later_inputs).run()
        return _SplitRun(sent[-1], sent, [p.grad for p in _leaves(model)], gradient_norms(model))


def _check_shape(model: nn.Module, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected or len(found) < 2:
        rule = expected if found != expected else "(batch, ..., hidden)"
        raise UnsupportedModelError(
            f"{type(model).__name__} gives its layers activations of shape {found}; expected {rule}, one row a "
            "sample. Models that fold other dimensions into the batch (multiple choice) cannot be pipelined."
        )


class _NoModules(nullcontext[None]):
    """In place of what tells `FlopCounterMode` the module that runs: all is one.

    Torch's own hangs hooks on the gradients of what modules take, which fails without gradients if that is a weight.
    """

    parents: ClassVar = {"Global"}


class _Chain:
    """Runs the model as a chain of the smallest possible stages, forward and backward."""

    def __init__(
        self,
        view: StageView,
        structure: Structure,
        compute: Compute,
        inputs: dict[str, Any],
        later_inputs: dict[str, Any],
    ) -> None:
        self.view = view
        self.cuts = structure.cut_positions()
        self.compute = compute
        self.inputs = inputs
        self.later_inputs = later_inputs
        self.flops = [0.0] * structure.num_units
        self.dtypes = [torch.float32] * (structure.num_units - 1)
        self.hidden_shape: tuple[int, ...] = ()

    def length_for(self, present: int, length: int) -> int | None:
        """Positions of the activation for sequences of `length`, not `present` tokens; None if it takes none."""
        self.view.install(range(1))
        try:
            with torch.no_grad():
                self.compute({key: _of_length(value, present, length) for key, value in self.inputs.items()})
        except StageExit as stage_exit:
            return stage_exit.hidden.shape[1] if stage_exit.hidden.dim() > 1 else None
        except (IndexError, RuntimeError, ValueError):
            return None  # Longer than there are positions, say.
        finally:
            self.view.remove()
        return None

    def run(self) -> list[torch.Tensor]:
        """What each stage gives, the loss last; with the backward if there is one."""
        received: torch.Tensor | None = None
        done: list[tuple[range, torch.Tensor | None, torch.Tensor]] = []
        try:
            for start, end in zip(self.cuts, self.cuts[1:], strict=False):
                output = self._run_stage(range(start, end), received)
                done.append((range(start, end), received, output))
                received = output.detach().requires_grad_(torch.is_grad_enabled())
            if torch.is_grad_enabled():  # Without, a hook may let embeddings ask for gradients all the same.
                self._backward(done)
        finally:
            self.view.remove()
        return [output.detach() for _, _, output in done]

    def _run_stage(self, units: range, received: torch.Tensor | None) -> torch.Tensor:
        self.view.install(units)
        self.view.received = received
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        with counter:
            try:
                output = self.compute(dict(self.inputs if received is None else self.later_inputs))
            except StageExit as stage_exit:
                output = stage_exit.hidden
                self.hidden_shape = tuple(output.shape)
                self.dtypes[units[0] : units[-1] + 1] = [output.dtype] * len(units)
        self.flops[units[0]] = float(counter.get_total_flops())
        return output

    def _backward(self, done: list[tuple[range, torch.Tensor | None, torch.Tensor]]) -> None:
        gradient = None
        for units, received, output in reversed(done):
            if output.requires_grad:
                with self.view.backward_of(units, received):
                    torch.autograd.backward(output, gradient)
            gradient = None if received is None else received.grad


def gradient_norms(model: nn.Module) -> torch.Tensor:
    norms = [p.grad.float().norm() if p.grad is not None else torch.zeros((), device=p.device) for p in _leaves(model)]
    return torch.stack(norms) if norms else torch.zeros(1)


def _leaves(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.requires_grad)


def _total(norms: torch.Tensor) -> float:
    return float(norms.norm())


def _is_close(found: float, expected: float, tolerance: float) -> bool:
    both_undefined = found != found and expected != expected
    is_same = both_undefined or found == expected  # Infinities differ by nan.
    return is_same or abs(found - expected) <= tolerance * max(abs(expected), 1e-3)


def _norms_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Alike where they are numbers, and not finite in the same places."""
    are_same = (found == expected) | (found.isnan() & expected.isnan())
    differences = torch.where(are_same, 0.0, found - expected)
    return _total(differences) <= tolerance * max(_total(expected[expected.isfinite()]), 1e-3)


@contextmanager
def gradients_discarded(model: nn.Module) -> Iterator[None]:
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


_PARTS = ("_parameters", "_buffers", "_modules")
"""Where a module holds what belongs to it."""


@contextmanager
def undisturbed(model: nn.Module, is_training: bool = False) -> Iterator[None]:
    """Evaluation mode, and no trace left in any random number generator or module mode.

    After an error the modules are as before, too: some models make parts of themselves anew in their first forward,
    which draws weights, and have to do so again where Trainer goes on with them.

    Args:
        is_training: whether the outermost module says that it trains, which a loss may ask.
    """
    modes = {module: module.training for module in model.modules()}
    own = {module: (vars(module).copy(), [vars(module)[name].copy() for name in _PARTS]) for module in modes}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    model.eval()
    model.training = is_training
    try:
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    except BaseException:
        for module, (attributes, parts) in own.items():
            vars(module).clear()
            vars(module).update(attributes)
            for name, part in zip(_PARTS, parts, strict=True):
                attributes[name].clear()
                attributes[name].update(part)
        raise
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, training in modes.items():
            module.training = training
