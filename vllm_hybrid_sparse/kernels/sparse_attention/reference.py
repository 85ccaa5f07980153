"""Attention over a set of pages in plain torch."""

from collections.abc import Sequence

from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS


def attend_pages(
    query: Tensor, key: Tensor, value: Tensor, pages: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with every query head of a group to all tokens of some pages of one KV head.

    query        [group, head_dim]     bf16 | f16 | f32 | f64
    key, value   [tokens, head_dim]    same dtypes; page p is tokens 16 p to 16 p + 15, the last one may be shorter
    pages        distinct page indices, in any order
    returns      (out, lse), f64: [group, head_dim] and [group]; zeros and -inf where there is no token
    """
    tokens = [t for page in pages for t in range(page * PAGE_TOKENS, min((page + 1) * PAGE_TOKENS, len(key)))]
    scores = scale * query.double() @ key[tokens].double().T
    return scores.softmax(dim=-1) @ value[tokens].double(), scores.logsumexp(dim=-1)
