"""vLLM's CPU worker over a host store."""

import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.worker import HostStoreWorker
from vllm_hybrid_sparse.memory.heap import IdleTrimmer, glibc_trim

_ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
# vLLM has every matrix product keep its code for the 32 numbers of tokens that it met last, and a model has five kinds
# of product. oneDNN keeps 1024 by itself: ever more pieces of heap between the tensors of prompts, so that it grows.
_ONEDNN_CACHED = 5 * 32


class HybridSparseCPUWorker(HostStoreWorker, CPUWorker):
    """On a machine without a GPU vLLM's own KV memory is the host store, and every page is computed where it lies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.environ.setdefault(_ONEDNN_CACHE, str(_ONEDNN_CACHED))  # read at the first product
        super().__init__(*args, **kwargs)
        self._heap = IdleTrimmer(glibc_trim())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the host store ready, and learn from the runner which requests a step has."""
        super().initialize_from_config(kv_cache_config)
        self._runtime.requests.follow(lambda: self.model_runner.input_batch.req_ids)

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass of one step; when steps rest, what prompts left of the heap goes back to the system."""
        self._heap.worked()
        return super().execute_model(scheduler_output)

    def shutdown(self) -> None:
        """End what the worker began."""
        self._heap.close()
        super().shutdown()
