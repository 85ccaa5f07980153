"""Policies: each is an order over a group's candidate pages and a rule for where to stop reading in it.

The fast kernels take a policy as a `SelectionSpec`; the selectors here say on numpy arrays what such a spec means.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.values import SelectionSpec

Floats = NDArray[np.floating[Any]]


def group_scores(page_scores: Floats, retained_lse: Floats | None = None) -> NDArray[np.float64]:
    """How much of its attention some query head of the group is estimated to give to each candidate page.

    The log of the largest estimated share among the heads: max over h of (s[h, p] - logsumexp over pages of s[h, .]).
    Heads are made comparable first, since a constant added to all scores of a head changes nothing of its attention.
    Scores that estimate a page's weight (key codes) are set against the retained set's too: a head that finds its
    weight there needs little of the candidates.

    page_scores    [group, candidates]  estimated attention scores, softmax scale applied; finite
    retained_lse   [group]              log-sum-exp of the scores of the retained set; None: shares of the candidates
    returns        [candidates]         <= 0; of one head the order of its scores; empty for no candidates
    """
    scores = np.asarray(page_scores, dtype=np.float64)
    if scores.shape[1] == 0:
        return np.empty(0)
    peak = scores.max(axis=1, keepdims=True)
    log_mass = peak + np.log(np.exp(scores - peak).sum(axis=1, keepdims=True))
    if retained_lse is not None:
        log_mass = np.logaddexp(log_mass, np.asarray(retained_lse, dtype=np.float64)[:, None])
    best: NDArray[np.float64] = (scores - log_mass).max(axis=0)
    return best


def rank_pages(scores: Floats) -> NDArray[np.int64]:
    """Indices of the pages by descending group score, ties by the lower index.

    scores     [candidates]
    returns    [candidates]  a permutation
    """
    return np.argsort(-np.asarray(scores, dtype=np.float64), kind="stable")


class Selector(Protocol):
    """What every policy answers. Pages are indices into the candidates of one group, 0 the first candidate.

    A policy with a fixed budget cuts the order it returns; one that looks at what it has read ends in `is_done`;
    one that judges each page by itself (an attention weight over a limit) leaves the others out of the order.
    """

    @property
    def spec(self) -> SelectionSpec:
        """The same policy as the kernels take it."""

    def order(self, page_scores: Floats, retained_lse: Floats | None = None) -> NDArray[np.int64]:
        """The pages that may be read, in the order of reading; the arguments are those of `group_scores`."""

    def is_done(self, mass: Floats) -> bool:
        """Whether to stop after a microbatch; mass is [group], each head's estimated share read so far (P_acc)."""


@dataclass(frozen=True, slots=True)
class SpecSelector:
    """The policies that a `SelectionSpec` can say, alone or combined.

    dense        every page, by page
    topk         the best `budget_pages` pages by group score (Quest, ArkVale)
    progressive  the best pages by group score, until P_acc > ε for every query head of the group (PSA, Algorithm 1, or
                 with the remainder that the key codes estimate)
    """

    spec: SelectionSpec

    def order(self, page_scores: Floats, retained_lse: Floats | None = None) -> NDArray[np.int64]:
        """Ranked or by page, cut to the budget."""
        num_candidates = page_scores.shape[1]
        pages = rank_pages(group_scores(page_scores, retained_lse)) if self.spec.ranked else np.arange(num_candidates)
        return pages[: self.spec.budget_pages(num_candidates)]

    def is_done(self, mass: Floats) -> bool:
        """P_acc > ε, strictly (line 17), for all heads: they share the pages, so the last one decides."""
        return bool(np.all(np.asarray(mass) > self.spec.threshold))


def make_selector(config: HybridSparseConfig) -> Selector:
    """The selector of the policy that the user chose. Raises ConfigError for hgca and fluxion: they order no pages."""
    if config.salience is not None or config.prediction is not None:
        raise ConfigError(f"policy={config.policy!r}: has no order of pages; see kernels/{config.policy}/reference.py")
    return SpecSelector(config.selection)
