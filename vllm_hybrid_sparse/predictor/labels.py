"""Head properties by offline analysis: the least budget that keeps a head's output (Fluxion, section 5.2, eq. 1 and 2).

`labels_reference.py` says the same literally, one attention for each budget that is tried.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.policy.budget import GRANULARITIES
from vllm_hybrid_sparse.predictor.segments import Segments, by_group, in_compute_dtype
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet

LABEL_GRANULARITIES = (1, *GRANULARITIES)
"""Tokens of a block for which the least budget is found."""

_CHUNK_TOKENS = 128  # tokens ranked singly are tried this many at a time, since most heads need few


@dataclass(frozen=True, slots=True)
class HeadLabels:
    """Least budgets of the query heads of one layer for one decode query, as shares of the host segment.

    The error is not monotone in the budget: a block more can make it worse. `budgets` is the least budget that meets
    the error, as the paper words it; `settled` is the least from which on every larger one meets it too.
    """

    budgets: Tensor  # [q_heads, 5] for each of LABEL_GRANULARITIES, in [0, 1]
    settled: Tensor  # [q_heads, 4] for each of GRANULARITIES, in [0, 1]

    @property
    def streaming(self) -> Tensor:
        """s_h [q_heads] bool: whether the retained set alone keeps the output within the error."""
        return is_streaming(self.budgets)

    @property
    def base_budget(self) -> Tensor:
        """bgt_h,0 [q_heads]: the least budget at one token a block."""
        return self.budgets[:, 0]

    @property
    def growth(self) -> Tensor:
        """k_h [q_heads]."""
        return fit_growth(self.budgets)


def is_streaming(budgets: Tensor) -> Tensor:
    """Whether no budget is needed, which is so at every granularity or at none.

    budgets   [..., 5] for each of LABEL_GRANULARITIES
    returns   [...] bool
    """
    return budgets[..., 0] == 0


def fit_growth(budgets: Tensor) -> Tensor:
    """The k of eq. 1, bgt(blk) = bgt_0 + k log2(blk), by least squares.

    The paper sets bgt_0 to the least budget at blk = 1 and fits k, but does not say whether the line that is fitted has
    a free intercept. Here it goes through bgt_0, since that is the line that eq. 1 is evaluated on.

    budgets   [..., 5] for each of LABEL_GRANULARITIES
    returns   [...]
    """
    log_blk = torch.tensor(LABEL_GRANULARITIES, dtype=budgets.dtype).log2()
    return ((budgets - budgets[..., :1]) * log_blk).sum(dim=-1) / log_blk.square().sum()


def label_heads(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, retained: RetainedSet, tau: float
) -> HeadLabels:
    """The least budget of each query head of a layer at each granularity, for one decode query (eq. 2).

        ||o_h(bgt, blk) - o_h|| / max over h' of ||o_h'||  <=  tau

    o_h(bgt, blk) attends to the retained set and the best blocks of the host segment by Quest's bound of the head's own
    query, sum over d of max(q_d max_d, q_d min_d), ties by the lower block; with one token a block that is the order of
    the true scores. Blocks are counted from the first candidate. Every budget of whole blocks is tried, 0 and all among
    them; a budget is the tokens of its blocks over those of the host segment.

    query          [q_heads, head_dim]            bf16 | f16 | f32, computed in f32; or f64
    keys, values   [kv_heads, tokens, head_dim]   likewise, the current token included
    scale          softmax scale
    tau            > 0, else ConfigError
    returns        HeadLabels; without candidates every budget is 0
    """
    if not tau > 0:
        raise ConfigError(f"tau={tau}: must be above 0")
    segments = Segments.of(retained, keys.shape[1])
    query, keys, values = (in_compute_dtype(tensor) for tensor in (query, keys, values))
    heads = by_group(query, keys.shape[0])
    scores = scale * heads @ keys.transpose(1, 2)
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    outputs = weights @ values / weights.sum(dim=-1, keepdim=True)
    tolerance = tau * float(outputs.norm(dim=-1).max())
    if segments.host_tokens == 0:
        zeros = query.new_zeros(len(query), len(LABEL_GRANULARITIES))
        return HeadLabels(zeros, zeros[:, 1:])
    host = segments.host
    kept = _Kept.of(weights, values, outputs, segments, tolerance)
    tokens = _token_budget(kept, scores[..., host], weights[..., host], values[:, host])
    least, settled = _block_budgets(kept, heads, keys[:, host], weights[..., host], values[:, host])
    budgets = torch.cat((tokens[..., None], least), dim=-1)
    return HeadLabels(budgets.flatten(0, 1), settled.flatten(0, 1))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the retained set gives to every partial output of a layer.

    With weights w_i = exp(s_i - max), the output over a set S is o + (sum over S of w_i (v_i - o)) / (sum over S of
    w_i), so both sums, the deviation and the weight, are accumulated in the order of a ranking.
    """

    outputs: Tensor  # [kv_heads, group, head_dim] full attention's, o
    weight: Tensor  # [kv_heads, group]
    deviation: Tensor  # [kv_heads, group, head_dim]
    tolerance: float  # tau * the largest norm of a head's output

    @classmethod
    def of(cls, weights: Tensor, values: Tensor, outputs: Tensor, segments: Segments, tolerance: float) -> "_Kept":
        """Sum up the sink and the local segment; weights [kv_heads, group, tokens], values and outputs as above."""
        part = torch.cat((weights[..., segments.sink], weights[..., segments.local]), dim=-1)
        part_values = torch.cat((values[:, segments.sink], values[:, segments.local]), dim=1)
        weight = part.sum(dim=-1)
        return cls(outputs, weight, part @ part_values - weight[..., None] * outputs, tolerance)

    def meets(self, deviation: Tensor, weight: Tensor) -> Tensor:
        """Eq. 2 multiplied by the weight; a set whose weights all underflow has no output and never meets it."""
        within: Tensor = deviation.norm(dim=-1) <= self.tolerance * weight
        return within & (weight > 0)


