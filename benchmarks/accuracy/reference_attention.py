"""Decode attention over exactly the pages that a rule chooses: the reference in plain torch, not the shipped kernels.

It bounds what a selection can reach: an oracle sees the true weights, and chance sees nothing. Rows measured with it
say `reference`. Bytes count only pages, since no summary is read.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.accuracy.kept_mass import by_page, oracle_order, oracle_pages, token_weights
from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.hf.implementation import AttentionSession
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec

IMPLEMENTATION = "hybrid_sparse_reference"
_RETAINED = RetainedSet()  # as in the shipped settings' defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRule:
    """How pages are chosen; give `ratio` or `promise`."""

    order: str  # oracle: by the largest true share of any head of the group; random: by chance
    ratio: float | None = None  # share of the candidates, rounded up
    promise: float | None = None  # oracle: as many pages as every head needs to keep this share of its weight
    retained: RetainedSet = _RETAINED

    def __post_init__(self) -> None:
        if self.order not in ("oracle", "random"):
            raise ValueError(f"order={self.order}: must be oracle or random")
        if (self.ratio is None) == (self.promise is None):
            raise ValueError(f"ratio={self.ratio}, promise={self.promise}: give one of them")
        if self.order == "random" and self.promise is not None:
            raise ValueError(f"promise={self.promise}: chance keeps none")

    def choose(self, shares: Tensor, tokens: int, layer: int) -> list[list[int]]:
        """The candidate pages read by each group, in order.

        shares   [kv_heads, group, pages]   true weights
        """
        first, end = self.retained.candidate_range(tokens)
        candidates = shares[..., first:end]
        heads = range(shares.shape[0])
        if self.promise is not None:
            counts = oracle_pages(candidates, 1.0 - candidates.sum(dim=-1), self.promise).tolist()
        else:
            assert self.ratio is not None
            counts = [SelectionSpec(ranked=True, budget_ratio=self.ratio).budget_pages(end - first) for _ in heads]
        if self.order == "random":
            rng = random.Random(f"{layer} {tokens}")
            return [rng.sample(range(first, end), counts[head]) for head in heads]
        order = oracle_order(candidates) + first
        return [order[head, : counts[head]].tolist() for head in heads]


class ReferenceSession(AttentionSession):
    """While entered, the model's decode rows read what `rule` chooses; a prefill's rows attend to all before them.

    Keys and values come with each call, so nothing is kept between calls and any cache may be decoded from.
    """

    def __init__(
        self, model: PreTrainedModel, rule: PageRule, *, watch: Callable[[DecodeStep], None] | None = None
    ) -> None:
        super().__init__(model, IMPLEMENTATION, _attend)
        self._rule = rule
        self._watch = watch
        self._stats = DecodeStats()

    keeps_request_state = False

    def adopt(self) -> None:
        """As in a SparseSession; here every call takes the sequence over."""

    def take_stats(self) -> DecodeStats:
        """What was decoded since the last call."""
        stats, self._stats = self._stats, DecodeStats()
        return stats

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend as the session is told to.

        query        [q_heads, new tokens, head_dim]
        key, value   [kv_heads, tokens, head_dim]   of the whole sequence
        returns      [new tokens, q_heads, head_dim]
        """
        new, total = query.shape[1], key.shape[1]
        if new == 1 or self._row_by_row:
            ends = range(total - new + 1, total + 1)
            rows = [
                self.decode(layer, query[:, row], key[:, :end], value[:, :end], scale) for row, end in enumerate(ends)
            ]
            return torch.stack(rows)
        past = torch.ones(new, total, dtype=torch.bool).tril(diagonal=total - new)
        output = torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=past, scale=scale, enable_gqa=True
        )
        return output[0].transpose(0, 1)

    def decode(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend with one token: query [q_heads, head_dim], key and value [kv_heads, tokens, head_dim]."""
        tokens = key.shape[1]
        weights = token_weights(query, key, scale)
        plans = self._rule.choose(by_page(weights), tokens, layer)
        retained = self._rule.retained.retained_pages(tokens)
        page_of = torch.arange(tokens) // PAGE_TOKENS
        read = torch.stack([torch.isin(page_of, torch.tensor([*retained, *plan])) for plan in plans])
        kept = weights * read[:, None]
        output = (kept / kept.sum(dim=-1, keepdim=True)) @ value.float()
        output = output.reshape(query.shape).to(query.dtype)
        page_bytes = 2 * PAGE_TOKENS * key.shape[2] * key.element_size()
        pages_read = sum(len(plan) + len(retained) for plan in plans)
        pages_total = key.shape[0] * -(-tokens // PAGE_TOKENS)
        self._stats += DecodeStats(
            pages_total=pages_total,
            pages_read=pages_read,
            total_bytes=pages_total * page_bytes,
            read_bytes=pages_read * page_bytes,
        )
        if self._watch:
            self._watch(DecodeStep(layer, query, key, value, scale, plans, output))
        return output


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it: [batch, heads, tokens, head_dim], the query's tokens the new ones."""
    session = ReferenceSession.entered(IMPLEMENTATION)
    if session is None or query.shape[0] != 1:
        raise ValueError(f"attn_implementation={IMPLEMENTATION}: one sequence, within a ReferenceSession")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return session.attend(module.layer_idx, query[0], key[0], value[0], scale)[None], None
