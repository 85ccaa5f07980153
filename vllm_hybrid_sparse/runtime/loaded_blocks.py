"""Blocks that something other than the layers may have written: a KV connector, for requests that begin or resume."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoadedBlocks:
    """The blocks of some sequences from their beginnings, as `NativeAttention.summarize` takes them."""

    blocks: Tensor  # [blocks] int32, one sequence after another
    starts: Tensor  # [sequences + 1] int32, where each sequence's blocks begin

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Self | None:
        """The blocks of each sequence; None if there are none."""
        given = list(sequences)
        blocks = [block for sequence in given for block in sequence]
        if not blocks:
            return None
        starts = accumulate(map(len, given), initial=0)
        return cls(torch.tensor(blocks, dtype=torch.int32), torch.tensor(list(starts), dtype=torch.int32))
