"""PSA's look at the accumulated attention weight after a microbatch, for a batch of rows, in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """What is known of every row and KV head after a microbatch."""

    lightest: Tensor  # [rows, q_heads] f64, log AS_min
    pages_left: Tensor  # [rows, kv_heads] int64, N_left
    budget_left: Tensor  # [rows, kv_heads] int64
    mass: Tensor  # [rows, q_heads] f64, P_acc
    done: Tensor  # [rows, kv_heads] bool


def verify(
    lse: Tensor,
    page_lse: Tensor,
    lightest: Tensor,
    pages_left: Tensor,
    budget_left: Tensor,
    threshold: float,
    log_left: Tensor | None = None,
) -> Verdict:
    """Algorithm 1 of PSA from line 13 to line 17, on logarithms, for rows and KV heads that are not done.

    A microbatch may be short, also empty: pages that no token was read of count nowhere. Where nothing is left unread,
    P_acc is 1. A group is done when P_acc exceeds the threshold for all its heads, or when it may read no more pages.

    lse           [rows, q_heads]           log AS_acc, this microbatch included (line 12)
    page_lse      [rows, q_heads, pages]    log AS of each page of the microbatch, -inf: not read
    lightest      [rows, q_heads]           log AS_min before it, +inf at first (line 4)
    pages_left    [rows, kv_heads]          N_left before it (line 7)
    budget_left   [rows, kv_heads]          pages that might still be read before it
    threshold     ε
    log_left      [rows, q_heads]           log of what the unread pages are estimated to weigh after this microbatch;
                                            None: each as much as the lightest page read (line 15)
    """
    rows, kv_heads = pages_left.shape
    grouped = page_lse.reshape(rows, kv_heads, page_lse.shape[1] // kv_heads, page_lse.shape[2])
    read = (grouped > -torch.inf).any(dim=2).sum(dim=2)
    lightest = lightest.double()
    if page_lse.shape[2]:
        weights = page_lse.double()
        lightest = torch.minimum(lightest, weights.masked_fill(weights == -torch.inf, torch.inf).amin(dim=2))  # line 13
    pages_left, budget_left = pages_left.long() - read, budget_left.long() - read  # line 14
    if log_left is None:
        unread = pages_left.repeat_interleave(grouped.shape[2], dim=1)
        log_left = torch.where(unread > 0, lightest + unread.clamp(min=1).log(), -torch.inf)
    mass = torch.where(log_left == -torch.inf, 1.0, torch.sigmoid(lse.double() - log_left))  # lines 15 and 16
    enough = (mass > threshold).reshape(rows, kv_heads, -1).all(dim=2)  # line 17
    return Verdict(lightest, pages_left, budget_left, mass, enough | (budget_left <= 0))
