"""Fluxion's selector: each group's granularity and budgets from the predicted properties of its heads (section 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.errors import ConfigError

Floats = NDArray[np.floating[Any]]

GRANULARITIES = (16, 32, 64, 128)
"""Tokens of a logical block that the selector may choose: 1, 2, 4 or 8 stored pages."""

_SLACK_BLOCKS = 1e-6
"""`budget * blocks` may exceed a whole number by this much without costing a block, since budgets come as float32."""


@dataclass(frozen=True, slots=True)
class GroupBudgets:
    """What each group of a layer reads of the host segment at one decode step.

    Logical block b of granularity blk is the candidates' tokens [b * blk, b * blk + blk), counted from the first
    candidate. So it consists of whole stored pages; the last block may be shorter. A head selects its best `blocks`
    blocks. The group reads the union of its heads' blocks, which is at most the sum that `volume` counts.
    `volume` is for validation and tests: tasks are ordered by the pages that they still read (`planner.by_volume`).
    """

    granularity: NDArray[np.int64]  # [groups] tokens of a block; 0: all heads stream, nothing is ranked or read
    blocks: NDArray[np.int64]  # [groups, heads of a group] blocks to select; 0 for a streaming head
    volume: NDArray[np.float64]  # [groups] V(blk) of eq. 3, in key vectors; 0 if all heads stream


def predicted_budgets(base_budget: Floats, growth: Floats, granularity: int) -> NDArray[np.float64]:
    """Eq. 1, bgt(blk) = bgt_0 + k log2(blk), clipped to [0, 1]; any shape, shares of the host segment."""
    budget = np.asarray(base_budget, np.float64) + np.asarray(growth, np.float64) * np.log2(granularity)
    held: NDArray[np.float64] = np.clip(budget, 0.0, 1.0)
    return held


def select_budgets(
    base_budget: Floats,
    growth: Floats,
    streaming: NDArray[np.bool_],
    host_tokens: int,
    granularities: Sequence[int] = GRANULARITIES,
) -> GroupBudgets:
    """Choose for each group the granularity that moves the least data, and each head's budget at it (eq. 3).

        V(blk) = 2 L / blk + 2 L * (sum over the group's heads of bgt_h(blk)),   blk in {16, 32, 64, 128}

    The first term is the minima and maxima of the blocks, the second the keys and values of the selected tokens. A
    streaming head has budget 0, and a group of only streaming heads reads nothing. A retrieval head selects at least
    one block. The paper does not say which of two equal volumes wins; here the coarser one does, as it ranks fewer
    blocks.

    base_budget, growth   [groups, heads of a group]  bgt_0 and k as predicted, shares of the host segment
    streaming             [groups, heads of a group]
    host_tokens           L, candidate tokens; 0 means that every head streams
    granularities         the values of blk to choose from, ascending; a single one leaves no choice
    raises                ConfigError if the shapes differ or host_tokens is negative
    """
    base_budget, growth, streaming = np.asarray(base_budget), np.asarray(growth), np.asarray(streaming, bool)
    if base_budget.ndim != 2 or not base_budget.shape == growth.shape == streaming.shape:
        raise ConfigError(
            f"base_budget={base_budget.shape}, growth={growth.shape}, streaming={streaming.shape}: "
            "must be one shape, [groups, heads of a group]"
        )
    if host_tokens < 0:
        raise ConfigError(f"host_tokens={host_tokens}: must be 0 or more")
    blk = np.array(granularities[::-1])  # coarse first: argmin takes the first of equal ones
    budgets = np.stack([predicted_budgets(base_budget, growth, tokens) for tokens in blk])
    budgets[:, streaming] = 0.0
    volumes = 2 * host_tokens / blk[:, None] + 2 * host_tokens * budgets.sum(axis=-1)
    best = volumes.argmin(axis=0)
    groups = np.arange(len(best))
    chosen = blk[best]
    num_blocks = -(-host_tokens // chosen)[:, None]
    wanted = np.ceil(budgets[best, groups] * host_tokens / chosen[:, None] - _SLACK_BLOCKS).astype(np.int64)
    reads = ~streaming & (host_tokens > 0)
    idle = ~reads.any(axis=1)
    return GroupBudgets(
        granularity=np.where(idle, 0, chosen),
        blocks=np.where(reads, np.clip(wanted, 1, np.maximum(num_blocks, 1)), 0),
        volume=np.where(idle, 0.0, volumes[best, groups]),
    )
