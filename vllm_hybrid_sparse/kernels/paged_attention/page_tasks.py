"""Chooses what decode rows of the page policies read with a device (`csrc/page_tasks.cpp`), in two calls for all rows.

Scoring needs nothing from the device, so it is done while the device attends the retained sets. The order of reading
may need the weight of the retained sets.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import CPU, check_tensor
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.values import GroupKey


class OrderedPages(NamedTuple):
    """The pages that one group of a decode row may read in addition to its retained set."""

    # Best first; page 0 is the request's first. Empty if the retained set is estimated to be enough.
    pages: NDArray[np.int64]
    scored: int  # candidates whose summaries were scored
    # How many of `pages`, in whole microbatches, are estimated to be enough, or all; 0 if no estimate is asked for.
    expected: int
    share: float  # P_acc before any candidate is read; 1 if the policy asks for no estimate
    # The weight of the candidates unread after each microbatch as key codes estimate it, natural log,
    # [microbatches, group]; None if the policy does not ask. The microbatches are those of all `pages`, read or not.
    log_unread: NDArray[np.float32] | None


_SIZES = np.dtype(  # Engine::OrderSizes
    [("pages", "i4"), ("scored", "i4"), ("expected", "i4"), ("unread", "i4"), ("share", "f4")]
)


def score_candidates(
    attention: NativeAttention,
    selection: _native.Selection,
    kv_cache: Tensor,
    query: Tensor,
    batch: NativeBatch,
) -> None:
    """Score the candidates of decode rows, if the policy ranks them. The rows' keys and values are stored already.

    The kernel keeps the scores for `order_candidates`. Until that call it may attend to given pages, and nothing else.

    selection   from `native_selection`, made once
    query       [rows, q_heads, head_dim]   of the KV dtype, contiguous
    batch       the rows, one stored token each
    """
    attention.check_policy(selection, batch)
    check_tensor("query", query, attention.dtype, (batch.num_tokens, attention.num_q_heads, attention.head_dim), CPU)
    attention.check_reach(batch, kv_cache)
    attention.engine.score_candidates(
        kv_cache.data_ptr(),
        attention.block_stride(kv_cache),
        query.data_ptr(),
        query.stride(0),
        batch.native,
        selection,
    )


def order_candidates(
    attention: NativeAttention, selection: _native.Selection, retained_lse: Tensor
) -> dict[GroupKey, OrderedPages]:
    """The pages that each group of the rows scored last may read, in the order of reading.

    Only the number of rows is checked: that other rows of the same number were scored last goes unnoticed.

    selection      the same as for `score_candidates`
    retained_lse   [rows, q_heads] f32   log-sum-exp of the rows' retained sets, natural log
    raises         KernelError if another number of rows was scored last
    """
    rows, size = len(retained_lse), attention.num_q_heads // attention.num_kv_heads
    check_tensor("retained_lse", retained_lse, torch.float32, (rows, attention.num_q_heads), CPU)
    engine = attention.engine
    if not engine.order_candidates(selection, rows, retained_lse.data_ptr()):
        raise KernelError(f"retained_lse={tuple(retained_lse.shape)}: must be of as many rows as were scored last")
    sizes = np.empty(rows * attention.num_kv_heads, dtype=_SIZES)
    engine.describe_orders(sizes.ctypes.data)
    pages = np.empty(sizes["pages"].sum(), dtype=np.int64)
    unread = np.empty(sizes["unread"].sum(), dtype=np.float32)
    engine.copy_orders(pages.ctypes.data, unread.ctypes.data)
    ordered, first_page, first_unread = {}, 0, 0
    for index, (length, scored, expected, estimates, share) in enumerate(sizes.tolist()):
        of_group = unread[first_unread : first_unread + estimates].reshape(-1, size) if estimates else None
        ordered[GroupKey(*divmod(index, attention.num_kv_heads))] = OrderedPages(
            pages[first_page : first_page + length], scored, expected, share, of_group
        )
        first_page, first_unread = first_page + length, first_unread + estimates
    return ordered
