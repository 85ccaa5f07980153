"""Attention of many rows to contiguous tokens in plain torch."""

import torch
from torch import Tensor


def attend_dense(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attend with every row to all tokens, or to those up to its own.

    query        [q_heads, rows, head_dim]
    key, value   [kv_heads, tokens, head_dim]   of the same dtype; q_heads a multiple of kv_heads
    causal       row i sees the tokens 0 to i; as many rows as tokens
    returns      (out, lse) f32: [q_heads, rows, head_dim] normalised, [q_heads, rows] natural log; zeros and -inf where
                 there is no token
    """
    group = query.shape[0] // key.shape[0]
    key, value = (part.float().repeat_interleave(group, dim=0) for part in (key, value))
    scores = scale * query.float() @ key.transpose(1, 2)
    if causal:
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(dim=2)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weights @ value, lse
