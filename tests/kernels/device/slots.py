"""A pool whose unused slots and tokens are NaN, and the logical keys and values of what lies in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.values import PAGE_TOKENS

SCALE = 0.3


@dataclass
class Pool:
    """Pages in slots, each page in a slot of its own; built on the CPU."""

    k_pool: Tensor
    v_pool: Tensor
    slots: Tensor  # [rows, kv_heads, pages] int32
    page_tokens: Tensor  # [rows, kv_heads, pages] int32

    def tokens(self, row: int, kv_head: int, pages: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """K and V of the valid tokens of some pages of a row and KV head, [tokens, head_dim]; by default of all."""
        keys, values = [self.k_pool[:0, 0]], [self.v_pool[:0, 0]]
        for page in range(self.slots.shape[2]) if pages is None else pages:
            slot, tokens = int(self.slots[row, kv_head, page]), int(self.page_tokens[row, kv_head, page])
            if slot >= 0:
                keys.append(self.k_pool[slot, :tokens])
                values.append(self.v_pool[slot, :tokens])
        return torch.cat(keys), torch.cat(values)


def make_pool(tokens: Sequence[Sequence[Sequence[int]]], head_dim: int, dtype: torch.dtype) -> Pool:
    """A pool of pages with these numbers of valid tokens [rows][kv_heads][pages]; -1: no page in this place."""
    page_tokens = torch.tensor(tokens, dtype=torch.int32)
    wanted = int((page_tokens >= 0).sum())
    spare = 3
    k_pool, v_pool = torch.full((2, wanted + spare, PAGE_TOKENS, head_dim), torch.nan, dtype=dtype)
    free = torch.randperm(wanted + spare, dtype=torch.int32).tolist()
    slots = torch.full_like(page_tokens, -1)
    for place in (page_tokens >= 0).nonzero().tolist():
        slot, valid = free.pop(), int(page_tokens[tuple(place)])
        slots[tuple(place)] = slot
        k_pool[slot, :valid], v_pool[slot, :valid] = torch.randn(2, valid, head_dim).to(dtype)
    return Pool(k_pool, v_pool, slots, page_tokens.clamp(min=0))


def attend_reference(pool: Pool, query: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States after all pages of every row are folded in, and the weight of each page: f64 out, lse, page_lse."""
    rows, kv_heads, pages = pool.slots.shape
    group = query.shape[1] // kv_heads
    out, lse = out.double(), lse.double()
    page_lse = torch.full((rows, query.shape[1], pages), -torch.inf, dtype=torch.float64)
    for row in range(rows):
        for kv_head in range(kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            state = out[row, heads], lse[row, heads]
            for page in range(pages):
                part = attend_pages(query[row, heads], *pool.tokens(row, kv_head, [page]), [0], SCALE)
                page_lse[row, heads, page] = part[1]
                state = merge_states(*state, *part)
            out[row, heads], lse[row, heads] = state
    return out, lse, page_lse


def empty_states(rows: int, q_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """States that have seen nothing; what they hold as `out` must not be looked at."""
    return torch.full((rows, q_heads, head_dim), torch.nan), torch.full((rows, q_heads), -torch.inf)
