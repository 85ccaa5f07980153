"""PSA's Algorithm 1, and the same with an estimated remainder, literal and slow."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, estimate_weights, score_deviation
from vllm_hybrid_sparse.kernels.merge.reference import merge_states, merge_with_unread
from vllm_hybrid_sparse.kernels.score.reference import score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.policy.selectors import SpecSelector
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
    selector: SpecSelector,
    retained: RetainedSet,
    scale: float,
    summary: str,
    code_bits: int = 2,
) -> ProgressiveResult:
    """Decode one group of query heads of one request, its candidate pages in the selector's order (PSA, section 3.2).

    Algorithm 1 with what the paper leaves to the text or to us:
    - the retained set is attended first; it counts in AS_acc, not in AS_min, and its pages are not in N_left;
    - after a microbatch of m pages AS_min has seen each of them by itself (line 13), the test (line 17) comes once;
    - each head of the group has its own AS_acc, AS_min and P_acc; the group goes on until all of them are done;
    - AS is kept as its logarithm.
    AS_min starts at the largest value, so at least one microbatch is read whatever the threshold.

    Not all of the paper's figure 4 follows from lines 13 to 17. For the same weights they give 305 / (305 + 55 * 8) =
    0.41 after the first microbatch, where the figure has 0.61, and 1 once all twelve blocks are read, where it has
    0.98. Its text ends the reading when P_acc equals the threshold, line 17 when it exceeds it.

    Where the selector asks for an estimated remainder, `estimated_reading` says when to stop. Part of what key codes
    estimate of the unread candidates is then given to those read (`with_unread`), if the policy says so.

    query        [group, head_dim]     bf16 | f16 | f32
    key, value   [seq_len, head_dim]   same dtype, the current token included
    scale        factor of the scores
    summary      minmax | cuboid_mean | key_codes | none, with which nothing can be ranked
    """
    first_page, end_page = retained.candidate_range(len(key))
    attend = partial(attend_pages, query, key, value, scale=scale)
    alone = out, log_as_acc = attend_pages(query, key, value, retained.retained_pages(len(key)), scale)
    log_as_min = torch.full_like(log_as_acc, torch.inf)

    candidates = key[first_page * PAGE_TOKENS : end_page * PAGE_TOKENS]
    if summary == "key_codes":
        codes = encode_keys(candidates, code_bits)
        scores = estimate_weights(query, codes, scale)
        deviations = score_deviation(query, codes, scale)
        ranking = selector.order(scores.numpy(), log_as_acc.numpy(), deviations.numpy())
    elif summary == "none":
        assert not selector.spec.ranked
        ranking = selector.order(torch.zeros(len(query), end_page - first_page).numpy())
    else:
        scores = score_pages(query, summarize_pages(candidates, summary), scale, summary)
        ranking = selector.order(scores.numpy())
    order = [first_page + int(index) for index in ranking]
    share = selector.spec.attributed if summary == "key_codes" else 0.0
    if selector.spec.estimated_remainder and order:
        result = estimated_reading(attend, out, log_as_acc, order, scores, selector)
        if share and result.pages:
            result = result._replace(out=with_unread(attend, alone, result.pages, scores, first_page, share))
        return result

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
    if share and pages:
        out = with_unread(attend, alone, pages, scores, first_page, share)
    return ProgressiveResult(out, log_as_acc, pages, mass)


def estimated_reading(
    attend: Callable[[list[int]], tuple[Tensor, Tensor]],
    out: Tensor,
    log_read: Tensor,
    order: list[int],
    log_weights: Tensor,
    selector: SpecSelector,
) -> ProgressiveResult:
    """Read candidate pages until what is unread is estimated to be little enough.

    P_acc is the weight read, which is exact, over itself plus the estimates of all unread pages. A round takes the next
    pages in order, whole microbatches of them, until P_acc would do if they weighed what they are estimated to; then
    they are read, and P_acc is looked at. With the retained set enough, no page is read.

    attend        pages -> (out, lse) of these pages
    out, log_read [group, head_dim], [group] f64   of the retained set
    order         the candidate pages that may be read
    log_weights   [group, candidates] f64          of all candidates, which are the pages in order
    """
    assert len(order) == log_weights.shape[1], "a budget and an estimated remainder do not go together"
    first_page = min(order)
    weights = {page: log_weights[:, page - first_page] for page in order}
    pages: list[int] = []
    mass: list[Tensor] = []

    def kept(log_taken: Tensor, unread: list[int]) -> Tensor:
        if not unread:
            return torch.ones_like(log_taken)
        log_rest = torch.stack([weights[page] for page in unread]).logsumexp(dim=0)
        return torch.exp(log_taken - torch.logaddexp(log_taken, log_rest))

    unread = list(order)
    while unread and not selector.is_done(kept(log_read, unread).numpy()):
        count, log_expected = 0, log_read
        while count < len(unread) and (count == 0 or not selector.is_done(kept(log_expected, unread[count:]).numpy())):
            step = unread[count : count + selector.spec.microbatch_pages]
            log_expected = torch.stack([log_expected, *(weights[page] for page in step)]).logsumexp(dim=0)
            count += len(step)
        taken, unread = unread[:count], unread[count:]
        part_out, part_lse = attend(taken)
        out, log_read = merge_states(out, log_read, part_out, part_lse)
        pages += taken
        mass.append(kept(log_read, unread))
    return ProgressiveResult(out, log_read, pages, mass)


def with_unread(
    attend: Callable[[list[int]], tuple[Tensor, Tensor]],
    alone: tuple[Tensor, Tensor],
    pages: list[int],
    log_weights: Tensor,
    first_page: int,
    share: float,
) -> Tensor:
    """Attention over the retained set and some candidates, with a share of the others' estimated weight given to these.

    attend        pages -> (out, lse) of these pages, [group, head_dim] and [group] f64
    alone         (out, lse) of the retained set
    pages         the candidates read, one at the least
    log_weights   [group, candidates] f64       of all candidates, the first of which is page `first_page`
    returns       [group, head_dim] f64
    """
    unread = sorted({first_page + index for index in range(log_weights.shape[1])} - set(pages))
    log_unread = log_weights[:, [page - first_page for page in unread]].logsumexp(dim=-1)
    return merge_with_unread(*alone, *attend(pages), log_unread, share)
