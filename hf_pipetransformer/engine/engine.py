"""Engine that executes a rank's action list: computations on its stages, transfers over the links between them.

The engine decides when to compute and what to transfer. The stage programs (`program.py`) do the computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hf_pipetransformer.comm.errors import wait_for
from hf_pipetransformer.comm.transfers import post, receiving, sending, with_tensor
from hf_pipetransformer.engine.timing import NOTHING
from hf_pipetransformer.schedules.actions import BEGINS_BACKWARD, GIVES, NEEDS, Action, ActionList, Op


if TYPE_CHECKING:
    from hf_pipetransformer.engine.program import MicroBatches, StageProgram
    from hf_pipetransformer.engine.timing import StepMeter


class Pending(Protocol):
    """Transfer in progress."""

    def wait(self) -> torch.Tensor:
        """Wait until the tensor has arrived (receive) or may be reused (send), and return it."""


class Link(Protocol):
    """One direction of traffic between two stages. Messages have no tags: sends and receives match by order."""

    def receive(self, shape: tuple[int, ...]) -> Pending:
        """Post the receive of the next message."""

    def send(self, tensor: torch.Tensor) -> Pending:
        """Start sending `tensor`, which must not be modified until the returned transfer has been waited for."""

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a filler message."""


class Wire:
    """Link to the global rank `peer`, described in errors. `timeout` is in seconds per transfer.

    Use the process group of the two ranks for nothing else, because messages match by order, and warm it up first:
    otherwise the first transfer blocks the host.
    """

    def __init__(
        self, peer: int, group: Any, description: str, dtype: torch.dtype, device: torch.device, timeout: float
    ) -> None:
        self.description = description
        self.dtype = dtype
        self.device = device
        # On a GPU a wait with a timeout blocks the host until the transfer is done; without one it orders streams.
        self._timeout = timeout if device.type == "cpu" else None
        self._receiving, self._sending = f"receiving {description}", f"sending {description}"
        # Each message is a copy of one of these, with a tensor of its own.
        nothing = torch.empty(0, dtype=dtype, device=device)
        self._incoming, self._outgoing = receiving(nothing, peer, group), sending(nothing, peer, group)

    def receive(self, shape: tuple[int, ...]) -> Pending:
        # New for each message: an activation becomes a leaf of its micro-batch's graph, and stays until the backward.
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return _Posted(tensor, post([with_tensor(self._incoming, tensor)]), self._timeout, self._receiving)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def send(self, tensor: torch.Tensor) -> Pending:
        # A backend sends memory as it lies, and its send must not keep the graph of the forward alive.
        tensor = tensor.detach().contiguous()
        return _Posted(tensor, post([with_tensor(self._outgoing, tensor)]), self._timeout, self._sending)


@dataclass
class _Posted:
    tensor: torch.Tensor
    works: list[Any]
    timeout: float | None
    what: str

    def wait(self) -> torch.Tensor:
        """Wait for the transfer.

        Raises:
            PeerLostError: the neighbor died, or `pipeline_timeout` passed.
        """
        for work in self.works:
            wait_for(work, self.timeout, self.what)
        return self.tensor


@dataclass(frozen=True)
class Local:
    """Stand-in for a link if the neighboring stage is on this rank, as its stage number `chunk`."""

    chunk: int


@dataclass(frozen=True)
class StageLinks:
    """Sources and destinations of a stage's activations and gradients; None at the ends of the pipeline."""

    forward_in: Link | Local | None = None
    forward_out: Link | Local | None = None
    backward_in: Link | Local | None = None
    backward_out: Link | Local | None = None


class Engine:
    """Executor of the stages of one rank. `programs` and `links` have one entry per stage, indexed by chunk."""

    def __init__(self, programs: Sequence[StageProgram], links: Sequence[StageLinks], meter: StepMeter) -> None:
        self.programs = programs
        self.links = links
        self.meter = meter

    def begin(self, actions: ActionList, micro_batches: MicroBatches) -> ActionListRun:
        """Start executing an action list. No action runs before `ActionListRun.advance` or `ActionListRun.drain`.

        Micro-batches are looked up only when an action needs them.
        """
        run = ActionListRun(self, micro_batches)
        run.extend(actions)
        return run


