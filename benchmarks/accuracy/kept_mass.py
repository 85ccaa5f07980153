"""How much of the true attention weight a decode step kept, and how few pages an oracle would have needed for it."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet


def token_weights(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Each query head's true attention weights.

    query     [q_heads, head_dim]
    keys      [kv_heads, tokens, head_dim]
    returns   [kv_heads, group, tokens] f32, summing to 1 over the tokens
    """
    grouped = query.float().view(keys.shape[0], -1, keys.shape[2])
    weights: Tensor = (scale * grouped @ keys.float().transpose(1, 2)).softmax(dim=-1)
    return weights


def by_page(weights: Tensor) -> Tensor:
    """Sums over the tokens of each page: [..., tokens] becomes [..., pages]."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % PAGE_TOKENS))
    sums: Tensor = padded.unflatten(-1, (-1, PAGE_TOKENS)).sum(dim=-1)
    return sums


def page_shares(step: DecodeStep) -> Tensor:
    """Each query head's true attention weight by page: [kv_heads, group, pages] f32, summing to 1 over the pages."""
    return by_page(token_weights(step.query, step.keys, step.scale))


def oracle_order(candidates: Tensor) -> Tensor:
    """The order in which an oracle reads a group's candidates: by the largest true share of any head.

    candidates   [..., group, pages]   true shares
    returns      [..., pages] int64
    """
    return candidates.amax(dim=-2).argsort(dim=-1, descending=True, stable=True)


def oracle_pages(candidates: Tensor, retained: Tensor, promise: float) -> Tensor:
    """Pages that an oracle reads for every head of a group to keep `promise`; all where that is not enough.

    candidates   [..., group, pages]   true shares of the candidate pages
    retained     [..., group]          true share of the retained set
    returns      [...] int64
    """
    order = oracle_order(candidates)[..., None, :].expand_as(candidates)
    gathered = torch.nn.functional.pad(candidates.gather(-1, order).cumsum(dim=-1), (1, 0))
    short = (retained[..., None] + gathered < promise).any(dim=-2)
    return short.sum(dim=-1).clamp(max=candidates.shape[-1])


def output_error(step: DecodeStep, weights: Tensor) -> Tensor:
    """Deviation from full attention's output, by the longest such output of the layer (Fluxion, equation 2).

    weights   [kv_heads, group, tokens]   the true ones
    returns   [kv_heads, group] f32; 0 where every output is zero
    """
    true = weights @ step.values.float()
    deviation: Tensor = (step.output.float().view(true.shape) - true).norm(dim=-1)
    longest: Tensor = true.norm(dim=-1).max()
    return deviation / longest.clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(slots=True)
class KeptMass:
    """Records of decode rows, one for each layer, step and KV head; of its heads the one that kept least counts."""

    retained: RetainedSet
    promise: float
    kept: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # read of the candidates; of HGCA the packed ones
    oracle: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    error: list[float] = field(default_factory=list)  # of the output, largest of the group's heads
    place: list[tuple[int, int]] = field(default_factory=list)  # layer, KV head

    def watch(self, step: DecodeStep) -> None:
        """Record one layer's decode row."""
        first, end = self.retained.candidate_range(step.keys.shape[1])
        weights = token_weights(step.query, step.keys, step.scale)
        shares = by_page(weights)
        candidates = shares[..., first:end]
        retained = 1.0 - candidates.sum(dim=-1)
        read = torch.zeros(shares.shape[0], 1, shares.shape[2])
        for head, plan in enumerate(step.plans):
            read[head, 0, plan] = 1.0
        kept = retained + (shares * read).sum(dim=-1)
        heads = len(step.plans)
        pages = [len(plan) for plan in step.plans]
        for head, packed in enumerate(step.packed):
            kept[head] += weights[head][:, packed].sum(dim=-1)
            pages[head] += -(-len(packed) // PAGE_TOKENS)
        self.kept += kept.amin(dim=-1).tolist()
        self.pages += pages
        self.oracle += oracle_pages(candidates, retained, self.promise).tolist()
        self.candidates += heads * [end - first]
        self.error += output_error(step, weights).amax(dim=-1).tolist()
        self.place += [(step.layer, head) for head in range(heads)]

    def summary(self) -> dict[str, float]:
        """Means and shares over all records; pages as shares of the candidates. Empty where nothing was recorded."""
        if not self.kept:
            return {}
        kept = np.array(self.kept)
        return {
            "pages_read": _ratio(self.pages, self.candidates),
            "oracle_pages_read": _ratio(self.oracle, self.candidates),
            "kept_mean": float(kept.mean()),
            "kept_at_least_0.95": _at_least(kept, 0.95),
            "kept_at_least_0.90": _at_least(kept, 0.90),
            "kept_at_least_0.85": _at_least(kept, 0.85),
            "kept_worst": float(kept.min()),
            "output_error_mean": float(np.mean(self.error)),
        }

    def by_head(self) -> dict[str, list[list[float]]]:
        """Means over the steps, [layers][KV heads]: `kept`, `output_error`, `pages_read` (share of the candidates)."""
        if not self.place:
            return {}
        layer, head = np.array(self.place).T
        shape = (int(layer.max()) + 1, int(head.max()) + 1)

        def total(values: list[float] | list[int]) -> NDArray[np.float64]:
            sums = np.zeros(shape)
            np.add.at(sums, (layer, head), values)
            return sums

        records = np.maximum(total([1] * len(self.place)), 1)
        means = {
            "kept": total(self.kept) / records,
            "pages_read": total(self.pages) / np.maximum(total(self.candidates), 1),
            "output_error": total(self.error) / records,
        }
        return {name: np.round(values, 5).tolist() for name, values in means.items()}

    def oracle_deciles(self) -> list[list[float]]:
        """Pages that the oracle needs, as shares of the candidates: [layers][11], from the least to the most of all
        steps and KV heads of a layer (PSA, figure 2). Empty where nothing was recorded.
        """
        if not self.place:
            return []
        layer = np.array(self.place)[:, 0]
        needed = np.array(self.oracle) / np.maximum(self.candidates, 1)
        tenths = np.linspace(0, 1, 11)
        return [np.quantile(needed[layer == one], tenths).round(5).tolist() for one in range(int(layer.max()) + 1)]


def _ratio(part: list[int], whole: list[int]) -> float:
    return sum(part) / max(1, sum(whole))


def _at_least(kept: NDArray[np.float64], limit: float) -> float:
    return float((kept >= limit - 1e-6).mean())  # sums of float32 shares
