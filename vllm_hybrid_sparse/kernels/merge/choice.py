"""Chooses the merging kernel for a device."""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.fallbacks import count_fallback
from vllm_hybrid_sparse.kernels.merge import reference

logger = logging.getLogger(__name__)

Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def choose_merge(device_type: str, dtype: torch.dtype) -> tuple[str, Merge]:
    """The name and the function that merges states: flashinfer, triton or torch.

    A missing package is logged once, and counted. When serving, all states are float32, so FlashInfer's kernel is not
    taken.

    device_type   cuda; any other gets torch
    dtype         of the outputs; FlashInfer merges bf16 and f16, Triton merges float32 states
    """
    if device_type != "cuda":
        return "torch", reference.merge_states
    half = dtype in (torch.bfloat16, torch.float16)
    if half and find_spec("flashinfer") is not None:
        from vllm_hybrid_sparse.kernels.merge import flashinfer  # noqa: PLC0415  only where it is installed

        return "flashinfer", flashinfer.merge_states
    if find_spec("triton") is None:
        count_fallback("merge_kernel")
        logger.warning("Neither FlashInfer nor Triton is installed: attention states are merged by torch")
        return "torch", reference.merge_states
    from vllm_hybrid_sparse.kernels.merge import gpu  # noqa: PLC0415  only where Triton is installed

    if half:
        count_fallback("merge_kernel")
        logger.warning("FlashInfer is not installed: attention states are merged by Triton")
    return "triton", gpu.merge_states
