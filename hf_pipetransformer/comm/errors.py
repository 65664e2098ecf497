"""Errors of a run, and the one way to wait for another rank."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist


T = TypeVar("T")


class PipelineError(RuntimeError):
    """Fatal error of a run; the message names the first known cause."""


class ModelSettingError(ValueError):
    """Error for a model setting or layer type that pipeline stages do not support; the message names it."""


class LossDoesNotDecomposeError(ValueError):
    """The loss of a batch is neither the weighted mean nor the sum of the losses of its parts."""


class PeerLostError(PipelineError):
    """Error for a rank that does not answer because it died or is doing something else."""


OUT_OF_MEMORY_REMEDY = (
    "This layout does not fit: set a larger pipeline_parallel_size, pipeline_compression='memory' (no stage becomes "
    "larger than at the start), a smaller per_device_train_batch_size or pipeline_checkpoint='layers'. "
    "Another run in this output_dir plans only longer pipelines; `hf-pipetransformer plan` shows what fits."
)

LAUNCH_HINT = (
    "accelerate launch --multi_gpu --num_processes N script.py "
    "(without GPUs, too; on the CPUs of a machine that has GPUs: "
    "ACCELERATE_USE_CPU=true torchrun --nproc_per_node N script.py)"
)

_present_limit: timedelta | None = None


def set_present_limit(seconds: float) -> None:
    """Set the timeout in seconds of waits for other ranks: short in a step, longer between steps."""
    global _present_limit
    _present_limit = timedelta(seconds=seconds)


def present_limit() -> float | None:
    """Return the current timeout in seconds of waits for other ranks; None before `set_present_limit`."""
    return None if _present_limit is None else _present_limit.total_seconds()


def wait_for(work: Any, seconds: float | None, what: str) -> None:
    """Wait for a `torch.distributed` work handle, up to `present_limit()`, or `seconds` if no limit is set.

    With `seconds` None, the process group's own timeout applies: on GPUs, a wait with a timeout would block the host
    until the device is done, while one without only orders the streams.

    Raises:
        PeerLostError: the transfer failed or timed out; `what` names the transfer and the peer.
    """
    if seconds is None:
        guarded(work.wait, what)
    else:
        limit = timedelta(seconds=seconds) if _present_limit is None else _present_limit
        guarded(partial(work.wait, limit), what)


def guarded(call: Callable[[], T], what: str) -> T:
    """Run a blocking collective; if it fails, raise an error that names it.

    Raises:
        PeerLostError: the call failed; `what` names the collective.
        RuntimeError: a signal handler's own error.
    """
    try:
        return call()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # The cause is on this rank, not on a peer.
    except RuntimeError as error:
        if _is_of_signal_handler(error):
            raise
        raise PeerLostError(f"Lost contact while {what}: {_first_line(error)}") from error


def _is_of_signal_handler(error: BaseException) -> bool:
    """Return True if a signal handler raised an error: torch's does in any call, when a loader's worker dies."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    # Drop gloo's advice ("This is typically caused by ..."), which is about another layer.
    return str(error).strip().split("\n", 1)[0].split(". This is typically", 1)[0]


# gloo, and NCCL in some calls, raise plain RuntimeErrors, of which only the text tells.
_LOST_CONTACT = ("gloo", "nccl", "connection closed", "pair closure")


def is_second_hand(error: BaseException) -> bool:
    """Return True if an error only says that another rank is gone."""
    if isinstance(error, (PeerLostError, dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _LOST_CONTACT)
