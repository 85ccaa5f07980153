"""The device pool on a GPU: its slots are filled by kernels that read pinned host memory in place."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.kernels.copy.gpu import load_pages
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.page_keys import places_of
from vllm_hybrid_sparse.memory.queues import DeviceQueue, Mark, upload


class CudaPool(DevicePool):
    """A `DevicePool` whose writes are launched in order on its own queue.

    A write returns once it is launched. Before a reader reads a slot, its own queue must follow `mark`. A slot may be
    released, and so filled again, only when nothing reads it any more.
    """

    def __init__(self, shape: PoolShape, queue: DeviceQueue) -> None:
        super().__init__(shape, queue.device)
        self.queue = queue

    def fill(self, slots: NDArray[np.int32], source: HostPages, pages: NDArray[np.int64]) -> None:
        """Gather pages from the host store, which is pinned if there is a GPU (PSA, Algorithm 1, line 9)."""
        heads, places_in_head = map(torch.from_numpy, places_of(pages))
        with self.queue.launching():
            offsets = upload(source.offsets(heads, places_in_head), self.queue.device)
            places = upload(torch.from_numpy(slots), self.queue.device)
            load_pages(source.elements, offsets, places, self.key, self.value)

    def follow(self, mark: Mark) -> None:
        """See `DevicePool`."""
        self.queue.follow(mark)

    def mark(self) -> Mark:
        """See `DevicePool`."""
        return self.queue.mark()

    def put(self, slots: NDArray[np.int32], key: Tensor, value: Tensor) -> None:
        """See `DevicePool`; the tensors lie in CPU memory."""
        with self.queue.launching():
            index = upload(torch.from_numpy(slots).long(), self.queue.device)
            self.key[index] = upload(key, self.queue.device)
            self.value[index] = upload(value, self.queue.device)

    def put_tokens(self, slots: NDArray[np.int32], offsets: NDArray[np.int64], key: Tensor, value: Tensor) -> None:
        """See `DevicePool`; the tensors lie in CPU memory."""
        with self.queue.launching():
            places = torch.from_numpy(np.stack([slots, offsets], dtype=np.int64))
            slot_index, token_index = upload(places, self.queue.device).unbind()
            self.key[slot_index, token_index] = upload(key, self.queue.device)
            self.value[slot_index, token_index] = upload(value, self.queue.device)
