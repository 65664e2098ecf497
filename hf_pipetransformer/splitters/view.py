"""View of one stage: the model's own forward code, restricted to the blocks that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from hf_pipetransformer.comm.errors import PipelineError
from hf_pipetransformer.schedules.placement import attention_of, mlp_of
from hf_pipetransformer.splitters.adapters import bare_model


if TYPE_CHECKING:
    from hf_pipetransformer.splitters.base import Splitter
    from hf_pipetransformer.splitters.structure import StandIn, Structure


Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function that returns a faster version of a function, such as `torch.compile`."""


class StageExit(Exception):
    """Exception that carries a stage's last activation out of the model's forward. The engine catches it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("a pipeline stage ended here; this exception is caught by the pipeline engine")
        self.hidden = hidden


Override = tuple[nn.Module, Callable[..., Any] | None, Callable[..., Any] | None]
"""A module, its forward on a stage, and what is called there in place of that and its hooks; None for its own."""


class Overrides:
    """Attributes of modules that stand in for those of their classes, or for their own, until `restore`."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        own = vars(module)
        self._before.append((own, name, own.get(name)))
        own[name] = value

    def restore(self) -> None:
        while self._before:
            own, name, before = self._before.pop()
            # Deleted rather than set to what the class has, which would be the instance's from then on.
            del own[name]
            own.update({} if before is None else {name: before})


@contextmanager
def overriding_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Call these in place of the modules' own forwards inside."""
    overrides = Overrides()
    try:
        for module, forward in forwards:
            overrides.put(module, "forward", forward)
        yield
    finally:
        overrides.restore()


@dataclass
class Ran:
    """Forward of a model that a view has restricted, with its result."""

    result: Any = None


