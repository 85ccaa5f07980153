"""Copies blocks into frames of the device pool, layer by layer behind a step's attention.

The next step waits for a small copy, and reads the blocks in their frames. To wait for a large one would stop all
requests' tokens as long as it takes: half a second for 128K tokens of an 8B model over PCIe 5. So a large copy runs in
the background, and its rows stay as they are until it has finished. If the host ranks, a step may wait for it after
all, because the copies share the loader's one thread and queue with the loads of two-tier rows.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.errors import LoadError
from vllm_hybrid_sparse.memory.block_frames import FrameShape
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import Mark
from vllm_hybrid_sparse.memory.transfers import FrameFill, Loader

_NO_BLOCKS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Entering:
    """Blocks that enter frames behind a step's attention.

    By then nothing reads the frames' old content. Either the host has waited in every layer for the queries of the rows
    that own these blocks, and those come behind everything that earlier steps launched. Or the copies follow a mark.
    """

    blocks: NDArray[np.int64]
    frames: NDArray[np.int32]
    awaited: bool  # whether the next step waits for the copies, however long they take


class Entrance:
    """The blocks under way, of at most one step. Only for the step's thread."""

    def __init__(self, loader: Loader, shape: FrameShape, sources: Sequence[HostPages]) -> None:
        """Nothing is under way.

        sources   every layer's host store; all have the same layout
        """
        self.failures: list[Exception] = []  # of copies, until they are reported
        self.entered_blocks = 0  # since the start
        self.ready: Mark | None = None  # behind the copies of all blocks settled so far; None: they are done
        self._loader, self._shape, self._sources = loader, shape, sources
        self._entering: Entering | None = None
        self._is_under_way = np.zeros(sources[0].num_pages // shape.pages_per_block, dtype=np.bool_)
        self._fills: dict[int, Future[Mark | None]] = {}  # by layer

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The blocks that are under way."""
        return _NO_BLOCKS if self._entering is None else self._entering.blocks

    def under_way(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these blocks are under way."""
        return self._is_under_way[blocks]

    def begin(self, entering: Entering) -> None:
        """Put blocks under way; no others may be. Each layer of the step calls `enter` when it may be copied."""
        assert self._entering is None
        self._entering = entering
        self._is_under_way[entering.blocks] = True

    def enter(self, layer: int, entering: Entering, after: Mark | None) -> None:
        """Copy one layer's part. Its host store holds the step's tokens by now. See `FrameFill` for `after`."""
        fill = FrameFill(self._sources[layer], self._shape, layer, entering.blocks, entering.frames, after)
        self._fills[layer] = self._loader.fill_frames(fill)

    def settle(self, *, wait: bool) -> NDArray[np.int64]:
        """Between steps, find out whether the blocks under way have arrived. Returns those that never will.

        They have arrived when all their copies are done. If they are awaited, launched copies are enough, because what
        reads the frames follows `ready`.

        wait   treat them as awaited
        """
        if self._entering is None:
            return _NO_BLOCKS
        attended = len(self._fills) == self._shape.layers  # in all layers: the step did not fail
        awaited = wait or self._entering.awaited
        if attended and not awaited and not all(fill.done() for fill in self._fills.values()):
            return _NO_BLOCKS
        complete, ready = attended, self.ready
        failures = []
        for fill in self._fills.values():
            try:
                ready = fill.result()
            except LoadError as error:
                failures.append(error)
                complete = False
                ready = self._loader.pool.mark()  # behind its copies that were launched: its frames go to other blocks
        if complete and not awaited and ready is not None and not ready.passed():
            return _NO_BLOCKS  # so that rows already resident do not wait for it
        self.ready = ready
        self.failures += failures
        entered, self._entering, self._fills = self._entering.blocks, None, {}
        self._is_under_way[entered] = False
        if not complete:
            return entered
        self.entered_blocks += len(entered)
        return _NO_BLOCKS
