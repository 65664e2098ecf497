"""Tracing of a model on a real batch: its layers, the blocks that use each parameter, and activation shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_pipetransformer.schedules import placement as blocks
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import Media, Splitter, UnsupportedModelError, layers_of


StandIn = Callable[[torch.Tensor], Any]
"""Function from the received activation to a replacement for the output of an entry module."""


@dataclass(frozen=True)
class Structure:
    """A model as a chain of blocks (see `Layout`).

    Args:
        layers: the model's blocks, bottom first.
        cuts_inside_layers: True if a stage boundary may fall inside a layer.
        entries: the disjoint modules that produce the activation entering the first layer, the one that returns it
            last. On a stage without the embeddings the last one returns the received activation and the others their
            `stand_ins`. Anything else that runs before the first layer (position biases, rotary embeddings) runs on
            every stage.
        stand_ins: per entry, a function that turns the received activation into a value shaped like the entry's
            output, because the code that unpacks that output or reads its shape runs on every stage.
        other_stand_ins: the same with other values, by which the self-check sees whether anything reads values.
        has_only_activations: True if every entry returns the activation alone, so that both are the same.
        returns_tuple: length of the tuple or list that a layer returns; 0 for a bare tensor.
        returns_list: True if it is a list.
        blocks_of_parameter: parameter name to the blocks that use it, in increasing order; more than one for tied
            weights and relative position biases.
        blocks_of_buffer: the same for buffers, including non-persistent ones.
        changes_in_place: True if the activation entering a layer or leaving the last one is modified in place.
        enters_layers: True if no module returns the activation entering the first layer, because code around the
            modules computes it (OPT adds two embeddings). The received activation then replaces the layer's input.
        media: what the embeddings encode beside tokens. Later stages run without any, as on text alone.
        changed_before: number of the last layer before which code around the layers changes the activation; 0 if none
            does. With media such code needs what is encoded, so that the first stage has all of it.
    """

    layers: list[nn.Module]
    cuts_inside_layers: bool
    entries: list[nn.Module]
    returns_tuple: int
    blocks_of_parameter: dict[str, tuple[int, ...]]
    blocks_of_buffer: dict[str, tuple[int, ...]]
    changes_in_place: bool
    enters_layers: bool = False
    stand_ins: list[StandIn] = field(default_factory=list)
    other_stand_ins: list[StandIn] = field(default_factory=list)
    has_only_activations: bool = True
    returns_list: bool = False
    media: Media | None = None
    changed_before: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_blocks(self) -> int:
        return blocks.num_blocks(self.num_layers)

    def cut_positions(self) -> list[int]:
        """Return the block indices before which a stage may begin, and the end of the chain."""
        lowest = blocks.attention_of(self.changed_before) if self.media is not None and self.changed_before else 0
        return [block for block in self.block_starts() if block == 0 or block > lowest]

    def block_starts(self) -> list[int]:
        """Return the block indices between which the model can be cut at all, and the end of the chain."""
        step = 1 if self.cuts_inside_layers else 2
        return [0, *range(1, self.num_blocks - 1, step), self.num_blocks - 1, self.num_blocks]


class _Trace(TorchFunctionMode):
    """Record of one forward: the modules around the layers, and after how many layers each parameter was read."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        self._index_of = {id(layer): index for index, layer in enumerate(layers)}
        self._inside = {id(module) for layer in layers for module in layer.modules()}
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._stack: list[nn.Module] = []
        self.spanning: list[nn.Module] = []
        self.before: list[tuple[nn.Module, nn.Module | None]] = []
        self.after: list[tuple[nn.Module, int]] = []
        self.outputs: dict[int, tuple[Any, int | None]] = {}
        self.versions: list[tuple[Any, int | None]] = []
        self.layer_calls: list[int] = []
        self.layer_outputs: list[Any] = []
        self.reads: dict[int, int] = {}
        self.reads_between: set[int] = set()
        self._reads_since_layer: list[int] = []
        self.changes_between: list[tuple[int, int]] = []
        self.changed_before = 0

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        handles: list[Any] = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) in self._index_of:
            hidden = args[0] if args else kwargs.get("hidden_states")
            self._enter_layer(hidden)
            self.versions.append((hidden, _version(hidden)))
            self.layer_calls.append(self._index_of[id(module)])
        elif id(module) not in self._inside:
            self._stack.append(module)

    def _enter_layer(self, hidden: Any) -> None:
        """Note that the next layer begins with `hidden`, and settle which parameters were read since the last one."""
        if not self.layer_calls:
            # What encloses the first layer encloses all of them.
            self.spanning = list(self._stack)
        last, version = self.versions[-1] if self.versions else (None, None)
        # It is unchanged if it is the very tensor that the last layer gave, and nobody has written to it since.
        if self.layer_outputs and not (hidden is last and _version(hidden) == version):
            self.changed_before = len(self.layer_outputs)
            if self._reads_since_layer:
                self.changes_between.append((self.changed_before, self._reads_since_layer[0]))
        self.reads_between.update(self._reads_since_layer)
        self._reads_since_layer = []

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if id(module) in self._index_of:
            self.layer_outputs.append(output)
            hidden = output[0] if isinstance(output, (tuple, list)) else output
            self.versions.append((hidden, _version(hidden)))
        elif id(module) not in self._inside:
            self._stack.pop()
            if not self.layer_calls:
                self.before.append((module, self._stack[-1] if self._stack else None))
                self.outputs[id(module)] = output, _version(output)
            elif module not in self.spanning:
                self.after.append((module, len(self.layer_calls)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        result = func(*args, **(kwargs or {}))
        is_between_layers = 0 < len(self.layer_outputs) == len(self.layer_calls)
        # Functions such as `cat` get their tensors in a list.
        for value in chain.from_iterable(each if isinstance(each, (list, tuple)) else (each,) for each in given):
            if id(value) in self._parameters:
                self.reads[id(value)] = len(self.layer_outputs)
                # Reading only a shape or dtype needs no values, so it works on every stage.
                gives_values = isinstance(result, (torch.Tensor, list, tuple)) and not isinstance(result, torch.Size)
                if is_between_layers and gives_values:
                    self._reads_since_layer.append(id(value))
        return result


def trace_structure(
    model: nn.Module, splitter: Splitter, run_forward: Callable[[], Any], numbers_vary: bool = False
) -> Structure:
    """Run the model once with hooks and read its structure.

    Args:
        run_forward: runs the whole model on a small batch, without gradient.
        numbers_vary: numbers that the embeddings give beside the activation follow from the batch, as those of texts
            do; images have one size in a run.

    Raises:
        UnsupportedModelError: the layers do not run once each in order, or a weight is applied between two of them.
    """
    layers = layers_of(splitter, bare_model(model))
    trace = _Trace(model, layers)
    with torch.no_grad(), trace.hooked(model), trace:
        run_forward()
    _check_order(model, layers, trace)
    # A module that runs several times counts where it runs last.
    ran = [module for module, parent in trace.before if parent in trace.spanning]
    outer = list({id(module): module for module in reversed(ran)}.values())[::-1]
    entered, entered_version = trace.versions[0]
    hidden_shape = getattr(entered, "shape", torch.Size())
    # What was written to after its module returned it is not what enters the layers.
    unchanged = {key: output for key, (output, version) in trace.outputs.items() if version == entered_version}
    makers = [i for i, module in enumerate(outer) if unchanged.get(id(module)) is entered]
    if makers:
        below = [each for each in outer[: makers[-1]] if _is_activation(each, trace.outputs, hidden_shape)]
        entries = [*below, outer[makers[-1]]]
    else:
        # The code around them adds what several modules give: those with weights need the first stage.
        entries = [module for module in outer if any(True for _ in module.parameters())]
    beside = [module for module in outer if module not in entries]
    outputs, first_output = [trace.outputs[id(entry)][0] for entry in entries], trace.layer_outputs[0]
    users, media = _users(splitter, layers, entries, beside, trace), splitter.media(model)
    if media is not None:
        # All that encodes media, also what no sample of this batch had.
        inside = {id(parameter) for parameter in media.decoder.parameters()}
        encoders = (id(parameter) for parameter in media.module.parameters())
        users |= {key: (blocks.EMBEDDINGS,) for key in encoders if key not in inside}
        # On every stage transformers takes the device of the first parameter for that of the model.
        users[id(next(media.module.parameters()))] = tuple(range(blocks.head_of(len(layers)) + 1))
    # Modules that never ran (an unused pooler) go to the head: some stage must own them when the model is saved.
    head = (blocks.head_of(len(layers)),)
    others = (torch.Tensor, bool, int, float) if numbers_vary else (torch.Tensor,)
    return Structure(
        layers=layers,
        cuts_inside_layers=splitter.cuts_inside_layers,
        entries=entries,
        returns_tuple=len(first_output) if isinstance(first_output, (tuple, list)) else 0,
        returns_list=isinstance(first_output, list),
        blocks_of_parameter={name: users.get(id(p), head) for name, p in model.named_parameters()},
        blocks_of_buffer={name: users.get(id(b), head) for name, b in model.named_buffers()},
        changes_in_place=any(_version(value) != version for value, version in trace.versions),
        enters_layers=not makers,
        stand_ins=[_stand_in(output, hidden_shape) for output in outputs],
        other_stand_ins=[_stand_in(output, hidden_shape, others) for output in outputs],
        has_only_activations=all(getattr(output, "shape", None) == hidden_shape for output in outputs),
        media=media,
        changed_before=trace.changed_before,
    )


def _check_order(model: nn.Module, layers: list[nn.Module], trace: _Trace) -> None:
    """Check that the layers ran once each in order, with nothing that changes the activation between two of them."""
    name, num_layers = type(model).__name__, len(layers)
    passes = len(trace.layer_calls) // num_layers
    if passes > 1 and trace.layer_calls == list(range(num_layers)) * passes:
        raise UnsupportedModelError(
            f"One loss runs {name} {passes} times, expected once: leave out what has it run again, as "
            "label_smoothing_factor and compute_loss_func do with SFTTrainer."
        )
    if not trace.layer_calls:
        raise UnsupportedModelError(
            f"{name} calls none of its {num_layers} layers as a module: it calls their `forward` itself, as "
            "SqueezeBERT does, or does not run them for this batch. Expected `layer(hidden, ...)` once each, in order."
        )
    if trace.layer_calls != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{name} ran its layers in the order {trace.layer_calls}: expected each of {num_layers} once, in order. "
            "Pass `splitter=` with a Splitter whose layers are in the order in which they run, or use "
            "transformers.Trainer."
        )
    if trace.changes_between:
        index, key = trace.changes_between[0]
        weight = next(weight for weight, parameter in model.named_parameters() if id(parameter) == key)
        raise UnsupportedModelError(
            f"{name} reads {weight} between layers {index - 1} and {index}, and changes the activation that goes from "
            "one to the other. Each stage runs such code for the layers of others too: let it run inside a layer, or "
            "use transformers.Trainer."
        )


def _is_activation(module: nn.Module, outputs: dict[int, tuple[Any, int | None]], hidden_shape: torch.Size) -> bool:
    """True if the module has weights or an output shaped like the hidden states: only the first stage can run it.

    Rotary embeddings have neither, and run on every stage.
    """
    output = outputs[id(module)][0]
    values = output if isinstance(output, (tuple, list)) else [output]
    is_like_hidden = any(isinstance(value, torch.Tensor) and value.shape == hidden_shape for value in values)
    return is_like_hidden or any(True for _ in module.parameters())


def _stand_in(output: Any, hidden_shape: torch.Size, others: tuple[Any, ...] = ()) -> StandIn:
    """Return a function that makes a value structured like `output` from the received activation.

    Tensors of the hidden states' shape become the activation, others zeros with its batch size and length. What is of
    the types `others` gets another value, tensors ones: whoever reads their values, and not only their form, then
    computes something else.
    """
    if isinstance(output, torch.Tensor):
        shape, dtype, fill = output.shape, output.dtype, int(torch.Tensor in others)
        # A copy, because the code after the entry may write to it.
        if shape == hidden_shape:
            return lambda received: received.detach().clone()
        # The axis of the activation that each axis follows, or None. Position embeddings, for example, have no batch
        # dimension: their length follows all the same.
        offset = len(hidden_shape) - len(shape) if shape == hidden_shape[-len(shape) :] else 0
        axes = [
            axis + offset if offset or (axis < 2 and hidden_shape[axis : axis + 1] == (size,)) else None
            for axis, size in enumerate(shape)
        ]
        return lambda received: torch.full(
            [size if axis is None else received.shape[axis] for axis, size in zip(axes, shape, strict=True)],
            fill,
            dtype=dtype,
            device=received.device,
        )
    if isinstance(output, Mapping):
        # A `ModelOutput` of transformers is constructed with keyword arguments.
        kind = type(output)
        named = {key: _stand_in(value, hidden_shape, others) for key, value in output.items()}
        return lambda received: kind(**{key: make(received) for key, make in named.items()})
    if isinstance(output, (tuple, list)):
        sequence, parts = type(output), [_stand_in(value, hidden_shape, others) for value in output]
        if sequence not in (tuple, list):  # A named tuple.
            return lambda received: sequence(*(make(received) for make in parts))
        return lambda received: sequence(make(received) for make in parts)
    if isinstance(output, others):
        changed = not output if isinstance(output, bool) else output + 1
        return lambda received: changed
    return lambda received: output


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, torch.Tensor) else None


