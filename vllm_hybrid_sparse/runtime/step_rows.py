"""Decode rows that a device computes by itself: a step's data on them, the same for all layers."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.step_tensors import StepTensors
from vllm_hybrid_sparse.values import PAGE_TOKENS

_LEAST_ROOM = 16
_ROOMS = 8  # values from one power of two to the next


def room_for(number: int) -> int:
    """Round a number up to one of few values, so that launches for it serve many steps.

    0 stays 0. Any other becomes at most an eighth larger, or the next multiple of 16.
    """
    above = 1 << max(0, number - 1).bit_length()  # the next power of two
    step = max(_LEAST_ROOM, above // (2 * _ROOMS))
    return -(-number // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows, and where their new tokens are stored. Tensors lie on the device, valid until the next step."""

    NUMBERS: ClassVar[tuple[str, ...]] = ()  # fields of a subclass that launches depend on

    held: Hashable  # where the tensors lie, and their shapes
    tokens: tuple[int, ...]  # the rows' tokens in the step's batch
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
        tensors: StepTensors,
        name: Hashable,
        own: Mapping[str, NDArray[Any]],
        **numbers: Any,
    ) -> Self:
        """Upload the data of one row or more.

        tokens        [rows]   of the step's batch
        last_blocks   [rows]   those that the new tokens lie in
        seq_lens      [rows]   tokens of the requests, the new one included
        source        of any layer: all have the same layout
        tensors       uploads the rows' tensors under `name`, together with `own`, the tensors of a subclass
        numbers       other fields of a subclass
        """
        lengths = np.array(seq_lens, dtype=np.int32)
        in_block = (lengths - 1) % (source.pages_per_block * PAGE_TOKENS)
        pages = np.array(last_blocks, dtype=np.int64) * source.pages_per_block + in_block // PAGE_TOKENS
        offsets = source.offsets(torch.arange(source.num_kv_heads), torch.from_numpy(pages)[:, None])
        arrays: dict[str, NDArray[Any]] = {
            "index": np.array(tokens, dtype=np.int64),
            "lengths": lengths,
            "host_offsets": offsets.numpy(),
            "host_places": in_block % PAGE_TOKENS,
        }
        held, uploaded = tensors.upload(name, {**arrays, **own})
        return cls(
            held=held,
            tokens=tuple(tokens),
            seq_lens=tuple(lengths.tolist()),
            filled_pages=tuple(pages[lengths % PAGE_TOKENS == 0].tolist()),
            **uploaded,
            **numbers,
        )

    def launch_key(self, layer: int, *tensors: Tensor) -> Hashable:
        """Everything that launches for these rows of a layer depend on; `tensors` are of the step's tokens."""
        numbers = [getattr(self, name) for name in self.NUMBERS]
        places = [(tensor.data_ptr(), tensor.stride(0)) for tensor in tensors]
        return layer, self.held, self.tokens[0] if self.together else None, *numbers, *places

    @property
    def together(self) -> bool:
        """Whether the rows follow one another in the batch, in order."""
        return self.tokens == tuple(range(self.tokens[0], self.tokens[0] + len(self.tokens)))

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor of the step's tokens; in place if they are `together`."""
        return tensor[self.tokens[0] : self.tokens[-1] + 1] if self.together else tensor[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRows(StepRows):
    """Rows whose pages the device itself chooses (`ranking.py`)."""

    NUMBERS: ClassVar = ("most_retained", "most_candidates", "most_budget")

    blocks: Tensor  # [rows, blocks] int32, of each row's request
    candidates: Tensor  # [rows] int32
    budgets: Tensor  # [rows] int32, how many of them may be read
    retained: Tensor  # [rows, kv_heads] int32, pages that are always read
    most_retained: int  # the most of any row, rounded up by `room_for`; likewise below
    most_candidates: int
    most_budget: int
