"""vLLM's CPU worker over a host store."""

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.worker import HostStoreWorker

_ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
# vLLM has every matrix product keep its code for the 32 numbers of tokens that it met last, and a model has five kinds
# of product. oneDNN keeps 1024 by itself: ever more pieces of heap between the tensors of prompts, so that it grows.
_ONEDNN_CACHED = 5 * 32


class HybridSparseCPUWorker(HostStoreWorker, CPUWorker):
    """On a machine without a GPU vLLM's own KV memory is the host store, and every page is computed where it lies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.environ.setdefault(_ONEDNN_CACHE, str(_ONEDNN_CACHED))  # read at the first product
        super().__init__(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the host store ready, and learn from the runner which requests a step has."""
        super().initialize_from_config(kv_cache_config)
        self._runtime.requests.follow(lambda: self.model_runner.input_batch.req_ids)
