"""Callback for any `Trainer` that computes frozen parts of its model once."""

from __future__ import annotations

import atexit
import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

from hf_pipetransformer.cache.frozen_parts.stored import StoredParts, named
from hf_pipetransformer.comm.topology import Topology, get_topology
from hf_pipetransformer.data.batches import batch_size
from hf_pipetransformer.data.rng import States, random_state, same_states
from hf_pipetransformer.options.arguments import READERS, PipeTransformerArguments
from hf_pipetransformer.report import logger
from hf_pipetransformer.splitters.adapters import bare_model
from hf_pipetransformer.splitters.base import maximal_frozen
from hf_pipetransformer.training.part_stores import PartStores


_WHOLE = (
    *(DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU),
    DistributedType.MULTI_NPU,
)
"""Ways to train in which each process has the whole model."""


@dataclass
class _Run:
    """See `PartsRun`."""

    args: Any
    state: TrainerState
    topology: Topology
    model: nn.Module
    train_loader: Any
    eval_dataset: Any = None
    reads_loss_alone: bool = False
    """Not known: a loss of the script's may read more."""

    @property
    def train_dataset(self) -> Any:
        return getattr(self.train_loader, "dataset", None)

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        return maximal_frozen(bare_model(self.model))

    @property
    def is_whole(self) -> bool:
        return self.args.n_gpu <= 1 and AcceleratorState().distributed_type in _WHOLE

    @property
    def sends_buffers(self) -> bool:
        return bool(self.args.parallel_mode == ParallelMode.DISTRIBUTED)

    def note(self, **fields: Any) -> None: ...

    def end_plan(self) -> None: ...


class _CalledParts(StoredParts):
    """Parts that are looked up where the model is called, as nobody tells of batches.

    In training that is from the first call in a batch to its backward, in evaluation inside each call.
    """

    is_in_step = False
    _is_open = False
    """True in a batch of the training."""
    _is_noted = False
    """True in a call of the model that was noted."""
    _since_call: States | None = None

    def __init__(self, run: _Run) -> None:
        super().__init__(run, PartStores(run))
        self._open = ExitStack()

    def begin(self) -> None:
        """Begin a batch of the training."""
        self.is_in_step = False  # What was seen is tried now, for which the model may be called.
        self.begin_step()
        self.is_in_step, self._since_call = True, self._drawn()

    def _begin(self) -> None:
        super()._begin()
        if self._step is None and self.args.activation_cache != "off" and self.run.is_whole:
            self._say("ComputedOnce has nothing to store: no module of the model has frozen parameters alone.")

    def close(self) -> None:
        """Leave the batch, or the call of an evaluation, that is in progress."""
        self._is_open = False
        self._open.close()

    def _drawn(self) -> States | None:
        return random_state(self.args.device) if self._watch is not None else None

    def enter_root(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        inputs = named(*args, **kwargs)
        if not self.run.model.training and not torch.is_grad_enabled():
            self.close()
            self._open.enter_context(self.evaluating(inputs, generates=True, reads_loss_alone=False))
        elif self._step is not None and self.is_in_step and self.has_parts:
            # What a loss has made with random numbers is not of the batch.
            before, now = self._since_call, self._drawn()
            given = inputs if before is None or now is None or same_states(now, before) else {}
            if self._is_open:
                self._step.add(given)
            else:
                self._open.enter_context(self.batch(given, batch_size(inputs)))
                self._is_open = True
        else:
            return
        self._is_noted = True
        super().enter_root(args, kwargs)

    def leave_root(self) -> None:
        if not self._is_noted:
            return
        self._is_noted = False
        super().leave_root()
        if not self._is_open:
            self.close()
        self._since_call = self._drawn()


class ComputedOnce(TrainerCallback):
    """Compute what a script froze once, in any `Trainer`, and read it from a store from the second epoch on.

    Give it first among the callbacks. The numbers are those of the trainer without it. What is frozen and not stored,
    and why, is said in one line each.

    Calls of frozen parts are looked up inside calls of the model itself. `PipeTransformerTrainer`, which needs no
    callback, also does so where a loss or generation calls a part directly, and under `torch_compile`; and it reads
    records of padded text in a batch of any length, since it knows if the loss alone is read. It also leaves
    samples unread whose outputs are stored, which the callback does not.

    Args:
        mode (`str`): `auto` if measured times say that it pays, `on` wherever it is possible, or `off`.
        dir (`str`, *optional*): folder on a local disk, by default the temporary folder of the machine.
        max_gb (`float`, *optional*): gigabytes for all parts on each machine, by default half of the free space.
        dtype (`str`): of what is stored: `auto` is that of the outputs; `bfloat16` halves them and rounds.
        keep (`bool`): keep what is stored for later runs with the same frozen weights.

    Raises:
        ValueError: an option has a value that it does not take.
    """

    def __init__(
        self, mode: str = "auto", *, dir: str | None = None, max_gb: float | None = None, dtype: str = "auto",
        keep: bool = False,
    ) -> None:  # fmt: skip
        self._options = {"activation_cache": READERS["activation_cache"]("mode", mode)}
        for name, value in {"dir": dir, "max_gb": max_gb, "dtype": dtype, "keep": keep}.items():
            self._options[f"activation_cache_{name}"] = READERS[f"activation_cache_{name}"](name, value)
        self._parts: _CalledParts | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if isinstance(args, PipeTransformerArguments):
            raise ValueError(
                "PipeTransformerTrainer computes frozen parts once by itself: leave the callback ComputedOnce out, "
                "and set its options as arguments (activation_cache, activation_cache_dir, ...)."
            )
        self._end()  # An exception may have ended the training before.
        own: Any = copy.copy(args)
        vars(own).update(self._options, plan_only=False)
        topology = get_topology(args.ddp_timeout)
        run = _Run(own, state, topology, kwargs["model"], kwargs["train_dataloader"])
        if args.torch_compile or not run.is_whole:
            with_what = "torch_compile" if args.torch_compile else "models of which processes have parts or copies"
            logger.warning(f"ComputedOnce stores nothing with {with_what}.")
            return
        self._parts = _CalledParts(run)
        self._parts.following(kwargs["train_dataloader"])
        atexit.register(self._end)  # No callback is told of an exception, after which stores are to be deleted, too.

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._parts is not None:
            self._parts.begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # After the backward, and before callbacks that look at the model when the step has ended.
        if self._parts is not None:
            self._parts.close()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._parts is not None:
            self._parts.close()
            self._parts.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._parts is not None:
            self._parts.close()
            self._parts.is_in_step = False
            if control.should_save:
                self._parts.serving.check_thoroughly()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._parts is not None:
            self._parts.end_epoch(control.should_training_stop)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end()

    def _end(self) -> None:
        atexit.unregister(self._end)
        if self._parts is not None:
            self._parts.close()
            self._parts.end()
        self._parts = None
