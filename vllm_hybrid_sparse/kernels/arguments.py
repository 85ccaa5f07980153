"""What wrappers of kernels check before a kernel that trusts them runs, and sizes that device kernels share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.values import PAGE_TOKENS

CPU = torch.device("cpu")
KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DEVICE_HEAD_DIM = 256
"""Largest head dimension of the device kernels; a tile of keys and one of values must fit a multiprocessor."""

_HEAD_DIM_STEP = 16

_MIN_DOT_ROWS = 16
"""Rows that a matrix instruction has at least; a smaller group is padded to it, which costs no bytes."""

SCORE_WARPS = 8
"""Warps of a program that sums what pages weigh, `score_tile` of them at a time. Not tuned on a GPU yet."""


def check_tensor(
    name: str,
    tensor: Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
    strided_dims: int = 0,
) -> None:
    """Raise KernelError for a tensor that a kernel would misread.

    shape          sizes, None where any will do
    strided_dims   leading dimensions that may have any stride; the others must lie close together
    """
    # Some sixty a layer of a step, so what is usual is looked at first, and in few calls.
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    sizes_given = tensor.shape
    fits = len(sizes_given) == len(shape)
    if fits:
        for size, wanted in zip(sizes_given, shape, strict=True):
            if wanted is not None and wanted != size:
                fits = False
                break
    is_dense = tensor.is_contiguous() or (strided_dims > 0 and _is_dense(tensor, strided_dims))
    if tensor.dtype not in allowed or tensor.device != device or not fits or not is_dense:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        names = " | ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        strides = "its last dimensions contiguous" if strided_dims else "contiguous"
        raise KernelError(
            f"{name}={list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}, strides "
            f"{list(tensor.stride())}: must be [{sizes}] {names} on {device}, {strides}"
        )


def _is_dense(tensor: Tensor, strided_dims: int) -> bool:
    if tensor.numel() == 0:
        return True
    stride = 1
    for dim in range(tensor.dim() - 1, strided_dims - 1, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != stride:
            return False
        stride *= tensor.shape[dim]
    return True


def check_pools(k_pool: Tensor, v_pool: Tensor) -> int:
    """Check the pool's two tensors, [slots, 16, head_dim] of one KV dtype, and return head_dim."""
    check_tensor("k_pool", k_pool, KV_DTYPES, (None, PAGE_TOKENS, None), k_pool.device)
    check_tensor("v_pool", v_pool, k_pool.dtype, k_pool.shape, k_pool.device)
    return check_head_dim(k_pool.shape[2])


def check_host(host: Tensor, dtypes: torch.dtype | Sequence[torch.dtype], device: torch.device) -> None:
    """Check elements of the host store, [elements], which kernels on a GPU read and write in place: pinned there."""
    check_tensor("host", host, dtypes, (None,), CPU)
    if device.type == "cuda" and not host.is_pinned():
        raise KernelError(f"host={host.numel()} elements in pageable memory: must be pinned")


def check_head_dim(head_dim: int) -> int:
    """Return a head dimension that the device kernels take."""
    if head_dim % _HEAD_DIM_STEP or not _HEAD_DIM_STEP <= head_dim <= MAX_DEVICE_HEAD_DIM:
        raise KernelError(
            f"head_dim={head_dim}: must be a multiple of {_HEAD_DIM_STEP}, {_HEAD_DIM_STEP} to {MAX_DEVICE_HEAD_DIM}"
        )
    return head_dim


def group_size(q_heads: int, kv_heads: int) -> int:
    """Query heads that share a KV head."""
    if kv_heads < 1 or q_heads % kv_heads or q_heads < kv_heads:
        raise KernelError(f"q_heads={q_heads}: must be a multiple of kv_heads={kv_heads}")
    return q_heads // kv_heads


def block_group(group: int, least: int = _MIN_DOT_ROWS) -> int:
    """Heads that a kernel computes with for a group's: a power of two.

    least   a power of two; 1 where no matrix instruction takes them
    """
    return max(least, 1 << (group - 1).bit_length())


def score_tile(heads: int) -> int:
    """Pages whose weights a program sums at a time, of so many heads: a power of two, as `heads` is.

    With 2048 of them 128K tokens are four tiles, each of which waits for memory once. More heads than 16 take fewer,
    so that registers suffice: with `SCORE_WARPS`, Triton 3.9's code for sm_90 spills nothing up to 64 heads. Of 32
    heads 2048 pages would take 1 kB of stack a thread. Not tuned on a GPU yet.
    """
    return 2048 if heads <= 16 else 2**13 // heads


def row_dtype(stored: torch.dtype) -> torch.dtype:
    """What queries, new keys and values, and outputs are of, where the KV cache is of `stored`: bf16 for FP8."""
    return torch.bfloat16 if stored == torch.float8_e4m3fn else stored