def _users(
    splitter: Splitter,
    layers: list[nn.Module],
    entries: list[nn.Module],
    beside: list[nn.Module],
    trace: _Trace,
) -> dict[int, tuple[int, ...]]:
    """Map the id of every used parameter and buffer to its blocks; `beside` are modules that run on every stage."""
    head = blocks.head_of(len(layers))
    everywhere = range(head + 1)
    users: dict[int, set[int]] = {}

    def add(module: nn.Module, where: Iterable[int], recurse: bool = True) -> None:
        for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
            users.setdefault(id(tensor), set()).update(where)

    for entry in entries:
        add(entry, [blocks.EMBEDDINGS])
    for index, layer in enumerate(layers):
        attention, mlp = blocks.attention_of(index), blocks.mlp_of(index)
        of_mlp = {id(tensor) for part in splitter.mlp_parts(layer) for tensor in _tensors(part)}
        for tensor in _tensors(layer):
            users.setdefault(id(tensor), set()).add(mlp if id(tensor) in of_mlp else attention)
    for module, num_layers_before in trace.after:
        # Code between two layers runs on every stage, also on those that have neither of them.
        add(module, [head] if num_layers_before == len(layers) else everywhere, recurse=False)
    for key, num_layers_before in trace.reads.items():
        if num_layers_before == len(layers):
            users.setdefault(key, set()).add(head)  # For example a tied embedding that the head reads directly.
    for key in trace.reads_between:
        users.setdefault(key, set()).update(everywhere)
    for module in beside:
        add(module, everywhere)
    for module in trace.spanning:
        # Any block may use a parameter that sits directly on a module around the stack.
        add(module, everywhere, recurse=False)
    # The same goes for a module next to the layers that never ran: its weight is read without calling it (DeBERTa).
    after = [module for module, _ in trace.after]
    ran = {id(part) for module in [*layers, *entries, *beside, *after] for part in module.modules()}
    for module in trace.spanning[-1].modules():
        if id(module) not in ran:
            add(module, everywhere, recurse=False)
    return {key: tuple(sorted(where)) for key, where in users.items()}


