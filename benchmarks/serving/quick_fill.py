"""vLLM's DecodeBenchConnector with random numbers that are drawn once and then repeated: a large KV cache fills fast.

torch draws random numbers on one core, a few hundred MB a second, which for 16 GiB of host memory takes minutes.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as vllms

from vllm_hybrid_sparse.memory.prefault import prefault

_DRAWN = 2**24
"""Numbers that are drawn, at least one block of them."""


class QuickFillWorker(vllms.DecodeBenchConnectorWorker):
    """Fills the memory."""

    def _fill_tensor(self, kv_cache: torch.Tensor, fill_mean: float, fill_std: float, fill_dtype: torch.dtype) -> None:
        """Fill a whole tensor, some blocks at a time, all pieces alike."""
        if kv_cache.device.type == "cpu":
            prefault(kv_cache)  # as our worker does, before small pages are touched
        blocks = kv_cache.view(fill_dtype)
        pieces = blocks.split(max(1, _DRAWN // max(1, blocks[0].numel())))
        drawn = self._make_fill_values(pieces[0].shape, blocks.device, fill_dtype, fill_mean, fill_std)
        for piece in pieces:
            piece.copy_(drawn[: len(piece)])


class DecodeBenchConnector(vllms.DecodeBenchConnector):
    """Fills the KV cache once at start-up, `startup_fill`, instead of computing prompts.

    By this name hybrid_sparse knows that the connector writes the KV cache where it lies.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            self.connector_worker.__class__ = QuickFillWorker
