"""Triton's interpreter, with two things mended that these kernels and their callers need, and two that cost time."""

import threading
from dataclasses import replace
from types import SimpleNamespace
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

    Each call of one kernel's function by another would wrap all of Triton's language once more, and whole numbers are
    tested for overflows that are then not reported.
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

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)

    patch, launch, lock = interpreter._patch_lang, interpreter.GridExecutor.__call__, threading.RLock()
    whole = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # as if a function used all modules
    wrapped = False  # in the launch under way

    def wrap_once(_fn: Any) -> Any:
        nonlocal wrapped
        scope = interpreter._LangPatchScope() if wrapped else patch(whole)
        wrapped = True
        return scope

    def launch_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal wrapped
        with lock, np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            wrapped = False
            return launch(self, *args, **kwargs)

    interpreter._patch_lang = wrap_once
    interpreter.GridExecutor.__call__ = launch_alone
