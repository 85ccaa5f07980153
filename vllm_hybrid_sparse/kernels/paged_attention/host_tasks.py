"""The parts of a decode row, one call for each (`csrc/host_tasks.cpp`), for a runtime that decides in between.

`NativeAttention.forward` does everything in one call. If a device shares the work, the host scores the candidates and
attends to its own part of the pages.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import CPU, check_tensor
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.values import PAGE_TOKENS


class HostState(NamedTuple):
    """Partial attention of one group over some pages."""

    out: Tensor  # [group, head_dim] f32, normalised; zeros where no token was seen
    lse: Tensor  # [group] f32, natural log; -inf where no token was seen
    lightest_lse: Tensor  # [group] f32, log-sum-exp of the page that weighs least; inf where no token was seen


def score_pages(
    attention: NativeAttention, query: Tensor, kv_cache: Tensor, block_table: Tensor, first_page: int, end_page: int
) -> Tensor:
    """Score the summaries of some pages of one request. The pages must be full.

    query         [q_heads, head_dim]   of the KV dtype
    kv_cache      as in `NativeAttention.forward`
    block_table   [blocks] int32        of the request
    returns       [q_heads, end_page - first_page] f32: log weights with key codes, otherwise estimated scores
    """
    if attention.summary == "none":
        raise KernelError("summary='none': there is nothing to score")
    _check(attention, query, attention.num_q_heads, block_table)
    if not 0 <= first_page <= end_page <= len(block_table) * attention.layout.pages_per_block:
        raise KernelError(f"first_page={first_page} end_page={end_page}: must be pages of {len(block_table)} blocks")
    scores = torch.empty(attention.num_q_heads, end_page - first_page, dtype=torch.float32)
    if end_page > first_page:
        attention.engine.score_pages(
            kv_cache.data_ptr(),
            attention.block_stride(kv_cache),
            block_table.data_ptr(),
            query.data_ptr(),
            first_page,
            end_page - first_page,
            scores.data_ptr(),
        )
    return scores


def attend_pages(
    attention: NativeAttention,
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    kv_head: int,
    pages: Tensor,
    seq_len: int,
    token_scores: Tensor | None = None,
) -> HostState:
    """Attend with the query heads of one group to some pages of one request, in place.

    query         [group, head_dim]   of the KV dtype
    kv_cache      as in `NativeAttention.forward`
    block_table   [blocks] int32      of the request
    pages         [pages] int32       in any order, each once; page 0 is the request's first
    seq_len       tokens of the request; the rest of its last page is ignored
    token_scores  [group, pages * 16] f32, out: scaled scores of the tokens, page after page; undefined beyond seq_len
    """
    group = attention.num_q_heads // attention.num_kv_heads
    _check(attention, query, group, block_table)
    if not 0 <= kv_head < attention.num_kv_heads:
        raise KernelError(f"kv_head={kv_head}: must be one of {attention.num_kv_heads}")
    check_tensor("pages", pages, torch.int32, (None,), CPU)
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < len(block_table) * (
        attention.layout.pages_per_block
    ):
        raise KernelError(f"pages={int(pages.min())} to {int(pages.max())}: must lie in {len(block_table)} blocks")
    if token_scores is not None:
        check_tensor("token_scores", token_scores, torch.float32, (group, len(pages) * PAGE_TOKENS), CPU)
    state = HostState(
        *(torch.empty(size, dtype=torch.float32) for size in ((group, attention.head_dim), (group,), (group,)))
    )
    attention.engine.attend_pages(
        kv_cache.data_ptr(),
        attention.block_stride(kv_cache),
        block_table.data_ptr(),
        query.data_ptr(),
        kv_head,
        pages.data_ptr(),
        len(pages),
        seq_len,
        state.out.data_ptr(),
        state.lse.data_ptr(),
        state.lightest_lse.data_ptr(),
        token_scores.data_ptr() if token_scores is not None else 0,
    )
    return state


def _check(attention: NativeAttention, query: Tensor, heads: int, block_table: Tensor) -> None:
    check_tensor("query", query, attention.dtype, (heads, attention.head_dim), CPU)
    check_tensor("block_table", block_table, torch.int32, (None,), CPU)
