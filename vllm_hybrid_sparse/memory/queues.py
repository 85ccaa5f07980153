"""Ordered queues of work on a device and marks in them: all that the runtime needs of CUDA's streams and events.

Where tensors lie in CPU memory, every call has done its work when it returns, and a queue has nothing to order. That is
how the CUDA device runs in tests, with interpreted kernels.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in a queue: an event."""

    def wait(self) -> None:
        """Block the calling thread, and nothing else, until the work before the mark is done."""

    def passed(self) -> bool:
        """Whether it is done; nothing is waited for."""

    def seconds_since(self, earlier: Self) -> float:
        """Time of the device between two marks of one queue, both of which are waited for."""


class DeviceQueue(Protocol):
    """Work that a device does in order: a stream. Threads may share one; what each gives it keeps its order."""

    device: torch.device

    def launching(self) -> AbstractContextManager[object]:
        """Give the queue what the calling thread launches until the exit, tensors it makes included."""

    def mark(self) -> Mark:
        """A mark behind everything that the queue was given."""

    def follow(self, mark: Mark) -> None:
        """Let what the queue is given from now on begin only after the mark, which may be another queue's."""

    def keep(self, *tensors: Tensor) -> None:
        """Let nothing else have the memory of tensors of another queue before the work given to this one is done."""


class _Passed:
    """A mark of a queue whose work is always done."""

    def __init__(self) -> None:
        self._made_s = time.perf_counter()

    def wait(self) -> None:
        """Not at all."""

    def passed(self) -> bool:
        """Always."""
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
        with torch.cuda.device(self.device):  # which a thread of ours may not have chosen yet
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
    """A queue of its own."""
    return StreamQueue(torch.cuda.Stream(device)) if device.type == "cuda" else DoneQueue(device)


def current_queue(device: torch.device) -> DeviceQueue:
    """The queue that the calling thread launches to as it is: vLLM's, in a step."""
    return StreamQueue(torch.cuda.current_stream(device)) if device.type == "cuda" else DoneQueue(device)


def host_empty(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """CPU memory that a device may write without waiting: pinned beside a GPU."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on the device, queued on the current stream; the tensor may be dropped at once.

    Its staging memory is torch's pinned cache, which gives a block out again only after the copies from it.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
