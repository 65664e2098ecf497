"""Model that the start-up checks run on (`ProbeTarget`), and the reproducible conditions that they run it under."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_pipetransformer.compat.trainer_compat import with_attributes
from hf_pipetransformer.data.batches import SampleBatch
from hf_pipetransformer.data.effects import modes_kept
from hf_pipetransformer.data.rng import random_state_kept
from hf_pipetransformer.engine.losses import LossRule, LossScope
from hf_pipetransformer.options.refusals import keeps_statistics
from hf_pipetransformer.schedules.placement import block_of
from hf_pipetransformer.splitters.base import Splitter, config_value, main_input_of
from hf_pipetransformer.splitters.masters import HALVES, master_names
from hf_pipetransformer.splitters.quantized import float32_products, is_packed, put_in_evaluation_mode
from hf_pipetransformer.splitters.script_code import ScriptHooks, attributes_kept
from hf_pipetransformer.splitters.view import StageExit, StageView
from hf_pipetransformer.startup.twin import WHOLE, ProbeSubmodel


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.structure import Structure


MOST_GRADIENTS = 2**22
"""Largest number of elements that the checks take gradients of: the smallest parameters', 16 MiB in float32.

Parameters beyond it (vocabularies, the matrices of wide layers) pass gradients on, which the smaller ones show.
"""


@dataclass(frozen=True)
class ProbeTarget:
    """Model, its splitter, a small batch, and the computation of its loss.

    The functions of `check` and `costs` know the model through this alone. `twin` says which of its layers compute.

    Args:
        inputs: batch on the model's device.
        compute: returns the whole model's loss for some inputs and the number of items to divide by.
        count: returns the number of items of a batch that the loss averages over.
        complete: adds to a batch what the loss reads and the data set does not have, for which it may run the model.
        has_reference: True if each batch of a training first runs through the model as a frozen reference.
        scope: samples that one call of the loss sees in the run.
        rule: by which the losses of parts add up.
        shape_without_rows: returns the shape of an output for some inputs, if evaluations of the run gather it and it
            has no row for each sample.
        why_whole_head: reason why the loss of the run may not be computed in slices of the sequence; None if it may.
        hooks: the script's, which are not called; None if they are.
        without_labels: computes in place of `compute` if that raises; None to raise.
    """

    model: nn.Module
    splitter: Splitter
    inputs: SampleBatch
    compute: Callable[[dict[str, Any], int], torch.Tensor]
    count: Callable[[Any], int]
    twin: ProbeSubmodel = WHOLE
    complete: Callable[[SampleBatch], SampleBatch] = SampleBatch.of
    has_reference: bool = False
    scope: LossScope = LossScope.PARTS
    rule: LossRule = LossRule.MEAN
    shape_without_rows: Callable[[SampleBatch], str | None] = lambda _inputs: None
    why_whole_head: str | None = None
    without_labels: Callable[[dict[str, Any], int], torch.Tensor] | None = None
    hooks: ScriptHooks | None = None

    def calling_hooks_below_head(self, structure: Structure) -> AbstractContextManager[None]:
        """Call the script's hooks that a run calls by micro-batches: of layers, embeddings and what is around them."""
        if self.hooks is None:
            return nullcontext()
        parts = [*structure.layers, *structure.entries]
        inside, own = [module for part in parts for module in part.modules()], {id(part) for part in parts}
        below_root = [module for module in self.model.modules() if module is not self.model]
        return self.hooks.on([*inside, *(m for m in below_root if own & {id(each) for each in m.modules()})])

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the loss of `inputs`, divided by the number of items of the whole batch `self.inputs`."""
        return self.compute(inputs, self.count(self.inputs))

    @property
    def main_input(self) -> str:
        """Name of the input that the embeddings read."""
        return main_input_of(self.model)

    @property
    def is_text(self) -> bool:
        tokens = self.inputs[self.main_input]
        return tokens.dim() == 2 and not tokens.is_floating_point()

    @property
    def has_padded_texts(self) -> bool:
        """True if each sample is a row of tokens, or some rows."""
        return self.is_text and self.inputs.sequences is None

    @property
    def pad_token_id(self) -> int:
        media = self.splitter.media(self.model)
        # Around a smaller language model that of the family may be beyond its words (Idefics3).
        return config_value(self.model if media is None else media.decoder, "pad_token_id") or 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the twin reads."""
        return self.twin.parameters(self.model)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @contextmanager
    def view(self, structure: Structure) -> Iterator[StageView]:
        """Yield a view of the model's stages, which leaves the model as it was."""
        view = StageView(self.model, self.splitter, structure)
        try:
            yield view
        finally:
            view.remove()


