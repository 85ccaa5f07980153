"""How much of the true attention weight a decode step kept, and how few pages an oracle would have needed for it."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet


def page_shares(step: DecodeStep) -> Tensor:
    """Each query head's true attention weight by page.

    returns   [kv_heads, group, pages] f32, summing to 1 over the pages
    """
    kv_heads, tokens, head_dim = step.keys.shape
    query = step.query.float().view(kv_heads, -1, head_dim)
    weights = (step.scale * query @ step.keys.float().transpose(1, 2)).softmax(dim=-1)
    padded = torch.nn.functional.pad(weights, (0, -tokens % PAGE_TOKENS))
    return padded.unflatten(-1, (-1, PAGE_TOKENS)).sum(dim=-1)


def oracle_pages(candidates: Tensor, retained: Tensor, promise: float) -> int:
    """Pages that an oracle reads for every head of a group to keep `promise`, by the largest true share of any head.

    candidates   [group, pages]   true shares of the candidate pages
    retained     [group]          true share of the retained set
    """
    order = candidates.amax(dim=0).argsort(descending=True)
    kept = retained[:, None] + candidates[:, order].cumsum(dim=1)
    enough = torch.cat(((retained >= promise).all()[None], (kept >= promise).all(dim=0)))
    return int(enough.int().argmax()) if bool(enough.any()) else candidates.shape[1]


@dataclass(slots=True)
class KeptMass:
    """Records of decode rows, one for each layer, step and KV head; of its heads the one that kept least counts."""

    retained: RetainedSet
    promise: float
    kept: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    oracle: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)

    def watch(self, step: DecodeStep) -> None:
        """Record one layer's decode row."""
        first, end = self.retained.candidate_range(step.keys.shape[1])
        shares = page_shares(step)
        for head, plan in enumerate(step.plans):
            candidates = shares[head, :, first:end]
            retained = 1.0 - candidates.sum(dim=1)
            kept = retained + shares[head][:, plan].sum(dim=1)
            self.kept.append(float(kept.min()))
            self.pages.append(len(plan))
            self.oracle.append(oracle_pages(candidates, retained, self.promise))
            self.candidates.append(end - first)

    def summary(self) -> dict[str, float]:
        """Means and shares over all records; pages as shares of the candidates."""
        kept = np.array(self.kept)
        return {
            "pages_read": _ratio(self.pages, self.candidates),
            "oracle_pages_read": _ratio(self.oracle, self.candidates),
            "kept_mean": float(kept.mean()),
            "kept_at_least_0.95": _at_least(kept, 0.95),
            "kept_at_least_0.90": _at_least(kept, 0.90),
            "kept_at_least_0.85": _at_least(kept, 0.85),
            "kept_worst": float(kept.min()),
        }


def _ratio(part: list[int], whole: list[int]) -> float:
    return sum(part) / max(1, sum(whole))


def _at_least(kept: NDArray[np.float64], limit: float) -> float:
    return float((kept >= limit - 1e-6).mean())  # sums of float32 shares
