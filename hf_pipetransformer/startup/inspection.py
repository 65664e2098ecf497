"""The boundary around all that runs a model before its first step.

Trainer may well train a model that cannot be looked at. So whatever the model's own code, or code that looks at it,
raises here becomes `UnsupportedModelError` on every rank. Only the first real step of a run may raise anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from hf_pipetransformer.autodp.topology import Topology
from hf_pipetransformer.errors import PipelineError
from hf_pipetransformer.splitters.base import UnsupportedModelError


T = TypeVar("T")

_NOT_OF_THE_MODEL = (PipelineError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Another rank's failure, a lack of memory, a device that is lost: Trainer would fare no better."""
_OUT_OF_HOST_MEMORY = "DefaultCPUAllocator"


class Inspection:
    """Makes calls that run a model, and turns what they raise into one kind of error.

    Args:
        topology: the ranks, which agree on the outcome.
        name: of the model's class.
    """

    def __init__(self, topology: Topology, name: str) -> None:
        self._topology = topology
        self._name = name
        self._of_data: Exception | None = None

    def reading(self, read: Callable[[int], T]) -> Callable[[int], T]:
        """Make `read` one whose errors are the data set's: they stay what they are."""

        def noting_errors(num_samples: int) -> T:
            try:
                return read(num_samples)
            except Exception as error:
                self._of_data = error
                raise

        return noting_errors

    def on_every_rank(self, call: Callable[[], T]) -> T:
        """Make a call on every rank; what one of them raises is refused by all. A collective call.

        Raises:
            UnsupportedModelError: the call raised on some rank; on that rank with its error as the cause.
        """
        value, refusal = self._attempt(call)
        for text in self._topology.gather(None if refusal is None else str(refusal)):
            if text is not None:
                raise refusal or UnsupportedModelError(text)
        return cast(T, value)

    def on_first_rank(self, call: Callable[[], Any]) -> Any:
        """Give every rank what a call gives on rank 0; see `Topology.decide`. A collective call.

        Raises:
            UnsupportedModelError: on every rank, the call raised; on rank 0 with its error as the cause.
        """
        refusals = []

        def attempt() -> list[Any]:
            value, refusal = self._attempt(call)
            refusals.append(refusal)
            return [value, None if refusal is None else str(refusal)]

        value, text = self._topology.decide(attempt)
        if text is not None:
            raise (refusals[0] if refusals else None) or UnsupportedModelError(text)
        return value

    def _attempt(self, call: Callable[[], T]) -> tuple[T | None, UnsupportedModelError | None]:
        """Return what a call gives, or what the model is refused for."""
        try:
            return call(), None
        except UnsupportedModelError as error:
            return None, error
        except _NOT_OF_THE_MODEL:
            raise
        except Exception as error:
            if error is self._of_data or _OUT_OF_HOST_MEMORY in str(error):
                raise
            refusal = UnsupportedModelError(
                f"{self._name} raises {type(error).__name__} while it is tried on stages: {error}. This model cannot "
                "be pipelined as it is; pass `splitter=` with a Splitter that knows it, or use transformers.Trainer."
            )
            refusal.__cause__ = error
            return None, refusal