def run_stage(
    view: StageView, blocks: range, received: torch.Tensor | None, forward: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Run `forward` on `blocks` alone; return their output, or the loss if they include the head.

    `received` stays set for a backward in which the model's own checkpointing reruns layers.
    """
    view.narrow(blocks)
    view.received = received
    try:
        return forward()
    except StageExit as stage_exit:
        # It holds the frames of the forward, and with them their tensors.
        stage_exit.__traceback__ = None
        return stage_exit.hidden


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module or the config has a dropout or jitter rate above 0."""
    config = getattr(model, "config", None)
    return _drops(*model.modules(), *([config] if hasattr(config, "__dict__") else []))


def _drops(*holders: Any) -> bool:
    rates = [value for holder in holders for name, value in vars(holder).items() if "drop" in name or "jitter" in name]
    # Torch's own modules name their rate `p`.
    rates += [holder.p for holder in holders if isinstance(holder, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def dropout_from(model: nn.Module, structure: Structure) -> int:
    """Return from which number of frozen layers on some that the script froze compute otherwise in evaluation mode.

    By dropout, or by statistics of batches.

    Returns:
        The number of layers plus 1 if there are none.
    """
    named = model.named_parameters()
    trained = {
        block_of(block) for name, p in named if p.requires_grad for block in structure.blocks_of_parameter[name]
    }
    parts = [structure.entries, *([layer] for layer in structure.layers)]
    random = (
        i
        for i, part in enumerate(parts)
        if i not in trained
        and any(_drops(module) or keeps_statistics(module) for own in part for module in own.modules())
    )
    # The embeddings freeze with the first layer.
    return max(1, next(random, len(parts)))


def num_frozen_by_user(model: nn.Module, structure: Structure) -> int:
    """Return the number of leading layers that the script froze; 0 if the embeddings are trained."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    # A weight that several blocks use is trained with the first of them.
    first = min((structure.blocks_of_parameter[name][0] for name in trained), default=structure.num_blocks - 1)
    return max(0, block_of(first) - 1)


def gradient_norms(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the norm of each trained parameter's gradient, 0 where there is none."""
    trained = [p for p in parameters if p.requires_grad]
    # In float32: half precision has three digits at most, and the checks compare four.
    norms = [torch.zeros((), device=p.device) if p.grad is None else p.grad.float().norm() for p in trained]
    return torch.stack(norms) if norms else torch.zeros(1)


@contextmanager
def gradients_discarded(model: nn.Module) -> Iterator[None]:
    """Enable gradients inside the context; on exit, put back those that the parameters had."""
    # Kept, not zeroed: a script may be between two backwards of its own.
    kept = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in kept:
        parameter.grad = None
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


_PARTS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""Attributes of a module that hold parameters, buffers, children and hooks."""


@contextmanager
def undisturbed(model: nn.Module, is_training: bool = False) -> Iterator[None]:
    """Put the model into evaluation mode, and restore RNG states, modes and what the script's modules hold on exit.

    On an error the modules' attributes are restored too: some models build parts of themselves, with random weights,
    in their first forward, and must do it again when a plain Trainer goes on with them.

    Args:
        is_training: value of `model.training` on the outermost module, which a loss may read.
    """
    own = {
        module: (vars(module).copy(), {name: vars(module)[name].copy() for name in _PARTS if name in vars(module)})
        for module in model.modules()
    }
    try:
        # Of the model's own GPU alone: the states of all GPUs would allocate memory on each.
        with modes_kept(own), random_state_kept(next(model.parameters()).device):
            put_in_evaluation_mode(model)
            model.training = is_training
            with attributes_kept(model):
                yield
    except BaseException:
        for module, (attributes, parts) in own.items():
            # The dictionary itself stays: hooks and wrappers may hold references to it.
            vars(module).clear()
            vars(module).update(attributes)
            for name, part in parts.items():
                attributes[name].clear()
                attributes[name].update(part)
        raise


@contextmanager
def in_full_precision(
    model: nn.Module, twin: ProbeSubmodel = WHOLE, inputs: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Run the model in float32 inside the context, with bitwise reproducible results.

    Replaces half-precision weights by float32 copies (the originals come back untouched), disables autocast even where
    a user's loss enables it, disables TF32, and replaces attention kernels that do not accept float32. Takes gradients
    of at most `MOST_GRADIENTS` elements. With `inputs`, tokens that are not in them have zero vectors in large
    vocabularies.
    """
    with ExitStack() as stack:
        rows = {} if inputs is None else _rows_in_use(model, inputs)
        stack.enter_context(_float32_weights(twin.tensors(model), rows))
        stack.enter_context(_few_gradients(twin.parameters(model)))
        stack.enter_context(_without_autocast())
        stack.enter_context(_float32_products())
        stack.enter_context(float32_products(model))
        stack.enter_context(_float32_attention(model))
        if any(parameter.is_cuda for parameter in model.parameters()):
            stack.enter_context(_deterministic())
        yield


def in_float32(batch: SampleBatch) -> SampleBatch:
    """Return the batch with its half-precision tensors cast to float32."""
    return batch.mapped(lambda value: value.float() if value.dtype in HALVES else value)


def with_masters(model: nn.Module, twin: ProbeSubmodel, inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Run the twin inside with the weights that `cast_masters` gives a stage."""
    names, named = master_names(model), chain(model.named_parameters(), model.named_buffers())
    own = [tensor for name, tensor in named if name in names and id(tensor) not in twin.passing]
    return _float32_weights(own, _rows_in_use(model, inputs))


@contextmanager
def _float32_weights(tensors: Iterable[torch.Tensor], rows: Mapping[int, torch.Tensor]) -> Iterator[None]:
    own = {tensor: tensor.data for tensor in tensors if tensor.dtype in HALVES and not is_packed(tensor)}
    gradients = {tensor: tensor.grad for tensor in own}
    try:
        for tensor, data in own.items():
            tensor.grad = None
            # Only host memory has pages that take none before they are written.
            is_vocabulary = data.dim() == 2 and data.is_cpu
            tensor.data = _with_rows(data, rows[len(data)]) if is_vocabulary and len(data) in rows else data.float()
        yield
    finally:
        for tensor, data in own.items():
            tensor.grad = None
            tensor.data = data
            # After the data: torch refuses a gradient of another dtype than its tensor's.
            tensor.grad = gradients[tensor]


_SMALL_VOCABULARY = 2**12
_SPECIAL_TOKENS = 2**10


def _rows_in_use(model: nn.Module, inputs: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Map sizes of large vocabularies to the tokens that a batch names; the first ones are models' special tokens."""
    # By number of rows, so that the matrix of a head over the same words is found as well.
    sizes = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    tokens = [value.flatten().cpu() for value in inputs.values() if isinstance(value, torch.Tensor)]
    named = torch.cat([torch.arange(_SPECIAL_TOKENS), *(each for each in tokens if each.dtype is torch.int64)])
    return {size: named[(named >= 0) & (named < size)].unique() for size in sizes if size > _SMALL_VOCABULARY}


def _with_rows(data: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return a float32 matrix of some rows of `data`, zeros elsewhere: two vocabularies can outweigh all layers.

    Mapped pages take no memory before they are written, unless a huge page is made of them for a single row.
    """
    zeros = mmap.mmap(-1, 4 * data.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux.
        zeros.madvise(mmap.MADV_NOHUGEPAGE)
    copy = torch.frombuffer(zeros, dtype=torch.float32).view(data.shape)
    copy[rows] = data[rows].float()
    return copy


@contextmanager
def _few_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    trained = sorted((p for p in parameters if p.requires_grad), key=lambda p: p.numel())
    num_elements = accumulate(p.numel() for p in trained)
    # The smallest is always kept: without any gradient nothing would be compared.
    left_out = [p for p, total in list(zip(trained, num_elements, strict=True))[1:] if total > MOST_GRADIENTS]
    for parameter in left_out:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in left_out:
            parameter.requires_grad_()


@contextmanager
def _without_autocast() -> Iterator[None]:
    # A user's loss may enter its own autocast context: replacing the switch keeps that from taking effect.
    switch = {"set_autocast_enabled": lambda *_: None}
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), with_attributes(torch, switch):
        yield


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
    own = config_value(model, "_attn_implementation")
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
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # Other kernels of attention add in an order that may change from run to run in their backward.
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        # Not an error: a model may have operations without a deterministic kernel.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
