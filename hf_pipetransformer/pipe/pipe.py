"""`Pipe` and `GPipe`, which replace `torch.distributed.pipeline.sync.Pipe` and `torchgpipe.GPipe`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from hf_pipetransformer.pipe.batchnorm import DeferredBatchNorm
from hf_pipetransformer.pipe.flow import Flow, run_undivided
from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values, gather, scatter
from hf_pipetransformer.pipe.recomputation import MODES, num_checkpointed
from hf_pipetransformer.pipe.skip import find_routes, verify_skippables
from hf_pipetransformer.pipe.stages import (
    Stage,
    check_module,
    device_of,
    normalised,
    split_by_balance,
    split_by_device,
)
from hf_pipetransformer.pipe.workers import is_same_place


def _rename_old(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Rename `partitions.<stage>.<child>.weight` in a state dict to `<child>.weight`, in place.

    torchgpipe writes the child's name there, PyTorch its position in the stage. The last argument of the hook is the
    list of error messages: names that can be read both ways are refused.
    """
    assert isinstance(module, Pipelined)
    names = [[name for name, _ in stage.module.named_children()] for stage in module._stages]
    start = prefix + "partitions."
    old = {key: key[len(start) :].split(".", 2) for key in state if key.startswith(start)}
    places = {(int(parts[0]), parts[1]) for parts in old.values() if len(parts) > 1 and parts[0].isdecimal()}
    if not places or any(stage >= len(names) for stage, _ in places):
        return
    by_name = {(stage, name): name for stage, row in enumerate(names) for name in row}
    by_position = {(stage, str(i)): name for stage, row in enumerate(names) for i, name in enumerate(row)}
    readings = [reading for reading in (by_name, by_position) if places <= reading.keys()]
    # Children called 0, 1, ... in every stage give the same names in both readings: nothing to refuse.
    if len(readings) > 1 and any(by_name[place] != by_position[place] for place in places):
        args[-1].append(
            f"Names that begin with {start!r} can be read as torchgpipe's (the child's name) or as PyTorch's (its "
            "position in the stage), and the two differ here. Rename them to those of the Sequential: '0.weight'."
        )
        return
    for key, parts in old.items():
        if readings and len(parts) > 1:
            place = int(parts[0]), parts[1]
            state[prefix + ".".join([readings[0][place], *parts[2:]])] = state.pop(key)


