"""Triton's interpreter, with the one thing mended that these kernels need and it lacks."""

from typing import Any

import triton
from triton import language as tl
from triton.runtime import interpreter

from vllm_hybrid_sparse.kernels.merge.gpu import _merge_kernel


def interprets() -> bool:
    """Whether the kernels of this process are interpreted."""
    return not isinstance(_merge_kernel, triton.runtime.JITFunction)


def mend_interpreter() -> None:
    """Let the interpreter's dot products take bf16, whose bits it would multiply as whole numbers."""
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
