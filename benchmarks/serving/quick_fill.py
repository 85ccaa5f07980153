"""vLLM's DecodeBenchConnector with random numbers that are drawn once and then repeated: a large KV cache fills fast.

torch draws random numbers on one core, a few hundred MB a second, which for 16 GiB of host memory takes minutes.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorWorker,
)

_DRAWN = 2**24 + 2**12 + 1
"""Numbers that are drawn; odd, so that a number that comes again lies at another place of its page."""


class QuickFillWorker(DecodeBenchConnectorWorker):
    """What fills the memory."""

    def _fill_tensor(self, kv_cache: torch.Tensor, fill_mean: float, fill_std: float, fill_dtype: torch.dtype) -> None:
        """Fill a whole tensor, a piece of all numbers at a time."""
        flat = kv_cache.view(fill_dtype).view(-1)
        drawn = self._make_fill_values((_DRAWN,), flat.device, fill_dtype, fill_mean, fill_std)
        for piece in flat.split(_DRAWN):
            piece.copy_(drawn[: len(piece)])


class QuickFillConnector(DecodeBenchConnector):  # type: ignore[misc]  # vLLM has no types
    """Fills the KV cache once at start-up, `startup_fill`, instead of computing prompts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            self.connector_worker.__class__ = QuickFillWorker