class Pipelined(nn.Module):
    """Sequential split into stages, with the Sequential's children, parameters and their names.

    Does not check its arguments: `prepared` does, before anything is moved.

    Args:
        expands: True to pass a tuple to the next module as several arguments, False as one.
    """

    def __init__(self, stages: Sequence[Stage], chunks: int, checkpoint: str, expands: bool) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        self.devices = [stage.device for stage in stages]
        # No ModuleList: torch would register every parameter under a second name.
        self._stages = tuple(stages)
        self._expands = expands
        for stage in stages:
            for name, child in stage.module.named_children():
                self.add_module(name, child)
        # What `_follow_replacements` compares with: a child assigned here later is not yet in the stage's own
        # Sequential.
        self._known = dict(self.named_children())
        self._routes = find_routes([stage.module for stage in stages])
        self.register_load_state_dict_pre_hook(_rename_old)  # type: ignore[no-untyped-call]

    @property
    def partitions(self) -> nn.ModuleList:
        """Modules of the stages. Their children are also this module's children."""
        return nn.ModuleList(stage.module for stage in self._stages)

    def __len__(self) -> int:
        return len(list(self.children()))

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def train(self, mode: bool = True) -> Self:
        for stage in self._stages:
            # The Sequentials of the stages are not registered as children: super() reaches what is in them, but not
            # themselves.
            stage.module.training = mode
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast dtypes. Raise a TypeError for a device: each stage has a fixed one."""
        named = {name for name in ("device", "tensor", "other") if kwargs.get(name) is not None}
        # A dtype is no place. A bool is an int for Python, but means non_blocking here.
        places = (torch.device, str, int, torch.Tensor)
        if named or any(isinstance(each, places) and not isinstance(each, bool) for each in args):
            _refuse_moving()
        return super().to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a TypeError, like `cpu` and `to_empty`: each stage has a fixed device."""
        _refuse_moving()

    cpu = to_empty = cuda

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, batch: MicroBatch) -> Any:
        check_values(batch.values, "The input", not self._expands)
        if not self._stages:
            return batch.value
        self._follow_replacements()
        pieces = self._cut(batch)
        for module in self.modules():
            # A small mini-batch has fewer micro-batches than `chunks`; and a failed one may have left sums.
            if isinstance(module, DeferredBatchNorm):
                module.begin(len(pieces))
        is_trained = self.training and torch.is_grad_enabled()
        checkpointed = num_checkpointed(self.checkpoint if is_trained else "never", len(pieces))
        # Without threads, ordering nodes and copies, which have nothing to do here.
        if len(pieces) == 1 and not checkpointed and len(set(self.devices)) == 1:
            return gather([run_undivided(self._stages, pieces[0], self._expands)])
        flow = Flow(self._stages, self._routes, checkpointed, self._expands)
        return gather(flow.run(pieces))

    def _follow_replacements(self) -> None:
        """Pick up children that were replaced after construction, here or in a partition."""
        replaced = {name: child for name, child in self.named_children() if self._known[name] is not child}
        for stage in self._stages:
            for name, child in list(stage.module.named_children()):
                if name in replaced:
                    child = replaced[name]
                # Replaced in a partition otherwise; where both were replaced, the one assigned to the pipeline wins.
                elif child is self._known[name]:
                    continue
                device = device_of(name, child)
                # A child without parameters counts as on the CPU, but runs wherever its input is.
                if next(child.parameters(), None) is not None and not is_same_place(device, stage.device):
                    raise ValueError(
                        f"Module {name!r} was replaced by one on {device}; its stage is on {stage.device}. Move it "
                        f"with .to({str(stage.device)!r})."
                    )
                setattr(stage.module, name, child)
                setattr(self, name, child)
                replaced[name] = child
        if replaced:
            self._known = dict(self.named_children())
            self._routes = find_routes([stage.module for stage in self._stages])

    def _cut(self, batch: MicroBatch) -> list[MicroBatch]:
        first = self._stages[0].device
        for i, value in enumerate(batch.values):
            if isinstance(value, torch.Tensor) and not is_same_place(value.device, first):
                raise ValueError(
                    f"All inputs should be on the same device as the first partition, {first}: input {i} is on "
                    f"{value.device}. Move it with .to({str(first)!r})."
                )
        return [MicroBatch(piece, batch.is_single) for piece in scatter(batch.values, self.chunks)]


def prepared(module: nn.Sequential, chunks: Any, checkpoint: Any, deferred_batch_norm: bool) -> nn.Sequential:
    """Check the arguments of a pipeline before a module is moved, and convert batch norms if requested."""
    check_module(module)
    try:
        is_positive = int(chunks) >= 1
    # An infinite number overflows in int().
    except (TypeError, ValueError, OverflowError):
        is_positive = False
    if not is_positive:
        raise ValueError(f"The number of chunks must be positive, found {chunks}.")
    if str(checkpoint) not in MODES:
        raise ValueError(f"checkpoint is not one of 'always', 'except_last', or 'never', found {str(checkpoint)!r}.")
    verify_skippables(module)
    if not len(module):
        # Allowed by PyTorch and torchgpipe, whose test suites require it.
        warnings.warn("The nn.Sequential has no modules: what goes in comes out.", stacklevel=3)
    if any(isinstance(each, Pipelined) for each in module.modules()) and (
        deferred_batch_norm or any(isinstance(each, DeferredBatchNorm) for each in module.modules())
    ):
        raise ValueError(
            "A pipeline inside a pipeline cannot have deferred batch norms: neither sees the whole mini-batch. Leave "
            "them out of both (deferred_batch_norm=False)."
        )
    if not deferred_batch_norm:
        return module
    converted = DeferredBatchNorm.convert_deferred_batch_norm(module, int(chunks))
    assert isinstance(converted, nn.Sequential)
    return converted


def _refuse_moving() -> NoReturn:
    raise TypeError(
        "A pipeline's stages stay on their devices: move the modules before they are wrapped. Casting is fine, as by "
        ".half() or .to(torch.bfloat16)."
    )


class LocalTensor(torch.Tensor):
    """Tensor with the `local_value()` of an RRef. Operations on it return plain tensors."""

    _value: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    def local_value(self) -> torch.Tensor:
        """Return the plain tensor, the same object on each call."""
        return self._value

    to_here = local_value  # Everything is in this process.

    # Pickles and deep copies are plain tensors: `_value` is an attribute of this process alone.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._value.__deepcopy__(memo)


