"""Loads microbatches of pages on a stream of their own, at the same time as the computation (PSA, section 3.3)."""

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import check_tensor
from vllm_hybrid_sparse.kernels.copy.gpu import load_pages


class StreamLoader:
    """A `PageLoader` that reads the host store in place. If the pool is not on a GPU, `start` loads at once.

    A slot must not be loaded while work queued on the current stream still reads it, nor twice by one loader.
    """

    def __init__(
        self,
        host: Tensor,
        page_offsets: Tensor,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        microbatch_pages: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Check the tables; nothing is loaded yet.

        host             [elements]                  as in `load_pages`
        page_offsets     [rows, kv_heads, pages]     int64, where pages begin in `host`; negative: already in its slot
        slots            [rows, kv_heads, pages]     int32, as in `progressive_attention`
        k_pool, v_pool   [slots, 16, head_dim]       out
        stream           to load on; None: a new one
        """
        if microbatch_pages < 1:
            raise KernelError(f"microbatch_pages={microbatch_pages}: must be 1 or more")
        check_tensor("slots", slots, torch.int32, (None, None, None), k_pool.device)
        check_tensor("page_offsets", page_offsets, torch.int64, slots.shape, k_pool.device)
        self._host, self._pools, self._microbatch_pages = host, (k_pool, v_pool), microbatch_pages
        self._page_offsets, self._slots = page_offsets, slots
        self._stream = stream
        self._loaded: dict[int, torch.cuda.Event] = {}
        if k_pool.device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(k_pool.device)
            self._stream.wait_stream(torch.cuda.current_stream(k_pool.device))
            for tensor in (page_offsets, slots):
                tensor.record_stream(self._stream)  # the loader may be gone before its last load has run

    def start(self, microbatch: int) -> None:
        """Queue the loads of a microbatch."""
        part = slice(microbatch * self._microbatch_pages, (microbatch + 1) * self._microbatch_pages)
        if self._stream is None:
            self._load(part)
            return
        with torch.cuda.stream(self._stream):
            self._load(part)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._loaded[microbatch] = event

    def wait(self, microbatch: int) -> None:
        """Make the current stream wait for a microbatch that was started; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._pools[0].device).wait_event(self._loaded.pop(microbatch))

    def _load(self, part: slice) -> None:
        offsets, slots = (table[:, :, part].contiguous().view(-1) for table in (self._page_offsets, self._slots))
        load_pages(self._host, offsets, slots, *self._pools)
