"""Summaries of pages in slots, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES, check_head_dim, check_tensor
from vllm_hybrid_sparse.values import PAGE_TOKENS, SUMMARY_VECTORS

DEVICE_SUMMARIES = ("minmax", "cuboid_mean")
"""Kinds of summary that these kernels make and score. Key codes have their own, in key_codes/ and code_scores/."""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def check_summary(summary: str) -> int:
    """Return the vectors of a kind of summary that the device knows."""
    if summary not in DEVICE_SUMMARIES:
        raise KernelError(f"summary={summary!r}: must be one of {', '.join(DEVICE_SUMMARIES)} on the device")
    return SUMMARY_VECTORS[summary]


def summarize_slots(k_pool: Tensor, slots: Tensor, places: Tensor, summaries: Tensor, *, summary: str) -> None:
    """Summarise full pages that lie in slots: `summarize_pages` of reference.py, bit for bit.

    What bounds it: the bytes of the keys it reads, 32 * head_dim a page in bf16.

    k_pool      [slots, 16, head_dim]             bf16 | f16 | f32; all 16 tokens of a page count
    slots       [pages]                           int32, trusted to lie in the pool; negative: skip
    places      [pages]                           int32, where in `summaries` each goes, trusted; none twice
    summaries   [places, vectors, head_dim]       of the KV dtype, out; minmax: (max, min), cuboid_mean: (centre,)
    """
    vectors = check_summary(summary)
    device = k_pool.device
    check_tensor("k_pool", k_pool, KV_DTYPES, (None, PAGE_TOKENS, None), device)
    head_dim = check_head_dim(k_pool.shape[2])
    check_tensor("slots", slots, torch.int32, (None,), device)
    check_tensor("places", places, torch.int32, slots.shape, device)
    check_tensor("summaries", summaries, k_pool.dtype, (None, vectors, head_dim), device)
    if slots.shape[0] == 0:
        return
    _summarize_kernel[(slots.shape[0],)](
        k_pool,
        slots,
        places,
        summaries,
        head_dim=head_dim,
        block_dim=triton.next_power_of_2(head_dim),
        minmax=summary == "minmax",
    )


@triton.jit
def _summarize_kernel(
    k_pool,
    slots,
    places,
    summaries,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    minmax: tl.constexpr,
):
    page = tl.program_id(0)
    slot = tl.load(slots + page).to(tl.int64)
    if slot < 0:
        return
    place = tl.load(places + page).to(tl.int64)
    tokens = tl.arange(0, _PAGE_TOKENS)
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    keys = tl.load(
        k_pool + (slot * _PAGE_TOKENS + tokens)[:, None] * head_dim + dims[None, :], mask=is_dim[None, :], other=0.0
    ).to(tl.float32)
    upper = tl.max(keys, axis=0)
    lower = tl.min(keys, axis=0)
    if minmax:
        target = summaries + place * 2 * head_dim + dims
        tl.store(target, upper.to(summaries.dtype.element_ty), mask=is_dim)
        tl.store(target + head_dim, lower.to(summaries.dtype.element_ty), mask=is_dim)
    else:
        centre = (lower + upper) / 2
        tl.store(summaries + place * head_dim + dims, centre.to(summaries.dtype.element_ty), mask=is_dim)
