"""Page scores in plain torch."""

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
