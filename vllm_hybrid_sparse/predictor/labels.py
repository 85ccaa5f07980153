"""Head properties by offline analysis: the least budget that keeps a head's output (Fluxion, section 5.2, eq. 1 and 2).

Blocks are ranked by the weight that key codes estimate for them, or by Quest's bounds, as in the paper. Serving ranks
in the same way, except that it reads both bits of two-bit codes only for pages that the signs put on a shortlist.
`labels_reference.py` does the same literally, with one attention for each budget that is tried.
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
"""The block sizes, in tokens, for which the least budget is found."""

_CHUNK_TOKENS = 128  # single tokens are tried this many at a time, since most heads need few


@dataclass(frozen=True, slots=True)
class HeadLabels:
    """Least budgets of the query heads of one layer for one decode query, as shares of the host segment.

    The error is not monotone in the budget: one more block can make it worse. `budgets` is the least budget that meets
    the error, as the paper words it. `settled` is the least budget that meets it together with all larger ones.
    """

    budgets: Tensor  # [q_heads, 5] for each of LABEL_GRANULARITIES, in [0, 1]
    settled: Tensor  # [q_heads, 4] for each of GRANULARITIES, in [0, 1]


def is_streaming(budgets: Tensor) -> Tensor:
    """Whether no budget is needed; this holds at every granularity or at none.

    budgets   [..., 5] for each of LABEL_GRANULARITIES
    returns   [...] bool
    """
    return budgets[..., 0] == 0


def fit_growth(budgets: Tensor) -> Tensor:
    """The k of eq. 1, bgt(blk) = bgt_0 + k log2(blk), by least squares.

    The paper sets bgt_0 to the least budget at blk = 1 and fits k, but does not say whether the fitted line has a free
    intercept. Here it goes through bgt_0, because eq. 1 is evaluated on that line.

    budgets   [..., 5] for each of LABEL_GRANULARITIES
    returns   [...]
    """
    log_blk = torch.tensor(LABEL_GRANULARITIES, dtype=budgets.dtype).log2()
    return ((budgets - budgets[..., :1]) * log_blk).sum(dim=-1) / log_blk.square().sum()


def label_heads(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    retained: RetainedSet,
    tau: float,
    page_weights: Tensor | None = None,
    attributed: float = 0.0,
) -> HeadLabels:
    """The least budget of each query head of a layer at each granularity, for one decode query (eq. 2).

        ||o_h(bgt, blk) - o_h|| / max over h' of ||o_h'||  <=  tau

    o_h(bgt, blk) attends to the retained set and to the best blocks of the host segment, ties by the lower block. Best
    is by the weight that the pages are estimated to have for the head, or by Quest's bound of its query, sum over d of
    max(q_d max_d, q_d min_d). At one token per block the bound is the true score, and these blocks are ranked by it
    whatever ranks the larger ones. Blocks are counted from the first candidate. Every budget of whole blocks is tried,
    including 0 and all; a budget is the tokens of its blocks over those of the host segment.

    query          [q_heads, head_dim]            bf16 | f16 | f32, computed in f32; or f64
    keys, values   [kv_heads, tokens, head_dim]   likewise, including the current token
    scale          softmax scale
    tau            > 0, else ConfigError
    page_weights   [q_heads, pages of the host segment] logarithms, as key codes estimate them; None: bounds rank blocks
    attributed     share of the other blocks' estimated weight that goes to the chosen ones, as in serving
                   (kernels/merge/attribution.py); needs page_weights and does not apply to single tokens
    returns        HeadLabels; without candidates every budget is 0
    """
    if not tau > 0:
        raise ConfigError(f"tau={tau}: must be above 0")
    if attributed and page_weights is None:
        raise ConfigError(f"attributed={attributed}: must be 0 where no page weights are given")
    segments = Segments.of(retained, keys.shape[1])
    query, keys, values = (in_compute_dtype(tensor) for tensor in (query, keys, values))
    heads = by_group(query, keys.shape[0])
    scores = scale * heads @ keys.transpose(1, 2)
    highest = scores.amax(dim=-1, keepdim=True)
    weights = (scores - highest).exp()
    outputs = weights @ values / weights.sum(dim=-1, keepdim=True)
    tolerance = tau * float(outputs.norm(dim=-1).max())
    if segments.host_tokens == 0:
        zeros = query.new_zeros(len(query), len(LABEL_GRANULARITIES))
        return HeadLabels(zeros, zeros[:, 1:])
    host = segments.host
    kept = _Kept.of(weights, values, outputs, segments, tolerance)
    tokens = _token_budget(kept, scores[..., host], weights[..., host], values[:, host])
    if page_weights is None:
        block_scores = _bound_blocks(heads, keys[:, host])
    else:
        block_scores = _weigh_blocks(by_group(page_weights, keys.shape[0]))
    estimates = [(logs - highest).exp() for logs in block_scores] if attributed else None
    least, settled = _block_budgets(kept, block_scores, weights[..., host], values[:, host], estimates, attributed)
    budgets = torch.cat((tokens[..., None], least), dim=-1)
    return HeadLabels(budgets.flatten(0, 1), settled.flatten(0, 1))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the retained set contributes to every partial output of a layer.

    With weights w_i = exp(s_i - max), the output over a set S is o + (sum over S of w_i (v_i - o)) / (sum over S of
    w_i). So both sums, the deviation and the weight, are accumulated in the order of a ranking.
    """

    outputs: Tensor  # [kv_heads, group, head_dim] those of full attention, o
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

    def meets_with_unread(self, deviation: Tensor, weight: Tensor, unread: Tensor, share: float) -> Tensor:
        """Eq. 2 if the blocks read also get a share of the others' estimated weight (`attribute_unread`).

        deviation, weight   [kv_heads, group, blocks, head_dim] and [kv_heads, group, blocks], only of the blocks read
        unread              [kv_heads, group, blocks] estimated weight of the others
        returns             [kv_heads, group, blocks] bool
        """
        total = self.weight[..., None] + weight
        given = share * unread / (total + (1 - share) * unread)
        of_read = (self.deviation[:, :, None] + deviation) / total[..., None]
        error = (of_read + given[..., None] * deviation / weight[..., None]).norm(dim=-1)
        within: Tensor = error <= self.tolerance * (1 + given)  # false if a weight underflows, as the error is NaN then
        return within


