"""Fluxion's labels, literally, in plain torch: one attention for each budget that is tried. Slow, but easy to read."""

import math

import torch
from torch import Tensor

from vllm_hybrid_sparse.predictor.labels import LABEL_GRANULARITIES
from vllm_hybrid_sparse.predictor.segments import Segments
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet


def attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """softmax(q K^T scale) V of one head: query [head_dim], keys and values [tokens, head_dim]."""
    return torch.softmax(scale * keys @ query, dim=0) @ values


def rank_blocks(query: Tensor, keys: Tensor, blk: int, page_weights: Tensor | None) -> list[range]:
    """The blocks of the host segment as ranges of its tokens, best first, ties by the lower block.

    page_weights   [pages] logarithms of the pages' weights, which rank blocks of whole pages; None: Quest's bounds rank
                   them. Single tokens are always ranked by their bound, which is their score
    """
    blocks = [range(start, min(start + blk, len(keys))) for start in range(0, len(keys), blk)]

    def score(block: range) -> float:
        if page_weights is not None and blk > 1:
            return math.log(sum(math.exp(page_weights[start // PAGE_TOKENS]) for start in block[::PAGE_TOKENS]))
        part = keys[block.start : block.stop]
        upper, lower = part.max(dim=0).values, part.min(dim=0).values
        return float(torch.maximum(query * upper, query * lower).sum())

    return sorted(blocks, key=lambda block: (-score(block), block.start))


def least_budgets(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    retained: RetainedSet,
    tau: float,
    page_weights: Tensor | None = None,
    attributed: float = 0.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Eq. 2 for every query head: the least budget at each of LABEL_GRANULARITIES, and the settled ones.

    Arguments as for `label_heads`, in float64.
    """
    segments = Segments.of(retained, keys.shape[1])
    group = len(query) // len(keys)
    outputs = [attend(q, keys[h // group], values[h // group], scale) for h, q in enumerate(query)]
    largest = max(float(output.norm()) for output in outputs)
    kept = [*range(segments.sink_end), *range(segments.host_end, segments.tokens)]
    least: list[list[float]] = []
    settled: list[list[float]] = []
    for h, q in enumerate(query):
        head_keys, head_values = keys[h // group], values[h // group]
        weights = None if page_weights is None else page_weights[h]
        least.append([])
        settled.append([])
        for blk in LABEL_GRANULARITIES:
            chosen = list(kept)
            met: list[float] = []  # budgets that meet the error; missed: the others
            missed: list[float] = []
            for block in [range(0), *rank_blocks(q, head_keys[segments.host], blk, weights)]:
                chosen += [segments.sink_end + token for token in block]
                budget = (len(chosen) - len(kept)) / max(segments.host_tokens, 1)
                output = attend(q, head_keys[chosen], head_values[chosen], scale)
                read = chosen[len(kept) :]
                if attributed and blk > 1 and 0 < len(read) < segments.host_tokens:
                    assert weights is not None
                    unread = set(range(len(weights))) - {(token - segments.sink_end) // PAGE_TOKENS for token in read}
                    log_unread = weights[sorted(unread)].logsumexp(dim=0)
                    of_read = attend(q, head_keys[read], head_values[read], scale)
                    lse_chosen = (scale * head_keys[chosen] @ q).logsumexp(dim=0)
                    # add the unread weight: its attributed share as the blocks read, the rest as the whole output
                    unread_weight = torch.exp(log_unread - lse_chosen)
                    stand_in = attributed * of_read + (1 - attributed) * output
                    output = (output + unread_weight * stand_in) / (1 + unread_weight)
                error = float((output - outputs[h]).norm()) / largest
                everything = len(chosen) == segments.tokens
                (met if error <= tau or everything else missed).append(budget)
            least[-1].append(min(met))
            settled[-1].append(min(budget for budget in met if not missed or budget > max(missed)))
    return least, settled