class StageView:
    """Restriction of a model to a range of its blocks, by overriding `forward` on module instances.

    Module tree, parameter names and the model's own forward code stay unchanged. Layers that this stage does not own
    pass their input through, the received activation replaces the embeddings' output, and after the last owned block
    `StageExit` carries the activation out of the forward with its autograd graph intact.

    Args:
        compiled: compiles a layer's forward, or half of it; None leaves them as they are.
        recomputes_layers: a backward runs the forward of each layer again, and between them only the layers' inputs
            are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        splitter: Splitter,
        structure: Structure,
        compiled: Compile | None = None,
        recomputes_layers: bool = False,
    ) -> None:
        self.model = model
        self.splitter = splitter
        self.structure = structure
        self._num_blocks = structure.num_blocks
        self._compiled = compiled
        self._recomputes_layers = recomputes_layers
        self._faster: dict[tuple[int, str], Callable[..., Any]] = {}
        self.received: torch.Tensor | None = None
        self.is_running = False
        """True while `run` executes the model."""
        self._overrides = Overrides()
        self._forwards: dict[range, list[Override]] = {}
        self._noted: list[torch.Tensor] | None = None
        self._around: list[nn.Module] | None = None
        self.blocks: range | None = None
        """Blocks that the model is restricted to; None without a restriction."""
        self._without_media: list[RemovableHandle] = []
        """Handle of the hook that takes media from the inputs of later stages."""
        self.methods: dict[str, Callable[..., Any]] = {}
        """Methods that the transformers model has while it is installed, by the names of those that they replace."""
        self._installed_methods = Overrides()
        self._installed: tuple[range, ...] = ()

    @property
    def is_installed(self) -> bool:
        return bool(self._installed)

    def install(self, *parts: range) -> None:
        """Restrict the model to these stages' blocks, one stage at a time, the first now; replaces earlier ones."""
        self.remove()
        self.narrow(parts[0])
        self._installed = parts
        for name, method in self.methods.items():
            self._installed_methods.put(bare_model(self.model), name, method)

    def run(self, blocks: range, received: torch.Tensor | None, forward: Callable[[], Any]) -> Any:
        """Return the result of `forward`, see `running`."""
        with self.running(blocks, received) as ran:
            ran.result = forward()
        return ran.result

    @contextmanager
    def running(self, blocks: range, received: torch.Tensor | None) -> Iterator[Ran]:
        """Restrict the model to `blocks` for one forward inside; the restriction stays until `widen`.

        Whoever enters notes the forward's result. If `blocks` do not include the head it is the activation after the
        last block, at which the forward ends.

        Args:
            received: the activation that enters `blocks`, `(batch, seq, hidden)`; None for the embeddings.

        Raises:
            PipelineError: the model skipped the last of `blocks`.
        """
        self.narrow(blocks)
        self.received, self.is_running = received, True
        ran = Ran()
        try:
            yield ran
        except StageExit as stage_exit:
            # The traceback references the frames of the whole forward, and with them every activation.
            stage_exit.__traceback__ = None
            ran.result = stage_exit.hidden
            return
        except BaseException:
            # What has put forwards in place before takes them away next.
            self.widen()
            raise
        finally:
            self.received, self.is_running = None, False
        if blocks.stop < self._num_blocks:
            raise PipelineError(
                "The model ran to its end on a stage that does not hold the head: it skipped the stage's last layer. "
                "Layers that are skipped at random (layerdrop) cannot be stages."
            )

    @contextmanager
    def backward_of(self, blocks: range, received: torch.Tensor | None) -> Iterator[None]:
        """Restore the view of a `run` for its backward, where a model's own checkpointing reruns the layers."""
        self.narrow(blocks)
        self.received = received
        try:
            yield
        except BaseException:
            self.widen()
            raise
        finally:
            self.received = None

    def modules_around(self) -> list[nn.Module]:
        """Return the modules that have all layers and embeddings inside, the model first."""
        if self._around is None:
            inside = {id(each) for each in (*self.structure.layers, *self.structure.entries)}
            self._around = [
                module
                for module in self.model.modules()
                if id(module) not in inside and inside <= {id(each) for each in module.modules()}
            ]
        return self._around

    @contextmanager
    def noting_entrance_of_head(self) -> Iterator[list[torch.Tensor]]:
        """Yield a list that gets what enters the head in each forward, `(batch, seq, hidden)`, without graph."""
        noted: list[torch.Tensor] = []
        self._noted = noted
        # A layer of another stage, which passes on what it is given, calls no hooks.
        hook = self.structure.layers[-1].register_forward_hook(lambda _layer, _args, output: self._note(output))
        try:
            yield noted
        finally:
            self._noted = None
            hook.remove()

    def _note(self, output: Any) -> None:
        if self._noted is not None:
            # A layer that is used several times is the last one in its last call.
            hidden = (output[0] if self.structure.returns_tuple else output).detach()
            self._noted.append(hidden.clone() if self.structure.changes_in_place else hidden)

    def narrow(self, blocks: range) -> None:
        """Restrict the model to `blocks` until `widen`; an empty range passes the received activation through."""
        if blocks == self.blocks:
            return
        self._restore()
        self.blocks, media = blocks, self.structure.media
        if media is not None and 0 not in blocks:
            # The first stage has encoded them; without any, the model's code runs as on text alone.
            # PEFT calls the `forward` of a model that it wraps, which passes its hooks by.
            self._without_media = [
                module.register_forward_pre_hook(
                    lambda _module, args, kwargs: (args, {**self.inputs_read(kwargs)}), with_kwargs=True
                )
                for module in {self.model, media.module}
            ]
        if blocks not in self._forwards:
            # Cached: ranks with several stages switch between them many times per step.
            self._forwards[blocks] = self._forwards_of(blocks)
        for module, forward, call in self._forwards[blocks]:
            if forward is not None:
                self._overrides.put(module, "forward", forward)
            if call is not None:
                self._overrides.put(module, "_call_impl", call)

    def inputs_read(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs that the model reads here: media on the first stage only, whoever calls its `forward`."""
        media = self.structure.media
        if media is None or not self._without_media:
            return inputs
        return {name: value for name, value in inputs.items() if name not in media.names}

    def widen(self) -> None:
        """Restrict the model to the whole first installed stage again."""
        if self._installed:
            self.narrow(self._installed[0])

    def remove(self) -> None:
        self._restore()
        self._forwards.clear()
        self._installed = ()
        self._installed_methods.restore()

    def _restore(self) -> None:
        self._overrides.restore()
        while self._without_media:
            self._without_media.pop().remove()
        self.blocks = self.received = None

    def _forwards_of(self, blocks: range) -> list[Override]:
        """Return the modules that need another forward on a stage, or another call."""
        found: list[Override] = []
        if 0 not in blocks:
            structure = self.structure
            # Of what a stand-in returns, only structure and shape matter.
            makers: list[StandIn] = [*structure.stand_ins]
            if not structure.enters_layers:
                # The last entry is the one whose output enters the layers, so its values matter.
                makers[-1] = self._entering
            for entry, make in zip(structure.entries, makers, strict=True):
                found.append((entry, replaced := partial(self._replaced, make), replaced))
        for index, layer in enumerate(self.structure.layers):
            forward = self._layer_forward(index, layer, blocks)
            if attention_of(index) not in blocks and mlp_of(index) not in blocks:
                # Its hooks are called where it computes, and would change here what passes through.
                found.append((layer, forward, forward))
            else:
                found.append((layer, forward, partial(self._left, layer) if mlp_of(index) == blocks[-1] else None))
        return found

    def _left(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the last layer of a stage, and leave the model's forward behind its hooks."""
        output = type(layer)._call_impl(layer, *args, **kwargs)
        raise StageExit(output[0] if self.structure.returns_tuple else output)

    def _replaced(self, make: StandIn, *_args: Any, **_kwargs: Any) -> Any:
        if self.received is None:
            raise ValueError(
                f"The embeddings of {type(bare_model(self.model)).__name__} are called by themselves, where stages "
                "do not take part: call the model, or a module that has all of its layers."
            )
        return make(self.received)

    def _entering(self, received: torch.Tensor) -> torch.Tensor:
        """Return the received activation as the layers may take it."""
        # Autograd forbids in-place changes of a leaf that requires grad, and the received tensor is read again later.
        return received.clone() if self.structure.changes_in_place else received

    def _layer_forward(self, index: int, layer: nn.Module, blocks: range) -> Callable[..., Any] | None:
        """Return the forward of `layer` on a stage with `blocks`; None if its own forward will do."""
        attention, mlp = attention_of(index), mlp_of(index)
        last = blocks[-1] if blocks else 0
        # A stage of the embeddings alone ends where the first layer would begin.
        exits_before = last == 0 and index == 0
        exits_between = last == attention
        is_own = attention in blocks or mlp in blocks
        takes_received = self.structure.enters_layers and index == 0 and 0 not in blocks
        wraps = self.structure.returns_tuple
        own_forward = self._fast(index, "layer", layer.forward)
        run_attention = self._fast(index, "attention", partial(self.splitter.run_attention, layer))
        run_mlp = self._fast(index, "mlp", partial(self.splitter.run_mlp, layer))

        def run(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if attention in blocks and mlp in blocks:
                return own_forward(hidden, *args, **kwargs)
            if attention in blocks:
                hidden = run_attention(hidden, *args, **kwargs)
            elif mlp in blocks:
                hidden = run_mlp(hidden)
            # The model's code unpacks what a layer returns, so its length and kind have to be right.
            whole = [hidden, *[None] * (wraps - 1)]
            return hidden if not wraps else whole if self.structure.returns_list else tuple(whole)

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), args)
            if takes_received and self.received is not None:
                hidden = self._entering(self.received)
            if exits_before:
                raise StageExit(hidden)
            # A layer of another stage passes on its input, so there is nothing to compute again.
            if is_own and self._recomputes_layers and torch.is_grad_enabled():
                output = _recomputed(run, hidden, args, kwargs)
            else:
                output = run(hidden, *args, **kwargs)
            if exits_between:
                raise StageExit(output[0] if wraps else output)
            if not is_own and index == len(self.structure.layers) - 1:
                self._note(output)
            return output

        serves = attention in blocks and mlp in blocks and not takes_received
        if serves and self._compiled is None and not self._recomputes_layers:
            return None
        return forward

    def _fast(self, index: int, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, compiled if requested. Compiles once per layer and part, not again for a new layout."""
        if self._compiled is None:
            return function
        if (index, part) not in self._faster:
            self._faster[index, part] = self._compiled(function)
        return self._faster[index, part]


def _recomputed(run: Callable[..., Any], hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a layer, keeping only its input for the backward, which runs it again with the same RNG state."""
    args = tuple(map(_if_repeatable, args))
    kwargs = {key: _if_repeatable(value) for key, value in kwargs.items()}
    # The reentrant kind gives no gradients where its input requires none, as above frozen embeddings.
    return checkpoint(lambda given: run(given, *args, **kwargs), hidden, use_reentrant=False)


def _if_repeatable(argument: Any) -> Any:
    """Replace a KV cache by None unless it says that a layer may write to it twice.

    A model makes one for each forward if it is not told that it trains. The second write would append to the first.
    """
    is_cache = isinstance(argument, Cache)
    return None if is_cache and not getattr(argument, "takes_layers_again", False) else argument
