"""Blocks on their way into frames of the device pool, layer by layer behind a step's attention.

What is little is waited for by the next step, which reads it there. What is much would stop all requests' tokens for as
long as its copy takes: half a second for 128K tokens of an 8B model over PCIe 5. So it is left to itself, and what it
belongs to stays as it is until it has arrived.
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

    What was read there before is read by then: in every layer the host has waited for the queries of the rows whose
    blocks these are, and they come behind all that was launched in the steps before; or the copies follow a mark.
    """

    blocks: NDArray[np.int64]
    frames: NDArray[np.int32]
    awaited: bool  # by the next step, whatever that takes


class Entrance:
    """At most one step's blocks are under way. For the step's thread alone."""

    def __init__(self, loader: Loader, shape: FrameShape, sources: Sequence[HostPages]) -> None:
        """Nothing is under way.

        sources   every layer's host store, all laid out alike
        """
        self.failures: list[Exception] = []  # of loads, until they are reported
        self.entered_blocks = 0  # since the start
        self.ready: Mark | None = None  # behind all that filled frames so far; None: that is done
        self._loader, self._shape, self._sources = loader, shape, sources
        self._entering: Entering | None = None
        self._is_under_way = np.zeros(sources[0].num_pages // shape.pages_per_block, dtype=np.bool_)
        self._fills: dict[int, Future[Mark | None]] = {}  # by layer

    @property
    def blocks(self) -> NDArray[np.int64]:
        """Those that are under way."""
        return _NO_BLOCKS if self._entering is None else self._entering.blocks

    def under_way(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks are."""
        return self._is_under_way[blocks]

    def begin(self, entering: Entering) -> None:
        """Have blocks be under way, of which every layer of the step says when it may be copied; nothing else is."""
        assert self._entering is None
        self._entering = entering
        self._is_under_way[entering.blocks] = True

    def enter(self, layer: int, entering: Entering, after: Mark | None) -> None:
        """Copy one layer's part, whose host store holds the step's tokens by now; see `FrameFill` for `after`."""
        fill = FrameFill(self._sources[layer], self._shape, layer, entering.blocks, entering.frames, after)
        self._fills[layer] = self._loader.fill_frames(fill)

    def settle(self, *, wait: bool) -> NDArray[np.int64]:
        """Find out whether what is under way has arrived, between steps; the blocks that will not.

        It has when all of its copies are done, or as soon as they are launched where it is awaited: then what reads the
        frames follows `ready`.

        wait   as if it were awaited
        """
        if self._entering is None:
            return _NO_BLOCKS
        attended = len(self._fills) == self._shape.layers  # all layers: the step did not fail
        awaited = wait or self._entering.awaited
        if attended and not awaited and not all(fill.done() for fill in self._fills.values()):
            return _NO_BLOCKS
        complete = attended
        for fill in self._fills.values():
            try:
                self.ready = fill.result()
            except LoadError as error:
                self.failures.append(error)
                complete = False
        if complete and not awaited and self.ready is not None and not self.ready.passed():
            return _NO_BLOCKS
        entered, self._entering, self._fills = self._entering.blocks, None, {}
        self._is_under_way[entered] = False
        if not complete:
            return entered
        self.entered_blocks += len(entered)
        return _NO_BLOCKS
