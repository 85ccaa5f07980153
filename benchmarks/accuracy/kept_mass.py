"""How much of the true attention weight a decode step kept, and how few pages an oracle would have needed for it."""

from collections.abc import Sequence
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
    """Pages that an oracle reads for every head of a group to keep `promise`; all if that is not enough.

    candidates   [..., group, pages]   true shares of the candidate pages
    retained     [..., group]          true share of the retained set
    returns      [...] int64
    """
    order = oracle_order(candidates)[..., None, :].expand_as(candidates)
    gathered = torch.nn.functional.pad(candidates.gather(-1, order).cumsum(dim=-1), (1, 0))
    short = (retained[..., None] + gathered < promise).any(dim=-2)
    return short.sum(dim=-1).clamp(max=candidates.shape[-1])


def row_weights(steps: Sequence[DecodeStep]) -> Tensor:
    """The true attention weights of rows that follow one another in one layer.

    returns   [kv_heads, rows, group, tokens] f32 over the last row's tokens, 0 for those that a row does not see
    """
    last = steps[-1]
    kv_heads, tokens, head_dim = last.keys.shape
    queries = torch.stack([step.query.float().view(kv_heads, -1, head_dim) for step in steps], dim=1)
    scores = last.scale * queries.flatten(1, 2) @ last.keys.float().transpose(1, 2)
    seen = torch.tensor([step.keys.shape[1] for step in steps])
    hidden = torch.arange(tokens) >= seen[:, None, None]
    weights: Tensor = scores.view(kv_heads, len(steps), -1, tokens).masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return weights


def output_error(steps: Sequence[DecodeStep], weights: Tensor) -> Tensor:
    """Deviation from full attention's output, relative to the layer's longest in that step (Fluxion, equation 2).

    weights   [kv_heads, rows, group, tokens]   the true ones
    returns   [kv_heads, rows, group] f32; 0 if every output is zero
    """
    true = (weights.flatten(1, 2) @ steps[-1].values.float()).view(*weights.shape[:3], -1)
    given = torch.stack([step.output.float().view(true.shape[0], *true.shape[2:]) for step in steps], dim=1)
    longest = true.norm(dim=-1).amax(dim=(0, 2))[None, :, None]
    error: Tensor = (given - true).norm(dim=-1) / longest.clamp(min=torch.finfo(torch.float32).tiny)
    return error


@dataclass(slots=True)
class KeptMass:
    """Records of decode rows, one per layer, step and KV head; the head of the group that kept least counts."""

    retained: RetainedSet
    promise: float
    kept: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # candidate pages read; for HGCA the packed ones
    oracle: list[int] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)
    error: list[float] = field(default_factory=list)  # of the output, largest of the group's heads
    place: list[tuple[int, int]] = field(default_factory=list)  # layer, KV head

    def watch(self, steps: Sequence[DecodeStep]) -> None:
        """Record decode rows that follow one another in one layer."""
        weights = row_weights(steps)
        shares = by_page(weights)
        kv_heads, rows, _, pages = shares.shape
        ranges = [self.retained.candidate_range(step.keys.shape[1]) for step in steps]
        first, end = torch.tensor(ranges).T[..., None]
        page = torch.arange(pages)
        candidates = shares * ((first <= page) & (page < end))[:, None]
        retained = 1.0 - candidates.sum(dim=-1)
        read = torch.zeros(kv_heads, rows, 1, pages)
        read_pages = torch.zeros(kv_heads, rows, dtype=torch.long)
        packed_weight = torch.zeros_like(retained)
        for row, step in enumerate(steps):
            for head, plan in enumerate(step.plans):
                read[head, row, 0, plan] = 1.0
                read_pages[head, row] = len(plan)
            for head, packed in enumerate(step.packed):
                packed_weight[head, row] = weights[head, row][:, packed].sum(dim=-1)
                read_pages[head, row] += -(-len(packed) // PAGE_TOKENS)
        kept = retained + (candidates * read).sum(dim=-1) + packed_weight
        counts = (end - first).T.expand(kv_heads, rows)
        needed = oracle_pages(candidates, retained, self.promise).minimum(counts)
        self.kept += kept.amin(dim=-1).T.flatten().tolist()
        self.pages += read_pages.T.flatten().tolist()
        self.oracle += needed.T.flatten().tolist()
        self.candidates += counts.T.flatten().tolist()
        self.error += output_error(steps, weights).amax(dim=-1).T.flatten().tolist()
        self.place += [(step.layer, head) for step in steps for head in range(kv_heads)]

    def summary(self) -> dict[str, float]:
        """Means and shares over all records; pages as shares of the candidates. Empty if nothing was recorded."""
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
        """Pages that the oracle needs, as shares of the candidates: [layers][11], from the least to the most over all
        steps and KV heads of a layer (PSA, figure 2). Empty if nothing was recorded, as for layers with a window.
        """
        if not self.place:
            return []
        layer = np.array(self.place)[:, 0]
        needed = np.array(self.oracle) / np.maximum(self.candidates, 1)
        tenths = np.linspace(0, 1, 11)
        by_layer = [needed[layer == one] for one in range(int(layer.max()) + 1)]
        return [np.quantile(records, tenths).round(5).tolist() if records.size else [] for records in by_layer]


def _ratio(part: list[int], whole: list[int]) -> float:
    return sum(part) / max(1, sum(whole))


def _at_least(kept: NDArray[np.float64], limit: float) -> float:
    return float((kept >= limit - 1e-6).mean())  # sums of float32 shares
