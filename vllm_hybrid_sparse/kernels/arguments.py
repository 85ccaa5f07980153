"""What wrappers of kernels check before a kernel that trusts them runs, and sizes that device kernels share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.values import PAGE_TOKENS, head_dim_fits, head_dim_rule

CPU = torch.device("cpu")
KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DEVICE_HEAD_DIM = 256
"""Largest head dimension of the device kernels; a tile of keys and one of values must fit a multiprocessor."""


_MIN_DOT_ROWS = 16
"""Rows that a matrix instruction has at least; a smaller group is padded to it, which costs no bytes."""

_SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on the GPUs that have the least: compute capability 8.6, 8.9 and 12."""

_SHARED_BYTES_BESIDE = 2048
"""What a program needs beside its tiles, queries and weights. 1152 is the most seen in Triton 3.9's code for sm_86."""

LISTED_TILES = 3
"""Tiles that a program has in shared memory that turns pages from the host's order into rows: one more than others."""

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
    if not head_dim_fits(head_dim, MAX_DEVICE_HEAD_DIM):
        raise KernelError(f"head_dim={head_dim}: {head_dim_rule(MAX_DEVICE_HEAD_DIM)}")
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


def attention_tile(most: int, heads: int, head_dim: int, dtype: torch.dtype, *, tiles: int = 2) -> int:
    """Tokens that a program attends to at a time: `most`, or the largest half, quarter, … whose program fits every GPU.

    In shared memory a program has the keys and the values of a tile, its queries, and their weights. Half precision has
    `most` with up to 32 heads.

    most    the tile that was chosen where it fits; 16 times a power of two
    heads   a power of two, as `block_group` gives it
    tiles   how many tiles a program has in shared memory at a time: keys, values, and what it rearranges

    Raises KernelError where not even one page fits.
    """
    tile = most
    while tile > PAGE_TOKENS and _shared_bytes(tile, heads, head_dim, dtype, tiles) > _SHARED_BYTES:
        tile //= 2
    if (needed := _shared_bytes(tile, heads, head_dim, dtype, tiles)) > _SHARED_BYTES:
        raise KernelError(
            f"heads={heads}: a page of head_dim={head_dim} in {str(dtype).removeprefix('torch.')} needs {needed} bytes "
            f"of shared memory with so many, must be at most {_SHARED_BYTES}"
        )
    return tile


def device_fits(group: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `attention_tile` finds a tile for every kernel that attends with so many query heads of a KV head."""
    return _shared_bytes(PAGE_TOKENS, block_group(group), head_dim, dtype, LISTED_TILES) <= _SHARED_BYTES


def _shared_bytes(tile: int, heads: int, head_dim: int, dtype: torch.dtype, tiles: int) -> int:
    row_bytes = (1 << (head_dim - 1).bit_length()) * dtype.itemsize
    return (tiles * tile + heads) * row_bytes + heads * tile * dtype.itemsize + _SHARED_BYTES_BESIDE


def score_tile(heads: int) -> int:
    """Pages whose weights a program sums at a time, of so many heads: a power of two, as `heads` is.

    With 2048 of them 128K tokens are four tiles, each of which waits for memory once. More heads than 16 take fewer,
    so that registers suffice: with `SCORE_WARPS`, Triton 3.9's code for sm_90 spills nothing up to 64 heads. Of 32
    heads 2048 pages would take 1 kB of stack a thread. Not tuned on a GPU yet.
    """
    return 2048 if heads <= 16 else 2**13 // heads


def unread_tile(heads: int, head_dim: int) -> int:
    """Pages whose weights reading on sums at a time, beside its softmax, of so many heads: a power of two.

    Each sum waits for memory once, 64 times for 128K tokens at 128 pages. More heads or a larger head_dim take fewer,
    so that registers suffice in half precision (Triton 3.9's code for sm_90). Not tuned on a GPU yet.
    """
    return 128 if heads <= 16 and head_dim <= 128 else max(1, 256 // heads)


def row_dtype(stored: torch.dtype) -> torch.dtype:
    """What queries, new keys and values, and outputs are of, where the KV cache is of `stored`: bf16 for FP8."""
    return torch.bfloat16 if stored == torch.float8_e4m3fn else stored
