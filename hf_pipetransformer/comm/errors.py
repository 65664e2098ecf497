"""Errors between ranks, and the one way to wait for another rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch


T = TypeVar("T")


class PipelineError(RuntimeError):
    """The run cannot go on; the text names the first cause that is known."""


class ModelSettingError(ValueError):
    """A setting of the model, or a kind of layer in it, does not go with stages; the text says which."""


class PeerLostError(PipelineError):
    """Another rank did not answer: it died, or it is doing something else."""


OUT_OF_MEMORY_REMEDY = (
    "This layout does not fit: set a larger pipeline_parallel_size, pipeline_compression='memory' (no stage becomes "
    "larger than at the start), a smaller per_device_train_batch_size or pipeline_checkpoint='always'. "
    "A run that goes on in this output_dir plans no pipeline as short again."
)

_present_limit: float | None = None


def set_present_limit(seconds: float) -> None:
    """How long waits for other ranks may take from now on: little in a step, more between steps."""
    global _present_limit
    _present_limit = seconds


def present_limit() -> float | None:
    """Seconds that a wait for another rank may take now; None if nobody has said so yet."""
    return _present_limit


def wait_for(work: Any, seconds: float | None, what: str) -> None:
    """Wait for a `torch.distributed` work handle, at most `present_limit()`, or `seconds` where there is none.

    None leaves the limit to the process group: on GPUs a wait with a limit would block the host until the device is
    done, one without only orders the streams.

    Raises:
        PeerLostError: the transfer failed or took longer; `what` says what was awaited and from whom.
    """
    seconds = seconds if seconds is None or _present_limit is None else _present_limit
    guarded(work.wait if seconds is None else lambda: work.wait(timedelta(seconds=seconds)), what)


def guarded(call: Callable[[], T], what: str) -> T:
    """Run a blocking collective and name it if it fails.

    Raises:
        PeerLostError: the call raised; `what` says what was awaited.
    """
    try:
        return call()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # Its own cause, not another rank's.
    except RuntimeError as error:
        raise PeerLostError(f"Lost contact while {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    # The transport's own advice ("This is typically caused by ...") is about another layer.
    return str(error).strip().split("\n", 1)[0].split(". This is typically", 1)[0]
