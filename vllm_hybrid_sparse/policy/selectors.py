"""Policies: each is an order over a group's candidate pages and a rule for where to stop reading.

The fast kernels take a policy as a `SelectionSpec`; `SpecSelector` defines on numpy arrays what such a spec means.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.values import SelectionSpec

Floats = NDArray[np.floating[Any]]

ERROR_DEVIATIONS = 3.0
"""How far above its estimate a head's pages are ranked, in standard deviations of an estimated score."""


def group_scores(
    page_scores: Floats, retained_lse: Floats | None = None, deviations: Floats | None = None
) -> NDArray[np.float64]:
    """The log of the largest share of attention that any query head of the group is estimated to give to each page.

    This is max over h of (s[h, p] - logsumexp over pages of s[h, .]). The subtraction makes heads comparable: a
    constant added to all scores of a head does not change its attention. Scores that estimate a page's weight (key
    codes) are compared with the retained set's weight too, because a head that finds its weight there needs little of
    the candidates.

    With `deviations` a head's shares are taken at the upper end of what they may be, `ERROR_DEVIATIONS` standard
    deviations above their estimates. A page that one head has underrated is then read before pages of heads whose
    estimates are sure, and whose attention is spread evenly.

    page_scores    [group, candidates]  estimated attention scores, softmax scale applied; finite
    retained_lse   [group]              log-sum-exp of the scores of the retained set; None: shares of the candidates
    deviations     [group]              standard deviation of an estimated score, natural log; None: nothing is added
    returns        [candidates]         <= 0 without deviations; with one head in the order of its scores; empty for no
                                        candidates
    """
    scores = np.asarray(page_scores, dtype=np.float64)
    if scores.shape[1] == 0:
        return np.empty(0)
    peak = scores.max(axis=1, keepdims=True)
    log_mass = peak + np.log(np.exp(scores - peak).sum(axis=1, keepdims=True))
    if retained_lse is not None:
        log_mass = np.logaddexp(log_mass, np.asarray(retained_lse, dtype=np.float64)[:, None])
    if deviations is not None:
        log_mass = log_mass - ERROR_DEVIATIONS * np.asarray(deviations, dtype=np.float64)[:, None]
    best: NDArray[np.float64] = (scores - log_mass).max(axis=0)
    return best


def rank_pages(scores: Floats) -> NDArray[np.int64]:
    """Indices of the pages by descending group score, ties by the lower index.

    scores     [candidates]
    returns    [candidates]  a permutation
    """
    return np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")


@dataclass(frozen=True, slots=True)
class SpecSelector:
    """The policies that a `SelectionSpec` can express, alone or combined. Pages are indices into a group's candidates.

    dense        every page, by page
    topk         the best `budget_pages` pages by group score (Quest, ArkVale)
    progressive  the best pages by group score, until P_acc > ε for every query head of the group (PSA, Algorithm 1, or
                 with a remainder estimated from key codes)
    """

    spec: SelectionSpec

    def order(
        self, page_scores: Floats, retained_lse: Floats | None = None, deviations: Floats | None = None
    ) -> NDArray[np.int64]:
        """The pages that may be read, in reading order. Arguments as for `group_scores`.

        The deviations count only where a threshold on an estimated remainder ends the reading: pages that a head may
        have underrated are then worth reading, while a budget is best spent on what is estimated.
        """
        num_candidates = page_scores.shape[1]
        if not self.spec.ranked:
            return np.arange(num_candidates)
        allowed = deviations if self.spec.stops_by_estimates else None
        pages = rank_pages(group_scores(page_scores, retained_lse, allowed))
        return pages[: self.spec.budget_pages(num_candidates)]

    def is_done(self, mass: Floats) -> bool:
        """Whether to stop after a microbatch: P_acc > ε, strictly (line 17), for all heads, as they share the pages.

        mass   [group]  each head's estimated share read so far (P_acc)
        """
        return bool(np.all(np.asarray(mass) > self.spec.threshold))
