"""Attention over listed pages in plain torch."""

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore
from vllm_hybrid_sparse.kernels.page_directory.state import Listed
from vllm_hybrid_sparse.values import PAGE_TOKENS


def page_of(host: HostStore, kv_head: int, page: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of a page of the host store, [16, head_dim] of the KV dtype; its layout is that of copy/reference.py."""
    first = (
        page // host.pages_per_block * host.block_stride
        + kv_head * host.head_stride
        + page % host.pages_per_block * host.page_stride
    )
    pack = packed_together(host.elements.dtype)
    key, value = host.elements[first : first + 2 * PAGE_TOKENS * head_dim].view(2, -1).unbind()
    return (
        key.view(head_dim // pack, PAGE_TOKENS, pack).transpose(0, 1).reshape(PAGE_TOKENS, head_dim),
        value.view(PAGE_TOKENS // pack, head_dim, pack).transpose(1, 2).reshape(PAGE_TOKENS, head_dim),
    )


def attend_listed(
    query: Tensor, k_pool: Tensor, v_pool: Tensor, host: HostStore, listed: Listed, counts: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with every row to the pages listed for each of its KV heads, and put pages into slots where it says so.

    query            [rows, q_heads, head_dim]   bf16 | f16 | f32
    k_pool, v_pool   [slots, 16, head_dim]       of the same dtype, in and out
    listed           [rows, kv_heads, most]      slots (>= 0: there; -1: in the host store; below: there, and to be put
                                                 into slot -2 - s), pages of the host store, tokens of each
    counts           [rows, kv_heads]            how many of the pages are read
    returns          (out, lse), f64: [rows, q_heads, head_dim] and [rows, q_heads]; zeros and -inf where nothing is
    """
    rows, q_heads, head_dim = query.shape
    kv_heads = counts.shape[1]
    group = q_heads // kv_heads
    out = torch.zeros(rows, q_heads, head_dim, dtype=torch.float64)
    lse = torch.full((rows, q_heads), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for kv_head in range(kv_heads):
            keys, values = [k_pool[:0, 0]], [v_pool[:0, 0]]
            for at in range(int(counts[row, kv_head])):
                slot, page, tokens = (int(part[row, kv_head, at]) for part in listed)
                if slot >= 0:
                    key, value = k_pool[slot], v_pool[slot]
                else:
                    key, value = page_of(host, kv_head, page, head_dim)
                if slot < -1:
                    k_pool[-2 - slot], v_pool[-2 - slot] = key, value
                keys.append(key[:tokens])
                values.append(value[:tokens])
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores = scale * query[row, heads].double() @ torch.cat(keys).double().T
            out[row, heads] = scores.softmax(dim=-1) @ torch.cat(values).double()
            lse[row, heads] = scores.logsumexp(dim=-1)
    return out, lse
