"""Planning a reading, and reading on, of one group in plain torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.merge.reference import merge_states


class Planned(NamedTuple):
    """What a group is to read at first."""

    num_pages: int  # of the order
    log_unread: Tensor  # [group] f64, what the others are estimated to weigh
    share: float  # P_acc of the head that has the least, if the pages weighed what they are estimated to


class Read(NamedTuple):
    """What a group has read in the end."""

    out: Tensor  # [group, head_dim] f64, of the candidates
    lse: Tensor  # [group] f64, likewise
    num_pages: int  # of the order
    log_unread: Tensor  # [group] f64
    share: float


def least_share(log_read: Tensor, log_unread: Tensor) -> float:
    """P_acc of the head that has the least: what is read over itself and what is not."""
    return float((log_read - torch.logaddexp(log_read, log_unread)).exp().min())


def log_weight(scores: Tensor, pages: Sequence[int]) -> Tensor:
    """What pages are estimated to weigh together, [group]; scores [group, candidates]."""
    return scores[:, list(pages)].logsumexp(dim=1)


def plan_reading(
    scores: Tensor, order: Sequence[int], retained_lse: Tensor, budget: int, threshold: float, microbatch_pages: int
) -> Planned:
    """Whole microbatches of an order until P_acc would exceed the threshold if the estimates held.

    scores             [group, candidates] f64   log of each candidate's estimated weight
    order              a permutation of the candidates
    retained_lse       [group] f64               log-sum-exp of the retained set
    budget             pages that may be read
    threshold          in (0, 1]; at 1 the budget is read
    """
    count, log_expected = 0, retained_lse
    log_unread = log_weight(scores, order)
    share = least_share(log_expected, log_unread)
    while count < budget and share <= threshold:
        some = order[count : min(count + microbatch_pages, budget)]
        log_expected = torch.logaddexp(log_expected, log_weight(scores, some))
        count += len(some)
        log_unread = log_weight(scores, order[count:])
        share = least_share(log_expected, log_unread)
    return Planned(count, log_unread, share)


def read_on(
    attend: Callable[[Sequence[int]], tuple[Tensor, Tensor]],
    scores: Tensor,
    order: Sequence[int],
    retained_lse: Tensor,
    planned: Planned,
    budget: int,
    threshold: float,
    microbatch_pages: int,
) -> Read:
    """Read what is planned, and on by microbatches until P_acc exceeds the threshold for every head.

    attend   candidates -> (out, lse) of these pages, [group, head_dim] and [group] f64
    """
    count = planned.num_pages
    out, lse = attend(order[:count])
    log_unread = log_weight(scores, order[count:])
    share = least_share(torch.logaddexp(retained_lse, lse), log_unread)
    while count < budget and share <= threshold:
        end = min(count + microbatch_pages, budget)
        out, lse = merge_states(out, lse, *attend(order[count:end]))
        count = end
        log_unread = log_weight(scores, order[count:])
        share = least_share(torch.logaddexp(retained_lse, lse), log_unread)
    return Read(out, lse, count, log_unread, share)