def _token_budget(kept: _Kept, scores: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """The least budget [kv_heads, group] at one token per block.

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


def _bound_blocks(query: Tensor, keys: Tensor) -> list[Tensor]:
    """Quest's bounds of the blocks, [kv_heads, group, blocks] for each of GRANULARITIES.

    query   [kv_heads, group, head_dim]
    keys    [kv_heads, host tokens, head_dim]   whole pages
    """
    pages = keys.unflatten(1, (-1, PAGE_TOKENS))
    upper, lower = pages.amax(dim=2), pages.amin(dim=2)
    bounds = []
    for blk in GRANULARITIES:
        # max(q max, q min) is q max where q > 0 and q min elsewhere
        bounds.append(query.clamp(min=0) @ upper.transpose(1, 2) + query.clamp(max=0) @ lower.transpose(1, 2))
        if blk < GRANULARITIES[-1]:
            upper, lower = _pairs(upper, 1, -torch.inf).amax(dim=2), _pairs(lower, 1, torch.inf).amin(dim=2)
    return bounds


def _weigh_blocks(page_weights: Tensor) -> list[Tensor]:
    """The weights of the blocks, [kv_heads, group, blocks] for each of GRANULARITIES, logarithms like their pages'."""
    weights = [page_weights]
    for _ in GRANULARITIES[1:]:
        weights.append(_pairs(weights[-1], 2, -torch.inf).logsumexp(dim=3))
    return weights


def _pairs(blocks: Tensor, dim: int, missing: float) -> Tensor:
    """Pairs of neighbours along `dim`, which make blocks of twice the size; an odd last one is paired with `missing`.

    blocks    [..., blocks, ...]
    returns   [..., ceil(blocks / 2), 2, ...]
    """
    if blocks.shape[dim] % 2:
        shape = list(blocks.shape)
        shape[dim] = 1
        blocks = torch.cat((blocks, blocks.new_full(shape, missing)), dim=dim)
    pairs: Tensor = blocks.unflatten(dim, (-1, 2))
    return pairs


def _block_budgets(
    kept: _Kept,
    block_scores: list[Tensor],
    weights: Tensor,
    values: Tensor,
    estimates: list[Tensor] | None,
    attributed: float,
) -> tuple[Tensor, Tensor]:
    """The least and the settled budgets at each of GRANULARITIES, [kv_heads, group, 4] each.

    block_scores   for each of GRANULARITIES the scores [kv_heads, group, blocks] that rank the blocks
    weights        [kv_heads, group, host tokens]
    values         [kv_heads, host tokens, head_dim]   whole pages
    estimates      like block_scores, the estimated weights of the blocks; None: unread blocks are left out
    attributed     share of the unread weight that goes to the blocks read
    """
    value_pages = values.unflatten(1, (-1, PAGE_TOKENS))
    num_pages = value_pages.shape[1]
    page_weights = weights.unflatten(2, (-1, PAGE_TOKENS))
    weight = page_weights.sum(dim=-1)
    output_sums = (page_weights.transpose(1, 2) @ value_pages).transpose(1, 2)
    deviation = output_sums - weight[..., None] * kept.outputs[:, :, None]
    least, settled = [], []
    for index, (blk, scores) in enumerate(zip(GRANULARITIES, block_scores, strict=True)):
        pages = blk // PAGE_TOKENS
        num_blocks = scores.shape[-1]
        order = scores.argsort(dim=-1, descending=True, stable=True)
        weights_in_order = weight.gather(-1, order)
        deviations_in_order = deviation.gather(2, order[..., None].expand(*order.shape, deviation.shape[-1]))
        read_deviation, read_weight = deviations_in_order.cumsum(dim=2), weights_in_order.cumsum(dim=2)
        if estimates is None:
            read_meets = kept.meets(kept.deviation[:, :, None] + read_deviation, kept.weight[..., None] + read_weight)
        else:
            in_order = estimates[index].gather(-1, order)
            behind = in_order.flip(-1).cumsum(dim=-1).flip(-1)  # not all less what is read: that may be mostly rounding
            unread = pad(behind[..., 1:], (0, 1))
            read_meets = kept.meets_with_unread(read_deviation, read_weight, unread, attributed)
        read_meets[..., -1] = True  # everything is full attention itself, whatever the rounding
        meets = torch.cat((kept.meets(kept.deviation, kept.weight)[..., None], read_meets), dim=-1)
        sizes = torch.full_like(order, pages)
        sizes[order == num_blocks - 1] = num_pages - (num_blocks - 1) * pages
        share = pad(sizes, (1, 0)).cumsum(dim=-1).to(weight.dtype) / num_pages
        last_miss = torch.where(meets, 0, torch.arange(1, meets.shape[-1] + 1)).amax(dim=-1)
        least.append(share.gather(-1, meets.int().argmax(dim=-1, keepdim=True))[..., 0])
        settled.append(share.gather(-1, last_miss[..., None])[..., 0])
        if blk < GRANULARITIES[-1]:
            weight, deviation = _pairs(weight, 2, 0.0).sum(dim=3), _pairs(deviation, 2, 0.0).sum(dim=3)
    return torch.stack(least, dim=-1), torch.stack(settled, dim=-1)
