"""What Triton's interpreter lacks for Liger's kernels: floats as scalars, and two functions of CUDA's library."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl  # Functions that are interpreted look it up in their module.
from triton.language.extra import libdevice
from triton.runtime import interpreter


_convert = interpreter._implicit_cvt


def complete() -> None:
    """Add them; it may be called again."""
    interpreter._implicit_cvt = _converted
    libdevice.rsqrt, libdevice.tanh = _rsqrt, _tanh


def _converted(value: Any) -> Any:
    if not isinstance(value, float):
        return _convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]
    return 1.0 / tl.sqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
