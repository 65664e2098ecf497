"""Looks over a trainer's shoulder: bits around transitions, what is frozen, traffic between stages, samples drawn."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from hf_pipetransformer.cache.training import TrainingCache
from hf_pipetransformer.engine.engine import Wire
from tests.support.models import MODELS, PAD, make_rows


SAMPLES = "pipetransformer_samples"
"""Where a batch says which samples it holds, with the activation cache."""


@dataclass
class Record:
    """What one rank saw in one run.

    Args:
        transitions: `step`, `from`, `to`, and the bits `before` and `after`.
        steps: what was true at the end of each optimizer step.
        samples: `(optimizer step, sample indices)` of each loader batch that this rank read.
        executions: for each half of each layer, attention first: samples that it ran in training while it was frozen.
        modes: `(F, layer or -1 for the embeddings, training, repeats)` of forwards in training; `repeats` says
            whether the same input gave the same output twice.
    """

    transitions: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    samples: list[tuple[int, list[int]]] = field(default_factory=list)
    executions: list[list[int]] = field(default_factory=list)
    modes: list[tuple[int, int, bool, bool]] = field(default_factory=list)


def encoder_parts(model: nn.Module) -> tuple[nn.Module, Any]:
    """Embeddings and layers, found without the library."""
    base = getattr(model, model.base_model_prefix)
    encoder = getattr(base, "encoder", base)
    return base.embeddings, encoder.layer if hasattr(encoder, "layer") else encoder.layers


def halves(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """In attention and MLP the first module with weights, which runs once in each forward of its half."""
    mlp = layer.intermediate if hasattr(layer, "intermediate") else layer.mlp
    first, second = (
        next(module for module in part.modules() if isinstance(module, nn.Linear)) for part in (layer.attention, mlp)
    )
    return first, second


def frozen_names(model: nn.Module, num_frozen: int) -> set[str]:
    """Names of the parameters that a frozen prefix of `num_frozen` layers uses."""
    embeddings, layers = encoder_parts(model)
    modules = [embeddings, *layers[:num_frozen]] if num_frozen else []
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


def bits(value: Any) -> str:
    """A digest of a tensor's bits, or a plain value as text."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class _Traffic:
    """Counts the bytes that cross the wires of this rank, as the engine posts them."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self._send, self._receive = Wire.send, Wire.receive
        Wire.send = lambda wire, tensor: self.send(wire, tensor)
        Wire.receive = lambda wire, shape: self.receive(wire, shape)

    def send(self, wire, tensor):
        self._add("sent", wire, tensor.numel() * tensor.element_size())
        return self._send(wire, tensor)

    def receive(self, wire, shape):
        self._add("received", wire, torch.Size(shape).numel() * wire.dtype.itemsize)
        return self._receive(wire, shape)

    def _add(self, direction: str, wire: Any, size: int) -> None:
        kind = "gradient" if "gradient" in wire.description else "activation"
        self.bytes[f"{direction} {kind}"] += size


TRAFFIC = _Traffic()


class Observer(TrainerCallback):
    """Writes a `Record`; the trainer is given to it by `observe`."""

    def __init__(self, case: Any) -> None:
        self.record = Record()
        self.case = case
        self.trainer: Any = None
        self.is_in_step = False
        self._num_samples = 0
        self._leave_out_check_of_store()
        self._index_of = {
            _key(MODELS[case.model].task, row): index
            for index, row in enumerate(make_rows(case.model, case.num_samples))
        }
        assert len(self._index_of) == case.num_samples, "samples must differ to be told apart"

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        _, layers = encoder_parts(self.trainer.model)
        self.record.executions = [[0, 0] for _ in layers]
        for index, layer in enumerate(layers):
            for half, module in enumerate(halves(layer)):
                module.register_forward_pre_hook(self._count_samples(index, half))
        if "dropout" in self.case.changes:
            embeddings, layers = encoder_parts(self.trainer.model)
            for index, module in enumerate([embeddings, *layers], start=-1):
                module.register_forward_hook(self._hook(index), with_kwargs=True)

    def _leave_out_check_of_store(self) -> None:
        """Have the samples that are computed again, to check what is stored, not count as those of a step."""
        check = TrainingCache.check

        def uncounted(cache: TrainingCache) -> None:
            was_in_step, self.is_in_step = self.is_in_step, False
            try:
                check(cache)
            finally:
                self.is_in_step = was_in_step

        TrainingCache.check = uncounted  # type: ignore[method-assign]

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        TRAFFIC.bytes.clear()
        self._num_samples = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        trainer = self.trainer
        layout = trainer.layout
        frozen = frozen_names(trainer.model, layout.num_frozen_layers)
        named = dict(trainer.model.named_parameters())
        held = {name: parameter for name, parameter in named.items() if not parameter.is_meta}
        optimizer = trainer.pipeline_run.pipelined.training.optimizer.optimizer
        name_of = {id(parameter): name for name, parameter in named.items()}
        grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.record.steps.append(
            {
                "step": state.global_step - 1,
                "num_frozen": layout.num_frozen_layers,
                "places": list(layout.places),
                "position": trainer.pipeline_run.pipelined.pipeline.stage.groups.position,
                "cache_level": layout.cache_level,
                "boundaries": list(layout.boundaries),
                "num_microbatches": layout.num_microbatches,
                "num_samples": self._num_samples,
                "bytes": dict(TRAFFIC.bytes),
                "frozen": {name: bits(parameter) for name, parameter in held.items() if name in frozen},
                "with_gradient_flag": sorted(name for name, p in held.items() if p.requires_grad and name in frozen),
                "in_optimizer": sorted(name_of.get(id(p), "unknown") for p in grouped),
                "with_state": sorted(name_of.get(id(p), "unknown") for p in optimizer.state),
                "layout": repr(layout),
            }
        )

    def drawn(self, inputs: dict[str, Any]) -> None:
        """A loader batch comes in."""
        task = MODELS[self.case.model].task
        num_samples = len(inputs.get("pixel_values" if task == "image" else "input_ids", []))
        self._num_samples += num_samples
        if self.trainer.pipeline_run.pipelined.pipeline.stage.groups.is_first:
            step = self.trainer.state.global_step
            self.record.samples.append((step, self._samples_of(inputs, num_samples, task)))

    def _samples_of(self, inputs: dict[str, Any], num_samples: int, task: str) -> list[int]:
        known = inputs.get(SAMPLES)
        if known is not None and task == "image":
            return known.tolist()  # A stored image is not read: the pixels are a placeholder.
        rows = [{key: value[i] for key, value in inputs.items()} for i in range(num_samples)]
        samples = [self._index_of[_key(task, row)] for row in rows]
        assert known is None or known.tolist() == samples, "the tokens of another sample"
        return samples

    def snapshot(self) -> dict[str, Any]:
        """The bits of all that this rank trains."""
        trainer = self.trainer
        stage, model = trainer.pipeline_run.pipelined.pipeline.stage, trainer.model
        blocks = {block for part in stage.layout.blocks_of_rank(stage.groups.position) for block in part}
        named = dict(model.named_parameters())
        name_of = {id(parameter): name for name, parameter in named.items()}
        users = stage.view.structure.blocks_of_buffer
        state = {
            f"{name_of.get(id(parameter), 'unknown')}/{key}": bits(value)
            for parameter, entries in trainer.pipeline_run.pipelined.training.optimizer.optimizer.state.items()
            for key, value in entries.items()
        }
        return {
            "weights": {name: bits(p) for name, p in named.items() if not p.is_meta},
            "buffers": {name: bits(b) for name, b in model.named_buffers() if blocks & set(users[name])},
            "state": state,
        }

    def _count_samples(self, index: int, half: int) -> Any:
        def count(_module: Any, args: Any) -> None:
            if self.is_in_step and index < self.trainer.layout.num_frozen_layers:
                self.record.executions[index][half] += len(args[0])

        return count

    def _hook(self, index: int) -> Any:
        busy = False

        def again(module, args, kwargs, output):
            nonlocal busy
            layout = self.trainer.layout
            # Only where the layer really runs: K=1.
            if busy or not torch.is_grad_enabled() or layout is None or layout.num_stages > 1:
                return
            busy = True
            repeated = module(*args, **kwargs)
            busy = False
            first = [value[0] if isinstance(value, tuple) else value for value in (output, repeated)]
            self.record.modes.append((layout.num_frozen_layers, index, module.training, torch.equal(*first)))

        return again


def _key(task: str, row: dict[str, Any]) -> tuple[float, ...]:
    """What tells a sample from the others, with or without padding."""
    if task == "image":
        return tuple(torch.as_tensor(row["pixel_values"]).flatten()[:4].tolist())
    words = torch.as_tensor(row["input_ids"])
    return tuple(words[words != PAD].tolist())


def observe(base: type, observer: Observer) -> type:
    """The trainer class `base` under the eyes of `observer`."""

    class Observed(base):
        observed: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            observer.trainer = self

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            observer.drawn(inputs)
            observer.is_in_step = True
            try:
                return super().training_step(model, inputs, *args, **kwargs)
            finally:
                observer.is_in_step = False

        def get_batch_samples(self, *args: Any) -> Any:
            # With the first batch, which is asked for here.
            self.pipeline_run.pipelined.start()
            if self.pipeline_run.pipelined.training is not self.observed:
                self.observed = self.pipeline_run.pipelined.training
                self.observe(self.observed.transitions)
            return super().get_batch_samples(*args)

        def observe(self, transitions: Any) -> None:
            move = transitions.move

            def observed(change: Any) -> None:
                entry = {"step": self.state.global_step, "from": self.layout.as_event(), "before": observer.snapshot()}
                move(change)
                entry |= {"to": self.layout.as_event(), "after": observer.snapshot()}
                entry["stage"] = self.pipeline_run.pipelined.pipeline.stage.groups.position
                observer.record.transitions.append(entry)

            transitions.move = observed

    return Observed
