"""HGCA's decode rows in parts (`csrc/hgca_tasks.cpp`), for a runtime whose device attends the dense window.

Without a device, `NativeAttention.forward` does everything in one call.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import CPU, check_tensor
from vllm_hybrid_sparse.kernels.latest_rows import LatestRows
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import stored_batch


class PackedState(NamedTuple):
    """Partial attention of decode rows over their requests' packed tokens."""

    out: Tensor  # [rows, q_heads, head_dim] f32, normalised; zeros where nothing is packed
    lse: Tensor  # [rows, q_heads] f32, natural log; -inf where nothing is packed
    pages: int  # pages read, for all rows and KV heads


def judging_rows(seq_len: int) -> int:
    """How many of a request's latest tokens judge its host side: those of its last page."""
    return (seq_len - 1) % _native.PAGE_TOKENS + 1


def begin_row(
    attention: NativeAttention, layer: _native.HgcaLayer, kv_cache: Tensor, block_table: Tensor, slot: int, seq_len: int
) -> None:
    """Judge the entries that leave a row's window, and pack the salient ones (Algorithm 1, lines 10-14 and 23-25).

    The row's new token is stored already.

    block_table   [blocks] int32   of the request
    raises        KernelError if the slot's state is not for the tokens before the new one
    """
    check_tensor("block_table", block_table, torch.int32, (None,), CPU)
    begun = attention.engine.begin_hgca_row(
        kv_cache.data_ptr(), attention.block_stride(kv_cache), block_table.data_ptr(), layer, slot, seq_len
    )
    if not begun:
        raise KernelError(f"slot={slot}: its state is not for the first {seq_len - 1} tokens of the request")


def attend_packed(
    attention: NativeAttention, layer: _native.HgcaLayer, slots: Sequence[int], query: Tensor
) -> PackedState:
    """Attend with decode rows to the packed salient entries of their requests (Algorithm 2, line 12).

    slots   of the rows' requests
    query   [rows, q_heads, head_dim]   of the KV dtype, contiguous
    """
    shape = (len(slots), attention.num_q_heads, attention.head_dim)
    check_tensor("query", query, attention.dtype, shape, CPU)
    out, lse = torch.empty(shape, dtype=torch.float32), torch.empty(shape[:2], dtype=torch.float32)
    of_rows = torch.tensor(slots, dtype=torch.int32)
    pages = attention.engine.attend_packed(
        layer, of_rows.data_ptr(), len(slots), query.data_ptr(), out.data_ptr(), lse.data_ptr()
    )
    return PackedState(out, lse, pages)


def end_row(
    attention: NativeAttention, layer: _native.HgcaLayer, slot: int, seq_len: int, scores: Tensor, lse: Tensor
) -> None:
    """Bring the moving averages of a row's request up to date (Algorithm 1, line 8).

    scores   [q_heads, tokens] f32   scaled scores of the window's tokens, page after page; the first dimension may be
                                     strided, and anything behind the window's pages is ignored
    lse      [q_heads] f32           their log-sum-exp, contiguous
    """
    heads = attention.num_q_heads
    check_tensor("scores", scores, torch.float32, (heads, None), CPU, strided_dims=1)
    check_tensor("lse", lse, torch.float32, (heads,), CPU)
    attention.engine.end_hgca_row(layer, slot, seq_len, scores.data_ptr(), scores.stride(0), lse.data_ptr())


def reevaluate(
    attention: NativeAttention, layer: _native.HgcaLayer, kv_cache: Tensor, appended: Sequence[LatestRows]
) -> None:
    """Judge the host side of requests again, by rows that were appended (Algorithm 1, lines 19 to 22).

    appended   at most one for each request; the rows' keys and values are stored
    """
    if not appended:
        return
    batch = stored_batch(
        [len(of.query) for of in appended],
        [of.seq_len for of in appended],
        [of.block_table for of in appended],
        [of.slot for of in appended],
        decode=False,
    )
    attention.check_reach(batch, kv_cache)
    query = torch.cat([of.query for of in appended])
    if query.shape[1:] != (attention.num_q_heads, attention.head_dim) or query.dtype != attention.dtype:
        raise KernelError(f"query={tuple(query.shape)} {query.dtype}: must be the layer's rows of {attention.dtype}")
    attention.engine.reevaluate_rows(
        kv_cache.data_ptr(), attention.block_stride(kv_cache), query.data_ptr(), query.stride(0), batch.native, layer
    )
