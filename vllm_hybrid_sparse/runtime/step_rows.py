"""Decode rows that a device computes by itself: what a step says of them once, the same for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import upload
from vllm_hybrid_sparse.values import PAGE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Which rows they are, and where their new tokens are stored. Tensors lie on the device."""

    tokens: tuple[int, ...]  # of the step's batch, those that the rows are
    seq_lens: tuple[int, ...]  # of their requests, the new token included
    filled_pages: tuple[int, ...]  # of the host store, those that the new tokens fill
    index: Tensor  # [rows] int64: `tokens`
    lengths: Tensor  # [rows] int32: `seq_lens`
    host_offsets: Tensor  # [rows, kv_heads] int64: of the pages of the new tokens in a layer's host store …
    host_places: Tensor  # [rows] int32: … and the tokens' places in these pages

    @classmethod
    def place(
        cls,
        tokens: Sequence[int],
        last_blocks: Sequence[int],
        seq_lens: Sequence[int],
        source: HostPages,
        device: torch.device,
        **own: Any,
    ) -> Self:
        """One row or more.

        tokens        [rows]   of the step's batch
        last_blocks   [rows]   those that the new tokens lie in
        seq_lens      [rows]   tokens of the requests, the new one included
        source        of any layer: all are laid out alike
        own           what a subclass has beside
        """
        lengths = np.array(seq_lens, dtype=np.int32)
        in_block = (lengths - 1) % (source.pages_per_block * PAGE_TOKENS)
        pages = np.array(last_blocks, dtype=np.int64) * source.pages_per_block + in_block // PAGE_TOKENS
        offsets = source.offsets(torch.arange(source.num_kv_heads), torch.from_numpy(pages)[:, None])
        return cls(
            tokens=tuple(tokens),
            seq_lens=tuple(lengths.tolist()),
            filled_pages=tuple(pages[lengths % PAGE_TOKENS == 0].tolist()),
            index=upload(torch.tensor(tokens, dtype=torch.int64), device),
            lengths=upload(torch.from_numpy(lengths), device),
            host_offsets=upload(offsets, device),
            host_places=upload(torch.from_numpy(in_block % PAGE_TOKENS), device),
            **own,
        )

    @property
    def together(self) -> bool:
        """Whether they follow one another in the batch, in their order."""
        return self.tokens == tuple(range(self.tokens[0], self.tokens[0] + len(self.tokens)))

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor of the step's tokens; where they are `together`, in place."""
        return tensor[self.tokens[0] : self.tokens[-1] + 1] if self.together else tensor[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRows(StepRows):
    """Rows whose pages the device itself chooses (`ranking.py`)."""

    blocks: Tensor  # [rows, blocks] int32, of each row's request
    candidates: Tensor  # [rows] int32
    budgets: Tensor  # [rows] int32, how many of them may be read
    retained: Tensor  # [rows, kv_heads] int32, pages that are read whatever the candidates
    most_retained: int
    most_candidates: int
    most_budget: int
