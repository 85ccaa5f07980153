"""Launches that come again, step after step, as CUDA graphs: a layer's dozen kernels cost the host one launch then.

To launch a kernel from Python takes some ten microseconds and more, to replay a graph of many of them as much as one.
What a graph was captured of runs again exactly, with the same places and numbers: what changes from step to step must
lie in tensors whose places don't (`memory/step_tensors.py`), and numbers must be such that they serve many steps
(`step_rows.room_for`).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

_MOST = 2048
"""Graphs that are kept. Of 32 layers those of 64 kinds of steps."""

_IDLE_RUNS = 8 * _MOST
"""A graph makes room for another when so many launches came without it. Sooner, and kinds of steps that take turns
would be captured again and again, which takes far longer than to launch them."""

_MOST_MET = 2 * _MOST
"""Kinds of launches that are remembered until they come again."""


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
        self._met: OrderedDict[Hashable, None] = OrderedDict()  # once, and not captured
        self._graphs: OrderedDict[Hashable, tuple[Captured, int]] = OrderedDict()  # with the run that used it last
        self._runs = 0

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launch, or replay what was launched for the same key.

        key      all that the launches depend on: whatever differs in two calls with the same key has no effect
        launch   it must wait for nothing
        """
        self._runs += 1
        graph = self._graph(key, launch)
        if graph is None:
            launch()
            return
        self._graphs[key] = graph, self._runs
        self._graphs.move_to_end(key)
        graph.replay()

    def _graph(self, key: Hashable, launch: Callable[[], None]) -> Captured | None:
        """The key's graph, captured now where that is worth it; None: it is to be launched."""
        if self._capture is None:
            return None
        if key in self._graphs:
            return self._graphs[key][0]
        if key not in self._met:
            self._met[key] = None
            if len(self._met) > _MOST_MET:
                self._met.popitem(last=False)
            return None
        if not self._has_room():
            return None
        try:
            graph = self._capture(launch)
        except Exception as error:  # noqa: BLE001 - whatever it is, launched one by one it is raised again
            logger.warning("hybrid_sparse: launches cannot be captured in CUDA graphs (%s); they cost more now", error)
            self._capture = None
            return None
        del self._met[key]
        return graph

    def _has_room(self) -> bool:
        """Whether there may be a further graph, which another that nobody used lately has made room for."""
        if len(self._graphs) < _MOST:
            return True
        oldest = next(iter(self._graphs))
        if self._graphs[oldest][1] > self._runs - _IDLE_RUNS:
            return False
        del self._graphs[oldest]
        return True


class CudaCapture:
    """Captures on a stream of its own. What the launches allocate is memory that all graphs have in turn."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See `Capture`. Raises what the launches raise, and RuntimeError where something cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads launch and wait beside this one, on streams of their own.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # it says only that the capture is invalid now
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph
