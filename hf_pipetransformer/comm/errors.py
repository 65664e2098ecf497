"""Errors between ranks, and the one way to wait for another rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch


T = TypeVar("T")


class PipelineError(RuntimeError):
    """Fatal error of a run; the message names the first known cause."""


class ModelSettingError(ValueError):
    """Error for a model setting or layer type that pipeline stages do not support; the message names it."""


class PeerLostError(PipelineError):
    """Error for a rank that does not answer because it died or is doing something else."""


OUT_OF_MEMORY_REMEDY = (
    "This layout does not fit: set a larger pipeline_parallel_size, pipeline_compression='memory' (no stage becomes "
    "larger than at the start), a smaller per_device_train_batch_size or pipeline_checkpoint='always'. "
    "A run that goes on in this output_dir plans no pipeline as short again."
)

LAUNCH_HINT = (
    "accelerate launch --multi_gpu --num_processes N script.py ... "
    "(on CPU add `--use_cpu true` after the script's name)"
)

_present_limit: float | None = None


def set_present_limit(seconds: float) -> None:
    """Set the timeout in seconds of waits for other ranks: short in a step, longer between steps."""
    global _present_limit
    _present_limit = seconds


def present_limit() -> float | None:
    """Return the current timeout in seconds of waits for other ranks; None before `set_present_limit`."""
    return _present_limit


def wait_for(work: Any, seconds: float | None, what: str) -> None:
    """Wait for a `torch.distributed` work handle, up to `present_limit()`, or `seconds` if no limit is set.

    With `seconds` None, the process group's own timeout applies: on GPUs, a wait with a timeout would block the host
    until the device is done, while one without only orders the streams.

    Raises:
        PeerLostError: the transfer failed or timed out; `what` names the transfer and the peer.
    """
    seconds = seconds if seconds is None or _present_limit is None else _present_limit
    guarded(work.wait if seconds is None else lambda: work.wait(timedelta(seconds=seconds)), what)


def guarded(call: Callable[[], T], what: str) -> T:
    """Run a blocking collective; if it fails, raise an error that names it.

    Raises:
        PeerLostError: the call failed; `what` names the collective.
    """
    try:
        return call()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # The cause is on this rank, not on a peer.
    except RuntimeError as error:
        raise PeerLostError(f"Lost contact while {what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    # Drop gloo's advice ("This is typically caused by ..."), which is about another layer.
    return str(error).strip().split("\n", 1)[0].split(". This is typically", 1)[0]
