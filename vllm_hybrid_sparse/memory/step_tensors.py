"""Small tensors that every step uploads again, with one copy for all of them, and always to the same places.

A captured CUDA graph reads where it read at capture, so a later step's numbers must lie there too.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.memory.queues import host_empty

_ALIGNED_BYTES = 512
"""Alignment of a tensor's start: torch's own, because what Triton compiles depends on it."""

_MOST = 256
"""The most kinds of steps that keep their places; the one used longest ago gives its places up. One kind takes 1 MB
for 32 rows of 128K tokens in blocks of 16."""


class StepTensors:
    """Tensors on one device. Only for the step's thread and one queue.

    Because they share one queue, an upload comes after whatever still reads the last contents.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: OrderedDict[Hashable, tuple[Tensor, dict[str, Tensor]]] = OrderedDict()

    def upload(self, name: Hashable, parts: Mapping[str, NDArray[Any]]) -> tuple[Hashable, dict[str, Tensor]]:
        """Copy arrays to the device, queued on the current stream.

        A call with the same name and shapes as an earlier one overwrites that call's tensors and returns them.

        name      distinguishes sets of tensors that a step needs at the same time
        returns   a key for the places of the tensors, which identifies a graph that reads them; and the tensors by name
        """
        arrays = {part: np.ascontiguousarray(array) for part, array in parts.items()}
        key = (name, *((part, array.shape, array.dtype.str) for part, array in arrays.items()))
        if key not in self._held:
            self._held[key] = self._allocate(arrays)
            if len(self._held) > _MOST:
                self._held.popitem(last=False)
        self._held.move_to_end(key)
        buffer, tensors = self._held[key]
        staged = host_empty((len(buffer),), torch.uint8, self.device)
        staged_bytes = staged.numpy()
        for (_, array), begin in zip(arrays.items(), _begins(arrays), strict=False):
            staged_bytes[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        buffer.copy_(staged, non_blocking=True)
        return (buffer.data_ptr(), key), tensors

    def _allocate(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[Tensor, dict[str, Tensor]]:
        begins = _begins(arrays)
        buffer = torch.empty(begins[-1], dtype=torch.uint8, device=self.device)
        tensors = {}
        for (part, array), begin in zip(arrays.items(), begins, strict=False):
            dtype = torch.from_numpy(array[:0]).dtype
            tensors[part] = buffer[begin : begin + array.nbytes].view(dtype).view(array.shape)
        return buffer, tensors


def _begins(arrays: Mapping[str, NDArray[Any]]) -> list[int]:
    """Where each array begins and where the last one ends, in bytes."""
    begins = [0]
    for array in arrays.values():
        begins.append(begins[-1] + -(-array.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)
    return begins
