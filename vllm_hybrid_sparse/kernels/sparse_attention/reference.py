"""Attention over a set of pages, or over pages in slots, in plain torch."""

from collections.abc import Sequence

import torch
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


def attend_slots(
    query: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor, page_tokens: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Let groups of query heads attend to the pages in some slots.

    query        [groups, group, head_dim]
    key_pool     [slots, 16, head_dim], value_pool likewise; slots that no group names are not looked at
    slots        [groups, pages] int64, -1 for none
    page_tokens  [groups, pages] int64, tokens that each page has, 0 to 16
    returns      (out, lse, page_lse, scores) f32: [groups, group, head_dim] normalised, [groups, group],
                 [groups, group, pages] and [groups, group, pages, 16]; zeros and -inf where no token is seen
    """
    seen = torch.arange(PAGE_TOKENS) < page_tokens.masked_fill(slots < 0, 0)[..., None]  # [groups, pages, 16]
    index = slots.clamp(min=0)
    unseen = ~seen[..., None]
    key = key_pool[index].float().masked_fill(unseen, 0.0)
    value = value_pool[index].float().masked_fill(unseen, 0.0)
    scores = scale * torch.einsum("ngd,nptd->ngpt", query.float(), key)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    page_lse = scores.logsumexp(dim=-1)
    lse = page_lse.logsumexp(dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None, None])
    return torch.einsum("ngpt,nptd->ngd", weights, value), lse, page_lse, scores