def _token_budget(kept: _Kept, scores: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """[kv_heads, group] the least budget at one token a block.

    scores, weights   [kv_heads, group, host tokens]
    values            [kv_heads, host tokens, head_dim]
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    kv_head = torch.arange(len(values))[:, None, None]
    weight, deviation = kept.weight, kept.deviation
    found = kept.meets(deviation, weight)
    needed = torch.where(found, 0, order.shape[-1])
    for start in range(0, order.shape[-1], _CHUNK_TOKENS):
        if found.all():
            break
        chosen = order[..., start : start + _CHUNK_TOKENS]
        added = weights.gather(-1, chosen)
        deviations = added[..., None] * (values[kv_head, chosen] - kept.outputs[:, :, None])
        sums = weight[..., None] + added.cumsum(dim=-1)
        deviations = deviation[:, :, None] + deviations.cumsum(dim=-2)
        meets = kept.meets(deviations, sums)
        now = ~found & meets.any(dim=-1)
        needed = torch.where(now, start + meets.int().argmax(dim=-1) + 1, needed)
        found |= now
        weight, deviation = sums[..., -1], deviations[:, :, -1]
    return needed.to(weights.dtype) / order.shape[-1]


def _block_budgets(kept: _Kept, query: Tensor, keys: Tensor, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the settled budgets, [kv_heads, group, 4] each, at each of GRANULARITIES.

    query          [kv_heads, group, head_dim]
    keys, values   [kv_heads, host tokens, head_dim]   whole pages
    weights        [kv_heads, group, host tokens]
    """
    num_pages = keys.shape[1] // PAGE_TOKENS
    missing = -num_pages % (GRANULARITIES[-1] // PAGE_TOKENS)  # filled up with pages of no weight
    key_pages, value_pages = (part.unflatten(1, (-1, PAGE_TOKENS)) for part in (keys, values))
    upper, lower = (pad(part, (0, 0, 0, missing)) for part in (key_pages.amax(dim=2), key_pages.amin(dim=2)))
    if missing:  # a short last block is bounded by its own pages
        upper[:, num_pages:], lower[:, num_pages:] = upper[:, num_pages - 1, None], lower[:, num_pages - 1, None]
    page_weights = weights.unflatten(2, (-1, PAGE_TOKENS))
    weight = page_weights.sum(dim=-1)
    output_sums = (page_weights.transpose(1, 2) @ value_pages).transpose(1, 2)
    deviation = output_sums - weight[..., None] * kept.outputs[:, :, None]
    weight, deviation = pad(weight, (0, missing)), pad(deviation, (0, 0, 0, missing))
    least, settled = [], []
    for blk in GRANULARITIES:
        pages = blk // PAGE_TOKENS
        num_blocks = -(-num_pages // pages)
        # max(q max, q min) is q max where q > 0 and q min elsewhere
        upper_d, lower_d = (part[:, :num_blocks].transpose(1, 2) for part in (upper, lower))
        bounds = query.clamp(min=0) @ upper_d + query.clamp(max=0) @ lower_d
        order = bounds.argsort(dim=-1, descending=True, stable=True)
        weights_in_order = weight.gather(-1, order)
        deviations_in_order = deviation.gather(2, order[..., None].expand(*order.shape, deviation.shape[-1]))
        meets = kept.meets(
            torch.cat((kept.deviation[:, :, None], deviations_in_order), dim=2).cumsum(dim=2),
            torch.cat((kept.weight[..., None], weights_in_order), dim=2).cumsum(dim=2),
        )
        meets[..., -1] = True  # everything: full attention itself, whatever the rounding
        sizes = torch.full_like(order, pages)
        sizes[order == num_blocks - 1] = num_pages - (num_blocks - 1) * pages
        share = pad(sizes, (1, 0)).cumsum(dim=-1).to(weight.dtype) / num_pages
        last_miss = torch.where(meets, 0, torch.arange(1, meets.shape[-1] + 1)).amax(dim=-1)
        least.append(share.gather(-1, meets.int().argmax(dim=-1, keepdim=True))[..., 0])
        settled.append(share.gather(-1, last_miss[..., None])[..., 0])
        if blk < GRANULARITIES[-1]:  # pairs of these blocks are the next ones
            upper, lower = upper.unflatten(1, (-1, 2)).amax(dim=2), lower.unflatten(1, (-1, 2)).amin(dim=2)
            weight, deviation = weight.unflatten(2, (-1, 2)).sum(dim=3), deviation.unflatten(2, (-1, 2)).sum(dim=3)
    return torch.stack(least, dim=-1), torch.stack(settled, dim=-1)
