"""Page scores in plain torch, and what they say of the pages that are not read."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def score_pages(query: Tensor, summaries: Tensor, scale: float, summary: str) -> Tensor:
    """Estimate the attention score of each page to each query head of a group.

    minmax (Quest, an upper bound of every token's score): scale * sum over d of max(q_d max_d, q_d min_d).
    cuboid_mean (ArkVale, PSA): scale * q . centre.

    query      [group, head_dim]             bf16 | f16 | f32
    summaries  [pages, vectors, head_dim]    as `summarize_pages` returns them
    returns    [group, pages]                f64, computed in f64
    """
    query, summaries = query.double(), summaries.double()
    if summary == "minmax":
        upper, lower = summaries.unbind(dim=1)
        products = (query[:, None] * upper).maximum(query[:, None] * lower)
        return scale * products.sum(dim=-1)
    assert summary == "cuboid_mean"
    return scale * query @ summaries[:, 0].T


def log_unread_after(log_weights: NDArray[np.floating], order: NDArray[np.int64], step: int) -> NDArray[np.float64]:
    """Estimated log weight of what is unread after each microbatch of `step` pages.

    log_weights   [group, candidates]   as key codes estimate them
    order         [pages]               those that may be read, in the order of reading; the others stay unread
    returns       [microbatches, group] the last row is -inf if all are read; none for no pages
    """
    weights = np.asarray(log_weights, dtype=np.float64)
    never = torch.from_numpy(np.delete(weights, order, axis=1)).logsumexp(dim=1, keepdim=True)
    backwards = np.concatenate([never.numpy(), weights[:, order[::-1]]], axis=1)
    suffix = np.logaddexp.accumulate(backwards, axis=1)[:, ::-1]  # [:, p]: of what is unread after p pages
    ends = np.arange(step, len(order) + step, step)
    after: NDArray[np.float64] = suffix[:, np.minimum(ends, len(order))].T
    return after
