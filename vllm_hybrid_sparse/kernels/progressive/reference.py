"""PSA's Algorithm 1, literal and slow."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.kernels.score.reference import score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.policy.selectors import Selector
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet


class ProgressiveResult(NamedTuple):
    """What one group of query heads computed and how it got there."""

    out: Tensor  # [group, head_dim] f64
    lse: Tensor  # [group] f64, of everything read
    pages: list[int]  # candidate pages read, in the order of reading; page 0 is the first of the request
    mass: list[Tensor]  # P_acc after each microbatch, [group] f64


def progressive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    selector: Selector,
    retained: RetainedSet,
    scale: float,
    summary: str,
) -> ProgressiveResult:
    """Decode one group of query heads of one request, its candidate pages in the selector's order (PSA, section 3.2).

    Algorithm 1 with what the paper leaves to the text or to us:
    - the retained set is attended first; it counts in AS_acc, not in AS_min, and its pages are not in N_left;
    - after a microbatch of m pages AS_min has seen each of them by itself (line 13), the test (line 17) comes once;
    - each head of the group has its own AS_acc, AS_min and P_acc; the group goes on until all of them are done;
    - AS is kept as its logarithm.
    AS_min starts at the largest value, so at least one microbatch is read whatever the threshold.

    query        [group, head_dim]     bf16 | f16 | f32
    key, value   [seq_len, head_dim]   same dtype, the current token included
    scale        factor of the scores
    """
    first_page, end_page = retained.candidate_range(len(key))
    out, log_as_acc = attend_pages(query, key, value, retained.retained_pages(len(key)), scale)
    log_as_min = torch.full_like(log_as_acc, torch.inf)

    candidates = key[first_page * PAGE_TOKENS : end_page * PAGE_TOKENS]
    scores = score_pages(query, summarize_pages(candidates, summary), scale, summary)
    order = [first_page + int(index) for index in selector.order(scores.numpy())]

    num_left = end_page - first_page
    pages: list[int] = []
    mass: list[Tensor] = []
    microbatch_pages = selector.spec.microbatch_pages
    for start in range(0, len(order), microbatch_pages):
        for page in order[start : start + microbatch_pages]:
            page_out, log_as = attend_pages(query, key, value, [page], scale)
            out, log_as_acc = merge_states(out, log_as_acc, page_out, log_as)
            log_as_min = torch.minimum(log_as_min, log_as)
            num_left -= 1
            pages.append(page)
        log_as_left = log_as_min + (math.log(num_left) if num_left else -math.inf)
        mass.append(torch.exp(log_as_acc - torch.logaddexp(log_as_acc, log_as_left)))
        if selector.is_done(mass[-1].numpy()):
            break
    return ProgressiveResult(out, log_as_acc, pages, mass)
