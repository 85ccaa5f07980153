"""Attention over a microbatch of slots, folded into running states, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.kernels.arguments import attention_tile, block_group, check_pools, check_tensor, group_size
from vllm_hybrid_sparse.values import PAGE_TOKENS

_TILE_TOKENS = 64
"""Tokens that a program reads at a time, where they fit (`attention_tile`). Not tuned on a GPU yet."""

_TILE_TOKENS_KEEPING = 32
"""The same where scores are kept: with 64 tokens registers do not suffice at head_dim 128 (sm_90)."""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def attend_slots(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    page_tokens: Tensor,
    done: Tensor,
    out: Tensor,
    lse: Tensor,
    page_lse: Tensor,
    *,
    scale: float,
    token_scores: Tensor | None = None,
) -> None:
    """Attend with every decode row to a microbatch of pages in slots, and fold it into the row's state in place.

    What it adds up and what it gives of each page are PSA's, Algorithm 1, lines 10 to 12, and section 4 ("aggregate the
    attention weights of tokens within each block"). Rows and KV heads that are done are left as they are, `page_lse`
    included.

    What bounds it: the bytes of the slots it reads, 64 * head_dim a page in bf16. One program reads all pages of a row
    and KV head, so a small batch does not fill a device.

    query            [rows, q_heads, head_dim]       of the KV dtype, rows may be strided
    k_pool, v_pool   [slots, 16, head_dim]           bf16 | f16 | f32; head_dim a multiple of 16, 16 to 256
    slots            [rows, kv_heads, pages]         int32, trusted to lie in the pool; negative: no page
    page_tokens      [rows, kv_heads, pages]         int32, 0 to 16; what lies behind them in a slot is not looked at
    done             [rows, kv_heads]                uint8
    out, lse         [rows, q_heads, head_dim], [rows, q_heads]   f32, in and out: normalised; natural log, -inf where
                                                     nothing was seen: then the `out` that comes in is not looked at,
                                                     and what goes out is zeros if still nothing was seen
    page_lse         [rows, q_heads, pages]          f32, out: log-sum-exp of each page, -inf where it has no token
    token_scores     [rows, q_heads, pages * 16]     f32, out, rows and heads may be strided: each token's scaled
                                                     score, -inf where there is none; None: not wanted
    """
    head_dim = check_pools(k_pool, v_pool)
    device = k_pool.device
    check_tensor("query", query, k_pool.dtype, (None, None, head_dim), device, strided_dims=1)
    rows, q_heads, _ = query.shape
    check_tensor("slots", slots, torch.int32, (rows, None, None), device, strided_dims=2)
    _, kv_heads, pages = slots.shape
    check_tensor("page_tokens", page_tokens, torch.int32, (rows, kv_heads, pages), device, strided_dims=2)
    check_tensor("done", done, torch.uint8, (rows, kv_heads), device)
    check_tensor("out", out, torch.float32, (rows, q_heads, head_dim), device)
    check_tensor("lse", lse, torch.float32, (rows, q_heads), device)
    check_tensor("page_lse", page_lse, torch.float32, (rows, q_heads, pages), device)
    if token_scores is not None:
        shape = (rows, q_heads, pages * PAGE_TOKENS)
        check_tensor("token_scores", token_scores, torch.float32, shape, device, strided_dims=2)
    group = group_size(q_heads, kv_heads)
    if rows == 0:
        return
    heads = block_group(group)
    most = _TILE_TOKENS if token_scores is None else _TILE_TOKENS_KEEPING
    _attend_kernel[(rows, kv_heads)](
        query,
        k_pool,
        v_pool,
        slots,
        page_tokens,
        done,
        out,
        lse,
        page_lse,
        lse if token_scores is None else token_scores,
        query.stride(0),
        slots.stride(0),
        slots.stride(1),
        page_tokens.stride(0),
        page_tokens.stride(1),
        0 if token_scores is None else token_scores.stride(0),
        0 if token_scores is None else token_scores.stride(1),
        pages,
        scale,
        keep_scores=token_scores is not None,
        group=group,
        head_dim=head_dim,
        block_group=heads,
        block_dim=triton.next_power_of_2(head_dim),
        tile_pages=attention_tile(most, heads, head_dim, k_pool.dtype) // PAGE_TOKENS,
    )


# Numbers that change from round to round, and tensors that begin anywhere in what was uploaded together: not to be
# compiled anew for each kind.
_CHANGING = [
    "slots_row_stride",
    "slots_head_stride",
    "tokens_row_stride",
    "tokens_head_stride",
    "scores_row_stride",
    "scores_head_stride",
    "num_pages",
]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=["slots", "page_tokens"])
def _attend_kernel(
    query,
    k_pool,
    v_pool,
    slots,
    page_tokens,
    done,
    out,
    lse,
    page_lse,
    token_scores,
    query_row_stride,
    slots_row_stride,
    slots_head_stride,
    tokens_row_stride,
    tokens_head_stride,
    scores_row_stride,
    scores_head_stride,
    num_pages,
    scale,
    keep_scores: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    tile_pages: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    if tl.load(done + row * kv_heads + kv_head) != 0:
        return

    heads = tl.arange(0, block_group)
    dims = tl.arange(0, block_dim)
    is_head = heads < group
    is_dim = dims < head_dim
    is_output = is_head[:, None] & is_dim[None, :]
    q_heads = kv_head * group + heads
    state = row * kv_heads * group + q_heads
    q = tl.load(query + row * query_row_stride + q_heads[:, None] * head_dim + dims[None, :], mask=is_output, other=0.0)

    # The state so far is what a loop over all pages would have at this point: peak, total and the sum of values.
    peak = tl.load(lse + state, mask=is_head, other=float("-inf"))
    seen = peak > float("-inf")
    total = tl.where(seen, 1.0, 0.0)
    outputs = out + state[:, None] * head_dim + dims[None, :]
    acc = tl.load(outputs, mask=is_output & seen[:, None], other=0.0)

    tokens = tl.arange(0, tile_pages * _PAGE_TOKENS)
    tile = tl.arange(0, tile_pages)
    for start in range(0, num_pages, tile_pages):
        pages = start + tokens // _PAGE_TOKENS
        listed = pages < num_pages
        slot = tl.load(slots + row * slots_row_stride + kv_head * slots_head_stride + pages, mask=listed, other=-1)
        limit = tl.load(
            page_tokens + row * tokens_row_stride + kv_head * tokens_head_stride + pages, mask=listed, other=0
        )
        is_token = (slot >= 0) & (tokens % _PAGE_TOKENS < limit)
        places = (slot.to(tl.int64) * _PAGE_TOKENS + tokens % _PAGE_TOKENS)[:, None] * head_dim + dims[None, :]
        is_element = is_token[:, None] & is_dim[None, :]
        k = tl.load(k_pool + places, mask=is_element, other=0.0)
        v = tl.load(v_pool + places, mask=is_element, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        if keep_scores:
            kept = q_heads[:, None] * scores_head_stride + start * _PAGE_TOKENS + tokens[None, :]
            of_row = token_scores + row * scores_row_stride
            tl.store(of_row + kept, scores, mask=is_head[:, None] & listed[None, :])
        paged = tl.reshape(scores, (block_group, tile_pages, _PAGE_TOKENS))
        page_peak = tl.max(paged, axis=2)
        page_base = tl.where(page_peak == float("-inf"), 0.0, page_peak)
        page_total = tl.sum(tl.exp(paged - page_base[:, :, None]), axis=2)
        is_page = start + tile < num_pages
        tl.store(
            page_lse + state[:, None] * num_pages + (start + tile)[None, :],
            page_base + tl.log(page_total),
            mask=is_head[:, None] & is_page[None, :],
        )

        new_peak = tl.maximum(peak, tl.max(page_peak, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - base)
        weights = tl.exp(scores - base[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    is_empty = total == 0.0
    tl.store(outputs, tl.where(is_empty[:, None], 0.0, acc / total[:, None]), mask=is_output)
    tl.store(lse + state, tl.where(is_empty, float("-inf"), peak + tl.log(total)), mask=is_head)
