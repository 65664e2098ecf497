"""The view of one stage: the model's own code, run from the first to the last unit that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.schedules.placement import attention_of, mlp_of
from hf_pipetransformer.splitters.base import Splitter
from hf_pipetransformer.splitters.structure import StandIn, Structure


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A function to a faster one that does the same."""


class StageExit(Exception):
    """Carries a stage's last activation out of the model's forward; caught by the engine, never by users."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("a pipeline stage ended here; this exception is caught by the pipeline engine")
        self.hidden = hidden


class StageView:
    """Makes a model run only a range of its units, by overriding `forward` on instances.

    The module tree, the names of parameters and the model's own forward code stay as they are: layers that this stage
    does not own hand their input on, the embeddings are replaced by the received activation, and after the last owned
    unit `StageExit` leaves the model with the activation; its autograd graph stays intact.

    Args:
        model: the whole model.
        splitter: how to run half a layer.
        structure: from `trace_structure`.
        compiled: makes a faster function of a layer's forward, or of one half of it; None leaves them as they are.
    """

    def __init__(
        self, model: nn.Module, splitter: Splitter, structure: Structure, compiled: Compile | None = None
    ) -> None:
        self.model = model
        self.splitter = splitter
        self.structure = structure
        self._compiled = compiled
        self._faster: dict[tuple[int, str], Callable[..., Any]] = {}
        self.received: torch.Tensor | None = None
        self.is_running = False
        """Whether the model runs a part of its units now (`run`)."""
        self._overridden: list[tuple[nn.Module, Any]] = []
        self._forwards: dict[range, list[tuple[nn.Module, Callable[..., Any]]]] = {}
        self.units = range(0)
        self._installed: tuple[range, ...] = ()

    @property
    def is_installed(self) -> bool:
        """Whether the model runs a part of its units only."""
        return bool(self._installed)

    def install(self, *parts: range) -> None:
        """Let the model run the units of these stages only, one stage at a time. Replaces an earlier view."""
        self.remove()
        self.narrow(parts[0])
        self._installed = parts

    def run(self, units: range, received: torch.Tensor | None, forward: Callable[[], Any]) -> Any:
        """Let `forward` run `units` and no others. Until `widen` the model does so.

        Args:
            units: some of the model's.
            received: the activation that enters them, `(batch, seq, hidden)`; None for the embeddings.
            forward: runs the model.

        Returns:
            What `forward` returned if the head is among `units`, else the activation that leaves them.

        Raises:
            PipelineError: the model skipped the last of `units`.
        """
        self.narrow(units)
        self.received, self.is_running = received, True
        try:
            result = forward()
        except StageExit as stage_exit:
            # The traceback holds the frames of the whole forward, and with them every activation.
            stage_exit.__traceback__ = None
            return stage_exit.hidden
        finally:
            self.received, self.is_running = None, False
        if units.stop < self.structure.num_units:
            raise PipelineError(
                "The model ran to its end on a stage that does not hold the head: it skipped the stage's last layer. "
                "Layers that are skipped at random (layerdrop) cannot be stages."
            )
        return result

    @contextmanager
    def backward_of(self, units: range, received: torch.Tensor | None) -> Iterator[None]:
        """The backward of what `run` gave: a model that recomputes its layers itself finds them as they were then.

        Args:
            units: see `run`.
            received: see `run`.
        """
        self.narrow(units)
        self.received = received
        try:
            yield
        finally:
            self.received = None

    def narrow(self, units: range) -> None:
        """Run `units` alone until `widen`."""
        if units == self.units:
            return
        self._restore()
        self.units = units
        if units not in self._forwards:
            # Ranks with several stages come back to each of them many times in a step.
            self._forwards[units] = self._forwards_of(units)
        for module, forward in self._forwards[units]:
            self._overridden.append((module, module.__dict__.get("forward")))
            module.forward = forward

    def widen(self) -> None:
        """Run the whole first stage again."""
        if self._installed:
            self.narrow(self._installed[0])

    def remove(self) -> None:
        """Give the model its own forward back."""
        self._restore()
        self._forwards.clear()
        self._installed = ()

    def _restore(self) -> None:
        for module, own in self._overridden:
            del module.forward
            if own is not None:
                module.forward = own
        self._overridden.clear()
        self.units = range(0)
        self.received = None

    def _forwards_of(self, units: range) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """The modules whose own forward does not serve a stage that owns `units`, and what they run instead."""
        found = [] if 0 in units else self._entry_forwards()
        for index, layer in enumerate(self.structure.layers):
            forward = self._layer_forward(index, layer, units)
            if forward is not None:
                found.append((layer, forward))
        return found

    def _entry_forwards(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """What the entries give in a stage without the embeddings."""
        entries = self.structure.entries
        forwards: list[Callable[..., Any]] = [partial(self._give_stand_in, make) for make in self.structure.stand_ins]
        if not self.structure.enters_layers:
            forwards[-1] = self._give_received
        return list(zip(entries, forwards, strict=True))

    def _give_stand_in(self, make: StandIn, *_args: Any, **_kwargs: Any) -> Any:
        assert self.received is not None, "the engine sets the received activation before it runs the model"
        return make(self.received)  # What the code around makes of it is not read.

    def _give_received(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        assert self.received is not None, "the engine sets the received activation before it runs the model"
        # Autograd does not let a leaf be changed where it lies, and others still read it.
        return self.received.clone() if self.structure.changes_in_place else self.received

    def _layer_forward(self, index: int, layer: nn.Module, units: range) -> Callable[..., Any] | None:
        """What `layer` does in a stage that owns `units`; None if its own forward serves."""
        attention, mlp = attention_of(index), mlp_of(index)
        last = units[-1]
        exits_before = last == 0 and index == 0
        exits_after = last in (attention, mlp)
        takes_received = self.structure.enters_layers and index == 0 and 0 not in units
        wraps = self.structure.returns_tuple
        own_forward = self._fast(index, "layer", layer.forward)
        run_attention = self._fast(index, "attention", partial(self.splitter.run_attention, layer))
        run_mlp = self._fast(index, "mlp", partial(self.splitter.run_mlp, layer))

        def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if attention in units and mlp in units:
                return own_forward(hidden, *args, **kwargs)
            if attention in units:
                hidden = run_attention(hidden, *args, **kwargs)
            elif mlp in units:
                hidden = run_mlp(hidden)
            whole = [hidden, *[None] * (wraps - 1)]
            return hidden if not wraps else whole if self.structure.returns_list else tuple(whole)

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), args)
            if takes_received and self.received is not None:
                hidden = self.received.clone() if self.structure.changes_in_place else self.received
            if exits_before:
                raise StageExit(hidden)
            output = run(hidden, *args, **kwargs)
            if exits_after:
                raise StageExit(output[0] if wraps else output)
            return output

        serves = attention in units and mlp in units and not exits_after and not takes_received
        if serves and self._compiled is None:
            return None
        return forward

    def _fast(self, index: int, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled if that was asked for: once for each layer, whatever stages come and go."""
        if self._compiled is None:
            return function
        if (index, part) not in self._faster:
            self._faster[index, part] = self._compiled(function)
        return self._faster[index, part]
