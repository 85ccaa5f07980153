"""Captures launches that come again, step after step, in CUDA graphs: a layer's dozen kernels then cost one launch.

Launching a kernel from Python takes ten microseconds or more; replaying a graph of many kernels takes as long as one
launch. A graph repeats exactly what was captured, with the same places and numbers. So what changes from step to step
must lie in tensors whose places stay the same (`memory/step_tensors.py`), and numbers must suit many steps
(`step_rows.room_for`).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Protocol

import torch

from vllm_hybrid_sparse.kernels.fallbacks import count_fallback

logger = logging.getLogger(__name__)

_MOST = 2048
"""The most graphs that are kept: with 32 layers, those of 64 kinds of steps."""

_IDLE_RUNS = 8 * _MOST
"""A graph makes room for another after this many runs without it. If it did so sooner, kinds of steps that take
turns would be captured again and again, which takes far longer than launching them."""

_MOST_MET = 2 * _MOST
"""The most kinds of launches that are remembered until they come again."""


class Captured(Protocol):
    """Work that can be launched again."""

    def replay(self) -> None:
        """Launch it on the current stream."""


Capture = Callable[[Callable[[], None]], Captured]
"""Records what a function launches, without running it, and returns the record."""


class LaunchGraphs:
    """Graphs, by what their launches depend on. Only for the step's thread and one queue.

    Launches that are met for the first time are not captured: kernels may have to be compiled, and they may not come
    again.
    """

    def __init__(self, capture: Capture | None) -> None:
        """No graphs yet.

        capture   None: everything is launched directly
        """
        self._capture = capture
        self._met: OrderedDict[Hashable, None] = OrderedDict()  # met once, not captured
        self._graphs: OrderedDict[Hashable, tuple[Captured, int]] = OrderedDict()  # with the run that used it last
        self._runs = 0

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Launch, or replay what was launched for the same key.

        key      all that the launches depend on: any other difference between two calls with the same key has no effect
        launch   must not wait for anything
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
        """The key's graph, captured now if that is worth it; None: launch directly."""
        if key in self._graphs:
            return self._graphs[key][0]
        if self._capture is None:
            return None
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
            count_fallback("device_graphs")
            logger.warning(
                "hybrid_sparse: launches cannot be captured in CUDA graphs (%s); what is not captured yet costs more",
                error,
            )
            self._capture = None
            self._met.clear()
            return None
        del self._met[key]
        return graph

    def _has_room(self) -> bool:
        """Whether there is room for another graph. May drop the one used longest ago, if it was idle long enough."""
        if len(self._graphs) < _MOST:
            return True
        oldest = next(iter(self._graphs))
        if self._graphs[oldest][1] > self._runs - _IDLE_RUNS:
            return False
        del self._graphs[oldest]
        return True


class CudaCapture:
    """Captures on its own stream. All graphs use the same memory, in turn, for what their launches allocate."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See `Capture`. Raises what the launches raise, and RuntimeError if something cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads launch and wait at the same time, on their own streams.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # it says only that the capture is invalid now
                    self._end(graph)
                raise
            self._end(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture. If the driver has made it invalid, do what torch then leaves out before raising its error.

        torch asks the driver first, and at an error does not tell its allocator that the capture has ended. The
        allocator would wait for that for ever before it reuses any memory that a second queue has read (`keep`).
        """
        try:
            graph.capture_end()
        except BaseException:
            device = self._stream.device.index
            with suppress(RuntimeError):  # it was told: torch failed later, and the graph gives the pool back itself
                torch._C._cuda_endAllocateToPool(device, self._pool)
                torch._C._cuda_releasePool(device, self._pool)
            raise
