"""Gradient all-reduce over replicas, and over the stages that share a parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from hf_pipetransformer.comm.errors import guarded, wait_for
from hf_pipetransformer.comm.staging import host_buffer
from hf_pipetransformer.comm.transfers import broadcast
from hf_pipetransformer.schedules.actions import Action, ActionList, Op


@dataclass(frozen=True)
class SharedParameter:
    """Parameter that several stages use, such as a tied embedding. The first user owns its optimizer state.

    `group` has the ranks of all stages that use it, over all replicas; `pipeline_group` those of this pipeline, of
    which `owner` is the first (a global rank).
    """

    name: str
    parameter: torch.nn.Parameter
    group: Any
    pipeline_group: Any
    owner: int
    is_owner: bool

    def reduced(self, gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Sum its gradient over stages and replicas in `dtype`. Collective: call on every rank of `group`.

        Returns a vector `(numel + 1,)`. The last entry counts the ranks whose gradient is not None.
        """
        # All ranks of the group take part, also those whose stage gave no gradient.
        own = torch.zeros_like(self.parameter) if gradient is None else gradient
        flag = own.new_full((1,), 0.0 if gradient is None else 1.0, dtype=dtype)
        flat = torch.cat([own.reshape(-1).to(dtype), flag])
        guarded(lambda: dist.all_reduce(flat, group=self.group), f"summing the gradient of {self.name} over stages")
        return flat

    def take(self, flat: torch.Tensor, is_used: bool) -> None:
        """Set `.grad` from the result of `reduced` on the owner; to None elsewhere, or if no rank had a gradient."""
        parameter = self.parameter
        # On the owner alone, which updates it for all: elsewhere it would count again in the norm of the gradients.
        own = flat[:-1].view_as(parameter).to(parameter.dtype) if self.is_owner and is_used else None
        parameter.grad = own


@torch.no_grad()
def share_values(shared: Sequence[SharedParameter]) -> None:
    """Broadcast the updated values of shared parameters, which every rank must list in the same order.

    Collective: call on every rank of the pipeline.
    """
    for entry in shared:
        broadcast(entry.parameter.data, entry.owner, entry.pipeline_group, f"the updated value of {entry.name}")


class GradientSums:
    """Float32 sums of the gradients of half-precision weights over the backwards of an optimizer step.

    A sum of many bfloat16 gradients loses what is below 1/256 of it. Until `GradientReducer.finish`, `.grad` of these
    weights is None.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._half = {p for p in parameters if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.buffers: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Memory to use for the sums of some parameters."""
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._add) for parameter in self._half]

    def dtype_of(self, parameter: torch.nn.Parameter) -> torch.dtype:
        """Return the dtype in which a parameter's gradients are added."""
        return torch.float32 if parameter in self._half else parameter.dtype

    def take(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter, and forget it if it is a sum."""
        return self._sums.pop(parameter, parameter.grad)

    def hand_out(self) -> None:
        """Set `.grad` of the parameters whose sums were not taken, rounded to their dtype."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

    def remove(self) -> None:
        self._sums.clear()
        for hook in self._hooks:
            hook.remove()

    def _add(self, parameter: Any) -> None:
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)
        elif parameter in self.buffers:
            self._sums[parameter] = self.buffers[parameter].copy_(parameter.grad)
        else:
            self._sums[parameter] = parameter.grad.float()
        # Or autograd would add the next gradient to it in half precision.
        parameter.grad = None


# The default of DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


class _Bucket:
    """Flat buffer of the gradients of some parameters, followed by one flag per parameter: 1 if it had a gradient."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], sums: GradientSums) -> None:
        self.parameters = parameters
        self.num_ready = 0
        self._sums = sums
        self.work: Any = None
        self._num_awaited: int | None = None
        self._sizes = [parameter.numel() for parameter in parameters]
        total = sum(self._sizes)
        # The flags travel behind the gradients, which saves a second all-reduce.
        self._flat = parameters[0].new_zeros(total + len(parameters), dtype=sums.dtype_of(parameters[0]))
        pieces = self._flat[:total].split(self._sizes)
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.flags = self._flat[total:]
        self.is_complete = False
        """True if this rank had all gradients, so that it needs no flags of the others."""
        # Sums in float32 are added up in the buffer that is sent, and need no memory of their own.
        sums.buffers |= zip(parameters, self.views, strict=True)

    @property
    def is_full(self) -> bool:
        """True if all gradients of this step are there. Parameters without `requires_grad` are not waited for."""
        if self._num_awaited is None:  # Counted once per step, because every hook call asks.
            self._num_awaited = sum(parameter.requires_grad for parameter in self.parameters)
        return self.num_ready == self._num_awaited

    def launch(self, group: Any, what: str) -> None:
        gradients = [self._sums.take(parameter) for parameter in self.parameters]
        # Made on the host, where asking `all` does not wait for the device.
        flags = torch.tensor([0.0 if gradient is None else 1.0 for gradient in gradients])
        self.is_complete = bool(flags.all())
        if self.is_complete:
            self.flags.fill_(1.0)
        else:
            # A new buffer: the asynchronous copy of the step before may still read an old one.
            self.flags.copy_(host_buffer(self.flags).copy_(flags), non_blocking=True)
        for parameter, gradient, view in zip(self.parameters, gradients, self.views, strict=True):
            if gradient is None:
                # The buffer still has the sum of the step before.
                view.zero_()
            elif gradient is not view:
                view.copy_(gradient)
                parameter.grad = None  # Free it now: the bucket has the only copy needed.
        del gradients
        self.work = guarded(lambda: dist.all_reduce(self._flat, group=group, async_op=True), what)

    def wait(self, timeout: float, what: str) -> None:
        # A wait with a timeout would block the host until the device is done.
        wait_for(self.work, timeout if self._flat.is_cpu else None, what)
        self.work, self.num_ready, self._num_awaited = None, 0, None

    def hand_out(self, used: Sequence[float] | None) -> None:
        """Set `.grad` to views of the buffer, or rounded copies. One without gradient on any replica keeps None.

        `used` counts the replicas with a gradient, by parameter; None: each had one here.
        """
        for parameter, view, count in zip(self.parameters, self.views, used or repeat(1.0), strict=used is not None):
            parameter.grad = view.to(parameter.dtype) if count else None


class GradientReducer:
    """All-reduce of a stage's gradients over its replicas, in buckets that overlap with the backward, as in DDP.

    All replicas launch the buckets in the same order, the reverse order of the parameters, which is roughly the order
    of the backward. `finish` fills in zeros for missing gradients, so replicas may use different parameters, or have
    no samples at all.

    `parameters` must be in the same order on every replica, without those shared with other stages. `group` is None if
    there is only one replica. `sums` adds gradients in another dtype than the weights'.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        group: Any,
        timeout: float,
        replicas: str,
        sums: GradientSums | None = None,
    ) -> None:
        self.sums = sums or GradientSums([])
        self.group = group
        self.timeout = timeout
        self.what = f"summing gradients over {replicas}"
        self.buckets: list[_Bucket] = []
        self._hooks: list[Any] = []
        self._next = 0
        self._final: set[torch.nn.Parameter] = set()
        if group is None:
            return
        for bucket_parameters in _in_buckets([p for p in parameters if p.requires_grad]):
            bucket = _Bucket(bucket_parameters, self.sums)
            self.buckets.append(bucket)
            for parameter in bucket_parameters:
                # Hooks run in the order in which they were registered, so those of `sums` have added a gradient before
                # this one may send it.
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(bucket)))

    def arm(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Announce that the next gradient of these parameters completes their sum for this optimizer step."""
        self._final.update(parameters)

    def finish(self, shared: Sequence[SharedParameter] = ()) -> None:
        """Launch the remaining buckets, wait for all, and set `.grad` to the sums.

        Collective: call on every rank, with `shared` in the same order. Synchronizes with the device only if a
        gradient is missing on this rank, to learn if another has it.
        """
        # Of unused parameters no gradient came; they must not count for the next step.
        self._final.clear()
        # A bucket with an unused parameter never fills by itself, and other replicas wait for it.
        while self._next < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets:
            bucket.wait(self.timeout, self.what)
        self._next = 0
        # Only after all buckets, and in the order of the list: every rank calls the collectives in one order.
        taken = [(self.sums.take(entry.parameter), self.sums.dtype_of(entry.parameter)) for entry in shared]
        missing = [entry.is_owner and own is None for entry, (own, _) in zip(shared, taken, strict=True)]
        sums = [entry.reduced(*each) for entry, each in zip(shared, taken, strict=True)]
        # What is left belongs to weights in no bucket, as with one replica.
        self.sums.hand_out()
        unknown = [bucket.flags for bucket in self.buckets if not bucket.is_complete]
        unknown += [flat[-1:] for flat, is_missing in zip(sums, missing, strict=True) if is_missing]
        used = iter(_read(unknown) if unknown else [])
        for bucket in self.buckets:
            bucket.hand_out(None if bucket.is_complete else next(used))
        for entry, flat, is_missing in zip(shared, sums, missing, strict=True):
            # An owner that had a gradient itself knows that there is one.
            entry.take(flat, is_used=not is_missing or bool(next(used)[0]))

    def remove(self) -> None:
        self.sums.remove()
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: _Bucket) -> Any:
        def ready(parameter: torch.Tensor) -> None:
            if parameter in self._final:
                self._final.discard(parameter)
                bucket.num_ready += 1
                # Only in order, even if a later bucket is full: all replicas must post the all-reduces in one order.
                while self._next < len(self.buckets) and self.buckets[self._next].is_full:
                    self._launch_next()

        return ready

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        bucket.launch(self.group, self.what)
        self._next += 1


def last_gradients(
    actions: ActionList,
    chunks: Mapping[torch.nn.Parameter, Collection[int]],
    put_off: Collection[torch.nn.Parameter],
) -> list[tuple[Action, list[torch.nn.Parameter]]]:
    """Return the actions that complete the gradients of parameters, in order, each with its parameters.

    `chunks` gives the stages of the rank that use each parameter. Gradients of the parameters in `put_off` come from
    `BACKWARD_WEIGHT` actions, if the list has any.
    """
    last: dict[tuple[int, bool], int] = {}
    for position, action in enumerate(actions):
        if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            last[action.chunk, action.op is Op.BACKWARD_WEIGHT] = position
    found: dict[int, list[torch.nn.Parameter]] = {}
    for parameter, users in chunks.items():
        ends = [
            last[chunk, kind] for chunk in users for kind in (False, parameter in put_off) if (chunk, kind) in last
        ]
        if ends:
            found.setdefault(max(ends), []).append(parameter)
    return [(actions[position], found[position]) for position in sorted(found)]


def _read(parts: Sequence[torch.Tensor]) -> list[list[float]]:
    # One `tolist` for all tensors, because each one synchronizes with the device.
    values = iter(torch.cat([part.float() for part in parts]).tolist())
    return [[next(values) for _ in range(len(part))] for part in parts]


def _in_buckets(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    # From the last layer down, as the backward gives gradients, so that the first bucket is full first.
    for parameter in reversed(parameters):
        num_bytes = parameter.numel() * parameter.element_size()
        # A bucket is one flat tensor, and so of one dtype.
        if not buckets or size + num_bytes > BUCKET_BYTES or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += num_bytes
    return buckets