def _tensors(part: nn.Module | nn.Parameter) -> list[torch.Tensor]:
    return [part] if isinstance(part, nn.Parameter) else [*part.parameters(), *part.buffers()]


@dataclass(frozen=True)
class ActivationShape:
    """Rule that derives the activation shape at the stage boundaries from a batch.

    Args:
        input_shape: the main input's shape in the probe, without the sample dimension.
        hidden_shape: the activation's shape in the probe, without the sample dimension: `(seq, hidden)`.
        multiple: the model pads sequences to a multiple of this (Longformer); 0 if only the probe's length is known.
    """

    main_input: str
    input_shape: tuple[int, ...]
    hidden_shape: tuple[int, ...]
    multiple: int = 1

    @property
    def changes_length(self) -> bool:
        """True if the activation of a text may have another length than its number of tokens."""
        return len(self.input_shape) == 1 and self.multiple != 1

    def of(self, inputs: dict[str, Any]) -> tuple[int, ...]:
        """Return the activation's shape `(batch, seq, hidden)` for a batch.

        Raises:
            ValueError: the main input is missing, or of a size or length that the model does not take.
        """
        value = inputs.get(self.main_input)
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"The batch has no tensor {self.main_input!r}, the model's main input; found {sorted(inputs)}."
            )
        shape = tuple(value.shape[1:])
        # For the shape of the probe the answer is known, whatever the model does to lengths.
        if shape == self.input_shape:
            return (value.shape[0], *self.hidden_shape)
        if len(shape) == 1 and self.multiple and self._is_of_sequences:
            return (value.shape[0], padded_length(shape[0], self.multiple), *self.hidden_shape[1:])
        # A sound has one dimension too, but no tokens to be padded.
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
        return len(self.input_shape) == 1 and padded_length(self.input_shape[0], self.multiple) == self.hidden_shape[0]


def padded_length(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class Probe:
    """Result of running the model on one tiny batch at start-up.

    Args:
        block_flops: forward floating-point operations of each block, for the whole probe batch.
        boundary_dtypes: dtype of the activation after each block except the head.
        placeholders: batch entries that only the embeddings read: other values on later stages change no bit.
        media_share: share of the embeddings' operations in frozen encoders of media, whose outputs may be stored.
    """

    structure: Structure
    block_flops: tuple[float, ...]
    boundary_dtypes: tuple[torch.dtype, ...]
    activation: ActivationShape
    placeholders: frozenset[str]
    media_share: float = 0.0
