"""One call of a loss on each rank of a pipeline, for a whole batch: the model's call in it is the pipeline's forward.

Up to that call the code of the loss runs on every rank, behind it on the last stage alone, which has the outputs. What
is cut into micro-batches are the arguments of the model, not the batch that the loss is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from hf_pipetransformer.comm.transfers import broadcast_tree
from hf_pipetransformer.data.batches import SampleBatch, detach_tags
from hf_pipetransformer.data.rng import drawing_from, same_states
from hf_pipetransformer.engine.losses import LossRule
from hf_pipetransformer.runtime.joining import BatchOfAll, Joined, join_parts
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.view import overriding_forwards


if TYPE_CHECKING:
    from hf_pipetransformer.data.rng import States
    from hf_pipetransformer.engine.program import MicroBatch
    from hf_pipetransformer.runtime.execution import LoaderBatch, StageRunner
    from hf_pipetransformer.runtime.stage import Stage


class LeavesLoss(BaseException):
    """Takes a rank without the head out of a loss, where the loss calls the model.

    No `Exception`, which the code around that call might handle.
    """


class OfStages(tuple[Any, ...]):
    """Outputs of layers, which are on several stages: to read them is an error."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(
            "The loss reads hidden_states or attentions of the model's layers, which are on several stages. Set "
            "pipeline_parallel_size=1 and pipeline_parallel_num_microbatches=1 for it."
        )

    __getitem__ = __iter__ = __len__ = _refuse


