"""What the page policies let decode rows read with a device (`csrc/page_tasks.cpp`), in two calls for all rows.

Scores need nothing of the device, so they are taken while it attends the retained sets; the order of reading may need
what those weigh.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import check_floats, check_queries
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, stored_batch
from vllm_hybrid_sparse.values import GroupKey


class OrderedPages(NamedTuple):
    """What one group of a decode row may read beside its retained set."""

    pages: tuple[int, ...]  # best first, 0 the request's first; none where the retained set is estimated to be enough
    scored: int  # candidates whose summaries were scored
    share: float  # P_acc before any candidate is read; 1 where the policy asks for no estimate
    # What key codes estimate that the unread candidates weigh after each microbatch, natural log,
    # [microbatches, group]; None where the policy does not ask. All of `pages` counts, read or not.
    log_unread: NDArray[np.float64] | None


def score_candidates(
    attention: NativeAttention,
    selection: _native.Selection,
    kv_cache: Tensor,
    query: Tensor,
    seq_lens: Sequence[int],
    block_tables: Sequence[Tensor],
) -> None:
    """Score the candidates of decode rows whose keys and values are stored, as far as the policy ranks them.

    `order_candidates` takes it from there; until then the kernel may attend to given pages, and nothing else.

    selection      a `native_selection` made once
    query          [rows, q_heads, head_dim]   of the KV dtype, contiguous
    seq_lens       tokens of each row's request, its own included
    block_tables   [blocks] int32              of each
    """
    rows = len(seq_lens)
    check_queries(attention, query, (rows, attention.num_q_heads, attention.head_dim))
    batch = stored_batch([1] * rows, seq_lens, block_tables, [-1] * rows, decode=True)
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
    ordered = {}
    for row in range(rows):
        for head in range(attention.num_kv_heads):
            unread = engine.last_unread_after(row, head)
            ordered[GroupKey(row, head)] = OrderedPages(
                pages=tuple(engine.last_plan(row, head)),
                scored=engine.last_scored(row, head),
                share=engine.last_share(row, head),
                log_unread=np.array(unread).reshape(-1, size) if unread else None,
            )
    return ordered
