"""Attention of one layer for a batch, from the logical K and V of every request, in plain torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.progressive.reference import ProgressiveResult, progressive_attention
from vllm_hybrid_sparse.policy.selectors import SpecSelector
from vllm_hybrid_sparse.values import RetainedSet


class BatchResult(NamedTuple):
    """The output of a batch and what its decode rows read."""

    out: Tensor  # [tokens, q_heads, head_dim] f64
    groups: list[list[ProgressiveResult]]  # [decode rows in batch order][kv_heads]


def paged_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    query_lens: Sequence[int],
    decode_mask: Sequence[bool],
    selector: SpecSelector,
    retained: RetainedSet,
    scale: float,
    summary: str,
    code_bits: int = 2,
) -> BatchResult:
    """Attend with the latest tokens of every request to tokens of the same request up to their own.

    A request that decodes (one row, decode_mask set) attends to the retained set and to the candidate pages that the
    selector reads, each group of query heads for itself. All other rows attend to everything up to their own token.

    query         [tokens, q_heads, head_dim]     the rows of all requests one after another; bf16 | f16 | f32
    keys, values  for each request [seq_len, kv_heads, head_dim], the tokens of its rows included
    query_lens    rows of each request, 0 to seq_len; they are its latest tokens
    """
    out = torch.zeros(query.shape, dtype=torch.float64)
    groups = []
    row = 0
    for key, value, query_len, decodes in zip(keys, values, query_lens, decode_mask, strict=True):
        rows = query[row : row + query_len]
        if decodes:
            assert query_len == 1
            kv_heads = range(key.shape[1])
            heads = rows[0].reshape(key.shape[1], -1, query.shape[-1])
            results = [
                progressive_attention(
                    heads[h],
                    key[:, h],
                    value[:, h],
                    selector=selector,
                    retained=retained,
                    scale=scale,
                    summary=summary,
                    code_bits=code_bits,
                )
                for h in kv_heads
            ]
            out[row] = torch.cat([result.out for result in results])
            groups.append(results)
        else:
            out[row : row + query_len] = causal_attention(rows, key, value, scale)
        row += query_len
    return BatchResult(out, groups)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sliding_window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attend with the latest tokens of one request to every token up to their own.

    query            [rows, q_heads, head_dim]       row i is token seq_len - rows + i
    key, value       [seq_len, kv_heads, head_dim]   q_heads is a multiple of kv_heads
    sliding_window   how many tokens a row sees, its own the last; 0: all
    sinks            [q_heads]                       scores of one more token, which has no value; None: there is none
    returns          [rows, q_heads, head_dim]       f64
    """
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = scale * torch.einsum("rhd,thd->hrt", query.double(), key)
    rows, tokens = query.shape[0], key.shape[0]
    everything, own = torch.ones(rows, tokens, dtype=torch.bool), tokens - rows
    unseen = everything.triu(diagonal=own + 1)
    if sliding_window:
        unseen |= everything.tril(diagonal=own - sliding_window)
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, rows, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :tokens]
    return torch.einsum("hrt,thd->rhd", weights, value)
