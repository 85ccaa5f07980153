"""What `ranking.py` launches on a GPU, or interpreted over CPU memory: Triton's kernels."""

from typing import Any

from torch import Tensor

from vllm_hybrid_sparse.kernels.code_scores import gpu as code_scores
from vllm_hybrid_sparse.kernels.code_scores.reference import CodeScores
from vllm_hybrid_sparse.kernels.key_codes.gpu import encode_pages, rotate_queries
from vllm_hybrid_sparse.kernels.listed_attention.gpu import attend_listed
from vllm_hybrid_sparse.kernels.merge.gpu import merge_with_unread
from vllm_hybrid_sparse.kernels.page_directory import gpu as directory
from vllm_hybrid_sparse.kernels.reading.gpu import plan_reading, read_on
from vllm_hybrid_sparse.kernels.score.gpu import best_pages, group_scores, rank_pages

_MOST_UNSORTED = 0.5
"""Part of the candidates that is picked out instead of sorting them all. Reckoned, not measured on a GPU."""

__all__ = [
    "attend_listed",
    "directory",
    "encode_pages",
    "merge_with_unread",
    "order_pages",
    "plan_reading",
    "read_on",
    "score_codes",
]


def score_codes(query: Tensor, codes: Tensor, blocks: Tensor, candidates: Tensor, **numbers: Any) -> CodeScores:
    """What candidates are estimated to weigh; see kernels/code_scores."""
    return code_scores.score_codes(rotate_queries(query), codes, blocks, candidates, **numbers)


def order_pages(scores: Tensor, kv_heads: int, retained_lse: Tensor, deviations: Tensor | None, most: int) -> Tensor:
    """The best candidates by group score, `most` of them at the least, [rows, kv_heads, any] int64."""
    best = group_scores(scores, kv_heads, retained_lse, deviations)
    return rank_pages(best) if most > _MOST_UNSORTED * scores.shape[-1] else best_pages(best, most)
