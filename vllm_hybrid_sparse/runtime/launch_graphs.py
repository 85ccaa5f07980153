"""Launches that come again, step after step, as CUDA graphs: a layer's dozen kernels cost the host one launch then.

To launch a kernel from Python takes some ten microseconds and more, to replay a graph of many of them as much as one.
What a graph was captured of runs again exactly, with the same places and numbers: what changes from step to step must
lie in tensors whose places don't (`memory/step_tensors.py`), and numbers must be such that they serve many steps
(`step_rows.room_for`).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

_MOST = 4096
"""Graphs that are kept; the one replayed longest ago goes first. Of 32 layers those of 128 kinds of steps."""


class Captured(Protocol):
    """Work that can be launched again."""

    def replay(self) -> None:
        """Launch it on the current stream."""


Capture = Callable[[Callable[[], None]], Captured]
"""Lets a function launch what it launches, without running it, and returns that."""


class LaunchGraphs:
    """Graphs by what their launches depend on. For the step's thread alone, and one queue.

    What is met for the first time is launched as it is: kernels may have to be compiled, and it may not come again.
    """

    def __init__(self, capture: Capture | None) -> None:
        """No graphs.

        capture   None: everything is launched as it is
        """
        self._capture = capture
        self._graphs: OrderedDict[Hashable, Captured | None] = OrderedDict()  # None: it was met once

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launch, or replay what was launched for the same key.

        key      all that the launches depend on: whatever differs in two calls with the same key has no effect
        launch   it must wait for nothing, and keep no tensor that it makes
        """
        if self._capture is None:
            launch()
        elif key not in self._graphs:
            launch()
            self._keep(key, None)
        else:
            graph = self._graphs[key] or self._captured(key, launch)
            self._graphs.move_to_end(key)
            if graph is None:
                launch()
            else:
                graph.replay()

    def _captured(self, key: Hashable, launch: Callable[[], None]) -> Captured | None:
        """Capture, and keep it; None where that failed: then nothing is captured any more."""
        assert self._capture is not None
        try:
            graph = self._capture(launch)
        except RuntimeError as error:
            logger.warning("hybrid_sparse: launches cannot be captured in CUDA graphs (%s); they cost more now", error)
            self._capture = None
            return None
        self._keep(key, graph)
        return graph

    def _keep(self, key: Hashable, graph: Captured | None) -> None:
        self._graphs[key] = graph
        if len(self._graphs) > _MOST:
            self._graphs.popitem(last=False)


class CudaCapture:
    """Captures on a stream of its own. What the launches allocate is memory that all graphs have in turn."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See `Capture`. RuntimeError where something cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads launch and wait beside this one, on streams of their own.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph
