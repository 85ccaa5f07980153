"""What one group of a decode row reads, in microbatches, and when that is enough (PSA, section 3.2, Algorithm 1)."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Pages of one group in the order of reading; of the retained set, or candidates."""

    group: GroupKey
    pages: tuple[int, ...]  # of the request, 0 its first
    seq_len: int  # tokens of the request
    microbatch_pages: int
    threshold: float | None = None  # stop once so much of the weight is read; None: read all
    candidates: int = 0  # of the group, read or not
    scored: int = 0  # of them, those whose summaries were scored
    # Log weight that key codes estimate of what is unread after so many microbatches, [microbatches, group].
    log_unread: NDArray[np.float64] | None = None
    lightest_rest: bool = False  # P_acc takes every unread page to weigh as much as the lightest one read (line 15)

    @property
    def estimated_rest(self) -> NDArray[np.float64] | None:
        """`log_unread`, where P_acc takes it for what is unread."""
        return None if self.lightest_rest else self.log_unread

    @property
    def microbatches(self) -> int:
        """How many there are to read."""
        return math.ceil(len(self.pages) / self.microbatch_pages)

    def microbatch(self, index: int) -> tuple[int, ...]:
        """The pages of one microbatch; the last one may be shorter, and beyond it there are none."""
        return self.pages[index * self.microbatch_pages : (index + 1) * self.microbatch_pages]

    def page_tokens(self, index: int) -> list[int]:
        """How many tokens each page of a microbatch has: 16, but for the request's last page."""
        return [min(PAGE_TOKENS, self.seq_len - PAGE_TOKENS * page) for page in self.microbatch(index)]

    def log_rest(self, index: int, lightest_lse: Tensor) -> Tensor:
        """What is unread after a microbatch is taken to weigh.

        lightest_lse   [group]   log-sum-exp of the page that weighs least of the candidates read; inf before any
        returns        [group]   natural log; -inf where every candidate is read
        """
        left = self.candidates - min(len(self.pages), (index + 1) * self.microbatch_pages)
        if left == 0:
            return torch.full_like(lightest_lse, -torch.inf)
        if self.estimated_rest is not None:
            return torch.from_numpy(self.estimated_rest[index]).to(lightest_lse.dtype)
        return lightest_lse + math.log(left)


def kept_share(lse: Tensor, log_rest: Tensor) -> float:
    """P_acc (line 16) of the head of a group that has least of its weight read.

    lse        [group]   of everything read, the retained set included
    log_rest   [group]   of what is unread
    """
    return float(torch.sigmoid(lse.double() - log_rest.double()).nan_to_num(nan=0.0).min())
