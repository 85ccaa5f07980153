"""Ordered queues of work on a device, and marks in them: all that the runtime needs of CUDA's streams and events.

If tensors lie in CPU memory, every call has done its work when it returns, and a queue has nothing to order. That is
how the CUDA device runs in tests, with interpreted kernels.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, Self

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a queue: an event."""

    def wait(self) -> None:
        """Block the calling thread, and nothing else, until the work before the mark is done."""

    def passed(self) -> bool:
        """Whether that work is done; does not wait."""

    def seconds_since(self, earlier: Self) -> float:
        """Device time between two marks of one queue; both must have passed."""


class DeviceQueue(Protocol):
    """Work that a device does in order: a stream. Threads may share one; each thread's work keeps its order."""

    device: torch.device

    def launching(self) -> AbstractContextManager[object]:
        """Until the exit, put what the calling thread launches on this queue, including the tensors it makes."""

    def mark(self) -> Mark:
        """A mark behind everything put on the queue so far."""

    def follow(self, mark: Mark) -> None:
        """Hold all later work of this queue back until the mark, which may be another queue's, has passed."""

    def keep(self, *tensors: Tensor) -> None:
        """Keep the memory of other queues' tensors from being reused before this queue's work so far is done."""


class _Passed:
    """A mark of a queue whose work is always done."""

    def __init__(self) -> None:
        self._made_s = time.perf_counter()

    def wait(self) -> None:
        """Return at once."""

    def passed(self) -> bool:
        """Always True."""
        return True

    def seconds_since(self, earlier: Self) -> float:
        """See `Mark`."""
        return self._made_s - earlier._made_s


class DoneQueue:
    """The `DeviceQueue` of tensors in CPU memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def launching(self) -> AbstractContextManager[object]:
        """See `DeviceQueue`."""
        return nullcontext()

    def mark(self) -> Mark:
        """See `DeviceQueue`."""
        return _Passed()

    def follow(self, mark: Mark) -> None:
        """See `DeviceQueue`."""

    def keep(self, *tensors: Tensor) -> None:
        """See `DeviceQueue`."""


class _Event:
    """A mark in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def wait(self) -> None:
        """See `Mark`."""
        self.event.synchronize()

    def passed(self) -> bool:
        """See `Mark`."""
        done: bool = self.event.query()
        return done

    def seconds_since(self, earlier: Self) -> float:
        """See `Mark`."""
        elapsed_ms: float = earlier.event.elapsed_time(self.event)
        return elapsed_ms / 1e3


class StreamQueue:
    """The `DeviceQueue` over a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.device = stream.device
        self._stream = stream

    def launching(self) -> AbstractContextManager[object]:
        """See `DeviceQueue`; the stream's device becomes the thread's current one as well."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        """See `DeviceQueue`."""
        with torch.cuda.device(self.device):  # whichever one the calling thread has chosen
            return _Event(self._stream)

    def follow(self, mark: Mark) -> None:
        """See `DeviceQueue`."""
        assert isinstance(mark, _Event)
        self._stream.wait_event(mark.event)

    def keep(self, *tensors: Tensor) -> None:
        """See `DeviceQueue`."""
        for tensor in tensors:
            tensor.record_stream(self._stream)


def open_queue(device: torch.device) -> DeviceQueue:
    """A new queue."""
    return StreamQueue(torch.cuda.Stream(device)) if device.type == "cuda" else DoneQueue(device)


def current_queue(device: torch.device) -> DeviceQueue:
    """The queue that the calling thread launches to now: in a step, vLLM's."""
    return StreamQueue(torch.cuda.current_stream(device)) if device.type == "cuda" else DoneQueue(device)


def choose_device(device: torch.device) -> Callable[[], None] | None:
    """What a new thread must call before it works for a GPU, as an executor's initializer; None for the CPU.

    A new thread's current GPU is the first one. Whatever it asks of CUDA would open a context there as well, which
    takes hundreds of megabytes, and so would leaving `DeviceQueue.launching`, which sets the thread's own GPU back.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index  # of the calling thread
    return partial(torch.cuda.set_device, index)


def device_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """One thread that works for a device, and has chosen it before its first task."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=choose_device(device))


def host_empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """CPU memory that a device can write without anyone waiting: pinned if the device is a GPU."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on the device, queued on the current stream; the tensor may be dropped at once.

    The staging memory comes from torch's pinned cache, which reuses a block only after the copies from it are done.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
