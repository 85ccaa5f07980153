"""What pages weigh, from their key codes, in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.key_codes.reference import estimate_weights, score_deviation, unpack_codes


class CodeScores(NamedTuple):
    """What rows' candidates are estimated to weigh, and how far a key's estimated score may be off."""

    weights: Tensor  # [rows, q_heads, most], natural log; -inf for c >= candidates[row]
    deviations: Tensor  # [rows, q_heads], standard deviation, natural log; 0 for a row without candidates


def score_codes(
    query: Tensor,
    codes: Tensor,
    blocks: Tensor,
    candidates: Tensor,
    *,
    first_page: int,
    most: int,
    pages_per_block: int,
    scale: float,
    code_bits: int,
) -> CodeScores:
    """Estimate what each candidate page weighs for each query head: `estimate_weights` page for page.

    The deviations are `score_deviation` of each row and KV head.

    Candidate c of a row is its request's page p = first_page + c, which lies in `codes` as page p % pages_per_block of
    block blocks[row, p // pages_per_block].

    query        [rows, q_heads, head_dim]        any floating dtype
    codes        [kv_heads, store_pages, bytes]   uint8, as `pack_codes` gives them
    blocks       [rows, any]                      int32; behind a row's candidates not looked at
    candidates   [rows]                           int32, candidate pages of each row, at most `most`
    returns      f64
    """
    rows, q_heads, head_dim = query.shape
    group = q_heads // len(codes)
    scores = torch.full((rows, q_heads, most), -torch.inf, dtype=torch.float64)
    deviations = torch.zeros(rows, q_heads, dtype=torch.float64)
    for row, count in enumerate(candidates.tolist()):
        pages = first_page + torch.arange(count)
        places = blocks[row, pages // pages_per_block] * pages_per_block + pages % pages_per_block
        for kv_head, of_head in enumerate(codes):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            of_pages = unpack_codes(of_head[places], head_dim, code_bits)
            scores[row, heads, :count] = estimate_weights(query[row, heads], of_pages, scale)
            if count:
                deviations[row, heads] = score_deviation(query[row, heads], of_pages, scale)
    return CodeScores(scores, deviations)
