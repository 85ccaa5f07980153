"""Attention over listed pages, each read in its slot or in place from the host, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.kernels.arguments import (
    LISTED_TILES,
    attention_tile,
    block_group,
    check_host,
    check_pools,
    check_tensor,
    group_size,
)
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.merge.gpu import merge_splits
from vllm_hybrid_sparse.kernels.page_directory.state import Listed
from vllm_hybrid_sparse.values import PAGE_TOKENS

_PROGRAMS = 1024
"""Programs that lists are split for, as in `frame_attention`. Reckoned, not tuned on a GPU."""

_TILE_TOKENS = 32
"""Tokens that a program reads at a time, where they fit (`listed_tile`). With 64, registers do not suffice for reading
on at head_dim 128 (sm_90). Not tuned on a GPU yet."""

_STAGES = 3
"""Triton's own number. A program of one page has one stage: Triton 3.9 would have two more pages in shared memory."""

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def attend_listed(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    host: HostStore,
    listed: Listed,
    counts: Tensor,
    tally: Tally,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend with every decode row to the pages listed for each of its KV heads: `attend_listed` of reference.py.

    A page is read in its slot, or in place from the host store, whose layout is turned into rows in registers; where
    the list gives it a slot, it is put there on the way, so that it crosses the link once. The list is split over
    programs and their partial states are merged; how many there are follows from the list's room and the rows.

    What bounds it: the bytes of the pages, 64 * head_dim each in bf16; of those that are not in slots, the link.

    query            [rows, q_heads, head_dim]   of the KV dtype, rows may be strided
    k_pool, v_pool   [slots, 16, head_dim]       bf16 | f16 | f32, out where pages are put; head_dim a multiple of 16,
                                                 16 to 256
    host             of the layer
    listed           [rows, kv_heads, most]      of `page_directory.gpu.look_up`, trusted; not looked at behind `counts`
    counts           [rows, kv_heads]            int32, 0 to most, trusted
    tally            what was read is added to it
    returns          (out, lse): [rows, q_heads, head_dim] and [rows, q_heads] f32, normalised, natural log; zeros and
                     -inf where nothing is listed, never NaN
    """
    head_dim = check_pools(k_pool, v_pool)
    device = k_pool.device
    check_tensor("query", query, k_pool.dtype, (None, None, head_dim), device, strided_dims=1)
    rows, q_heads, _ = query.shape
    check_tensor("slots", listed.slots, torch.int32, (rows, None, None), device)
    kv_heads, most = listed.slots.shape[1:]
    check_tensor("pages", listed.pages, torch.int32, listed.slots.shape, device)
    check_tensor("tokens", listed.tokens, torch.int32, listed.slots.shape, device)
    check_tensor("counts", counts, torch.int32, (rows, kv_heads), device)
    check_host(host.elements, k_pool.dtype, device)
    group = group_size(q_heads, kv_heads)
    heads = block_group(group)
    tile = listed_tile(heads, head_dim, k_pool.dtype)
    splits = _splits(most, rows * kv_heads, tile)
    out = torch.empty(rows, q_heads, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(rows, q_heads, dtype=torch.float32, device=device)
    if rows == 0:
        return out, lse
    parts = torch.empty(rows, q_heads, splits, head_dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(rows, q_heads, splits, dtype=torch.float32, device=device)
    _attend_listed_kernel[(rows, kv_heads, splits)](
        query,
        k_pool,
        v_pool,
        host.elements,
        listed.slots,
        listed.pages,
        listed.tokens,
        counts,
        parts,
        part_lse,
        tally.numbers,
        query.stride(0),
        host.block_stride,
        host.head_stride,
        host.page_stride,
        host.pages_per_block,
        most,
        scale,
        group=group,
        head_dim=head_dim,
        pack=packed_together(k_pool.dtype),
        block_group=heads,
        block_dim=triton.next_power_of_2(head_dim),
        tile=tile,
        num_stages=_STAGES if tile > 1 else 1,
    )
    merge_splits(parts, part_lse, out, lse)
    return out, lse


def listed_tile(heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Pages that `read_pages` reads at a time, for `heads` of `block_group`. KernelError where not even one fits."""
    return attention_tile(_TILE_TOKENS, heads, head_dim, dtype, tiles=LISTED_TILES) // PAGE_TOKENS


def _splits(most: int, groups: int, tile: int) -> int:
    """Programs that share the list of a group, of at most `most` pages; groups: rows times KV heads."""
    return max(1, min(-(-most // tile), -(-_PROGRAMS // max(1, groups))))


@triton.jit
def _per_token(of_page, tile: tl.constexpr):
    """[tile * 16]: what is said of each page, for each of its tokens."""
    return tl.reshape(tl.broadcast_to(of_page[:, None], (tile, _PAGE_TOKENS)), (tile * _PAGE_TOKENS,))


@triton.jit
def read_pages(
    k_pool,
    v_pool,
    host,
    slot,
    page,
    limit,
    kv_head,
    block_stride,
    head_stride,
    page_stride,
    pages_per_block,
    head_dim: tl.constexpr,
    pack: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
):
    """K and V of some pages, [tile * 16, block_dim], zeros where there is no token.

    slot    [tile]   >= 0: there; below: in the host store, and to be put into slot -2 - s where that is one
    page    [tile]   of the host store
    limit   [tile]   tokens that the page has; 0: no page
    """
    token = tl.arange(0, tile * _PAGE_TOKENS) % _PAGE_TOKENS
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    slot_of = _per_token(slot, tile)
    is_token = token < _per_token(limit, tile)
    places = (slot_of.to(tl.int64) * _PAGE_TOKENS + token)[:, None] * head_dim + dims[None, :]
    held = (is_token & (slot_of >= 0))[:, None] & is_dim[None, :]
    k = tl.load(k_pool + places, mask=held, other=0.0)
    v = tl.load(v_pool + places, mask=held, other=0.0)

    away = (slot < 0) & (limit > 0)
    if tl.max(away.to(tl.int32), axis=0) > 0:
        offset = (page // pages_per_block).to(tl.int64) * block_stride + kv_head * head_stride
        offset += (page % pages_per_block).to(tl.int64) * page_stride
        # Pages are whole vectors of 16; without knowing it a thread reads an element at a time.
        offset = tl.multiple_of(offset, 16)
        # In the host's own order and whole, 16 bytes a thread: by their places in the page, or with a mask for each
        # token, they would be loads of 2 and 4 bytes (by the code for sm_90). What lies behind the tokens is dropped.
        of_page = tl.arange(0, _PAGE_TOKENS * block_dim)[None, :]
        k_host = tl.load(
            host + offset[:, None] + of_page, mask=away[:, None] & (of_page < _PAGE_TOKENS * head_dim), other=0.0
        )
        k_host = tl.permute(tl.reshape(k_host, (tile, block_dim // pack, _PAGE_TOKENS, pack)), (0, 2, 1, 3))
        k += tl.where(is_token[:, None], tl.reshape(k_host, (tile * _PAGE_TOKENS, block_dim)), 0.0)
        rows = tl.arange(0, _PAGE_TOKENS // pack)[None, :, None]
        in_row = tl.arange(0, block_dim * pack)[None, None, :]
        v_host = tl.load(
            host + offset[:, None, None] + _PAGE_TOKENS * head_dim + rows * (head_dim * pack) + in_row,
            mask=away[:, None, None] & (in_row < head_dim * pack),
            other=0.0,
        )
        v_host = tl.permute(tl.reshape(v_host, (tile, _PAGE_TOKENS // pack, block_dim, pack)), (0, 1, 3, 2))
        v += tl.where(is_token[:, None], tl.reshape(v_host, (tile * _PAGE_TOKENS, block_dim)), 0.0)

        put = (-2 - slot_of).to(tl.int64)
        put_at = (put * _PAGE_TOKENS + token)[:, None] * head_dim + dims[None, :]
        is_put = (is_token & (put >= 0))[:, None] & is_dim[None, :]
        tl.store(k_pool + put_at, k, mask=is_put)
        tl.store(v_pool + put_at, v, mask=is_put)
    return k, v


@triton.jit
def fold_pages(q, k, v, limit, peak, total, acc, scale, tile: tl.constexpr):
    """Fold pages into the running softmax of a group; `limit` as in `read_pages`, one page at least has a token."""
    is_token = tl.arange(0, tile * _PAGE_TOKENS) % _PAGE_TOKENS < _per_token(limit, tile)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(is_token[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    decay = tl.exp(peak - new_peak)
    weights = tl.exp(scores - new_peak[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total, acc


@triton.jit(do_not_specialize=["most"])  # which grows with contexts: each kind of number would be compiled anew
def _attend_listed_kernel(
    query,
    k_pool,
    v_pool,
    host,
    slots,
    pages,
    page_tokens,
    counts,
    out,
    lse,
    tally,
    query_row_stride,
    block_stride,
    head_stride,
    page_stride,
    pages_per_block,
    most,
    scale,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    pack: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    unit = row * tl.num_programs(1) + kv_head

    heads = tl.arange(0, block_group)
    is_head = heads < group
    states = (unit * group + heads) * splits + split
    count = tl.load(counts + unit)
    of_split = tl.cdiv(tl.cdiv(count, splits), tile) * tile
    first = split * of_split
    end = tl.minimum(count, first + of_split)
    if first >= end:
        tl.store(lse + states, tl.full((block_group,), float("-inf"), tl.float32), mask=is_head)
        return

    dims = tl.arange(0, block_dim)
    is_output = is_head[:, None] & (dims < head_dim)[None, :]
    in_row = (kv_head * group + heads)[:, None] * head_dim + dims[None, :]
    q = tl.load(query + row * query_row_stride + in_row, mask=is_output, other=0.0)
    peak = tl.full((block_group,), float("-inf"), tl.float32)
    total = tl.zeros((block_group,), tl.float32)
    acc = tl.zeros((block_group, block_dim), tl.float32)
    hits = tl.full((), 0, tl.int32)
    entered = tl.full((), 0, tl.int32)
    for start in range(first, end, tile):
        listed = start + tl.arange(0, tile)
        at = unit * most + listed
        slot = tl.load(slots + at, mask=listed < end, other=-1)
        page = tl.load(pages + at, mask=listed < end, other=0)
        limit = tl.load(page_tokens + at, mask=listed < end, other=0)
        k, v = read_pages(
            k_pool,
            v_pool,
            host,
            slot,
            page,
            limit,
            kv_head,
            block_stride,
            head_stride,
            page_stride,
            pages_per_block,
            head_dim,
            pack,
            block_dim,
            tile,
        )
        peak, total, acc = fold_pages(q, k, v, limit, peak, total, acc, scale, tile)
        hits += tl.sum((slot >= 0).to(tl.int32), axis=0)
        entered += tl.sum((slot <= -2).to(tl.int32), axis=0)

    tl.store(out + states[:, None] * head_dim + dims[None, :], acc / total[:, None], mask=is_output)
    tl.store(lse + states, peak + tl.log(total), mask=is_head)
    # Nothing is ordered by these sums: relaxed, since a fence would empty the cache of the programs beside this one.
    tl.atomic_add(tally, (end - first).to(tl.int64), sem="relaxed")
    tl.atomic_add(tally + 1, hits.to(tl.int64), sem="relaxed")
    tl.atomic_add(tally + 2, entered.to(tl.int64), sem="relaxed")
