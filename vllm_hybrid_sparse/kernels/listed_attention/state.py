"""What reads listed pages: where the host store has them, and sums over what was read."""

from typing import NamedTuple

import torch
from torch import Tensor


class HostStore(NamedTuple):
    """One layer's pages in host memory; strides in elements, multiples of 16, trusted."""

    elements: Tensor  # [elements] of the KV dtype, pinned beside a GPU
    block_stride: int
    head_stride: int
    page_stride: int
    pages_per_block: int


class Tally:
    """Sums over all that was read since it was made, in device memory: the kernels add, nobody subtracts."""

    NUMBERS = ("pages", "hits", "entered", "looked", "stops", "looks")
    """pages that were read; of them, those found in slots; those put into slots; groups that were looked at; of
    them, those with candidates left unread; looks at what was read."""

    def __init__(self, device: torch.device) -> None:
        """Zeros."""
        self.numbers = torch.zeros(len(self.NUMBERS), dtype=torch.int64, device=device)
        self.kept = torch.zeros(1, dtype=torch.float64, device=device)  # P_acc of the groups that were looked at
