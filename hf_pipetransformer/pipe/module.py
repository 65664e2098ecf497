"""`Pipelined`, the base class of `Pipe` and `GPipe`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn

from hf_pipetransformer.pipe.batchnorm import DeferredBatchNorm
from hf_pipetransformer.pipe.flow import Flow, run_undivided
from hf_pipetransformer.pipe.micro_batches import MicroBatch, check_values, gather, scatter
from hf_pipetransformer.pipe.recomputation import MODES, num_checkpointed
from hf_pipetransformer.pipe.skip import find_routes, verify_skippables
from hf_pipetransformer.pipe.stages import Stage, check_module, device_of
from hf_pipetransformer.pipe.workers import is_same_place


_FOLDER = "partitions."


def rename(state: dict[str, Any], prefix: str, names: Sequence[Sequence[str]], errors: list[str]) -> None:
    """Rename `partitions.<stage>.<child>.weight` in a state dict to `<child>.weight`, in place.

    torchgpipe writes the child's name there, PyTorch its position in the stage.

    Args:
        names: names of the children of each stage.
        errors: receives a message if the names can be read both ways.
    """
    start = prefix + _FOLDER
    old = {key: key[len(start) :].split(".", 2) for key in state if key.startswith(start)}
    places = {(int(parts[0]), parts[1]) for parts in old.values() if len(parts) > 1 and parts[0].isdecimal()}
    if not places or any(stage >= len(names) for stage, _ in places):
        return
    by_name = {(stage, name): name for stage, row in enumerate(names) for name in row}
    by_position = {(stage, str(i)): name for stage, row in enumerate(names) for i, name in enumerate(row)}
    readings = [reading for reading in (by_name, by_position) if places <= reading.keys()]
    if len(readings) > 1 and any(by_name[place] != by_position[place] for place in places):
        errors.append(
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
            stage.module.training = mode
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast dtypes. Raise a TypeError for a device: each stage has a fixed one."""
        named = {name for name in ("device", "tensor", "other") if kwargs.get(name) is not None}
        places = (torch.device, str, int, torch.Tensor)
        if named or any(isinstance(each, places) and not isinstance(each, bool) for each in args):
            _refuse_moving()
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Raise a TypeError: each stage has a fixed device."""
        _refuse_moving()

    def cpu(self) -> NoReturn:
        """Raise a TypeError: each stage has a fixed device."""
        _refuse_moving()

    def to_empty(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a TypeError: each stage has a fixed device."""
        _refuse_moving()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, batch: MicroBatch) -> Any:
        if not self._stages:
            check_values(batch.values, "The input", not self._expands)
            return batch.value
        self._follow_replacements()
        pieces = self._cut(batch)
        for module in self.modules():
            if isinstance(module, DeferredBatchNorm):
                module.begin(len(pieces))
        is_trained = self.training and torch.is_grad_enabled()
        checkpointed = num_checkpointed(self.checkpoint if is_trained else "never", len(pieces))
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
                elif child is self._known[name]:
                    continue
                device = device_of(name, child)
                if next(child.parameters(), None) is not None and not is_same_place(device, stage.device):
                    raise ValueError(
                        f"Module {name!r} was replaced by one on {device}; its stage is on {stage.device}."
                    )
                setattr(stage.module, name, child)
                setattr(self, name, child)
                replaced[name] = child
        if replaced:
            self._known = dict(self.named_children())
            self._routes = find_routes([stage.module for stage in self._stages])

    def _cut(self, batch: MicroBatch) -> list[MicroBatch]:
        check_values(batch.values, "The input", not self._expands)
        first = self._stages[0].device
        for i, value in enumerate(batch.values):
            if isinstance(value, torch.Tensor) and not is_same_place(value.device, first):
                raise ValueError(
                    f"All inputs should be on the same device as the first partition, {first}: input {i} is on "
                    f"{value.device}. Move it with .to({str(first)!r})."
                )
        return [MicroBatch(piece, batch.is_single) for piece in scatter(batch.values, self.chunks)]


def prepared(module: nn.Sequential, chunks: Any, checkpoint: Any, deferred_batch_norm: bool) -> nn.Sequential:
    """Check the arguments of a pipeline before a module is moved, and convert batch norms if requested.

    Raises:
        TypeError: as in `check_module` and `verify_skippables`.
        ValueError: as in `check_module`; invalid `chunks` or `checkpoint`; nested pipelines with deferred batch norms.
    """
    check_module(module)
    if not _is_positive(chunks):
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
            "A pipeline inside a pipeline cannot have deferred batch norms: neither sees the whole mini-batch."
        )
    if not deferred_batch_norm:
        return module
    converted = DeferredBatchNorm.convert_deferred_batch_norm(module, int(chunks))
    assert isinstance(converted, nn.Sequential)
    return converted


def _is_positive(chunks: Any) -> bool:
    try:
        return int(chunks) >= 1
    except (TypeError, ValueError, OverflowError):
        return False


def _refuse_moving() -> NoReturn:
    raise TypeError(
        "A pipeline's stages stay on their devices: move the modules before they are wrapped. Casting is fine, as by "
        ".half() or .to(torch.bfloat16)."
    )


def _rename_old(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    assert isinstance(module, Pipelined)
    names = [[name for name, _ in stage.module.named_children()] for stage in module._stages]
    rename(state, prefix, names, args[-1])
