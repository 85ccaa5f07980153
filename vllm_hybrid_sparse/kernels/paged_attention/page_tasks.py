"""What the page policies let decode rows read with a device (`csrc/page_tasks.cpp`), in two calls for all rows.

Scores need nothing of the device, so they are taken while it attends the retained sets; the order of reading may need
what those weigh.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import check_floats, check_queries
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, NativeBatch
from vllm_hybrid_sparse.values import GroupKey


class OrderedPages(NamedTuple):
    """What one group of a decode row may read beside its retained set."""

    # Best first, 0 the request's first; none where the retained set is estimated to be enough.
    pages: NDArray[np.int64]
    scored: int  # candidates whose summaries were scored
    # The first pages, by whole microbatches, that are estimated to be enough, or all; 0 where no estimate is asked.
    expected: int
    share: float  # P_acc before any candidate is read; 1 where the policy asks for no estimate
    # What key codes estimate that the unread candidates weigh after each microbatch, natural log,
    # [microbatches, group]; None where the policy does not ask. All of `pages` counts, read or not.
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
    """Score the candidates of decode rows whose keys and values are stored, as far as the policy ranks them.

    `order_candidates` takes it from there; until then the kernel may attend to given pages, and nothing else.

    selection   a `native_selection` made once
    query       [rows, q_heads, head_dim]   of the KV dtype, contiguous
    batch       the rows, one token each, which is stored
    """
    check_queries(attention, query, (batch.num_tokens, attention.num_q_heads, attention.head_dim))
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

    selection      the same
    retained_lse   [rows, q_heads] f32   log-sum-exp of what the retained sets hold, natural log
    """
    rows, size = len(retained_lse), attention.num_q_heads // attention.num_kv_heads
    check_floats("retained_lse", retained_lse, (rows, attention.num_q_heads))
    engine = attention.engine
    if not engine.order_candidates(selection, rows, retained_lse.data_ptr()):
        raise KernelError(f"retained_lse={tuple(retained_lse.shape)}: must be of the rows scored last")
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