class ActionListRun:
    """Execution of an action list, which the caller may advance in several parts."""

    def __init__(self, engine: Engine, micro_batches: MicroBatches) -> None:
        self.actions: ActionList = ()
        self.num_posted: Counter[Op] = Counter()
        """Number of transfers of each kind posted so far."""
        self.programs, self.links, self.meter = engine.programs, engine.links, engine.meter
        self.micro_batches = micro_batches
        # Stages with backwards. The others are frozen, or only predict: their forwards run without autograd.
        self._active: set[int] = set()
        self._position = 0
        # Keyed by transfer, as a table may post several receives before it takes the first.
        self._arriving: dict[Action, Pending | torch.Tensor] = {}
        self._to_send: dict[Action, torch.Tensor] = {}
        self._leaving: dict[Action, Pending] = {}
        self._results: dict[int, Any] = {}
        for program in self.programs:
            program.clear()

    def extend(self, actions: ActionList, micro_batches: MicroBatches | None = None) -> None:
        """Continue with another action list, for other micro-batches if they are given.

        Raises:
            ValueError: actions of the previous list have not run yet.
        """
        if self._position < len(self.actions):
            raise ValueError(f"{len(self.actions) - self._position} actions of the previous list have not run.")
        self.actions, self._position = actions, 0
        self.micro_batches = self.micro_batches if micro_batches is None else micro_batches
        # Those of earlier lists too: this one may have forwards whose backwards come with the next.
        self._active |= {action.chunk for action in actions if action.op in BEGINS_BACKWARD}
        for program in self.programs:
            program.extend(actions)

    def advance(self, before: Action | None = None) -> None:
        """Execute actions from where the last call stopped: up to `before`, or to the end.

        Raises:
            ValueError: `before` is not among those left.
        """
        end = len(self.actions)
        if before is not None:
            if before not in self.actions[self._position :]:
                raise ValueError(f"{before} is not among the {end - self._position} actions that are left.")
            end = self.actions.index(before, self._position)
        with self.meter.part("pipeline"):
            while self._position < end:
                action = self.actions[self._position]
                _HANDLERS[action.op](self, action)
                self._position += 1

    def drain(self) -> list[Any]:
        """Execute the remaining actions, wait for all sends, and return the same as `take_results`."""
        self.advance()
        with self.meter.part("pipeline"):
            # What is left are sends that no message confirms: gradients, and outputs of frozen stages.
            self._let_go(list(self._leaving))
        for program in self.programs:
            program.clear()  # Frees what the passes of a run share.
        return self.take_results()

    def take_results(self) -> list[Any]:
        """Return the last stage's outputs since the previous call, in micro-batch order; empty on other ranks."""
        # Taken away: in a window that runs on, the next call must not count them again.
        results, self._results = self._results, {}
        return [results[i] for i in sorted(results)]

    def abandon(self, neighbours: Mapping[Op, int], shape_of: Callable[[int], tuple[int, ...]]) -> None:
        """Stop in the middle of the action list. Collective: call on every rank of the pipeline.

        Each rank receives what its neighbors have sent, and sends zeros for the receives they have posted. Afterward
        no message is in flight and no activation is kept. Works only with one stage per rank, and only if
        micro-batches cross each link in the order of their numbers. `neighbours` gives, for each kind of transfer of
        this rank, how many matching transfers its neighbor has posted.
        """
        links, (program,) = self.links[0], self.programs
        for receive, link in ((Op.RECEIVE_FORWARD, links.forward_in), (Op.RECEIVE_BACKWARD, links.backward_in)):
            for i in range(self.num_posted[receive], neighbours[receive]):
                self._arriving[Action(receive, i)] = _wire(link, Action(receive, i)).receive(shape_of(i))
        for send, link in ((Op.SEND_FORWARD, links.forward_out), (Op.SEND_BACKWARD, links.backward_out)):
            for i in range(self.num_posted[send], neighbours[send]):
                wire = _wire(link, Action(send, i))
                self._leaving[Action(send, i)] = wire.send(wire.zeros(shape_of(i)))
        # All is posted before the first wait, here and on the neighbors, so nobody waits for one that waits.
        for pending in (*self._arriving.values(), *self._leaving.values()):
            if not isinstance(pending, torch.Tensor):
                pending.wait()
        self._arriving.clear()
        self._leaving.clear()
        self._to_send.clear()
        program.clear()

    # ---- computations ----

    def _forward(self, action: Action) -> None:
        _, i, chunk = action
        program, links = self.programs[chunk], self.links[chunk]
        received = self._take(links.forward_in, action)
        is_trained = chunk in self._active
        # To set the mode takes longer than to ask for it, and in training it mostly is the right one.
        mode = NOTHING if torch.is_grad_enabled() == is_trained else torch.set_grad_enabled(is_trained)
        with mode, self.meter.part("forward"), self.meter.tracing(action):
            result = program.forward(self.micro_batches[i], received)
        if links.forward_out is None:
            self._results[i] = result
        else:
            # Detached also between two stages of this rank: the backward of each is an action of its own.
            self._hand_on(result.detach(), links.forward_out, action)

    def _backward(self, action: Action) -> None:
        op, i, chunk = action
        program, links = self.programs[chunk], self.links[chunk]
        received = self._take(links.backward_in, action)
        # The peer has run its backward, so it has received the activation: this wait returns at once and frees it.
        self._let_go([_with_op(action, Op.SEND_FORWARD)])
        run = program.backward if op is Op.BACKWARD else program.backward_input
        with self.meter.part("backward"), self.meter.tracing(action):
            gradient = run(self.micro_batches[i], received)
        if gradient is not None and links.backward_out is not None:
            self._hand_on(gradient, links.backward_out, action)

    def _backward_weight(self, action: Action) -> None:
        with self.meter.part("backward"), self.meter.tracing(action):
            self.programs[action.chunk].backward_weight(self.micro_batches[action.micro_batch])

    # ---- transfers ----

    def _hand_on(self, tensor: torch.Tensor, to: Link | Local, action: Action) -> None:
        if isinstance(to, Local):
            self._arriving[Action(NEEDS[action.op], action.micro_batch, to.chunk)] = tensor
        else:
            self._to_send[_with_op(action, GIVES[action.op])] = tensor

    def _post_receive(self, action: Action) -> None:
        links = self.links[action.chunk]
        link = links.forward_in if action.op is Op.RECEIVE_FORWARD else links.backward_in
        # A receive is posted before its message is there, so the shape has to be known without it.
        shape = self.micro_batches[action.micro_batch].activation_shape
        self.num_posted[action.op] += 1
        self.meter.posting(action)
        self._arriving[action] = _wire(link, action).receive(shape)

    def _post_send(self, action: Action) -> None:
        op, _, chunk = action
        links = self.links[chunk]
        if op is Op.SEND_BACKWARD or chunk not in self._active:
            # No gradient will come back to confirm earlier sends; wait for them here to bound the memory they hold.
            self._let_go([sent for sent in self._leaving if (sent.op, sent.chunk) == (op, chunk)])
        link = links.forward_out if op is Op.SEND_FORWARD else links.backward_out
        self.num_posted[op] += 1
        self.meter.posting(action)
        self._leaving[action] = _wire(link, action).send(self._to_send.pop(action))

    def _take(self, link: Link | Local | None, action: Action) -> torch.Tensor | None:
        """Return the tensor that `action` consumes, waiting for its transfer; None at an end of the pipeline."""
        if link is None:
            return None
        transfer = _with_op(action, NEEDS[action.op])
        pending = self._arriving.pop(transfer, None)
        # Only a wrong table gets here; waiting would hang instead of saying so.
        if pending is None:
            raise ValueError(f"The table has {action} before what it takes was received or handed over.")
        if isinstance(pending, torch.Tensor):
            return pending
        with self.meter.waiting(transfer):
            return pending.wait()

    def _let_go(self, sends: Sequence[Action]) -> None:
        for send in sends:
            pending = self._leaving.pop(send, None)
            if pending is not None:
                with self.meter.waiting(send):
                    pending.wait()


_HANDLERS: dict[Op, Callable[[ActionListRun, Action], None]] = {
    Op.FORWARD: ActionListRun._forward,
    Op.BACKWARD: ActionListRun._backward,
    Op.BACKWARD_INPUT: ActionListRun._backward,
    Op.BACKWARD_WEIGHT: ActionListRun._backward_weight,
    Op.RECEIVE_FORWARD: ActionListRun._post_receive,
    Op.RECEIVE_BACKWARD: ActionListRun._post_receive,
    Op.SEND_FORWARD: ActionListRun._post_send,
    Op.SEND_BACKWARD: ActionListRun._post_send,
    Op.UPDATE: lambda _run, _action: None,  # The caller runs the optimizer step.
}


@lru_cache(maxsize=4096)
def _with_op(action: Action, op: Op) -> Action:
    """Return the transfer or computation of another kind for the same micro-batch; those of a schedule recur."""
    return action._replace(op=op)


def _wire(link: Link | Local | None, action: Action) -> Link:
    if link is None or isinstance(link, Local):
        raise ValueError(f"The table has a transfer ({action}) where the layout has no link.")
    return link
