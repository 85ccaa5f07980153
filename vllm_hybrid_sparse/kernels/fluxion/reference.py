"""Fluxion's decode step (section 5, figure 6) for one layer of one request, in plain torch.

Each of the paper's steps is described where it is computed: features in `predictor/features.py`, the network in
`predictor/model.py`, the selector in `policy/budget.py`. Here they follow each other. Where the paper leaves a choice:

- The anchor is the last query of the prompt, or of the rows appended last. It serves 256 rows, because the samples that
  the predictor was trained on lie up to that far behind their anchors. The row after those is the next anchor. A row
  without a known anchor is its own, and so is the first row that has a host segment.
- The heads of a group share what is read: the union of their selections, each ranked for its own query.
- Blocks are ranked by Quest's bounds, as in the paper, or by the weight that their key codes estimate.
- With codes of two bits in two parts (`split`), blocks are ranked by their signs first. The best blocks of each head (a
  few times as many as it selects) are ranked again by both bits. A head may select any block that was ranked again.
- A block's score is made from the stored summaries of its pages, so ranking reads the same bytes at every granularity.
  `granularities` of 16 alone allows no other.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.key_codes.reference import KeyCodes, encode_keys, estimate_scores, signs_of
from vllm_hybrid_sparse.kernels.merge.reference import merge_with_unread
from vllm_hybrid_sparse.kernels.score.reference import score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.policy.budget import GRANULARITIES, GroupBudgets, select_budgets
from vllm_hybrid_sparse.predictor.features import Anchor, attend_retained, decode_features, observe_anchor
from vllm_hybrid_sparse.predictor.model import Predictor
from vllm_hybrid_sparse.predictor.segments import Segments, in_compute_dtype
from vllm_hybrid_sparse.predictor.validation import STREAMING_PROBABILITY
from vllm_hybrid_sparse.values import CODE_BITS, PAGE_TOKENS, PageRanking, RetainedSet

ANCHOR_ROWS: Final = 256
"""Decode rows that an anchor serves."""

LISTED_BLOCKS: Final = 4
LISTED_MORE: Final = 8
"""With split codes, a head that selects n blocks ranks LISTED_BLOCKS * n + LISTED_MORE of them by both bits."""


@dataclass(frozen=True, slots=True)
class FluxionStep:
    """One decode row of one layer: what was predicted for its heads, what was read, and the output."""

    features: Tensor  # [q_heads, 41]
    budgets: GroupBudgets
    scores: list[Tensor]  # [kv_heads] of the ranked blocks, [group, blocks]; empty if none were ranked
    pages: list[list[int]]  # [kv_heads] candidate pages read, ascending
    out: Tensor  # [q_heads, head_dim] f64


@dataclass(slots=True)
class FluxionSequence:
    """One request in one layer, with the state that is kept from row to row."""

    predictor: Predictor
    retained: RetainedSet
    tau: float
    layer: int
    scale: float
    ranking: PageRanking
    granularities: Sequence[int] = GRANULARITIES
    attributed: float = 0.0  # share of the unread blocks' estimated weight that is credited to the candidates read
    dense_tokens: int = 0  # sequences of this many tokens or fewer are attended to as a whole
    split: bool = False  # key codes lie in two parts: the signs list the blocks that both bits rank
    anchor: Anchor | None = None
    anchor_tokens: int = 0  # tokens of the sequence up to the anchor, its own included
    tokens: int = 0  # tokens of the sequence after the last row
    last_query: Tensor | None = None  # [q_heads, head_dim] of the last row, if that was exact

    def append(self, query: Tensor, tokens: int) -> None:
        """Record an exact row: its query [q_heads, head_dim], and the number of tokens up to it."""
        self.last_query, self.tokens, self.anchor = query, tokens, None

    def decode(self, query: Tensor, keys: Tensor, values: Tensor) -> FluxionStep | None:
        """Attend with the latest token. None for a short sequence or one without candidates, which are read whole.

        query          [q_heads, head_dim]             bf16 | f16 | f32
        keys, values   [kv_heads, tokens, head_dim]    its own included
        """
        tokens = keys.shape[1]
        if Segments.of(self.retained, tokens).host_tokens == 0 or tokens <= self.dense_tokens:
            self.append(query, tokens)
            return None
        follows = self.tokens == tokens - 1
        if follows and self.last_query is not None and Segments.of(self.retained, tokens - 1).host_tokens:
            self._observe(self.last_query, keys[:, :-1], values[:, :-1])
        elif not follows or self.anchor is None or tokens - self.anchor_tokens > ANCHOR_ROWS:
            self._observe(query, keys, values)
        self.last_query, self.tokens = None, tokens
        assert self.anchor is not None
        return self._select_and_attend(self.anchor, query, keys, values)

    def _observe(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        weights = weigh_pages(query, keys, self) if self.ranking.code_bits else None
        self.anchor = observe_anchor(query, keys, values, self.scale, self.layer, self.retained, self.tau, weights)
        self.anchor_tokens = keys.shape[1]

    def _select_and_attend(self, anchor: Anchor, query: Tensor, keys: Tensor, values: Tensor) -> FluxionStep:
        segments = Segments.of(self.retained, keys.shape[1])
        states = attend_retained(
            in_compute_dtype(query), in_compute_dtype(keys), in_compute_dtype(values), self.scale, segments
        )
        features = decode_features(anchor, query, self.scale, states, segments)
        budgets = choose_budgets(self.predictor, features, len(keys), segments, self.granularities)
        scores, pages, out = list[Tensor](), list[list[int]](), list[Tensor]()
        heads = query.reshape(len(keys), -1, query.shape[1])
        for kv_head, (rows, key, value) in enumerate(zip(heads, keys, values, strict=True)):
            host, first_page = key[segments.host], segments.sink_end // PAGE_TOKENS
            blk = int(budgets.granularity[kv_head])
            counts = budgets.blocks[kv_head].tolist()
            ranks, chosen = self.rank(rows, host, blk, counts) if blk else (torch.empty(len(rows), 0), [])
            scores.append(ranks)
            pages.append([first_page + page for page in pages_of_blocks(chosen, blk, len(host) // PAGE_TOKENS)])
            out.append(self.attend(rows, key, value, pages[-1], blk, counts))
        return FluxionStep(features, budgets, scores, pages, torch.cat(out))

    def rank(
        self, query: Tensor, host_keys: Tensor, granularity: int, counts: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Scores of one group's logical blocks [group, blocks] f64, and the union of its heads' best.

        counts   how many blocks each head selects

        With split codes, a block's scores are by both bits if these were read, otherwise by the signs.
        """
        scores = block_scores(query, host_keys, granularity, self.scale, self.ranking)
        if not self.split:
            return scores, best_blocks(scores, counts)
        by_signs = sign_scores(query, host_keys, granularity, self.scale)
        wide = [count and min(LISTED_BLOCKS * count + LISTED_MORE, scores.shape[1]) for count in counts]
        listed = best_blocks(by_signs, wide)
        by_signs[:, listed] = scores[:, listed]
        return by_signs, [listed[place] for place in best_blocks(scores[:, listed], counts)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, pages: list[int], granularity: int, counts: Sequence[int]
    ) -> Tensor:
        """Attend with one group to the retained set and the candidates read, which may stand for the unread blocks.

        query        [group, head_dim]
        key, value   [tokens, head_dim]
        counts       how many blocks of `granularity` tokens each head selects
        returns      [group, head_dim] f64
        """
        retained = self.retained.retained_pages(len(key))
        if not (self.attributed and self.ranking.code_bits and pages):
            return attend_pages(query, key, value, [*retained, *pages], self.scale)[0]
        alone, read = (attend_pages(query, key, value, part, self.scale) for part in (retained, pages))
        segments = Segments.of(self.retained, len(key))
        scores, _ = self.rank(query, key[segments.host], granularity, counts)
        taken = {(page * PAGE_TOKENS - segments.sink_end) // granularity for page in pages}
        log_unread = unread_weights(scores, taken, counts)
        return merge_with_unread(*alone, *read, log_unread, self.attributed)


def choose_budgets(
    predictor: Predictor, features: Tensor, kv_heads: int, segments: Segments, granularities: Sequence[int]
) -> GroupBudgets:
    """Choose the budgets of each group of a layer from the features [q_heads, 41] of its heads."""
    heads = predictor.predict(features)
    base_budget, growth, streaming = (
        part.reshape(kv_heads, -1).numpy()
        for part in (heads.base_budget, heads.growth, heads.streaming >= STREAMING_PROBABILITY)
    )
    return select_budgets(base_budget, growth, streaming, segments.host_tokens, granularities)


def weigh_pages(query: Tensor, keys: Tensor, sequence: FluxionSequence) -> Tensor:
    """The log weights of the host segment's pages as key codes estimate them: [q_heads, pages] f32 (f64 for f64)."""
    host = Segments.of(sequence.retained, keys.shape[1]).host
    groups = zip(query.reshape(len(keys), -1, query.shape[1]), keys[:, host], strict=True)
    scores = [block_scores(rows, key, PAGE_TOKENS, sequence.scale, sequence.ranking) for rows, key in groups]
    return torch.cat(scores).to(in_compute_dtype(query).dtype)


def block_scores(query: Tensor, host_keys: Tensor, granularity: int, scale: float, ranking: PageRanking) -> Tensor:
    """Scores of the logical blocks of a host segment. The last block may be shorter.

    With min/max a score is Quest's bound over the block's keys, unscaled. With key codes it is the estimated weight of
    the block: the logarithm of the sum of exp(score) over its keys.

    query       [group, head_dim]
    host_keys   [host tokens, head_dim]   whole pages
    returns     [group, blocks] f64
    """
    if ranking.code_bits:
        return _weights(query, encode_keys(host_keys, ranking.code_bits), granularity, scale)
    blocks = host_keys.split(granularity)
    bounds = torch.stack([torch.stack((block.amax(dim=0), block.amin(dim=0))) for block in blocks])
    return score_pages(query, bounds, 1.0, "minmax")


def sign_scores(query: Tensor, host_keys: Tensor, granularity: int, scale: float) -> Tensor:
    """As `block_scores` with key codes, but from the signs of two-bit codes alone: [group, blocks] f64."""
    return _weights(query, signs_of(encode_keys(host_keys, CODE_BITS[-1])), granularity, scale)


def _weights(query: Tensor, codes: KeyCodes, granularity: int, scale: float) -> Tensor:
    tokens = estimate_scores(query, codes, scale).flatten(1)
    return torch.stack([part.logsumexp(dim=1) for part in tokens.split(granularity, dim=1)], dim=1)


def best_blocks(scores: Tensor, counts: Sequence[int]) -> list[int]:
    """The union of the heads' best blocks, ascending. If scores are equal, the lower block is better.

    scores   [group, blocks]
    counts   how many blocks each head selects
    """
    orders = [row.argsort(descending=True, stable=True).tolist() for row in scores]
    return sorted({block for order, count in zip(orders, counts, strict=True) for block in order[:count]})


def unread_weights(scores: Tensor, taken: Collection[int], counts: Sequence[int]) -> Tensor:
    """The weight that key codes estimate for the blocks not taken, for heads that select some; -inf for the others.

    scores    [group, blocks]
    counts    how many blocks each head selects
    returns   [group] natural log
    """
    left = [block for block in range(scores.shape[1]) if block not in taken]
    return scores[:, left].logsumexp(dim=1).masked_fill(torch.tensor(counts) == 0, -torch.inf)


def pages_of_blocks(blocks: Sequence[int], granularity: int, num_pages: int) -> list[int]:
    """The pages of some logical blocks of a host segment of `num_pages` pages. Both are counted from its first."""
    size = granularity // PAGE_TOKENS
    return [page for block in blocks for page in range(block * size, min((block + 1) * size, num_pages))]
