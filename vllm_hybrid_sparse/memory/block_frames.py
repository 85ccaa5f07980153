"""Frames: runs of slots in the device pool, each of which holds one whole block of the host store.

If all blocks of a request have frames, a decode step finds any page of the request from one number per block, which is
the same for all layers and KV heads. It looks nothing up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS

NO_FRAME = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """How the pages of one block lie in a frame: [layers, kv_heads, pages of a block]."""

    layers: int
    kv_heads: int
    pages_per_block: int

    @property
    def slots(self) -> int:
        """Slots of one frame."""
        return self.layers * self.kv_heads * self.pages_per_block

    def slots_of(self, frames: NDArray[np.int32], layer: int) -> NDArray[np.int32]:
        """Slots of one layer's pages, [frames, kv_heads, pages of a block]."""
        of_layer = self.kv_heads * self.pages_per_block
        pages = np.arange(layer * of_layer, (layer + 1) * of_layer, dtype=np.int32)
        slots: NDArray[np.int32] = frames[:, None] * np.int32(self.slots) + pages
        return slots.reshape(len(frames), self.kv_heads, self.pages_per_block)

    def view(self, pool: Tensor, layer: int) -> Tensor:
        """One layer's part of all frames of a pool.

        pool      [slots, 16, head_dim]
        returns   [frames, kv_heads, tokens of a block, head_dim]; the first dimension is strided
        """
        frames, head_dim = len(pool) // self.slots, pool.shape[-1]
        of_layer = pool[: frames * self.slots].view(
            frames, self.layers, self.kv_heads, self.pages_per_block * PAGE_TOKENS, head_dim
        )
        return of_layer[:, layer]


class BlockFrames:
    """Which blocks have frames. The blocks used longest ago give theirs up first. Not thread-safe."""

    def __init__(self, blocks: int, frames: int) -> None:
        """No block has a frame yet.

        blocks   number of blocks in the host store
        frames   number of frames that there can be; they are numbered from 0
        """
        self._frame_of = np.full(blocks, NO_FRAME, dtype=np.int32)
        self._block_of = np.full(frames, -1, dtype=np.int64)
        self._last_step = np.full(frames, -1, dtype=np.int64)
        self._free: list[int] = []

    def frames_of(self, blocks: NDArray[np.int64]) -> NDArray[np.int32]:
        """Frames of blocks, NO_FRAME if a block has none."""
        return self._frame_of[blocks]

    def use(self, blocks: NDArray[np.int64], step: int) -> None:
        """Record that a step uses these blocks. All of them must have frames."""
        self._last_step[self._frame_of[blocks]] = step

    def available(self, step: int) -> int:
        """Frames that `give` can hand out: free ones, and those whose blocks were last used before this step."""
        return len(self._free) + len(self._idle(step))

    def add(self, frames: Sequence[int]) -> None:
        """Add frames, which are free."""
        self._free += frames

    def give(self, blocks: NDArray[np.int64], step: int) -> bool:
        """Give frames to blocks if enough are available; otherwise change nothing and return False.

        The blocks have no frames yet, and each is named once. Free frames go first, then those of the blocks that were
        used longest ago, before this step.
        """
        lacking = len(blocks) - len(self._free)
        if lacking > 0:
            idle = self._idle(step)
            if len(idle) < lacking:
                return False
            oldest = idle[np.argsort(self._last_step[idle], kind="stable")[:lacking]]
            self.drop(self._block_of[oldest])
        frames = [self._free.pop() for _ in range(len(blocks))]
        self._frame_of[blocks] = frames
        self._block_of[frames] = blocks
        self._last_step[frames] = step
        return True

    def _idle(self, step: int) -> NDArray[np.int64]:
        return np.flatnonzero((self._block_of >= 0) & (self._last_step < step))

    def drop(self, blocks: NDArray[np.int64]) -> int:
        """Free the frames of blocks. Returns how many of the blocks had one."""
        frames = self._frame_of[blocks]
        held = np.unique(frames[frames >= 0])
        self._frame_of[self._block_of[held]] = NO_FRAME
        self._block_of[held] = -1
        self._free += held.tolist()
        return len(held)

    def give_up(self, before_step: int) -> list[int]:
        """Remove and return the frames that are free or whose blocks were last used before a step."""
        self.drop(self._block_of[self._idle(before_step)])
        frames, self._free = self._free, []
        return frames

    @property
    def free(self) -> int:
        """Frames that hold no block."""
        return len(self._free)

    def check_integrity(self) -> None:
        """AssertionError if a frame is lost or held twice."""
        held = np.flatnonzero(self._block_of >= 0)
        blocks = np.flatnonzero(self._frame_of >= 0)
        assert sorted(self._block_of[held].tolist()) == blocks.tolist(), "blocks and frames name different pairs"
        assert (self._frame_of[self._block_of[held]] == held).all(), "a frame holds another block than the block says"
        assert len(set(self._free)) == len(self._free), "a frame is free twice"
        assert not set(self._free) & set(held.tolist()), "a frame is free and held"