class LocalTuple(tuple[Any, ...]):
    """Tuple with the `local_value()` of an RRef."""

    def local_value(self) -> tuple[Any, ...]:
        """Return a plain tuple."""
        return tuple(self)

    to_here = local_value


# DistributedDataParallel and other wrappers look for tensors in a module's output through pytree.
register_pytree_node(LocalTuple, lambda values: (list(values), None), lambda values, _: LocalTuple(values))


def as_output(value: Any) -> Any:
    """Give a pipeline's output, a tensor or a tuple, the method `local_value()`."""
    if isinstance(value, (LocalTensor, LocalTuple)):
        return value
    if isinstance(value, tuple):
        return LocalTuple(value)
    output = value.as_subclass(LocalTensor)
    output._value = value
    return output


class Pipe(Pipelined):
    """Pipeline of an `nn.Sequential` over the devices that its modules are on, in one process (GPipe).

    Each mini-batch is cut into micro-batches. While a stage computes one micro-batch, the stage before it computes
    the next one. Output and gradients are those of the Sequential, except that batch norms see micro-batches.

    Consecutive modules on one GPU form a stage; on the CPU each child is a stage. A module without parameters and
    buffers runs on the CPU unless it is wrapped in `WithDevice`. The calling thread serves the CPU, and each GPU has
    a thread.

    Args:
        module: all parameters of a child must be on one device.
        chunks: number of micro-batches of a mini-batch.
        checkpoint: micro-batches that keep only their stages' inputs and are recomputed in the backward: `always`,
            `except_last` (all but the last) or `never`. In training mode with gradients only.
        deferred_batch_norm: True to update the running statistics of batch norms once per mini-batch, with the mean
            and variance of the whole mini-batch.

    Raises:
        TypeError: `module` is not an `nn.Sequential`, or a skip tensor has not exactly one stash and one pop.
        ValueError: `chunks` is below 1, `checkpoint` is unknown, or a child appears twice or is on several devices.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        module = prepared(module, chunks, checkpoint, deferred_batch_norm)
        super().__init__(split_by_device(module), chunks, checkpoint, expands=True)

    def forward(self, *inputs: Any) -> Any:
        """Run a mini-batch.

        Args:
            inputs: arguments of the first module, on its device. Tensors are cut along their first dimension; all
                other values, and tensors in `NoChunk`, go to every micro-batch unchanged.

        Returns:
            The tensor or tuple that the Sequential returns, also with `local_value()`. A value that is not a tensor
            becomes a list with one entry per micro-batch.

        Raises:
            TypeError: no tensor among the inputs, or among the values between two stages.
            ValueError: an input is not on the first stage's device.
            RuntimeError: the inputs give different numbers of micro-batches.
        """
        return self._run(MicroBatch(inputs, is_single=len(inputs) == 1))

    def __call__(self, *inputs: Any) -> Any:
        """Run `forward` and the module's hooks, and give the output `local_value()`."""
        return as_output(super().__call__(*inputs))


class GPipe(Pipelined):
    """Pipeline of an `nn.Sequential` that is moved to the given devices, with the interface of torchgpipe.

    Differs from `Pipe`: a tuple is one argument of the next module, all values must be tensors, and the output has no
    `local_value()`. `chunks`, `checkpoint` and `deferred_batch_norm` are as in `Pipe`.

    Args:
        balance: number of children of each stage, from `balance_by_time` or `balance_by_size`. Required.
        devices: one per stage; by default all GPUs.

    Raises:
        TypeError: as in `Pipe`.
        ValueError: as in `Pipe`, or `balance` is missing or does not fit the module.
        IndexError: fewer devices than stages.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        module = prepared(module, chunks, checkpoint, deferred_batch_norm)
        if balance is None:
            raise ValueError(
                "balance is required: how many children each stage takes. One is found by "
                "hf_pipetransformer.pipe.balance_by_time."
            )
        places = range(torch.cuda.device_count()) if devices is None else devices
        stages = split_by_balance(module, list(balance), [normalised(torch.device(each)) for each in places])
        super().__init__(stages, chunks, checkpoint, expands=False)
        self.balance = list(balance)

    def forward(self, input: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        """Run a mini-batch and return the tensor or tuple that the Sequential returns.

        Raises:
            TypeError: a value among the inputs or between two stages is not a tensor.
            ValueError: an input is not on the first stage's device.
        """
        return self._run(MicroBatch.of(input))
