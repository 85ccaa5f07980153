"""Triton's interpreter, with two things mended that these kernels and their callers need and it lacks."""

import threading
from typing import Any

import numpy as np
import triton
from triton import language as tl
from triton.runtime import interpreter

from vllm_hybrid_sparse.kernels.merge.gpu import _merge_kernel


def interprets() -> bool:
    """Whether the kernels of this process are interpreted."""
    return not isinstance(_merge_kernel, triton.runtime.JITFunction)


def mend_interpreter() -> None:
    """Let the interpreter's dot products take bf16, and let threads launch side by side, as on a GPU.

    It would multiply the bits of bf16 as whole numbers, and it keeps the place in the grid in one global variable.
    """
    create_dot = interpreter.InterpreterBuilder.create_dot
    if getattr(create_dot, "takes_bf16", False):
        return

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def mended(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return create_dot(self, as_float32(a), as_float32(b), *args)

    mended.takes_bf16 = True  # type: ignore[attr-defined]
    interpreter.InterpreterBuilder.create_dot = mended

    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def launch_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with lock, np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_alone
