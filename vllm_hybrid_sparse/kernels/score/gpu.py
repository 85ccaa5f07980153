"""Page scores, group scores and the order of a group's pages, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.kernels.arguments import (
    KV_DTYPES,
    SCORE_WARPS,
    block_group,
    check_head_dim,
    check_tensor,
    group_size,
    score_tile,
)
from vllm_hybrid_sparse.kernels.summarize.gpu import check_summary
from vllm_hybrid_sparse.policy.selectors import ERROR_DEVIATIONS

_TILE_SUMMARIES = 32
"""Summaries that a program scores. Not tuned on a GPU yet."""

_ERROR_DEVIATIONS = tl.constexpr(ERROR_DEVIATIONS)


def score_pages(query: Tensor, summaries: Tensor, places: Tensor, *, scale: float, summary: str) -> Tensor:
    """Estimate the attention score of every candidate page to each query head (PSA, Algorithm 1, line 5).

    `score_pages` of reference.py in float32. For minmax, max(q max, q min) of a dimension is q max where q > 0 and
    q min elsewhere, so the sum over dimensions is two products of matrices.

    What bounds it: the bytes of the summaries, 2 * vectors * head_dim a page in bf16.

    query       [rows, q_heads, head_dim]      of the KV dtype, rows may be strided
    summaries   [places, vectors, head_dim]    bf16 | f16 | f32; minmax: (max, min), cuboid_mean: (centre,)
    places      [rows, kv_heads, pages]        int32, where each page's summary is, trusted; negative: no such page
    returns     [rows, q_heads, pages]         f32, -inf where there is no page
    """
    vectors = check_summary(summary)
    device = summaries.device
    check_tensor("summaries", summaries, KV_DTYPES, (None, vectors, None), device)
    head_dim = check_head_dim(summaries.shape[2])
    check_tensor("query", query, summaries.dtype, (None, None, head_dim), device, strided_dims=1)
    rows, q_heads, _ = query.shape
    check_tensor("places", places, torch.int32, (rows, None, None), device, strided_dims=2)
    _, kv_heads, pages = places.shape
    group = group_size(q_heads, kv_heads)
    scores = torch.empty(rows, q_heads, pages, dtype=torch.float32, device=device)
    if scores.numel():
        _score_kernel[(rows, kv_heads, triton.cdiv(pages, _TILE_SUMMARIES))](
            query,
            summaries,
            places,
            scores,
            query.stride(0),
            places.stride(0),
            places.stride(1),
            pages,
            scale,
            group=group,
            head_dim=head_dim,
            block_group=block_group(group),
            block_dim=triton.next_power_of_2(head_dim),
            tile=_TILE_SUMMARIES,
            minmax=summary == "minmax",
        )
    return scores


def group_scores(
    page_scores: Tensor, kv_heads: int, retained_lse: Tensor | None = None, deviations: Tensor | None = None
) -> Tensor:
    """How much of its attention some query head of the group is estimated to give to each page.

    `group_scores` of policy/selectors.py in float32: the log of the largest estimated share among the group's heads,
    of the candidates, or of candidates and retained set together where the latter's weight is given. Deviations raise
    the shares of their heads.

    What bounds it: `page_scores`, read twice. One program reads those of a row and KV head.

    page_scores    [rows, q_heads, pages]     f32, -inf: no such page
    retained_lse   [rows, q_heads]            f32, log-sum-exp of the retained set
    deviations     [rows, q_heads]            f32, standard deviation of an estimated score
    returns        [rows, kv_heads, pages]    f32, <= 0 without deviations; -inf where there is no page
    """
    device = page_scores.device
    check_tensor("page_scores", page_scores, torch.float32, (None, None, None), device)
    rows, q_heads, pages = page_scores.shape
    group = group_size(q_heads, kv_heads)
    for name, of_heads in (("retained_lse", retained_lse), ("deviations", deviations)):
        if of_heads is not None:
            check_tensor(name, of_heads, torch.float32, (rows, q_heads), device)
    best = torch.empty(rows, kv_heads, pages, dtype=torch.float32, device=device)
    if best.numel():
        heads = block_group(group, least=1)
        _group_kernel[(rows, kv_heads)](
            page_scores,
            page_scores if retained_lse is None else retained_lse,
            page_scores if deviations is None else deviations,
            best,
            pages,
            group=group,
            block_group=heads,
            tile=score_tile(heads),
            has_retained=retained_lse is not None,
            has_deviations=deviations is not None,
            num_warps=SCORE_WARPS,
        )
    return best


def best_pages(scores: Tensor, count: int) -> Tensor:
    """Indices of some pages of the highest group scores, the highest first; of ties any.

    It is for budgets, which are a small part of the pages: sorting them all would take far longer (not measured).

    scores     [rows, kv_heads, pages]   f32
    count      1 to pages
    returns    [rows, kv_heads, count]   int64
    """
    return scores.topk(count, dim=-1).indices


def rank_pages(scores: Tensor) -> Tensor:
    """Indices of the pages by descending group score, ties by the lower index; pages that are none come last.

    scores     [rows, kv_heads, pages]   f32
    returns    [rows, kv_heads, pages]   int64, a permutation of each group's pages
    """
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


@triton.jit(do_not_specialize=["places_row_stride", "places_head_stride", "num_pages"])
def _score_kernel(
    query,
    summaries,
    places,
    scores,
    query_row_stride,
    places_row_stride,
    places_head_stride,
    num_pages,
    scale,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
    minmax: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    heads = tl.arange(0, block_group)
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    is_head = heads < group
    q_heads = kv_head * group + heads
    q = tl.load(
        query + row * query_row_stride + q_heads[:, None] * head_dim + dims[None, :],
        mask=is_head[:, None] & is_dim[None, :],
        other=0.0,
    )
    pages = tl.program_id(2) * tile + tl.arange(0, tile)
    listed = pages < num_pages
    place = tl.load(places + row * places_row_stride + kv_head * places_head_stride + pages, mask=listed, other=-1)
    is_page = place >= 0
    is_element = is_page[:, None] & is_dim[None, :]
    if minmax:
        upper_at = summaries + place.to(tl.int64)[:, None] * (2 * head_dim) + dims[None, :]
        upper = tl.load(upper_at, mask=is_element, other=0.0)
        lower = tl.load(upper_at + head_dim, mask=is_element, other=0.0)
        wide = q.to(tl.float32)
        positive = tl.maximum(wide, 0.0).to(q.dtype)
        negative = tl.minimum(wide, 0.0).to(q.dtype)
        products = tl.dot(positive, tl.trans(upper), input_precision="ieee")
        products = tl.dot(negative, tl.trans(lower), acc=products, input_precision="ieee")
    else:
        centre = tl.load(summaries + place.to(tl.int64)[:, None] * head_dim + dims[None, :], mask=is_element, other=0.0)
        products = tl.dot(q, tl.trans(centre), input_precision="ieee")
    tl.store(
        scores + (row * tl.num_programs(1) * group + q_heads)[:, None] * num_pages + pages[None, :],
        tl.where(is_page[None, :], products * scale, float("-inf")),
        mask=is_head[:, None] & listed[None, :],
    )


@triton.jit(do_not_specialize=["num_pages"])  # which grows with contexts: not to be compiled anew
def _group_kernel(
    page_scores,
    retained_lse,
    deviations,
    best,
    num_pages,
    group: tl.constexpr,
    block_group: tl.constexpr,
    tile: tl.constexpr,
    has_retained: tl.constexpr,
    has_deviations: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    heads = tl.arange(0, block_group)
    is_head = heads < group
    q_heads = row * kv_heads * group + kv_head * group + heads
    if has_retained:
        peak = tl.load(retained_lse + q_heads, mask=is_head, other=float("-inf"))
    else:
        peak = tl.full((block_group,), float("-inf"), tl.float32)
    total = tl.where(peak > float("-inf"), 1.0, 0.0)
    for start in range(0, num_pages, tile):
        pages = start + tl.arange(0, tile)
        scores = tl.load(
            page_scores + q_heads[:, None] * num_pages + pages[None, :],
            mask=is_head[:, None] & (pages < num_pages)[None, :],
            other=float("-inf"),
        )
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(scores - base[:, None]), axis=1)
        peak = new_peak
    log_mass = tl.where(total > 0, peak + tl.log(total), 0.0)
    if has_deviations:
        log_mass -= _ERROR_DEVIATIONS * tl.load(deviations + q_heads, mask=is_head, other=0.0)
    for start in range(0, num_pages, tile):
        pages = start + tl.arange(0, tile)
        scores = tl.load(
            page_scores + q_heads[:, None] * num_pages + pages[None, :],
            mask=is_head[:, None] & (pages < num_pages)[None, :],
            other=float("-inf"),
        )
        shares = tl.max(scores - log_mass[:, None], axis=0)
        tl.store(best + (row * kv_heads + kv_head) * num_pages + pages, shares, mask=pages < num_pages)