@dataclass
class LossCall:
    """Call of a loss for a whole batch.

    Args:
        batch: batch of this replica, with tags; its `forward` computes the loss.
        before: micro-batches that it was cut into, before the loss is known to give the model its own.
        forwards: runs the layers for micro-batches; returns what entered the head in each, None without the head.
        of_all: batch of all replicas, which the loss is given; None for this replica's own.
    """

    runner: StageRunner
    batch: LoaderBatch
    before: Sequence[MicroBatch]
    forwards: Callable[[list[MicroBatch]], list[torch.Tensor] | None]
    of_all: BatchOfAll | None
    is_entered: bool = field(default=False, init=False)
    states: States | None = field(default=None, init=False)
    """The shared random numbers when the loss called the model."""
    found: Joined | None = field(default=None, init=False)
    """What entered the head, for all samples that the loss sees; None without the head."""
    _is_inside: bool = field(default=False, init=False)

    @property
    def stage(self) -> Stage:
        return self.runner.stage

    def compute(self) -> Any:
        """Return what the loss returns of the batch; None on a rank without the head.

        Raises:
            ValueError: the loss does not call the model, calls it twice, or in a way that stages cannot follow.
        """
        own, cut = self.batch.inputs, self.before
        self._given = self.batch.prepare(detach_tags(own if self.of_all is None else self.of_all.inputs)[0])
        # A frozen reference has given entries to the micro-batches, which the batch does not have.
        names = sorted({*cut[0].inputs} - own.names)
        of_reference = {name: torch.cat([part.inputs[name] for part in cut]) for name in names}
        # The versions show what the loss has changed in place before it calls the model.
        self._versions = {id(each): each._version for each in self._given.values() if isinstance(each, torch.Tensor)}
        # In place of the outermost of these that is called the pipeline runs. Bound now, as they call the replacement.
        forwards = [(each, partial(self._forward, each, each.forward)) for each in self.stage.view.modules_around()]
        try:
            with overriding_forwards(forwards), drawing_from(self.batch.shared), self.stage.store.trained_shown():
                result = self.batch.forward({**self._given, **of_reference})
        except LeavesLoss as left:
            # The traceback references the frames of the loss, and with them its tensors.
            left.__traceback__ = None
            return None
        except (RuntimeError, NotImplementedError) as error:
            # Weights that this rank does not have are on the device `meta`.
            if "meta" not in str(error).lower() or self.stage.layout.pipeline_size == 1:
                raise
            raise self._reads_weights from error
        if not self.is_entered:
            raise ValueError(
                f"The loss does not call {self._name}, whose stages wait for it: expected one call a batch. Set "
                "pipeline_parallel_size=1 and pipeline_parallel_num_microbatches=1 for it."
            )
        if isinstance(result, torch.Tensor) and result.is_meta:
            raise self._reads_weights
        return result

    def share_states(self) -> None:
        """Let all ranks of the pipeline draw on from the same random numbers: the last stage may have drawn more.

        Collective: call on every rank of the pipeline.
        """
        shared, groups = self.batch.shared, self.stage.groups
        if shared is None or groups.pipeline_size == 1:
            return
        has_drawn = groups.is_last and self.states is not None and not same_states(shared.states, self.states)
        sent = [*shared.states] if has_drawn else None
        found = broadcast_tree(sent, groups.last_rank, groups.pipeline_control, groups.pipeline_ranks[groups.position])
        if found is not None:
            # Copies of their own, because they are views into a message.
            shared.states = {name: state.clone() for name, state in found[0].items()}, found[1]

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the head from a loss; leaves the gradients of what entered it to the backwards below."""
        head, found = self.stage.head, self.found
        assert head.program is not None and found is not None, "only the stage with the head has a loss"
        gradient = head.program.backward_of(loss, found.entering)
        head.gradients |= dict(zip(sorted(head.entered), found.cut(gradient), strict=True))

    @property
    def _reads_weights(self) -> ValueError:
        return ValueError(
            f"The loss reads weights of {self._name} itself, some of which other stages hold. Set "
            "pipeline_parallel_size=1 for it."
        )

    @property
    def _name(self) -> str:
        return type(bare_model(self.stage.view.model)).__name__

    def _forward(self, module: nn.Module, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return own_forward(*args, **kwargs)
        self._is_inside = True
        try:
            return self._run(module, own_forward, self._by_name(module, args, kwargs))
        finally:
            self._is_inside = False

    def _run(self, module: nn.Module, own_forward: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Return what a module gives of the whole batch, run on the stages; see `LossCall`."""
        is_model = module is self.stage.view.model

        def run(inputs: Mapping[str, Any]) -> Any:
            inputs = self.stage.view.inputs_read(inputs)
            # What is not the model runs under the autocast of the loss alone, as with Trainer.
            return self.runner.called(own_forward, inputs) if is_model else own_forward(**inputs)

        if self.is_entered and self.stage.layout.pipeline_size == 1:
            # All layers are here: a further call runs them as they are, for all rows at once.
            self.stage.view.widen()
            return run(given)
        if self.is_entered:
            raise ValueError(
                f"One loss runs {self._name} twice for a batch: the stages run it once. Join the rows of both calls "
                "in one, or set pipeline_parallel_size=1 and pipeline_parallel_num_microbatches=1."
            )
        self.is_entered = True
        # Amid the drawing of what the loss draws: the layers draw from this rank's own numbers.
        shared, runner = self.batch.shared, self.runner
        with drawing_from(shared):
            self.states = None if shared is None else shared.states
            own, on_host = self._own(given), [part.on_host for part in self.before]
            batch = replace(self.batch, inputs=own, forward=run)
            parts = runner.cut(batch, LossRule.SUM, len(self.before), on_host=on_host)
            entered = self.forwards(parts)
            if entered is None:
                raise LeavesLoss
            replicas = None if self.of_all is None else runner.replicas
            found = join_parts(detach_tags(own)[0], parts, entered, replicas, self.of_all)
            # A leaf, which collects the gradient that the layers wait for.
            self.found = replace(found, entering=found.entering.detach())
            self.found.entering.requires_grad_(torch.is_grad_enabled())
            program = self.stage.head.program
            assert program is not None, "the last stage has the head"
            outputs = program.run(self.found.entering, lambda: run(given))
        return _without_layers(outputs)

    def _by_name(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not args:
            return kwargs
        kind = type(bare_model(module) if module is self.stage.view.model else module)
        names = list(inspect.signature(kind.forward).parameters)[1:]
        return dict(zip(names, args, strict=False)) | kwargs

    def _own(self, given: dict[str, Any]) -> SampleBatch:
        """Return the model's arguments for the samples of this replica, with tags if they are the batch's.

        Raises:
            ValueError: a gradient would end at an argument, or the arguments are not those of the batch's samples.
        """
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        trained = [name for name, value in tensors.items() if value.requires_grad and torch.is_grad_enabled()]
        if trained:
            raise ValueError(
                f"The loss gives {self._name} {', '.join(sorted(trained))} with a gradient, which ends where the "
                "stages begin: detach it, compute it inside the model, or set pipeline_parallel_size=1 and "
                "pipeline_parallel_num_microbatches=1."
            )
        own, (_, tags) = self.batch.inputs.like(given), detach_tags(self.batch.inputs)
        is_batchs = all(
            value is self._given.get(name) and value._version == self._versions[id(value)]
            for name, value in tensors.items()
        )
        if self.of_all is not None:
            expected = sum(self.of_all.sizes)
            if own.size != expected:
                raise ValueError(
                    f"The loss gives {self._name} {own.size} rows of a batch of {expected}: with replicas each runs "
                    "its own rows, expected as many. Set pipeline_loss='replica', or use one replica."
                )
            own = self.of_all.own(own)
        # What the loss has made of the samples is no record of them.
        return own if tags is None or not is_batchs else tags.attach(own)


OF_LAYERS = ("hidden_states", "attentions", "all_hidden_states", "all_self_attentions")
"""Names of outputs that have an entry for each layer."""


def _without_layers(outputs: Any) -> Any:
    """Return outputs whose entries of the layers say where they are when they are read."""
    if isinstance(outputs, ModelOutput):
        for name in OF_LAYERS:
            if outputs.get(name) is not None:
                outputs[name] = OfStages()
    return outputs
