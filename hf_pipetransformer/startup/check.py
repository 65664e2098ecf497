"""Start-up check, in deterministic float32, that the split model has the loss and gradients of the whole one."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_pipetransformer.splitters.base import Splitter, UnsupportedModelError, config_value
from hf_pipetransformer.splitters.structure import ActivationShape, Probe, Structure, padded_length, trace_structure
from hf_pipetransformer.splitters.view import StageExit, StageView


_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Run the model in float32 inside the context, with bitwise reproducible results.

    Replaces half-precision weights by float32 copies (the originals come back untouched), disables autocast even where
    a user's loss enables it, disables TF32, and replaces attention kernels that do not accept float32.
    """
    with ExitStack() as stack:
        stack.enter_context(_float32_weights(model))
        stack.enter_context(_without_autocast())
        stack.enter_context(_float32_products())
        stack.enter_context(_float32_attention(model))
        if any(parameter.is_cuda for parameter in model.parameters()):
            stack.enter_context(_deterministic())
        yield


def in_float32(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its half-precision tensors cast to float32."""
    return {
        key: value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value
        for key, value in inputs.items()
    }


@contextmanager
def _float32_weights(model: nn.Module) -> Iterator[None]:
    own = {tensor: tensor.data for tensor in [*model.parameters(), *model.buffers()] if tensor.dtype in _HALVES}
    gradients = {tensor: tensor.grad for tensor in own}
    try:
        for tensor, data in own.items():
            tensor.grad = None
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in own.items():
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradients[tensor]


@contextmanager
def _without_autocast() -> Iterator[None]:
    switch = torch.set_autocast_enabled
    with ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        # A user's loss may enter its own autocast context: replacing the switch keeps that from taking effect.
        torch.set_autocast_enabled = lambda *_: None
        try:
            yield
        finally:
            torch.set_autocast_enabled = switch


@contextmanager
def _float32_products() -> Iterator[None]:
    backends: Any = torch.backends
    kernels = [
        *(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn),
        *(backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn),
    ]
    own = [kernel.fp32_precision for kernel in kernels]
    try:
        # A CTC loss reads cuDNN's legacy switch (`torch.backends.cudnn.flags`), and torch raises if it disagrees with
        # the newer `fp32_precision`.
        allowed_tf32 = backends.cudnn.allow_tf32
    except RuntimeError:
        allowed_tf32 = None  # The user set the two switches to different values.
    try:
        if allowed_tf32 is not None:
            backends.cudnn.allow_tf32 = False
        for kernel in kernels:
            kernel.fp32_precision = "ieee"
        yield
    finally:
        if allowed_tf32 is not None:
            backends.cudnn.allow_tf32 = allowed_tf32
        for kernel, precision in zip(kernels, own, strict=True):
            kernel.fp32_precision = precision


@contextmanager
def _float32_attention(model: Any) -> Iterator[None]:
    """Replace flash attention, which accepts half precision only."""
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if own is None or "flash" not in own:
        yield
        return
    try:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        yield
    finally:
        model.set_attn_implementation(own)


@contextmanager
def _deterministic() -> Iterator[None]:
    was_on, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)


LOSS_TOLERANCE = 1e-5
"""Largest relative difference between the split and the whole model's loss that counts as rounding."""
GRADIENT_TOLERANCE = 1e-4
"""Largest relative difference of the gradient norms that counts as rounding."""

Compute = Callable[[dict[str, Any]], torch.Tensor]


def probe_model(
    model: nn.Module, splitter: Splitter, compute: Compute, inputs: dict[str, Any], main_input: str
) -> Probe:
    """Trace the model and check in float32 that cutting it at every possible place keeps its loss and gradients.

    Args:
        compute: runs the whole model on inputs and returns a scalar to compare, the loss if there are labels.
        inputs: a tiny batch on the model's device.

    Raises:
        UnsupportedModelError: the split model differs from the whole one, or its loss reads the routers of all layers.
    """
    value = inputs.get(main_input)
    if not isinstance(value, torch.Tensor) or not value.dim():
        raise UnsupportedModelError(
            f"The batch has no tensor {main_input!r}, the main input of {type(model).__name__}, with one row a "
            f"sample; it has {sorted(inputs)}."
        )
    _refuse_loss_over_routers(model)
    is_text = value.dim() == 2 and not value.is_floating_point()
    structure = trace_structure(model, splitter, lambda: compute(inputs), is_text)
    chain = _Chain(StageView(model, splitter, structure), structure, compute, inputs, inputs)
    with torch.no_grad(), _said_of(model, structure):
        chain.run()
    multiple = _multiple(chain, value.shape[1]) if is_text else 1
    activation = ActivationShape(main_input, tuple(value.shape[1:]), tuple(chain.hidden_shape[1:]), multiple)
    _check_shape(model, chain.hidden_shape, activation.of(inputs))
    with in_full_precision(model):
        is_read = _check_split(model, splitter, structure, compute, in_float32(inputs), main_input)
    placeholders = frozenset[str]() if is_read else frozenset({main_input})
    return Probe(structure, tuple(chain.flops), tuple(chain.dtypes), activation, placeholders)


@contextmanager
def _said_of(model: nn.Module, structure: Structure) -> Iterator[None]:
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
    """Compare the split model with the whole one; return True if later stages may read the main input."""
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
    if not structure.has_only_activations:
        forms = replace(structure, stand_ins=structure.other_stand_ins)
        with_other_forms = _run_split(model, StageView(model, splitter, forms), forms, compute, inputs, inputs)
        if not found.has_the_bits_of(with_other_forms):
            raise UnsupportedModelError(
                f"Code of {type(model).__name__} behind its embeddings reads what they give beside the activation (a "
                "mask or a length, say), which a later stage does not have. Compute it from the inputs of the model "
                "instead, or use transformers.Trainer."
            )
    value = inputs[main_input]
    if not value.is_floating_point():
        return True
    others = {**inputs, main_input: _noise_like(value)}
    with_others = _run_split(model, StageView(model, splitter, structure), structure, compute, inputs, others)
    return not found.has_the_bits_of(with_others)


def _noise_like(value: torch.Tensor) -> torch.Tensor:
    """Return other values from the same range. Zeros could leave the result unchanged even where they are read."""
    low, high = value.aminmax()
    return torch.where(high > low, low + (high - low) * torch.rand_like(value), value + 1)


@dataclass(frozen=True)
class _SplitRun:
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
    """Return the multiple that the model pads sequences to: 1 if it does not pad, 0 if lengths follow another rule."""

    def follows(multiple: int, lengths: list[int]) -> bool:
        return all(chain.length_for(length, each) == padded_length(each, multiple) for each in lengths)

    found, other = chain.hidden_shape[1] if len(chain.hidden_shape) > 1 else 0, max(1, length - 1)
    if found == length and chain.length_for(length, other) == other:
        return 1
    # The shortest length that is padded to the same one. No longer ones are tried: there may be no positions for them,
    # which ends a process on a GPU.
    shortest, too_short = length, 0
    while shortest - too_short > 1:
        middle = (shortest + too_short) // 2
        shortest, too_short = (middle, too_short) if chain.length_for(length, middle) == found else (shortest, middle)
    multiple = found - too_short
    lengths = [length, shortest, max(1, too_short)]
    return multiple if multiple > 1 and found % multiple == 0 and follows(multiple, lengths) else 0


def _of_length(value: Any, length: int, found: int) -> Any:
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
    """Replacement for the module tracker of `FlopCounterMode` that counts everything under one module.

    Torch's own tracker hooks the gradients of module inputs, which fails under `no_grad` if an input is a weight.
    """

    parents: ClassVar = {"Global"}


class _Chain:
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
        self.flops = [0.0] * structure.num_blocks
        self.dtypes = [torch.float32] * (structure.num_blocks - 1)
        self.hidden_shape: tuple[int, ...] = ()

    def length_for(self, present: int, length: int) -> int | None:
        """Return the activation's length for sequences of `length` instead of `present` tokens; None if that fails."""
        self.view.install(range(1))
        try:
            with torch.no_grad():
                self.compute({key: _of_length(value, present, length) for key, value in self.inputs.items()})
        except StageExit as stage_exit:
            return stage_exit.hidden.shape[1] if stage_exit.hidden.dim() > 1 else None
        except (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception:
            return None  # For example, a model of one length that says so.
        finally:
            self.view.remove()
        return None

    def run(self) -> list[torch.Tensor]:
        """Return each stage's output, the loss last; run the backward too if gradients are enabled."""
        received: torch.Tensor | None = None
        done: list[tuple[range, torch.Tensor | None, torch.Tensor]] = []
        try:
            for start, end in zip(self.cuts, self.cuts[1:], strict=False):
                output = self._run_stage(range(start, end), received)
                done.append((range(start, end), received, output))
                received = output.detach().requires_grad_(torch.is_grad_enabled())
            if torch.is_grad_enabled():  # Outputs can require grad under no_grad (embedding hooks).
                self._backward(done)
        finally:
            self.view.remove()
        return [output.detach() for _, _, output in done]

    def _run_stage(self, blocks: range, received: torch.Tensor | None) -> torch.Tensor:
        self.view.install(blocks)
        self.view.received = received
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        with counter:
            try:
                output = self.compute(dict(self.inputs if received is None else self.later_inputs))
            except StageExit as stage_exit:
                output = stage_exit.hidden
                self.hidden_shape = tuple(output.shape)
                self.dtypes[blocks[0] : blocks[-1] + 1] = [output.dtype] * len(blocks)
        self.flops[blocks[0]] = float(counter.get_total_flops())
        return output

    def _backward(self, done: list[tuple[range, torch.Tensor | None, torch.Tensor]]) -> None:
        gradient = None
        for blocks, received, output in reversed(done):
            if output.requires_grad:
                with self.view.backward_of(blocks, received):
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
    is_same = both_undefined or found == expected  # inf - inf is nan.
    return is_same or abs(found - expected) <= tolerance * max(abs(expected), 1e-3)


def _norms_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """True if the norms are close where finite, and not finite in the same places."""
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


@contextmanager
def undisturbed(model: nn.Module, is_training: bool = False) -> Iterator[None]:
    """Put the model into evaluation mode, and restore RNG states and module modes on exit.

    On an error the modules' attributes are restored too: some models build parts of themselves, with random weights,
    in their first forward, and must do it again when a plain Trainer goes on with them.

    Args:
        is_training: value of `model.training` on the outermost module, which a loss may read.
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
