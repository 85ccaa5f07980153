"""What each group of a decode row may read beyond the retained set, in which order, and what it needs to stop."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_hybrid_sparse.policy.selectors import SpecSelector
from vllm_hybrid_sparse.runtime.readings import Reading, kept_share, log_unread_after
from vllm_hybrid_sparse.values import GroupKey, RetainedSet, SelectionSpec


@dataclass(frozen=True, slots=True)
class Ranker:
    """Turns page scores into readings, by the policy."""

    spec: SelectionSpec
    retained: RetainedSet
    weighs: bool  # whether scores are estimated log weights (key codes), to be set against the retained set's

    def scored_pages(self, seq_len: int) -> tuple[int, int]:
        """The pages whose scores decide for a request, as `(first_page, end_page)`; the same twice where none does."""
        first, end = self.retained.candidate_range(seq_len)
        fixed = self.spec.threshold == 1 and (self.spec.budget_ratio < 1 or self.spec.max_pages is not None)
        if not self.spec.ranked or (fixed and self.spec.budget_pages(end - first) == end - first):
            return first, first
        return first, end

    def reading(self, group: GroupKey, seq_len: int, scores: Tensor, retained_lse: Tensor) -> tuple[Reading, float]:
        """The candidates of one group.

        scores         [group, scored pages] f32
        retained_lse   [group] f32
        returns        (reading, P_acc before any candidate is read): the reading is empty where that is enough; 1 where
                       the policy asks for no estimate
        """
        first, end = self.retained.candidate_range(seq_len)
        shown = scores.numpy() if scores.shape[1] else np.zeros((1, end - first))
        ranked = SpecSelector(self.spec).order(shown, retained_lse.numpy() if self.weighs else None)
        share, log_unread = 1.0, None
        looks = self.spec.threshold < 1 and end > first
        estimates = looks and self.spec.estimated_remainder
        if estimates or (self.weighs and self.spec.attributed and scores.shape[1]):
            log_unread = log_unread_after(shown, ranked, self.spec.microbatch_pages)
        if estimates:
            share = kept_share(retained_lse, scores.logsumexp(dim=-1))
            if share > self.spec.threshold:
                ranked = ranked[:0]
        return Reading(
            group=group,
            pages=tuple((first + ranked).tolist()),
            seq_len=seq_len,
            microbatch_pages=self.spec.microbatch_pages,
            threshold=self.spec.threshold if looks else None,
            candidates=end - first,
            scored=scores.shape[1],
            log_unread=log_unread,
            lightest_rest=not self.spec.estimated_remainder,
        ), share


def no_scores(q_heads: int) -> Tensor:
    """Of no pages."""
    return torch.empty(q_heads, 0)
